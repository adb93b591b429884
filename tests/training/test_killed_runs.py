"""Runs that are killed, at any moment, end as those that are not."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors.torch
import torch
from killing import Deadly, forked, patched
from torch import Tensor
from training_models import CPU, net, splits

from prunekit.data.datasets import TensorImages
from prunekit.data.splits import Splits
from prunekit.settings.train import CheckpointSettings, ClampSettings, TrainSettings
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit
from prunekit.utils import state_folders as states

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
SEED = int(os.environ.get("PRUNEKIT_KILL_SEED", time.time_ns() % 2**32))
SETTINGS = TrainSettings(
    epochs=2,
    lr=0.02,
    accumulate=3,
    label_smoothing=0.1,
    mixup=0.4,
    cutmix=1.0,
    clamp_weight_grad=ClampSettings(limit=0.01),
)
EVERY_STEP = CheckpointSettings(every_steps=1)


def augmented() -> Splits:
    """Images that are shifted and flipped at random."""
    plain = splits(90)
    assert isinstance(plain.train, TensorImages)
    return replace(plain, train=replace(plain.train, transform=replace(plain.train.transform, augment="crop_flip")))


def train(folder: Path, optimizer: Literal["sgd", "adam"]) -> None:
    """Writes down what comes of a run: the final weights, of the last epoch and the best, and the history."""
    model, last = net(), {}

    def keep(row: Any) -> None:
        last.update({f"last.{name}": value.clone() for name, value in model.state_dict().items()})

    settings = replace(SETTINGS, optimizer=optimizer)
    checkpoints = Checkpoints(folder / "checkpoints", EVERY_STEP, log=lambda _: None)
    history = fit(model, augmented(), settings, device=CPU, seed=1, batch=8, on_epoch=keep, checkpoints=checkpoints)
    rows = [[row.train_loss, row.train_score, row.validation_loss, row.lr] for row in history.rows]
    found = {
        **model.state_dict(),
        **last,
        "rows": torch.tensor(rows, dtype=torch.float64),
        "clamped": torch.tensor([row.share for row in history.clamps], dtype=torch.float64),
        "best": torch.tensor(history.best_epoch),
        "random": torch.rand(3),  # what the caller draws next
    }
    safetensors.torch.save_file(found, folder / "result.safetensors")


def result(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = safetensors.torch.load_file(folder / "result.safetensors")
    return found


def save_in_halves(deadly: Deadly, patch: pytest.MonkeyPatch) -> None:
    """Half of a file is a moment to be killed at."""
    whole = states.save_tensors

    def save(path: Path, tensors: dict[str, Tensor]) -> None:
        whole(path, tensors)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        deadly.moment()
        path.write_bytes(content)

    patch.setattr(states, "save_tensors", save)


def killed_while_writing(folder: Path, optimizer: Literal["sgd", "adam"], at: int) -> int:
    """Trains in this process, which is killed at a moment of its writing; returns how many there were."""
    deadly = Deadly(at)
    with patched() as patch:
        save_in_halves(deadly, patch)
        deadly.around(patch, states, "write_state")
        for name in ("replace", "unlink", "rmdir"):
            deadly.around(patch, os, name)
        train(folder, optimizer)
    return deadly.moments


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_killed_at_random_and_resumed_it_ends_bit_identical(optimizer: Literal["sgd", "adam"], tmp_path: Path) -> None:
    """Six kills each: three on the clock, three while a checkpoint is written or an old one removed."""
    draw = random.Random(SEED)
    print(f"PRUNEKIT_KILL_SEED={SEED}")
    for name in ("whole", "counted"):
        (tmp_path / name).mkdir()
    start = time.perf_counter()
    forked(partial(train, tmp_path / "whole", optimizer))
    seconds = time.perf_counter() - start
    whole = result(tmp_path / "whole")
    assert not torch.equal(whole["last.0.weight"], net()[0].weight)
    moments = killed_while_writing(tmp_path / "counted", optimizer, 0)
    assert moments > 60
    kills = 0
    for trial in range(6):
        folder = tmp_path / str(trial)
        folder.mkdir()
        again = partial(train, folder, optimizer)
        if trial % 2:
            at = draw.randint(1, moments)
            kills += forked(partial(killed_while_writing, folder, optimizer, at)) != 0
        else:
            kills += forked(again, kill_after_s=draw.uniform(0, seconds)) != 0
        forked(again)
        require_same(result(folder), whole)
        left = [path.name for path in (folder / "checkpoints").iterdir()]
        assert len(left) <= EVERY_STEP.keep
        assert all(name.startswith("epoch-") for name in left)
    assert kills >= 3


def require_same(found: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
    """Checks a result; where training was over before the kill, there is no last epoch to remember."""
    last = {name for name in whole if name.startswith("last.")}
    assert found.keys() in (whole.keys(), whole.keys() - last)
    assert [name for name, value in found.items() if not torch.equal(value, whole[name])] == []
