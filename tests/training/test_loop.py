"""The training loop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from training_models import CPU, images, net, splits

from prunekit.data.datasets import ImageTransform, TensorImages
from prunekit.data.loader import batches
from prunekit.errors import ModelError, NonFiniteError
from prunekit.hooks.hook import count_hooks
from prunekit.measure.accuracy import evaluate
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.callback import Callback, ContextCallback, EpochRow, History, TrainingRun
from prunekit.training.loop import fit
from prunekit.utils.progress import reporting

SETTINGS = TrainSettings(epochs=3, lr=0.1)


def train(model: nn.Module, settings: TrainSettings = SETTINGS, **options: Any) -> History:
    return fit(model, splits(), settings, **{"device": CPU, "seed": 1, "batch": 16} | options)


def test_it_learns() -> None:
    model = net()
    history = train(model, TrainSettings(epochs=5, lr=0.1))
    assert [row.epoch for row in history.rows] == [1, 2, 3, 4, 5]
    assert history.rows[-1].train_loss < 0.5 * history.rows[0].train_loss
    found = evaluate(model, batches(splits().test, 20, shuffle_seed=None), "image_classification", CPU)
    assert found.values["top1"] >= 90
    assert all(row.images_per_s > 0 and row.seconds > 0 for row in history.rows)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_two_runs_are_bit_equal(optimizer: str) -> None:
    settings = TrainSettings(epochs=2, lr=0.01, optimizer=optimizer, label_smoothing=0.1)  # type: ignore[arg-type]
    one, other, seeded_otherwise = net(), net(), net()
    rows = train(one, settings).rows
    torch.randn(3)  # the state of the global generator does not matter
    again = train(other, settings).rows
    assert [row.train_loss for row in rows] == [row.train_loss for row in again]
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    train(seeded_otherwise, settings, seed=2)
    assert not torch.equal(one[0].weight, seeded_otherwise[0].weight)


def test_workers_do_not_change_the_result() -> None:
    one, other = net(), net()
    train(one, TrainSettings(epochs=1))
    train(other, TrainSettings(epochs=1), workers=1)
    assert torch.equal(one[0].weight, other[0].weight)


def test_it_does_what_a_plain_loop_does() -> None:
    """One epoch of SGD written out by hand, with the schedule and the weight decay as documented."""
    ours, plain = net(), net()
    ours[3] = plain[3] = nn.Identity()  # no dropout: its random numbers are the loop's own business
    settings = TrainSettings(epochs=1, lr=0.1, momentum=0.0, weight_decay=0.01, warmup=0.5, label_smoothing=0.1)
    history = train(ours, settings)
    factors = [1 / 3, 2 / 3, 1.0, 0.5]
    total = 0.0
    for (x, y), factor in zip(
        batches(splits().train, 16, shuffle_seed=1, drop_last=True).at_epoch(1), factors, strict=True
    ):
        loss = nn.functional.cross_entropy(plain(x), y, label_smoothing=0.1)
        total += loss.item()
        plain.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in plain.parameters():
                assert parameter.grad is not None
                decay = 0.01 * parameter if parameter.ndim >= 2 else 0
                parameter -= 0.1 * factor * (parameter.grad + decay)
    for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    assert history.rows[0].train_loss == pytest.approx(total / 4, rel=1e-6)
    assert history.rows[0].lr == pytest.approx(0.05)


def test_batches_that_cannot_be_read_are_counted_as_skipped_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    read = TensorImages.fetch

    def fetch(self: TensorImages, indices: Tensor, draw: Any = None) -> tuple[Tensor, Tensor]:
        found = read(self, indices, draw)
        return found if 5 not in indices or len(indices) < 16 else (found[0][:1], found[1][:1])

    monkeypatch.setattr(TensorImages, "fetch", fetch)
    rows = train(net()).rows
    assert [row.skipped for row in rows] == [1 - int(5 in left_out(epoch)) for epoch in (1, 2, 3)]
    assert any(row.skipped for row in rows)


def left_out(epoch: int) -> list[int]:
    """The images of the last batch, which is not full."""
    chosen = batches(splits().train, 16, shuffle_seed=1, drop_last=True).at_epoch(epoch)
    return chosen.order()[64:].tolist()  # type: ignore[no-any-return]


def test_validation_is_plain_cross_entropy_in_eval_mode() -> None:
    model = net()
    row = train(model, TrainSettings(epochs=1, lr=0.05, label_smoothing=0.3)).rows[0]
    x, y = splits().validation.fetch(torch.arange(20))
    output = model.eval()(x)
    assert row.validation_loss == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-5)
    assert row.validation_score == pytest.approx(100 * (output.argmax(1) == y).float().mean().item())


def scripted(monkeypatch: pytest.MonkeyPatch, top1: list[int]) -> None:
    """Makes validation report these percentages: of the start, and one an epoch."""
    from prunekit.training.loop import TrainingLoop

    left = list(top1)
    monkeypatch.setattr(TrainingLoop, "validate", lambda self, when: (0.01, float(left.pop(0))))


@pytest.mark.parametrize(("top1", "best"), [([50, 90, 70], 2), ([50, 90, 90], 3), ([90, 50, 70], 1), ([1, 1, 1], 3)])
@pytest.mark.parametrize("file", [True, False])
def test_the_best_epoch_is_restored_and_a_later_one_wins_a_tie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, top1: list[int], best: int, file: bool
) -> None:
    scripted(monkeypatch, [0, *top1])
    model, seen = net(), []
    path = tmp_path / "deep" / "best.safetensors" if file else None

    def remember(row: EpochRow) -> None:
        seen.append({name: value.clone() for name, value in model.state_dict().items()})

    assert train(model, checkpoint=path, on_epoch=remember).best_epoch == best
    for name, value in model.state_dict().items():
        assert torch.equal(value, seen[best - 1][name])
    if path is not None:
        stored = safetensors.torch.load_file(path)
        assert stored.keys() == model.state_dict().keys()
        assert all(torch.equal(stored[name], seen[best - 1][name]) for name in stored)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_no_epochs_leave_the_model_as_it_is(tmp_path: Path) -> None:
    model, same = net(), net()
    history = train(model, TrainSettings(epochs=0), checkpoint=tmp_path / "w.safetensors")
    assert history == History((), 0)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), same.state_dict().values(), strict=True))
    assert torch.equal(safetensors.torch.load_file(tmp_path / "w.safetensors")["0.weight"], same[0].weight)


def test_what_is_touched_is_restored() -> None:
    model = net()
    model[1].eval()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    train(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert count_hooks(model) == 0
    assert AcceleratorState._shared_state == {}
    assert "forward" not in vars(model)


def test_a_callers_accelerator_is_left_alone() -> None:
    AcceleratorState._shared_state["mark"] = 1
    try:
        train(net(), TrainSettings(epochs=1))
        assert AcceleratorState._shared_state == {"mark": 1}
    finally:
        AcceleratorState._shared_state.clear()


@pytest.mark.parametrize(("name", "kind"), [("sgd", SGD), ("adam", Adam), ("adamw", AdamW)])
def test_the_inner_optimizer_is_wrapped_around_the_whole_training(name: str, kind: type[Optimizer]) -> None:
    events: list[str] = []
    model = net()

    @contextmanager
    def wrap(optimizer: Optimizer) -> Iterator[None]:
        assert type(optimizer) is kind
        handle = optimizer.register_step_post_hook(lambda *_: events.append("step"))
        events.append("enter")
        yield
        handle.remove()
        events.append("exit")

    settings = TrainSettings(epochs=2, optimizer=name, lr=0.01)  # type: ignore[arg-type]
    train(
        model,
        settings,
        callbacks=[ContextCallback(lambda training: wrap(training.optimizer))],
        on_epoch=lambda row: events.append("epoch"),
    )
    assert events == ["enter", *["step"] * 4, "epoch", *["step"] * 4, "epoch", "exit"]


def test_a_last_batch_that_is_not_full_is_left_out_unless_it_is_the_only_one() -> None:
    sizes: list[int] = []
    model = net()
    handle = model.register_forward_hook(lambda m, i, o: sizes.append(len(o)) if torch.is_grad_enabled() else None)
    train(model, TrainSettings(epochs=1))
    assert sizes == [16] * 4
    train(model, TrainSettings(epochs=1), batch=100)
    assert sizes[4:] == [66, 66]  # the statistics that BatchNorm begins with, and the step
    handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "heads"), [("googlenet", 64, 2), ("inception_v3", 299, 1)])
def test_auxiliary_heads_are_trained(name: str, size: int, heads: int) -> None:
    torch.manual_seed(0)
    model = build_model(ModelSettings(name), num_classes=4)
    before = {key: value.clone() for key, value in model.named_parameters()}
    few = {part: replace(images(2, 0), transform=ImageTransform(size)) for part in ("train", "validation", "test")}
    unchanged = list(before)

    def compare(row: EpochRow) -> None:
        unchanged[:] = [key for key, value in model.named_parameters() if torch.equal(value, before[key])]

    settings = TrainSettings(epochs=1, lr=0.01, warmup=0.0)
    fit(model, replace(splits(), **few), settings, device=CPU, seed=0, batch=2, on_epoch=compare)
    assert unchanged == []
    assert sum("aux" in key.lower() and key.endswith(("fc2.weight", "fc.weight")) for key in before) == heads


def shows(figures: dict[str, str]) -> Callback:
    return ContextCallback(lambda _: nullcontext(), lambda: figures)


def test_progress_is_shown_on_stderr_and_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    train(net())
    assert capsys.readouterr() == ("", "")
    train(net(), progress=True, label="finetune", callbacks=[shows({"sparsity": "40.0%"})])
    out, err = capsys.readouterr()
    assert out == ""
    for shown in ("finetune 3/3", "12/12", "loss=", "top1=", "img/s=", "sparsity=40.0%"):
        assert shown in err


def test_no_bar_is_shown_where_none_is_wanted_in_a_call_that_shows_others(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting(True, "finetune"):
        train(net(), label="tried")
    assert "tried" not in capsys.readouterr().err


def test_a_resumed_run_says_how_far_it_is_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first 4 of 12 batches were made before; by this clock each takes six seconds."""
    model, calls, now = net(), itertools.count(), itertools.count(0, 6)
    paused = train(model, until=lambda: next(calls) == 5).paused
    seconds = [0.0]
    monkeypatch.setattr("prunekit.utils.progress.perf_counter", lambda: seconds[0])
    threads: list[Any] = []
    started = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr("prunekit.utils.progress.Thread", lambda target, daemon: threads.append(target) or started)

    def tick() -> bool:
        seconds[0] = float(next(now))
        threads[0].__self__.write()  # as the thread would
        return False

    with reporting(None, "finetune"):
        train(model, begin=paused, label="finetune", until=tick)
    lines = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines() if "batch" in line]
    assert lines[0] == "finetune: batch 5 of 12, about 42 s left"
    assert all(" of 12, about " in line for line in lines)


