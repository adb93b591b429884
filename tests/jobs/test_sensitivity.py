"""The fast curve against least squares by hand, and a job's analysis from its recipe to its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from equivalence import Net, assert_unchanged, randomized, snapshot
from torch import Tensor, nn
from torchvision.models import VisionTransformer

import prunekit
from prunekit.compaction.compact_model import compact
from prunekit.errors import DataError, PlanError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.jobs.analyses.sensitivity import CURVE_COLUMNS, analyze
from prunekit.jobs.finetune import prune_job
from prunekit.planning.plan import Plan
from prunekit.planning.sensitivity_curves import keep_in_group
from prunekit.report.pages.run_page import write_report
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings
from prunekit.statistics.layer_errors import RIDGE


def perceptron(self: Any, x: Tensor) -> Tensor:
    return self.second(self.first(x).relu())  # type: ignore[no-any-return]


def net() -> nn.Module:
    return randomized(Net(perceptron, first=nn.Linear(5, 7), second=nn.Linear(7, 3))).double().eval()


def inputs(count: int = 200) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_the_fast_curve_is_least_squares_on_what_is_left() -> None:
    model, x = net(), inputs()
    found = prunekit.sensitivity(model, x)
    curve = found.curves["first"]
    with torch.no_grad():
        hidden = model.first(x).relu()
        outputs, weight = model(x), model.second.weight.detach()
    ridge = float(RIDGE * hidden.square().mean())
    wide = torch.cat([hidden, torch.ones(len(x), 1, dtype=torch.float64)], 1) / len(x) ** 0.5
    pull = torch.diag(torch.tensor([1.0] * 7 + [0.0], dtype=torch.float64)) * ridge**0.5  # on changes of the weights
    system = torch.cat([wide, pull])
    for gone in range(1, 8):
        removed = list(curve.labels[:gone] - found.groups[0].labels.min())
        kept = [column for column in range(8) if column not in removed]
        missing = system[:, removed] @ weight.T[removed]  # what the kept columns should make up for
        change = torch.linalg.lstsq(system[:, kept], missing).solution
        left = (missing - system[:, kept] @ change).square().sum(0)
        share = float((left / outputs.var(0)).mean())
        assert curve.share_at(7 - gone) == pytest.approx(share, rel=1e-8)
    assert (np.diff(curve.errors) >= 0).all()


def test_the_api_measures_where_it_is_told_and_leaves_the_model_alone() -> None:
    model, x = net().train(), inputs()
    before = snapshot(model)
    messages: list[str] = []
    labels = torch.arange(200) % 3
    found = prunekit.sensitivity(model, x.split(64), measured_on=[(x[:50], labels[:50])], log=messages.append)
    assert messages[-1] == "sensitivity: measuring takes 7 forward passes over the samples, one as the model is"
    rows = pd.DataFrame(found.points())
    assert list(rows.columns) == [*CURVE_COLUMNS, "top1"]
    assert list(rows["kept"]) == [7, 6, 5, 4, 3, 2, 1]
    assert list(rows["macs_saved"]) == [8 * gone for gone in range(7)]
    assert rows.notna().all(axis=None)
    assert rows["error_total"].tolist() == [found.curves["first"].error_at(kept) for kept in rows["kept"]]
    (row,) = found.rows()
    assert (row["group"], row["module"], row["channels"], row["macs"]) == ("first", "first", 7, 56)
    assert row["half_measured"] == rows["error_measured"][4]
    assert row["half_total"] == rows["error_total"][4]
    within = rows["error_fast"] <= 0.1
    assert row["kept_10_fast"] == rows["kept"][within].min() / 7
    assert found.agreement is None  # one group has no order
    assert model.training
    assert count_hooks(model) == 0
    assert_unchanged(model, before)


class Wide(nn.Module):
    """Three groups, one read by a transposed convolution alone, and a head that is locked."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 1)
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.b(self.a(x).relu()).relu()).relu()
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def pictures(count: int = 32) -> Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def test_groups_by_glob_and_a_group_whose_reader_cannot_be_followed() -> None:
    model, x = randomized(Wide()).eval(), pictures()
    messages: list[str] = []
    everything = prunekit.sensitivity(model, x, measured_on=x, log=messages.append)
    assert [group.name for group in everything.groups] == ["a", "b", "up"]
    assert everything.curves.keys() == {"a", "up"}
    assert "sensitivity: no fast curve, order by magnitude: no layer that can be followed reads b" in messages
    alone = next(row for row in everything.rows() if row["group"] == "b")
    assert (alone["kept_1_fast"], alone["half_total"]) == (None, None)
    assert alone["half_measured"] > 0
    assert everything.agreement == pytest.approx(-1) or everything.agreement == pytest.approx(1)  # of two groups
    halves = [row["half_measured"] for row in everything.rows()]
    assert halves == sorted(halves, reverse=True)

    some = prunekit.sensitivity(model, x, measured_on=x, groups=["u*", "a"])
    assert [group.name for group in some.groups] == ["a", "up"]
    for name in ("a", "up"):
        np.testing.assert_array_equal(some.curves[name].labels, everything.curves[name].labels)
        for kept in range(1, some.curves[name].labels.size):
            assert some.curves[name].share_at(kept) == pytest.approx(everything.curves[name].share_at(kept), rel=1e-9)
        assert some.measured[name] == everything.measured[name]


