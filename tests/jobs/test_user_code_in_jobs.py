"""Jobs whose model or images are the user's own code, and jobs whose data or weights are not there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import prunekit
from prunekit.compaction.model_folder import read_manifest
from prunekit.errors import DataError, ModelError, UsageError
from prunekit.jobs.dry_run import dry_run
from prunekit.jobs.finetune import finetune
from prunekit.jobs.run.baseline_cache import trained_subject
from prunekit.jobs.run.command_subject import Own
from prunekit.jobs.run.subject_sources import resolve
from prunekit.jobs.stages.calibration_stage import calibrate
from prunekit.models.zoo import load_factory
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings

CODE = """
import torch
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Stripes(Dataset):
    def __init__(self, count, broken=()):
        self.targets, self.broken = [index % 3 for index in range(count)], broken

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("torn")
        pixels = torch.randint(0, 90, (3, 12, 12), generator=torch.Generator().manual_seed(index), dtype=torch.uint8)
        pixels[index % 3] += 120
        return pixels, index % 3


def four():
    return Net(4)


def data():
    return Stripes(90), Stripes(30)


def torn():
    return Stripes(90, broken=(4, 50)), Stripes(30, broken=(7,))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CODE, encoding="utf-8")
    return tmp_path / "own.py"


def job(output: Path, **changes: Any) -> JobSettings:
    settings = JobSettings(
        name="mine",
        model=ModelSettings("Net", "own"),
        data=DataSettings("own", image_size=12, batch=16, augment="crop_flip"),
        baseline=TrainSettings(epochs=2, lr=0.1),
        calibration=CalibrationSettings(images=32),
        prune=PruneSettings(budget=BudgetSettings(channels=0.5)),
        finetune=TrainSettings(epochs=1, lr=0.05),
        latency=LatencySettings(batches=(1,), repeats=5, explain=False),
        device="cpu",
        threads=1,
        output=output,
    )
    return replace(settings, **changes)


def silent(message: str) -> None:
    """A log that nobody reads."""


@pytest.mark.slow
def test_a_whole_job_of_the_users_own_model_and_images(file: Path, tmp_path: Path) -> None:
    own = Own(f"{file}:Net", f"{file}:torn")
    settings = job(tmp_path / "runs", data=replace(job(tmp_path).data, max_corrupt=3))
    plan = dry_run(settings, log=silent, own=own)
    log: list[str] = []
    run = finetune(settings, log=log.append, own=own)
    assert run.metrics["pruned"]["macs"] == plan["macs_after"] < plan["macs_before"]
    assert {row["n_test"] for row in run.metrics["accuracy"].values()} == {29}
    assert len(run.metrics["corrupt_images"]) == 3
    assert any(line.startswith("data: 3 corrupt images skipped: ") for line in log)
    assert read_manifest(run.folder / "model")["build"] is None
    with pytest.raises(ModelError, match="built by its owner's code"):
        prunekit.load(run.folder / "model")
    model = prunekit.load(run.folder / "model", model=load_factory(f"{file}:Net"))
    assert model.body[0].out_channels == 8
    assert resolve(run.folder / "model", factory=f"{file}:Net").sample_shape == (3, 12, 12)

    again = finetune(settings, log=log.append, own=own)
    assert any(line.startswith("dense: reused") for line in log)
    assert any(line.startswith("calibration: reused") for line in log)
    assert again.metrics["pruned"]["top1"] == run.metrics["pruned"]["top1"]


def test_calibration_says_what_it_skipped(file: Path, tmp_path: Path) -> None:
    data = DataSettings("own", image_size=12, batch=16, max_corrupt=3)
    log: list[str] = []
    settings = job(tmp_path / "runs", data=data, baseline=TrainSettings(epochs=0))
    calibrate(settings, log=log.append, own=Own(f"{file}:Net", f"{file}:torn"))
    assert any(line.startswith("data: ") and "corrupt image" in line for line in log)


def test_another_model_of_the_user_is_not_taken_for_the_same(file: Path, tmp_path: Path) -> None:
    settings, own = job(tmp_path / "runs", baseline=TrainSettings(epochs=0)), Own(f"{file}:Net", f"{file}:data")
    assert not calibrate(settings, log=silent, own=own).reused
    assert calibrate(settings, log=silent, own=own).reused
    file.write_text(CODE.replace("nn.ReLU(), nn.Conv2d", "nn.Tanh(), nn.Conv2d"), encoding="utf-8")
    assert not calibrate(settings, log=silent, own=own).reused


