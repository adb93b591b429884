"""The budget of the score: what is delivered holds where nothing was chosen, and what cannot be had is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from made_up_timings import time_by_macs
from torch import Tensor, nn

import prunekit as pk
from prunekit.errors import DataError, PlanError, UsageError
from prunekit.measure.score_drop import Drop
from prunekit.pruning import latency_budget_search, score_budget
from prunekit.pruning.score_budget import confirmed
from prunekit.report.headline import budgeted, on_time
from prunekit.tasks.task import Score


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points around four centers, some of which overlap."""
    generator = torch.Generator().manual_seed(seed)
    centers = 0.7 * torch.randn(4, 8, generator=torch.Generator().manual_seed(9))
    labels = torch.randint(4, (count,), generator=generator)
    return centers[labels] + torch.randn(count, 8, generator=generator), labels


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))
    optimizer, (x, y) = torch.optim.Adam(net.parameters(), 0.01), blobs(600, 1)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval()


def prune(model: nn.Module, **changed: Any) -> pk.Pruned:
    given: dict[str, Any] = {
        "calibration": blobs(256, 2)[0], "evaluate": "image_classification", "held_out": blobs(2000, 3),
        "max_drop": 0.03, "progress": False,
    }  # fmt: skip
    return pk.prune(model, **given | changed)


def right(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).double().mean())


def test_the_smallest_model_within_the_drop_is_delivered(model: nn.Sequential) -> None:
    small, large = prune(model, max_drop=0.05), prune(model, max_drop=0.015)
    data = blobs(4000, 4)
    for found, most in ((small, 0.05), (large, 0.015)):
        assert found.score is not None
        assert found.score.most <= most
        assert 980 <= found.score.samples <= 1020  # half of them
        assert right(model, data) - right(found.model, data) <= most
        assert found.plan.provenance["max_drop"]["asked"] == most
        assert f"{100 * most:.2f} points may be lost" in str(found)
    assert small.plan.channel_map.macs_left(small.plan.keep) < large.plan.channel_map.macs_left(large.plan.keep) < 1
    again = prune(model, max_drop=0.05)
    assert (again.plan.keep == small.plan.keep).all()
    assert all(map(torch.equal, again.model.parameters(), small.model.parameters()))


@pytest.mark.parametrize("way", ["values", "number", "agreement", "loader"])
def test_scores_come_in_several_ways(model: nn.Sequential, way: str) -> None:
    x, y = blobs(2000, 3)

    def values(found: nn.Module) -> Any:
        hits = (found(x).argmax(1) == y).double()
        return float(hits.mean()) if way == "number" else hits

    ways: dict[str, dict[str, Any]] = {
        "values": {"evaluate": values, "held_out": None},
        "number": {"evaluate": values, "held_out": None},
        "agreement": {"evaluate": None, "held_out": None, "calibration": blobs(1600, 2)[0]},
        "loader": {"held_out": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 100)},
    }
    found = prune(model, max_drop=0.1, **ways[way])
    assert found.score is not None
    assert found.score.drop <= 0.1
    assert found.plan.removed > 0
    assert (found.score.error is None) == (way == "number")
    if way == "agreement":  # of 1600 samples 1024 are calibrated on; half of the others confirms
        assert 280 <= found.score.samples <= 296
        assert found.score.dense == 100


def test_other_budgets_hold_too_or_are_named(model: nn.Sequential) -> None:
    found = prune(model, max_drop=0.05, params=0.6)
    assert found.plan.provenance["budgets"]["params"]["left"] <= 0.6
    with pytest.raises(PlanError, match=r"together with MACs 2.0 %, where the score falls by more: top-1"):
        prune(model, max_drop=0.01, macs=0.02)


