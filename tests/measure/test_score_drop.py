"""How much lower a pruned model scores: the same figures as by hand, and scores that cannot be compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prunekit.errors import DataError, ModelError, UsageError
from prunekit.measure import score_drop
from prunekit.measure.accuracy import evaluate
from prunekit.measure.score_drop import RULE_OF_THREE, HeldOut
from prunekit.tasks.task import Score, Task

CPU = torch.device("cpu")


def images(count: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randint(4, (count,), generator=generator)


def net(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(6, 4)


def answers(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return (model(images()[0]).argmax(1) == images()[1]).double()


def test_the_drop_of_a_task_is_the_difference_on_the_same_samples() -> None:
    dense, pruned = net(0), net(1)
    models = HeldOut(dense, images(), "image_classification")
    drop = models.drop(models.score(pruned))
    assert drop.drop == pytest.approx(float((answers(dense) - answers(pruned)).mean()))
    whole = evaluate(pruned, [images()], "image_classification", CPU)
    assert drop.score == whole.values["top1"]
    assert (drop.samples, drop.about.unit) == (400, "%")
    assert drop.interval is not None
    assert drop.interval[0] < drop.drop < drop.most < drop.interval[1]


def test_the_error_of_single_samples_is_that_of_a_paired_mean() -> None:
    """With a part for each sample the jackknife is the textbook's standard error."""
    dense, pruned = net(0), net(1)

    def margins(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return torch.tanh(model(images()[0])[:100].norm(dim=1))  # 0 without weights

    models = HeldOut(dense, None, margins)
    drop = models.drop(models.score(pruned))
    apart = (margins(dense) - margins(pruned)).numpy()
    spread = max(float(margins(model).max() - margins(model).min()) for model in (dense, pruned))
    paired = apart.std(ddof=1) / math.sqrt(len(apart))
    assert drop.error == pytest.approx(math.hypot(paired, RULE_OF_THREE * spread / len(apart)))
    t = 1.9842169516  # Student's 97.5 % quantile, 99 degrees of freedom
    assert drop.interval == pytest.approx((drop.drop - t * drop.error, drop.drop + t * drop.error), rel=1e-6)


def test_where_no_sample_differs_a_share_is_still_not_certain() -> None:
    """The rule of three: of n samples that are alike, up to 3 / n of all may differ."""
    for models in (HeldOut(net(0), images(), "image_classification"), HeldOut(net(0), None, answers)):
        drop = models.drop(models.score(net(0)))
        assert drop.drop == 0
        assert drop.most == pytest.approx(3 / 400, rel=0.02)


@pytest.mark.parametrize("batch", [26, 32, 128, 400])
def test_halves_are_alike_for_any_batch(batch: int) -> None:
    x, y = images(2500)
    loader = [(x[at : at + batch], y[at : at + batch]) for at in range(0, len(x), batch)]
    models = HeldOut(net(0), loader, "image_classification")
    first, second = (sum(models.dense.samples[part] for part in half) for half in models.halves)
    assert first + second == 2500
    assert abs(first - second) <= 32


def test_of_more_samples_than_are_kept_all_kinds_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted by class, as a folder of images is read."""
    x, y = images(1600)
    order = y.argsort()
    loader = [(x[order][at : at + 16], y[order][at : at + 16]) for at in range(0, 1600, 16)]
    monkeypatch.setattr(score_drop, "MOST_BYTES", x.nbytes // 3)
    models = HeldOut(net(0), loader, "image_classification")
    kept = torch.cat([targets for part in models.batches for _, targets in part])
    assert len(kept) < 800
    assert kept.bincount(minlength=4).min() > 0.2 * len(kept)


def test_single_scores_of_any_range_are_not_certain_either() -> None:
    def doubled(model: nn.Module) -> Tensor:
        return 100 * answers(model)

    models = HeldOut(net(0), None, doubled)
    assert models.drop(models.score(net(0))).most == pytest.approx(100 * 3 / 400, rel=0.02)


def test_the_number_of_samples_that_would_settle_a_drop_does() -> None:
    models = HeldOut(net(0), images(), "image_classification")
    for pruned in (net(0), net(1)):  # nothing differs, and much does
        drop = models.drop(models.score(pruned))
        count = drop.samples_for(0.1)
        single = (drop.error**2 - (RULE_OF_THREE / drop.samples) ** 2) * drop.samples  # type: ignore[operator]
        error = math.sqrt(max(0.0, single) / count + (RULE_OF_THREE / count) ** 2)
        assert 1.645 * error == pytest.approx(0.05, rel=0.05)


def test_halves_share_no_sample_and_are_all() -> None:
    models = HeldOut(net(0), images(), "image_classification")
    first, second = models.halves
    assert sorted([*first, *second]) == list(range(models.dense.parts))
    drops = [models.drop(models.score(net(1)), half) for half in (first, second)]
    assert sum(drop.samples for drop in drops) == 400
    mean = sum(drop.drop * drop.samples for drop in drops) / 400
    assert mean == pytest.approx(models.drop(models.score(net(1))).drop)


def test_without_labels_the_dense_model_is_right() -> None:
    models = HeldOut(net(0), images()[0], None)
    drop = models.drop(models.score(net(1)))
    same = (net(0)(images()[0]).argmax(1) == net(1)(images()[0]).argmax(1)).double().mean()
    assert (drop.dense, drop.drop) == (100.0, pytest.approx(1 - float(same)))


def test_less_may_be_better_and_another_unit_counts_as_it_is() -> None:
    """A perplexity rises by a share of the dense model's; a score in decibels falls by decibels."""

    def counts(output: Tensor, targets: Tensor) -> Tensor:
        error = nn.functional.cross_entropy(output, targets, reduction="sum").double()
        return torch.stack([error, error.new_tensor(len(targets))])

    def of(sums: Tensor) -> float:
        return float(torch.exp(sums[0] / sums[1]))

    perplexity = Task("text", nn.CrossEntropyLoss(), counts, (Score("ppl", "ppl", of, unit="", lower_is_better=True),))
    decibels = Task("sound", nn.CrossEntropyLoss(), counts, (Score("db", "level", lambda s: -of(s), unit="dB"),))
    found = {}
    for task in (perplexity, decibels):
        models = HeldOut(net(0), images(), task)
        found[task.name] = models.drop(models.score(net(1)))
    text, sound = found["text"], found["sound"]
    assert text.drop == pytest.approx(text.score / text.dense - 1)
    assert sound.drop == pytest.approx(sound.dense - sound.score)
    assert (text.in_words(0.25), sound.in_words(0.25)) == ("25.0 %", "0.250 dB")


class Right:
    """A metric: the share of right answers, computed at the end."""

    def __init__(self) -> None:
        self.right: list[Tensor] = []

    def update(self, output: Tensor, targets: Tensor) -> None:
        self.right.append(output.argmax(1) == targets)

    def compute(self) -> float:
        return float(torch.cat(self.right).double().mean())


def test_a_metric_is_computed_again_without_each_part() -> None:
    task = Task("metric", nn.CrossEntropyLoss(), None, (Score("right", "right", lambda x: 100 * x),), metric=Right)
    models, by_counts = HeldOut(net(0), images(), task), HeldOut(net(0), images(), "image_classification")
    found, expected = (each.drop(each.score(net(1))) for each in (models, by_counts))
    assert found.drop == pytest.approx(expected.drop)
    assert found.error == pytest.approx(expected.error, rel=0.6)  # of ten parts
    assert found.parts == 10


def sums(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(images()[0]).sum())


def test_a_function_that_fails_on_zeros_is_taken() -> None:
    """Such as one that divides by what the model finds."""

    def found(model: nn.Module) -> float:
        share = float(model.weight.abs().sum())  # type: ignore[operator,union-attr]
        return 1 - 1 / share / 100

    assert HeldOut(net(0), None, found).dense.parts == 1


def test_the_dense_model_is_as_it_was() -> None:
    model = nn.Sequential(net(0), nn.BatchNorm1d(4))

    def trains(given: nn.Module) -> Tensor:
        given.train()
        given(images()[0])
        return answers(model.eval())

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match="the same of one whose weights are all zero"):
        HeldOut(model, None, trains)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