def test_heads_have_curves_though_attention_uses_its_projections_without_calling_them() -> None:
    model = randomized(VisionTransformer(16, 8, 1, 4, 16, 24, num_classes=3)).double().eval()
    x = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = prunekit.sensitivity(model, x, measured_on=x[:8], groups=["*self_attention"])
    (heads,) = found.groups
    assert heads.labels.size == 4
    assert found.curves[heads.name].share_at(1) > 0
    small = compact(
        model, Plan(found.channel_map, keep_in_group(found.channel_map, found.curves[heads.name].labels, 1))
    )
    with torch.no_grad():
        want, got = model(x[:8]), small.eval()(x[:8])
    error = (got - want).square().mean() / want.var(0, correction=0).mean()
    assert found.measured[heads.name][-1].error == pytest.approx(float(error), rel=1e-9)


@pytest.mark.parametrize(
    ("images", "groups", "error", "message"),
    [
        ([], (), DataError, "calibration: expected at least 8 samples"),
        (pictures(1), (), DataError, "expected at least 8 images .* got a tensor of shape"),
        (["text"], (), DataError, "batch 1: expected batches of tensors.* got str"),
        (pictures(), ("c",), PlanError, "groups: 'c' matches no channel group; expected one of"),
        (pictures(), ("head",), PlanError, "groups: 'head' matches no channel group"),
        (torch.full((8, 3, 6, 6), torch.nan), (), DataError, "sample 0 holds NaN or Inf"),
    ],
)
def test_what_cannot_be_analyzed(images: Any, groups: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prunekit.sensitivity(randomized(Wide()).eval(), images, groups=groups)


def job(output: Path, **changes: Any) -> JobSettings:
    settings: dict[str, Any] = {
        "name": "small",
        "model": ModelSettings("resnet8", "cifar"),
        "data": DataSettings(image_size=8, batch=64),
        "baseline": TrainSettings(epochs=0),
        "calibration": CalibrationSettings(images=32),
        "device": "cpu",
        "threads": 1,
        "output": output,
    }
    return JobSettings(**settings | changes)


@pytest.fixture
def unseen_test_images(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes it fail when anything looks at test images."""
    from prunekit.data.splits import Splits

    def install() -> None:
        def refuse(self: Splits) -> None:
            raise AssertionError("test images")

        original = Splits.__getattribute__

        def look(self: Splits, name: str) -> Any:
            if name == "test":
                refuse(self)
            return original(self, name)

        monkeypatch.setattr(Splits, "__getattribute__", look)
        monkeypatch.setattr(Splits, "corrupt", {})

    return install


@pytest.mark.slow
def test_a_job_writes_its_curves_and_never_sees_test_images(
    tmp_path: Path, unseen_test_images: Callable[[], None]
) -> None:
    unseen_test_images()
    messages: list[str] = []
    finished: list[Path] = []
    run = analyze(job(tmp_path), measured=True, groups=["layer*"], log=messages.append, finish=finished.append)
    assert finished == [run.folder]
    assert run.folder.parent == tmp_path / "small" / "sensitivity"
    assert json.loads((run.folder / "status.json").read_text())["state"] == "finished"
    rows = pd.read_csv(run.folder / "sensitivity.csv")
    assert list(rows.columns) == [*CURVE_COLUMNS, "top1"]
    assert set(rows["group"]) == {group.name for group in run.result.groups}
    metrics = json.loads((run.folder / "sensitivity.json").read_text())
    assert metrics == json.loads(json.dumps(run.metrics))
    assert metrics["measured_images"] == 32
    first = next(iter(metrics["measured"].values()))
    measured = rows[rows["error_measured"].notna() & (rows["group"] == next(iter(metrics["measured"])))]
    assert measured["kept"].tolist() == [point["kept"] for point in first]
    assert measured["top1"].tolist() == pytest.approx([point["top1"] for point in first])


def test_a_wrong_glob_stops_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layer9"):
        analyze(job(tmp_path), groups=["layer9*"], log=print)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        analyze(job(tmp_path), groups=["layer1.0.conv1"], log=print, finish=fail)
    (folder,) = (tmp_path / "small" / "sensitivity").iterdir()
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_a_plan_by_elimination_leaves_its_curves_where_the_report_finds_them(tmp_path: Path) -> None:
    settings = PruneSettings(BudgetSettings(macs=0.7), criterion="elimination", scope="per_mac")
    latency = LatencySettings(batches=(1,), repeats=5, explain=False)
    run = prune_job(job(tmp_path, prune=settings, latency=latency), log=print, finish=None)
    rows = pd.read_csv(run.folder / "sensitivity.csv")
    assert list(rows.columns) == list(CURVE_COLUMNS)
    assert rows["error_measured"].isna().all()
    scores = pd.read_csv(run.folder / "scores.csv")
    for name, group in scores.groupby("group"):
        curve = rows[rows["group"] == name].set_index("kept")["error_total"]
        ascending = np.sort(group["score"])  # what each label adds, so that they sum to the curve
        assert curve[len(group)] == 0
        for gone in range(1, len(group)):
            assert curve[len(group) - gone] == pytest.approx(ascending[:gone].sum(), rel=1e-6, abs=1e-12)
    assert not (run.folder / "report.html").exists()
    page = write_report(run.folder).read_text()
    assert 'id="sensitivity"' in page
