"""Drops of a score: by how much a pruned model is below the dense one on the same samples, and how sure that is.

Idea: both models see the same samples, so most of what is random about a score cancels in the difference. The samples
are kept in parts, and the difference is computed again without each of them (delete-a-group jackknife, Wolter 1985),
which works for any score of a set of samples: shares, means, mean precision, perplexity.
Formula: of G parts, error^2 = (G - 1) / G * sum over g of (d_g - mean of all d_g)^2, where d_g is the drop without part
g. Bounds are drop + t * error, with Student's quantile of G - 1 degrees of freedom. Of a share of n samples, (3 / 1.645
/ n)^2 is added to error^2: where none of them differs, the bound is 3 / n (Hanley & Lippman-Hand 1983), and not 0.
Unit: a score in percent falls by a share (0.01 is one point); a score of which less is better rises by a share of the
dense model's; any other falls by so much of its own unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from prunekit.errors import DataError, ModelError, UsageError
from prunekit.hooks.model_copy import copied
from prunekit.tasks.batches import InputsAndTargets, ModelBatches
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import Measurement, Score, Task, get_task
from prunekit.utils.context import device_of, training_mode
from prunekit.utils.display import digits, in_unit, plural
from prunekit.utils.inputs import call, described, sample_count, select_samples, to_device
from prunekit.utils.tensors import gather

Evaluate: TypeAlias = "Callable[[nn.Module], Any] | Task | str"
"""A function of a model that returns its score, or the score of each sample; or a task, itself or its name."""
PARTS, FEWEST = 100, 80
"""Parts of the samples, about, and the least number of samples."""
PARTS_OF_METRIC = 10
"""Parts where a metric is computed again without each of them."""
PARTS_OF_VALUES = 200
"""Parts of the scores that a function returns, at most."""
MOST_BYTES = 2**31
"""Bytes of held-out samples that are kept."""
RULE_OF_THREE = 3 / NormalDist().inv_cdf(0.95)
"""Error of a share of which all samples are alike, times their number."""
SURE = 0.95
"""Probability with which a drop is at most the bound that decides."""
AGREEMENT = "agreement with the dense model"


@dataclass(frozen=True)
class Drop:
    """Difference of a pruned model's score from the dense one's, see `prunekit.measure.score_drop` for units."""

    score: float  # of the pruned model, in the score's own unit
    dense: float  # of the dense model
    drop: float
    error: float | None  # standard error of the drop; None where a function returns one number for all samples
    parts: int  # that the error was computed from
    samples: int  # 0 if unknown
    about: Score  # name, unit and direction of the score

    def bound(self, sure: float) -> float:
        """Return the drop that the true one is below with a probability."""
        if self.error is None:
            return self.drop
        return self.drop + _student(sure, self.parts - 1) * self.error

    @property
    def most(self) -> float:
        """The largest drop that cannot be ruled out, at 95 %."""
        return self.bound(SURE)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the 95 % interval of the drop; None without an error."""
        return None if self.error is None else (self.bound((1 - SURE) / 2), self.bound((1 + SURE) / 2))

    def in_words(self, drop: float) -> str:
        """Return a drop with its unit."""
        if self.about.lower_is_better:
            return f"{digits(100 * drop)} %"
        if self.about.unit == "%":
            return f"{100 * drop:.2f} points"
        return f"{digits(drop)} {self.about.unit}".rstrip()

    def __str__(self) -> str:
        ends = ""
        if self.interval is not None:
            ends = f" [{', '.join(self.in_words(end).split()[0] for end in self.interval)}]"
        way = "higher" if self.about.lower_is_better else "lower"
        on = f" on {plural(self.samples, 'held-out sample')}" if self.samples else ""
        before, after = (in_unit(value, self.about.unit) for value in (self.dense, self.score))
        drop, *unit = self.in_words(self.drop).split()
        return f"{self.about.label} {before} -> {after}: {' '.join((drop + ends, *unit))} {way}{on}"


@dataclass(frozen=True, eq=False)
class HeldOutScores:
    """Counts or outputs of a model on the parts, from which its score on any of them is computed."""

    about: Score
    parts: int
    samples: tuple[int, ...]  # of each part
    is_share: bool  # whether it is a share of the samples
    of: Callable[[Sequence[int]], float]  # parts -> the score on them


