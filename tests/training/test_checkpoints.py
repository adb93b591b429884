"""Checkpoints: how often, how many, of what, and what happens when they cannot be written or read."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from training_models import CPU, net, splits

from prunekit.errors import NonFiniteError, ResumeError
from prunekit.settings.train import CheckpointSettings, TrainSettings
from prunekit.training import checkpoints
from prunekit.training.callbacks.callback import Callback, History, TrainingRun
from prunekit.training.checkpoints import Checkpoints, CheckpointWarning
from prunekit.training.loop import TrainingLoop, fit
from prunekit.utils import files as artifacts
from prunekit.utils.state_folders import read_state, write_state

SETTINGS = TrainSettings(epochs=3, lr=0.05)
EVERY_STEP = CheckpointSettings(every_steps=1)


def train(
    folder: Path | None, model: nn.Module | None = None, keeping: CheckpointSettings = EVERY_STEP, **options: Any
) -> tuple[nn.Module, History, list[str]]:
    model, said = model or net(), []
    facts = options.pop("facts", None)
    kept = None if folder is None else Checkpoints(folder, keeping, log=said.append, facts=facts)
    given = {"splits": splits(), "settings": SETTINGS, "seed": 1, "batch": 16} | options
    return model, fit(model, given.pop("splits"), given.pop("settings"), device=CPU, checkpoints=kept, **given), said


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def losses(history: History) -> list[tuple[float, ...]]:
    return [(row.train_loss, row.validation_loss, row.lr) for row in history.rows]


class Stopping(Callback):
    """Ends a run before a step, as a crash would."""

    def __init__(self, at: int) -> None:
        self.at = at

    def before_step(self, step: int) -> None:
        if step == self.at:
            raise KeyboardInterrupt


def stopped(folder: Path, at: int, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(folder, callbacks=[*options.pop("callbacks", []), Stopping(at)], **options)


class Resuming(Stopping):
    """The same part in the run that goes on."""

    def __init__(self) -> None:
        super().__init__(0)


# A part's name is among what must not change.
Resuming.__name__ = Stopping.__name__


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_few_stay(tmp_path: Path) -> None:
    stopped(tmp_path, at=7)  # four steps in an epoch
    assert names(tmp_path) == ["epoch-0002-batch-000001", "epoch-0002-batch-000002"]
    stopped(tmp_path, at=11, keeping=replace(EVERY_STEP, keep=3))
    assert names(tmp_path) == ["epoch-0002-batch-000004", "epoch-0003-batch-000001", "epoch-0003-batch-000002"]
    tensors = safetensors.torch.load_file(tmp_path / "epoch-0003-batch-000001" / "tensors.safetensors")
    assert {"training/model/0.weight", "best/weights/0.weight"} <= tensors.keys()
    train(tmp_path, callbacks=[Resuming()])
    assert names(tmp_path) == ["epoch-0003-batch-000004", "epoch-0004-batch-000000"]


def test_a_run_that_is_over_gives_its_result_again(tmp_path: Path) -> None:
    model, history, _ = train(tmp_path / "kept", checkpoint=tmp_path / "best.safetensors")
    (tmp_path / "best.safetensors").unlink()
    again, same, said = train(tmp_path / "kept", checkpoint=tmp_path / "best.safetensors", model=net(3))
    assert equal(model, again)
    assert same == history
    assert said == [f"resumed from {tmp_path / 'kept' / 'epoch-0004-batch-000000'}: finished"]
    stored = safetensors.torch.load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_resumed_bit_by_bit(precision: Any, tmp_path: Path) -> None:
    settings = replace(SETTINGS, precision=precision, accumulate=2)
    model, history, _ = train(None, settings=settings, callbacks=[Resuming()])
    stopped(tmp_path, at=4, settings=settings)
    again, resumed, said = train(tmp_path, settings=settings, callbacks=[Resuming()])
    assert "epoch 2, batch 2" in said[0]
    assert equal(model, again)
    assert losses(history) == losses(resumed)


def test_the_caller_need_not_know_that_it_went_on(tmp_path: Path) -> None:
    """Times add up, and `on_epoch` is called for the epochs that are left."""
    seen: list[int] = []
    stopped(tmp_path, at=7, on_epoch=lambda row: seen.append(row.epoch))
    _, history, _ = train(tmp_path, callbacks=[Resuming()], on_epoch=lambda row: seen.append(row.epoch))
    assert seen == [1, 2, 3]
    assert [row.epoch for row in history.rows] == [1, 2, 3]
    assert all(row.seconds > 0 and row.images_per_s > 0 for row in history.rows)


def test_dtype_buffers_and_generators_of_all_kinds_come_back(tmp_path: Path) -> None:
    class Odd(nn.Module):
        """Draws from every generator, and keeps what it saw in a buffer that its state dict does not have."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, images: Tensor) -> Tensor:
            if self.training:
                import random

                self.seen = 0.9 * self.seen + images.mean().detach()
                images = images + 0.1 * random.gauss(0, 1) + 0.1 * float(np.random.normal()) + self.seen
            out: Tensor = self.inner(images)
            return out

    model, history, _ = train(None, Odd(), callbacks=[Resuming()])
    for at in (2, 6, 9):  # three times in the same run
        stopped(tmp_path, at=at, model=Odd())
    again, resumed, _ = train(tmp_path, Odd(), callbacks=[Resuming()])
    assert equal(model, again)
    assert losses(history) == losses(resumed)