def test_with_a_target_the_fastest_is_looked_for(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    time_by_macs(monkeypatch)
    found = prune(model, max_drop=0.1, target=pk.Target(block=4))
    assert found.score is not None
    assert found.score.most <= 0.1
    assert found.delivered is not None
    assert found.delivered.final.speedup > 1.1
    assert found.plan.provenance["binding"] == "speedup"
    assert not [note for note in found.notes if "slower than asked for" in note or "faster than asked for" in note]
    # Nothing shows the speedup that a search begins with where none was asked for.
    summary = found.delivered.summary()
    metrics = {"delivered": summary, "plan": found.plan.provenance}
    texts = [str(found), *on_time(metrics), *budgeted(found.plan.provenance)]
    texts += replace(found.delivered, final=replace(found.delivered.final, stable=False, doubts=("noise",))).shortfalls
    assert (summary["asked"], summary["excess"], summary["within"]) == ({}, 1.0, True)
    assert "time: as far as max_drop allows, " in texts[0]
    assert texts[-1] == "time: the figure is unstable: noise"
    assert not [text for text in texts if "1.02" in text or "× asked for" in text]


def test_a_budget_beside_the_score_that_binds_is_said_as_it_was_asked_for(model: nn.Sequential) -> None:
    plan = prune(model, max_drop=0.2, params=0.5).plan
    for binding in ("macs", "params"):  # whichever is the one that is used up
        provenance = {**plan.provenance, "binding": binding}
        (table,) = replace(plan, provenance=provenance).budgets()
        assert [row[2] for row in table.rows] == ["by max_drop", "50.0 %"]
        assert "as far as max_drop allows" in list(budgeted(provenance))[1]


def test_the_points_of_a_frontier_of_times_have_no_budget_but_their_own(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_by_macs(monkeypatch)
    given: dict[str, Any] = {"calibration": blobs(256, 2)[0], "held_out": blobs(600, 3)[0], "timed": False}
    (point,) = pk.frontier(model, points=[0.5], target=pk.Target(block=4), progress=False, **given).points
    assert isinstance(point.result, pk.Pruned)
    assert [*point.result.plan.provenance["budgets"]] == ["speedup"]
    assert "98.0 %" not in str(point.result)


def test_doubtful_times_are_measured_again_where_asked(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(*_: Any, again: bool = False, **more: Any) -> None:
        seen.append(again)
        raise PlanError("seen")

    monkeypatch.setattr(latency_budget_search, "profile", noted)
    for remeasure in (False, True):
        with pytest.raises(PlanError, match="seen"):
            pk.prune(model, torch.randn(2, 8), speedup=1.5, remeasure=remeasure, progress=False)
    assert seen == [False, True]


def test_plans_that_cannot_be_made_end_no_search(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial may lock more than the trace, so that what seemed possible is not."""
    made = score_budget.at_share

    def at_share(search: Any, inputs: Any, share: float) -> Any:
        if share < least:
            raise PlanError("locked by the trial")
        return made(search, inputs, share)

    monkeypatch.setattr(score_budget, "at_share", at_share)
    least = 0.4
    found = prune(model, max_drop=0.2)
    assert 0.3 < found.plan.channel_map.macs_left(found.plan.keep) < 0.6
    least = 1.0
    with pytest.raises(PlanError, match="locked by the trial"):
        prune(model, max_drop=0.2)


def test_a_drop_that_the_samples_cannot_tell_is_said_with_the_number_that_would(model: nn.Sequential) -> None:
    with pytest.raises(PlanError, match=r"100 held-out samples cannot confirm a drop of at most 0.2 points, .* 3,000$"):
        prune(model, max_drop=0.002, held_out=blobs(100, 3))
    with pytest.raises(PlanError, match=r"held-out samples, half of all, tell drops apart by .* in all would settle"):
        prune(model, max_drop=0.012, held_out=blobs(520, 3), scope="uniform", criterion="random", repair=False)


def test_plans_that_repeat_do_not_end_the_search(model: nn.Sequential) -> None:
    """Another budget binds at first, so that several shares give the same plan."""
    alone, beside = prune(model, max_drop=0.2), prune(model, max_drop=0.2, params=0.5)
    left = [found.plan.channel_map.macs_left(found.plan.keep) for found in (alone, beside)]
    assert abs(left[0] - left[1]) < 0.1
    assert left[1] < 0.45


def test_wider_models_are_confirmed_first_and_none_after_one_that_fails() -> None:
    """Fixed sequence testing: the last would hold, but one that is wider does not."""
    about = Score("top1", "top-1", float)
    drops = [Drop(90.0, 91.0, lost, 0.0, 20, 100, 1.0, about) for lost in (0.01, 0.04, 0.06, 0.02)]
    assert confirmed(drops, 0.05) == 2
    assert confirmed(drops[2:], 0.05) == 0
    assert confirmed(drops[:2], 0.05) == 2
    unsure = [Drop(90.0, 91.0, 0.04, 0.02, 20, 100, 1.0, about)]
    assert confirmed(unsure, 0.05) == 0


@pytest.mark.parametrize(("second", "least"), [(0.8, 0.875), (0.5, 0.8)])
def test_models_between_one_that_is_confirmed_and_one_that_is_not_are_tried(
    model: nn.Sequential, second: float, least: float
) -> None:
    """The second half loses more than the first, so that what the first allows, 0.75 of the MACs, is refused."""

    def values(found: nn.Module) -> Tensor:
        weights = [layer.weight for layer in found if isinstance(layer, nn.Linear)]
        lost = 1 - sum(weight.numel() for weight in weights) / sum(layer.weight.numel() for layer in model[::2])
        of_half = torch.tensor([0.4, second], dtype=torch.float64).repeat(20_000)
        return 1 - lost * of_half if any(weight.any() for weight in weights) else 0 * of_half

    plan = prune(model, max_drop=0.1, evaluate=values, held_out=None, repair=False, round_to=1).plan
    assert least <= plan.channel_map.macs_left(plan.keep) < least + 0.02


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_drop": -1}, "max_drop: expected a number above 0, got -1"),
        ({"max_drop": 1}, "expected a share below 1, such as 0.01 for one point, got 1"),
        ({"max_drop": None, "macs": 0.5}, "together with max_drop"),
        ({"sparsity": 0.5}, "because a pattern is given"),
        ({"held_out": None}, "expected samples with targets .* calibration data is read without its targets"),
        ({"evaluate": lambda model: 1.0}, "held_out: expected none beside a function"),
        ({"calibration": None, "evaluate": None, "held_out": None}, "held_out: expected samples"),
    ],
)
def test_what_does_not_fit_is_said(model: nn.Sequential, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        prune(model, **given)
    with pytest.raises(UsageError, match="a plan alone has no score"):
        pk.plan(model, torch.randn(2, 8), max_drop=0.01)
    collected = pk.collect(model, blobs(64, 2)[0])
    with pytest.raises(UsageError, match="what collect found"):
        pk.prune(model, calibration=collected, max_drop=0.01)


def test_settings_are_checked_as_keywords_are(model: nn.Sequential) -> None:
    both = pk.PruneSettings(pk.BudgetSettings(max_drop=0.3), pattern=pk.PatternSettings("unstructured", 0.5))
    with pytest.raises(UsageError, match="because a pattern is given"):
        prune(model, max_drop=None, settings=both)


def test_too_few_samples_are_no_score(model: nn.Sequential) -> None:
    with pytest.raises(DataError, match=r"a third of the 200 calibration samples .* give 240 samples or more"):
        prune(model, calibration=blobs(200, 2)[0], evaluate=None, held_out=None)
    with pytest.raises(DataError, match="at least 80 samples"):
        prune(model, held_out=blobs(20, 3))