def test_describe_is_called_once_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    train(net(), progress=True, callbacks=[ContextCallback(lambda _: nullcontext(), lambda: {"n": calls.append(1)})])
    capsys.readouterr()
    assert len(calls) == 3


class Notes(Callback):
    """Notes what it is told, and adds the sum of the squared weights of the last layer to the loss."""

    def __init__(self, model: nn.Module, share: float) -> None:
        self.model, self.share, self.told = model, share, list[str]()

    @contextmanager
    def active(self, training: TrainingRun) -> Iterator[None]:
        self.told.append(f"enter {training.steps} x {training.epochs}")
        yield
        self.told.append("exit")

    @contextmanager
    def around_validation(self) -> Iterator[None]:
        self.told.append("validate")
        yield

    def added_loss(self, images: Tensor, output: Any, labels: Tensor) -> Tensor:
        assert len(images) == len(labels) == len(output)
        return self.share * self.model.get_parameter("5.weight").square().sum() / 2

    def before_step(self, step: int) -> None:
        self.told.append(f"{step}-")

    def after_step(self, step: int, made: bool) -> None:
        self.told.append(f"{step}{'+' if made else '?'}")


def test_parts_are_told_of_every_step_in_order() -> None:
    model = net()
    notes = Notes(model, 0.0)
    train(model, replace(SETTINGS, epochs=2, accumulate=3), callbacks=[notes])
    assert notes.told == [
        "enter 2 x 2",
        *["1-", "1+", "2-", "2+", "validate", "3-", "3+", "4-", "4+", "validate"],
        "exit",
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_part_adds_to_the_loss_is_what_weight_decay_would_do(accumulate: int) -> None:
    decayed, penalized = net(), net()
    settings = TrainSettings(epochs=2, lr=0.05, weight_decay=0.0, accumulate=accumulate)
    train(penalized, settings, callbacks=[Notes(penalized, 0.1)])

    def decay(training: TrainingRun) -> nullcontext[None]:
        for group in training.optimizer.param_groups:
            group["weight_decay"] = 0.0
        last = decayed.get_parameter("5.weight")
        group = training.optimizer.param_groups[0]
        group["params"] = [parameter for parameter in group["params"] if parameter is not last]
        training.optimizer.add_param_group({**group, "params": [last], "weight_decay": 0.1})
        return nullcontext()

    train(decayed, settings, callbacks=[ContextCallback(decay)])
    for name, value in decayed.state_dict().items():
        torch.testing.assert_close(penalized.state_dict()[name], value, rtol=1e-4, atol=1e-6)


class Explodes(nn.Module):
    """Gives infinity once it has been called often enough in training."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.left -= 1
        return x * math.inf if self.left < 0 else x


def test_a_non_finite_loss_names_the_layer_the_epoch_and_the_step() -> None:
    model = net()
    model[3] = Explodes(6)
    message = r"the loss is nan in epoch 2, step 3; first not finite: the output of module '3' \(Explodes\)"
    with pytest.raises(NonFiniteError, match=message):
        train(model)
    assert count_hooks(model) == 0


def test_a_non_finite_parameter_is_named() -> None:
    model = net()
    with torch.no_grad():
        model[5].bias[2] = math.nan
    with pytest.raises(NonFiniteError, match=r"first not finite: parameter 'bias' of module '5' \(Linear\)"):
        train(model)


class Overflows(nn.Module):
    """Has a mask of minus infinity, and if asked a buffer that becomes infinite in training."""

    def __init__(self, spoiled: bool) -> None:
        super().__init__()
        self.spoiled = spoiled
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.spoiled:
            self.seen.fill_(math.inf)  # type: ignore[operator]
        return x


def test_a_mask_of_minus_infinity_does_not_stop_a_run() -> None:
    model = net()
    model[3] = Overflows(False)
    assert len(train(model).rows) == SETTINGS.epochs
    model[3] = Overflows(True)
    with pytest.raises(NonFiniteError, match=r"buffer '3\.seen' is NaN or Inf after epoch 1"):
        train(model)


def test_a_diverging_run_is_stopped() -> None:
    with pytest.raises(NonFiniteError, match=r"the loss is (nan|inf) in epoch \d+, step \d+; .*lower learning rate"):
        train(net(), TrainSettings(epochs=20, lr=1e18, warmup=0.0))


def test_a_weight_that_the_last_step_spoils_is_named() -> None:
    model = net()
    steps = len(splits().train) // 16

    @contextmanager
    def spoiled(optimizer: Optimizer) -> Iterator[None]:
        made = itertools.count(1)

        def spoil(*_: Any) -> None:
            if next(made) == steps:
                model[5].weight.data[1, 2] = math.inf

        handle = optimizer.register_step_post_hook(spoil)
        yield
        handle.remove()

    with pytest.raises(NonFiniteError, match=r"parameter '5.weight' is NaN or Inf after epoch 1; try a lower learning"):
        train(
            model,
            TrainSettings(epochs=1, lr=0.01),
            callbacks=[ContextCallback(lambda training: spoiled(training.optimizer))],
        )


def test_a_validation_loss_that_is_not_finite_is_an_error() -> None:
    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.training else x * math.inf

    model = net()
    model[3] = Overflows()
    with pytest.raises(NonFiniteError, match=r"the validation loss is nan in epoch 1; first not finite: .* '3'"):
        train(model, TrainSettings(epochs=1, lr=0.01))


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ModelError, match="all 6 have requires_grad=False"):
        train(net().requires_grad_(False))


def test_frozen_parts_stay_as_they_are() -> None:
    model = net()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    train(model)
    assert torch.equal(model[0].weight, before)


class Picky(nn.Linear):
    """Refuses a size by an assertion, as torchvision's vision transformers do."""

    def __init__(self) -> None:
        super().__init__(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("expected 224")


def test_a_model_of_other_classes_or_sizes_is_refused_before_anything_changes() -> None:
    model = net()
    model[5] = nn.Linear(128, 7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"expected logits of shape \(2, 4\) from two images .* got \(2, 7\)"):
        train(model)
    model[5] = nn.Linear(99, 4)
    with pytest.raises(ModelError, match=r"Sequential does not take images of shape \(3, 8, 8\): .*data\.image_size"):
        train(model)
    model[5] = Picky()
    with pytest.raises(ModelError, match=r"shape \(3, 8, 8\): AssertionError: expected 224; set data\.image_size"):
        train(model)
    assert torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
    assert torch.equal(model.state_dict()["1.num_batches_tracked"], before["1.num_batches_tracked"])