class HeldOut:
    """Held-out samples in parts, and the score of models on them; `score` is called for the dense model first."""

    def __init__(self, dense: nn.Module, samples: Any, evaluate: Evaluate | None) -> None:
        self.function: Callable[[nn.Module], Any] | None = None
        self.task: Task | None = None
        if evaluate is not None and not isinstance(evaluate, (str, Task)):
            if not callable(evaluate):
                raise UsageError(
                    f"evaluate: expected a function of a model that returns its score, or a task, got {evaluate!r}"
                )
            self.function = evaluate
        else:
            if samples is None:
                raise UsageError(
                    "held_out: expected samples that the score is measured on, got none; give held_out=loader, or "
                    "evaluate, a function of the model that returns its score"
                )
            self.task = IMAGE_CLASSIFICATION if evaluate is None else get_task(evaluate).bound(dense)
            self.batches = list(_pieces(dense, samples, None if evaluate is None else self.task))
            if evaluate is None:
                self.batches = [(inputs, _answers(dense, inputs)) for inputs, _ in self.batches]
            missing = next((inputs for inputs, targets in self.batches if targets is None), None)
            if missing is not None:
                raise DataError(f"held_out: expected samples with targets, got {described(missing)} alone")
        label = AGREEMENT if evaluate is None else "score"
        self.about = Score("agreement" if evaluate is None else "score", label, float, unit="%" if self.task else "")
        if self.task is not None and evaluate is not None:
            self.about = self.task.main
        self.dense = self.score(dense)
        if self.function is not None:
            self._require_sound(dense)

    def _require_sound(self, dense: nn.Module) -> None:
        """Raise if the function is not the same each time, does not depend on the model, or is lower if better."""
        first, again = self._whole(self.dense), self._whole(self.score(dense))
        if not math.isclose(first, again, rel_tol=1e-6, abs_tol=1e-9):
            raise UsageError(
                f"evaluate: expected the same score when the same model is given twice, got {first:.6g} and "
                f"{again:.6g}; set the seed inside the function, and read the samples in the same order"
            )
        broken = copied(dense)
        with torch.no_grad():
            for weight in broken.parameters():
                weight.zero_()
        try:
            scores = self.score(broken)
        except UsageError:  # NaN, as the cosine of zeros
            return
        found = self.drop(scores)
        constant = all(scores.of([part]) == self.dense.of([part]) for part in range(scores.parts))
        if constant or found.drop + 3 * (found.error or 0.0) < 0:
            same = "the same" if constant else f"a higher one, {found.score:.6g},"
            raise UsageError(
                f"evaluate: expected a score that is higher if the model is better, got {first:.6g} of the dense model "
                f"and {same} of one whose weights are all zero; return minus a loss or an error, or a score that "
                "depends on the model it is given"
            )

    @staticmethod
    def _whole(scores: HeldOutScores) -> float:
        return scores.of(range(scores.parts))

    def score(self, model: nn.Module) -> HeldOutScores:
        """Return what a model's score on any of the parts is computed from.

        Raises:
            UsageError: the function returns something else than a finite number, or one for each sample.
        """
        if self.function is not None:
            with training_mode(model, False), torch.no_grad():
                return _of_values(self.function(model), self.about)
        task, samples = self.task, [sample_count(inputs) for inputs, _ in self.batches]
        assert task is not None
        most = PARTS_OF_METRIC if task.metric is not None else PARTS
        number = min(most, len(self.batches))
        rows: list[list[tuple[Any, Any]]] = [[] for _ in range(number)]
        counted = [Measurement(task) for _ in range(number)]
        device = device_of(model)
        with training_mode(model, False), torch.inference_mode():
            for place, pair in zip((at % number for at in count()), self.batches, strict=False):
                inputs, targets = to_device(pair, device)
                found = task.scored(model, inputs, call(model, inputs))
                if task.metric is None:
                    counted[place].add(found, targets)
                else:
                    rows[place].append(to_device((found, targets), torch.device("cpu")))
        sizes = tuple(sum(samples[place::number]) for place in range(number))

        def of(chosen: Sequence[int]) -> float:
            if task.metric is None:
                return task.reached(torch.tensor([counted[at].counts for at in chosen], dtype=torch.float64).sum(0))
            whole = Measurement(task)
            for output, targets in (pair for at in chosen for pair in rows[at]):
                whole.add(output, targets)
            return task.reached(whole.result())

        return HeldOutScores(self.about, number, sizes, self.about.unit == "%", of)

    def drop(self, scores: HeldOutScores, parts: Sequence[int] | None = None) -> Drop:
        """Return how much lower a model scores than the dense one, on some parts; None: on all."""
        if scores.parts != self.dense.parts:
            raise UsageError(
                f"evaluate: expected as many scores as of the dense model, {self.dense.parts}, got {scores.parts}"
            )
        chosen = range(scores.parts) if parts is None else parts
        whole, before = scores.of(chosen), self.dense.of(chosen)
        error = None
        if len(chosen) > 1:
            without = [[part for part in chosen if part != left] for left in chosen]
            drops = np.array([self._lower(scores.of(some), self.dense.of(some)) for some in without])
            error = math.sqrt((len(chosen) - 1) / len(chosen) * float(((drops - drops.mean()) ** 2).sum()))
        count = sum(scores.samples[part] for part in chosen) if scores.samples else 0
        if error is not None and scores.is_share:
            error = math.hypot(error, RULE_OF_THREE / count)
        return Drop(whole, before, self._lower(whole, before), error, len(chosen), count, self.about)

    @property
    def halves(self) -> tuple[Sequence[int], Sequence[int]]:
        """Two halves of the parts, in turn; both are all of them where there is one part alone."""
        every = range(self.dense.parts)
        return (every, every) if len(every) < 4 else (every[::2], every[1::2])

    def _lower(self, score: float, dense: float) -> float:
        if self.about.lower_is_better:
            return score / dense - 1 if dense else math.inf
        return (dense - score) / (100 if self.about.unit == "%" else 1)