class Averaging(Callback):
    """An average of the weights, which is what is validated and kept."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.model: nn.Module | None = None

    def active(self, training: TrainingRun) -> AbstractContextManager[Any]:
        self.model = training.model
        return super().active(training)

    def after_step(self, step: int, made: bool) -> None:
        assert self.model is not None
        for name, value in self.model.state_dict().items():
            old = self.average.get(name, value)
            self.average[name] = (0.5 * old + 0.5 * value).to(value.dtype)

    @contextmanager
    def around_validation(self) -> Iterator[None]:
        assert self.model is not None
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.average)
        yield
        self.model.load_state_dict(before)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: Any) -> None:
        self.average = dict(state["average"])


def test_parts_go_on_from_their_state(tmp_path: Path) -> None:
    model, history, _ = train(None, callbacks=[Averaging(), Resuming()])
    stopped(tmp_path, at=6, callbacks=[Averaging()])
    again, resumed, _ = train(tmp_path, callbacks=[Averaging(), Resuming()])
    assert equal(model, again)
    assert losses(history) == losses(resumed)
    assert not equal(model, train(None)[0])


def test_by_the_clock_they_take_a_twentieth_of_the_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])

    def slow(path: Path, state: Any) -> None:
        now[0] += 2.0

    monkeypatch.setattr(checkpoints, "write_state", slow)
    kept = Checkpoints(tmp_path, CheckpointSettings(every_seconds=10))
    due = []
    for step in range(200):
        now[0] += 1
        if kept.due(step):
            due.append(now[0])
            kept.write({}, epoch=1, batch=step, work=step)
    assert due == [110.0, 152.0, 194.0, 236.0, 278.0]
    never = Checkpoints(tmp_path, CheckpointSettings(every_seconds=None))
    now[0] += 1e9
    assert not never.due(10**9)
    assert not Checkpoints(tmp_path, CheckpointSettings(every_seconds=None, every_steps=3)).due(2)
    assert Checkpoints(tmp_path, CheckpointSettings(every_seconds=None, every_steps=3)).due(3)


def full(patch: pytest.MonkeyPatch, broken: Callable[[int], bool]) -> None:
    """Writing a checkpoint fails in the middle, as on a full disk, each time that `broken` says of its number."""
    write, count = checkpoints.write_state, [0]

    def failing(path: Path, state: Any) -> None:
        count[0] += 1
        if not broken(count[0]):
            return write(path, state)
        with artifacts.atomic_folder(path) as temporary:
            (temporary / "tensors.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(temporary))

    patch.setattr(checkpoints, "write_state", failing)


def test_a_full_disk_keeps_the_last_good_one_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, history, _ = train(None, callbacks=[Resuming()])
    with monkeypatch.context() as patch:
        full(patch, lambda number: number > 3)
        other, rows, said = train(tmp_path, callbacks=[Resuming()])
    assert equal(model, other)
    assert losses(rows) == losses(history)
    assert names(tmp_path) == ["epoch-0001-batch-000003"]
    assert "epoch-0001-batch-000004 cannot be written ([Errno 28] No space left on device" in said[0]
    assert f"going on; the last good one: {tmp_path / 'epoch-0001-batch-000003'}" in said[0]
    again, resumed, said = train(tmp_path, callbacks=[Resuming()])
    assert said == [f"resumed from {tmp_path / 'epoch-0001-batch-000003'}: epoch 1, batch 3"]
    assert equal(model, again)
    assert losses(resumed) == losses(history)


def test_older_ones_make_room_for_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, lambda number: len(names(tmp_path)) > 1)  # no room for a third
    _, _, said = train(tmp_path)
    assert said == []
    assert names(tmp_path) == ["epoch-0003-batch-000004", "epoch-0004-batch-000000"]


def test_what_the_system_really_says_of_a_full_disk(tmp_path: Path) -> None:
    """Files may not grow beyond a limit: writing ends in the middle, by the kernel."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = net()
    kept = Checkpoints(tmp_path, EVERY_STEP)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.warns(CheckpointWarning, match=r"cannot be written \(\[Errno 27\] File too large"):
            fit(model, splits(), replace(SETTINGS, epochs=1), device=CPU, seed=1, batch=16, checkpoints=kept)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []
    assert kept.last is None