calls = iter(np.arange(1000.0))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda model: next(calls), "the same scores when the same model is given twice"),
        (lambda model: 0.5, "0.5 of the dense model and the same of one whose weights are all zero"),
        (lambda model: sum(-float(p.abs().sum()) for p in model.parameters()), "return minus a loss"),
        (lambda model: math.nan, "a finite number"),
        (lambda model: {"top1": 1.0}, "a finite number"),
        (lambda model: None, "a finite number"),
        (lambda model: (0.9, -0.3), "one for each of at least 80 samples"),
        (lambda model: answers(model)[torch.randperm(400)], "those of samples in another order"),
        (7, "a function of a model"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        HeldOut(net(0), None, function)


def test_samples_that_tell_no_score_are_refused() -> None:
    with pytest.raises(DataError, match="at least 80 samples to tell a drop by, got 40"):
        HeldOut(net(0), images(40), "image_classification")
    with pytest.raises(DataError, match="cannot unpack float32"):
        HeldOut(net(0), [images()[0]], "image_classification")
    with pytest.raises(ModelError, match=r"class scores \(B, classes\)"):
        HeldOut(nn.Unflatten(1, (2, 3)), images()[0], None)
    with pytest.raises(UsageError, match="held_out: expected samples"):
        HeldOut(net(0), None, "image_classification")