@pytest.mark.parametrize("edited", ["own.py", "nets.py"])
def test_what_forward_computes_counts(edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither modules nor weights change, and still neither baseline nor statistics may be used again."""
    code = CODE.replace("classes=3", "classes=10")
    (tmp_path / "own.py").write_text("from nets import Net\n" if edited == "nets.py" else code, encoding="utf-8")
    (tmp_path / "nets.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path / "cache"))
    data = DataSettings(image_size=8, batch=64)
    settings = job(tmp_path / "runs", data=data, baseline=TrainSettings(epochs=0))

    def reused() -> tuple[bool, bool]:
        for name in [name for name in sys.modules if name.startswith(("nets", "prunekit_user_own"))]:
            monkeypatch.delitem(sys.modules, name)  # as in another process
        log: list[str] = []
        statistics = calibrate(settings, log=log.append, own=Own(f"{tmp_path / 'own.py'}:Net")).reused
        return any(line.startswith("dense: reused") for line in log), statistics

    assert [reused(), reused()] == [(False, False), (True, True)]
    changed = code.replace("self.head(self.body(x)", "self.head(self.body(x).tanh()")
    (tmp_path / edited).write_text(changed, encoding="utf-8")
    assert [reused(), reused()] == [(False, False), (True, True)]


def test_own_weights_come_from_the_factory_or_a_file(file: Path, tmp_path: Path) -> None:
    own = Own(f"{file}:Net", f"{file}:data")
    trained = load_factory(f"{file}:Net")
    torch.save(trained.state_dict(), tmp_path / "net.th")
    with_file = job(tmp_path, model=ModelSettings("Net", "own", weights=str(tmp_path / "net.th")), baseline=None)
    model = trained_subject(with_file, log=silent, own=own).model
    assert torch.equal(model.head.weight, trained.head.weight)
    assert trained_subject(job(tmp_path, baseline=None), log=silent, own=own).trained


@pytest.mark.parametrize(
    ("changes", "own", "error", "expected"),
    [
        (
            {},
            Own(),
            UsageError,
            r"model\.zoo is 'own' and --model was not given: expected 'own' together with --model file\.py:f",
        ),
        ({}, Own("own.py:Net"), UsageError, "data.source is 'own' and --data was not given"),
        (
            {"model": ModelSettings("resnet18")},
            Own("own.py:Net", "own.py:data"),
            UsageError,
            "model.zoo is 'torchvision' and --model is own.py:Net",
        ),
        ({"model": ModelSettings("Net", "own", {"a": 1})}, Own("x", "y"), UsageError, "model.arguments: expected none"),
        ({}, Own("own.py:four", "own.py:data"), ModelError, r"expected logits of shape \(2, 3\) .* got \(2, 4\)"),
        ({}, Own("own.py:data", "own.py:data"), ModelError, r"or \(module, example\), got tuple"),
        ({}, Own("own.py:Net", "own.py:Net"), DataError, r"the factory to return prunekit\.data\.splits\.Splits"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(
    changes: dict[str, Any],
    own: Own,
    error: type[Exception],
    expected: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(error, match=expected):
        finetune(job(file.parent / "runs", **changes), log=silent, own=own)
    assert not (file.parent / "runs").exists()


def test_everything_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    model = ModelSettings("resnet20", "cifar", weights=str(tmp_path / "none.th"), origin="ask Ada")
    data = DataSettings("npz", root=tmp_path / "none.npz", origin="ask Bob")
    missing = job(tmp_path / "runs", model=model, data=data)
    with pytest.raises(DataError) as caught:
        finetune(missing, log=silent)
    first, second, third = str(caught.value).splitlines()
    assert first == "2 things are missing:"
    assert second.startswith(f"  data.root: {tmp_path / 'none.npz'} does not exist; expected a NumPy archive")
    assert second.endswith("give its path as data.root=PATH; ask Bob")
    assert third.startswith(
        f"  model.weights: {tmp_path / 'none.th'}: there is no such file of weights; give its path as"
    )
    assert third.endswith("model.weights=FILE; ask Ada")
    with pytest.raises(DataError, match=r"^model\.weights: .*none\.th: there is no such file"):
        finetune(replace(missing, data=DataSettings()), log=silent)


def test_weights_are_not_downloaded_for_data_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    settings = job(
        tmp_path,
        model=ModelSettings("resnet34", weights="IMAGENET1K_V1"),
        data=DataSettings("imagefolder", root=tmp_path / "none"),
    )
    with pytest.raises(DataError, match=r"(?s)2 things are missing:.*resnet34-b627a593\.pth is not in .*https://"):
        finetune(settings, log=silent)