def test_best_weights_that_cannot_be_written_are_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prunekit.training import checkpoints as best

    write, count = best.save_tensors, [0]

    def failing(path: Path, tensors: Any) -> None:
        count[0] += 1
        if count[0] <= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(best, "save_tensors", failing)
    top1 = iter([80.0, 90.0, 95.0, 99.0])
    validate = TrainingLoop.validate
    monkeypatch.setattr(TrainingLoop, "validate", lambda self, when: (validate(self, when)[0], next(top1)))
    model, _, said = train(tmp_path / "kept", checkpoint=tmp_path / "best.safetensors")
    assert sum("kept in memory" in line for line in said) == 4
    stored = safetensors.torch.load_file(tmp_path / "best.safetensors")  # written at the end
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())


def spoil(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def test_a_damaged_one_gives_way_to_the_one_before(tmp_path: Path) -> None:
    model, history, _ = train(None, callbacks=[Resuming()])
    stopped(tmp_path, at=7)
    spoil(tmp_path / "epoch-0002-batch-000002")
    again, rows, said = train(tmp_path, callbacks=[Resuming()])
    assert "checksum differs); looking for the one before" in said[0]
    assert said[1].endswith("epoch-0002-batch-000001: epoch 2, batch 1")
    assert equal(model, again)
    assert losses(rows) == losses(history)


def _set(*keys: Any, to: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a function that changes the value at a place of a state."""

    def change(state: Any) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = to(state[keys[-1]])

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("training", "model", "0.weight", to=lambda value: value * torch.nan), "'0.weight': it has NaN or Inf"),
        (_set("training", "model", "0.weight", to=lambda value: value.long()), "got (8, 3, 3, 3) of torch.int64"),
        (_set("training", "model", "0.weight", to=lambda value: value[:1, :, :1, :1]), "got (1, 3, 1, 1) of"),
        (_set("training", "model", to=lambda value: dict(list(value.items())[:-1])), "is not there"),
        (_set("training", "model", to=lambda value: {**value, "x": torch.ones(1)}), "'x' is not the model's"),
        (_set("best", "weights", "0.bias", to=lambda value: value.double()), "best weights: tensor '0.bias'"),
        (_set("training", "optimizer", "state", 0, "momentum_buffer", to=lambda value: value[:1]), "state 0: expected"),
        (_set("training", "optimizer", "param_groups", to=lambda value: value[:0]), "expected groups of"),
        (_set("training", to=lambda value: {}), "training: 'model' is not there"),
        (_set("position", "batch", to=str), "position.batch: Input should be a valid integer"),
        (_set("position", "rows", to=lambda value: [[1]]), "position.rows.0"),
        (_set("processes", to=lambda value: []), "expected the states of 1 processes"),
        (_set("processes", 0, "random", to=lambda value: None), None),
        (_set("identity", to=lambda value: 3), "expected what run it is of"),
    ],
)
def test_one_whose_contents_do_not_fit_gives_way_to_the_one_before(
    change: Callable[[Any], None], says: str | None, tmp_path: Path
) -> None:
    """Its checksums are right, as if prunekit had written it."""
    model, history, _ = train(None, callbacks=[Resuming()])
    stopped(tmp_path, at=7)
    newest = tmp_path / "epoch-0002-batch-000002"
    state = read_state(newest)
    change(state)
    write_state(newest, state)
    if says is None:  # what only its owner can judge is refused when it is loaded
        with pytest.raises(ResumeError, match="epoch-0002-batch-000002: cannot be resumed, a part of it does not fit"):
            train(tmp_path, callbacks=[Resuming()])
        return
    again, rows, said = train(tmp_path, callbacks=[Resuming()])
    assert says in said[0]
    assert said[0].endswith("looking for the one before")
    assert said[1].endswith("epoch-0002-batch-000001: epoch 2, batch 1")
    assert equal(model, again)
    assert losses(rows) == losses(history)


def test_without_a_whole_one_the_run_starts_anew(tmp_path: Path) -> None:
    model, history, _ = train(None, callbacks=[Resuming()])
    stopped(tmp_path, at=3)
    for folder in tmp_path.iterdir():
        spoil(folder)
    again, rows, said = train(tmp_path, callbacks=[Resuming()])
    assert len(said) == 2
    assert [name for name in names(tmp_path) if name.startswith("damaged-")] == [
        "damaged-epoch-0001-batch-000001",
        "damaged-epoch-0001-batch-000002",
    ]
    assert equal(model, again)
    assert losses(rows) == losses(history)


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"settings": replace(SETTINGS, lr=0.1)}, "training.lr: 0.05 there, 0.1 here"),
        ({"settings": replace(SETTINGS, epochs=4)}, "training.epochs: 3 there, 4 here"),
        ({"seed": 2}, "seed: 1 there, 2 here"),
        ({"batch": 8}, "batch: 16 there, 8 here"),
        ({"splits": replace(splits(), fingerprint="g")}, "data: 'f' there, 'g' here"),
        ({"model": net().append(nn.Linear(4, 4))}, "model.6.weight: nothing there, ['torch.float32', 4, 4] here"),
        ({"callbacks": []}, "callbacks: ['Stopping'] there, [] here"),
        ({"facts": {"plan": "b"}}, "plan: 'a' there, 'b' here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(changes: dict[str, Any], differing: str, tmp_path: Path) -> None:
    stopped(tmp_path, at=3, facts={"plan": "a"})
    before = names(tmp_path)
    with pytest.raises(ResumeError, match="is of another recipe, plan or version") as caught:
        train(tmp_path, **{"callbacks": [Resuming()], "facts": {"plan": "a"}} | changes)
    assert f"  {differing}\n" in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "epoch-0001-batch-000002"))
    assert names(tmp_path) == before


class Halved(torch.autograd.Function):
    """A root whose gradient at 0 is not finite."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient / 0


class Cut(nn.Module):
    """Lets values through, and from the third batch on no gradient that is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += self.training
        return Halved.apply(values) if self.calls > 3 else values  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_is_not_finite_names_layer_step_and_checkpoint(accumulate: int, tmp_path: Path) -> None:
    model = net()
    model[2] = nn.Sequential(nn.ReLU(), Cut(), nn.Identity())
    settings = replace(SETTINGS, accumulate=accumulate)
    with pytest.raises(NonFiniteError, match="a gradient is NaN or Inf in epoch 1") as caught:
        train(tmp_path, model, settings=settings)
    at, last = (3, 2) if accumulate == 1 else (4, 2)
    said = str(caught.value)
    assert f"epoch 1, step {at}, while the loss is finite" in said
    assert "first not finite on the way back: that of the output of module '2.0' (ReLU)" in said
    assert said.endswith(f"the last good checkpoint: {tmp_path / f'epoch-0001-batch-{last:06d}'}")
    kept = safetensors.torch.load_file(Path(said.rpartition(": ")[2]) / "tensors.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in kept.values())


def test_a_loss_that_is_not_finite_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"first not finite: .*; the last good checkpoint: none yet"):
        train(tmp_path, settings=TrainSettings(epochs=1, lr=1e30, warmup=0.0), keeping=CheckpointSettings())


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    stopped(tmp_path, at=3)
    shutil.copytree(tmp_path / "epoch-0001-batch-000002", tmp_path / ".epoch-0001-batch-000003.xyz.tmp")
    train(tmp_path, callbacks=[Resuming()])
    assert all(name.startswith("epoch-") for name in names(tmp_path))