def _pieces(dense: nn.Module, samples: Any, task: Task | None) -> Iterator[InputsAndTargets]:
    """Yield the samples in pieces of which there are enough for an error, as many as may be kept."""
    kept, taken = list[InputsAndTargets](), 0
    if task is not None and isinstance(samples, tuple) and len({len(tensor) for tensor in samples}) == 1:
        samples = TensorDataset(*samples)
    for inputs, targets in ModelBatches(dense, samples, task, where="held_out"):
        taken += sum(tensor.nbytes for tensor in gather(inputs))
        if kept and taken > MOST_BYTES:
            break
        kept.append((inputs, targets))
    total = sum(sample_count(inputs) for inputs, _ in kept)
    if total < FEWEST:
        raise DataError(f"held_out: expected at least {FEWEST} samples to tell a drop by, got {total}")
    each = max(1, min(32, total // PARTS))
    for inputs, targets in kept:
        whole = targets is None or isinstance(targets, (Tensor, list, tuple))
        size = each if whole else sample_count(inputs)
        for start in range(0, sample_count(inputs), size):
            part = slice(start, start + size)
            yield select_samples(inputs, part), None if targets is None else targets[part] if whole else targets


def _answers(dense: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """Return the classes that the dense model tells."""
    with training_mode(dense, False), torch.inference_mode():
        output = call(dense, to_device(inputs, device_of(dense)))
    scores = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(scores, Tensor) or scores.ndim != 2:
        raise ModelError(
            f"evaluate: without it a model is judged by whether it answers as the dense one, for which class scores "
            f"(B, classes) are expected, got {described(output)}; give evaluate, a function of the model that returns "
            "its score, or a task by name with held_out samples that have targets"
        )
    return scores.argmax(1).cpu()


def _of_values(found: Any, about: Score) -> HeldOutScores:
    """Return the scores of what a function returned: one number, or one for each sample."""
    try:
        values = np.atleast_1d(np.asarray(found.detach().cpu() if isinstance(found, Tensor) else found, dtype=float))
    except (TypeError, ValueError):
        values = np.empty((0, 0))
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise UsageError(
            f"evaluate: expected a function of a model that returns a finite number, higher if it is better, or one "
            f"for each sample, got {described(found) if isinstance(found, Tensor) else repr(found)}"
        )
    number = min(len(values), PARTS_OF_VALUES)
    folded = [values[place::number] for place in range(number)]
    samples = tuple(map(len, folded)) if number > 1 else ()
    is_share = bool(samples) and set(values.tolist()) <= {0.0, 1.0}
    return HeldOutScores(
        about,
        number,
        samples,
        is_share,
        lambda chosen: float(np.concatenate([folded[place] for place in chosen]).mean()),
    )


def _student(sure: float, freedom: int) -> float:
    """Return a quantile of Student's distribution, by the expansion of Cornish and Fisher (1938), two terms."""
    z = NormalDist().inv_cdf(sure)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
