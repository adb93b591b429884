"""Padding, and tokens without a label, change neither losses nor gradients, whatever the task; nor do small batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_language import bert, llama
from torch import Tensor, nn
from torch.nn import functional as F
from training_models import CPU

from prunekit.data.user_data import sample_splits
from prunekit.settings.train import DistillSettings, FeatureSettings, TrainSettings
from prunekit.tasks.task import get_task
from prunekit.training.callbacks import distillation
from prunekit.training.callbacks.callback import TrainingRun
from prunekit.training.callbacks.distillation import Distillation
from prunekit.training.loop import fit

IGNORED = -100
Batch = dict[str, Tensor]


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 30}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(5, 30, shape, generator=torch.Generator().manual_seed(sum(shape)))


def some(ids: Tensor) -> Tensor:
    """Labels of two tokens of three."""
    return ids.masked_fill(torch.arange(ids.numel()).view_as(ids) % 3 == 1, IGNORED)


def padded(batch: Batch, left: int, right: int) -> Batch:
    fill = {"labels": IGNORED}
    return {name: F.pad(value, (left, right), value=fill.get(name, 0)) for name, value in batch.items()}


def plain(length: int, **more: Tensor) -> Batch:
    return {"input_ids": tokens(3, length), "attention_mask": torch.ones(3, length, dtype=torch.long), **more}


CASES: dict[str, tuple[str, Callable[[], nn.Module], Batch, tuple[str, ...]]] = {
    "next token": ("causal_lm", llama, plain(6), ("model.layers.?",)),
    "answers": ("causal_lm", llama, plain(6, labels=some(tokens(3, 6))), ("model.layers.*.mlp",)),
    "masked": ("masked_lm", bert, plain(7, labels=some(tokens(3, 7))), ("bert.encoder.layer.*.output",)),
    "tags": ("token_classification", bert, plain(5, labels=some(tokens(3, 5))), ("bert.encoder.layer.*.output.dense",)),
    "translated": ("seq2seq", t5, plain(6, labels=tokens(3, 4)), ("*.block.*.layer.*.DenseReluDense",)),
    "as long": ("seq2seq", t5, plain(6, labels=some(tokens(3, 4))), ("*.block.*.layer.*.DenseReluDense",)),
}


def learned(case: str, teacher: nn.Module, batch: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the task's loss and what distillation adds, and the gradients of their sum."""
    name, make, _, modules = CASES[case]
    student = make().double()
    task = get_task(name).bound(student)
    settings = DistillSettings(weight=0.7, temperature=2.0, features=FeatureSettings(modules, weight=0.4))
    part = Distillation(teacher, settings, task=task)
    with part.active(TrainingRun(student, torch.optim.SGD(student.parameters(), lr=0.1), CPU, 4, 2)):
        inputs, targets = task.unpack(batch)
        output = student(**inputs)
        losses = [task.loss(output, targets), part.added_loss(inputs, output, targets)]
        sum(losses).backward()  # type: ignore[union-attr]
    return losses, {name: weight.grad for name, weight in student.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_no_loss_and_no_gradient(case: str, side: str) -> None:
    name, make, batch, _ = CASES[case]
    if side == "left" and make is not llama:
        pytest.skip("its positions count from the first token, padding or not")
    teacher = copy.deepcopy(make()).double()
    with torch.no_grad():
        for weight in teacher.parameters():
            weight += 0.05 * torch.randn(weight.shape, dtype=weight.dtype)
    longer = padded(batch, 0, 9) if side == "right" else padded(batch, 9, 0)
    if name == "seq2seq":  # 15 tokens are read, and 15 or 6 written
        longer["labels"] = F.pad(batch["labels"], (0, 11 if case == "as long" else 2), value=IGNORED)
    (losses, gradients), (same, others) = (learned(case, teacher, each) for each in (batch, longer))
    off = 1e-12 if side == "right" else 1e-7  # angles of positions are computed in float32
    torch.testing.assert_close(same, losses, rtol=off, atol=0)
    assert gradients.keys() == others.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(others[key], gradient, rtol=off, atol=off, msg=lambda text, key=key: key + text)


class Lines:
    """Texts of several lengths, of which one in two has few labels."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        ids = tokens(1, 4 + 5 * (index % 4))[0]
        labels = ids.clone()
        labels[: 3 * (index % 2)] = IGNORED
        return {"input_ids": ids, "labels": labels}


def test_small_batches_make_the_step_of_a_large_one() -> None:
    """Micro-batches have different numbers of tokens: each weighs as many as count in it."""
    teacher, found = llama(seed=1).double(), []
    splits = sample_splits({"train": Lines(8), "validation": Lines(3), "test": Lines(2)}, "causal_lm")
    settings = TrainSettings(epochs=2, optimizer="sgd", lr=0.1, distill=DistillSettings(weight=0.7, temperature=2.0))
    for batch, accumulate in ((4, 1), (2, 2), (1, 4)):
        student, part = llama().double(), Distillation(teacher, settings.distill, task="causal_lm")  # type: ignore[arg-type]
        own = replace(settings, accumulate=accumulate)
        rows = fit(student, splits, own, device=CPU, seed=3, batch=batch, callbacks=[part]).rows
        found.append((student.state_dict(), [row.train_loss for row in rows]))
    (whole, losses), *others = found
    for weights, same in others:
        torch.testing.assert_close(weights, whole, rtol=0, atol=1e-10)
        assert same == pytest.approx(losses, rel=1e-10)


def test_features_of_two_processes_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes have as many texts, and one of them most of the tokens."""
    teacher, student = llama(seed=1).double(), llama().double()
    short, long = padded({**plain(4), "labels": tokens(3, 4)}, 0, 5), {**plain(9), "labels": some(tokens(3, 9))}
    settings = DistillSettings(weight=0.0, features=FeatureSettings(("model.layers.?",)))
    given: list[Tensor] = []

    def errors(*batches: Batch) -> list[tuple[Tensor, int]]:
        part, found, task = Distillation(teacher, settings, task="causal_lm"), [], get_task("causal_lm")
        with part.active(TrainingRun(student, torch.optim.SGD(student.parameters(), lr=0.1), CPU, 4, 2)):
            for batch in batches:
                inputs, targets = task.unpack(batch)
                found.append((part.added_loss(inputs, student(**inputs), targets).detach(), task.weighed(targets)))
        return found

    ((whole, _),) = errors({name: torch.cat([short[name], long[name]]) for name in short})
    monkeypatch.setattr(distillation, "total_of", lambda sums: given.append(sums) or sums)
    errors(short, long)
    monkeypatch.setattr(distillation, "total_of", lambda sums: given[0] + given[1])
    parts = errors(short, long)
    assert len({weight for _, weight in parts}) == 2
    mean = sum(error * weight for error, weight in parts) / sum(weight for _, weight in parts)
    torch.testing.assert_close(mean, whole, rtol=1e-12, atol=0)
