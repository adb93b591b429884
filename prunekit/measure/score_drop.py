"""Drops of a score: by how much a pruned model is below the dense one on the same samples, and how sure that is.

Idea: both models see the same samples, so most of what is random about a score cancels in the difference. The samples
are kept in parts, and the difference is computed again without each of them (delete-a-group jackknife, Wolter 1985),
which works for any score of a set of samples: shares, means, mean precision, perplexity.
Formula: of G parts, error^2 = (G - 1) / G * sum over g of (d_g - mean of all d_g)^2, where d_g is the drop without part
g. Bounds are drop + t * error, with Student's quantile of G - 1 degrees of freedom. For n samples whose scores range
over r, 1 of a share, (3 / 1.645 * r / n)^2 is added to error^2: where no sample differs, the bound is 3 r / n (Hanley &
Lippman-Hand 1983), and not 0.
Unit: a score in percent falls by a share (0.01 is one point); a score of which less is better rises by a share of the
dense model's; any other falls by so much of its own unit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from prunekit.errors import DataError, ModelError, UsageError
from prunekit.hooks.model_copy import copied
from prunekit.tasks.batches import InputsAndTargets, ModelBatches, holds_all
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import Measurement, Score, Task, get_task
from prunekit.utils.context import device_of, training_mode
from prunekit.utils.display import digits, in_unit, plural
from prunekit.utils.inputs import call, described, sample_count, select_samples, to_device
from prunekit.utils.tensors import gather

Evaluate: TypeAlias = Callable[[nn.Module], Any] | Task | str
"""A function of a model that returns its score, or the score of each sample; or a task, itself or its name."""
PARTS, FEWEST = 100, 80
"""Parts of the samples, at most, and the least number of samples."""
PARTS_OF_METRIC = 10
"""Parts where a metric is computed again without each of them."""
MOST_BYTES = 2**31
"""Bytes of held-out samples that are kept; of more, every second batch, or every fourth, and so on."""
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
    spread: float  # range of the scores of single samples: 1 of a share, 0 if unknown
    about: Score  # name, unit and direction of the score
    dtype: str = ""  # int8 if it is a file in int8 that was scored, else empty

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

    def samples_for(self, limit: float) -> int:
        """Return how many samples would tell apart half of a drop, at 95 %."""
        if not self.error or not self.samples:
            return 0
        rule, told = RULE_OF_THREE * self.spread, limit / 2 / _student(SURE, self.parts - 1)
        single = max(0.0, self.error**2 - (rule / self.samples) ** 2) * self.samples  # variance of a sample
        return math.ceil((single + math.sqrt(single**2 + 4 * (told * rule) ** 2)) / (2 * told**2))

    def in_words(self, drop: float) -> str:
        """Return a drop with its unit."""
        if self.about.lower_is_better:
            return f"{digits(100 * drop)} %"
        if self.about.unit == "%":
            return f"{100 * drop:.2f} points" if abs(drop) >= 5e-5 or not drop else f"{100 * drop:.1g} points"
        return f"{digits(drop)} {self.about.unit}".rstrip()

    @property
    def with_interval(self) -> str:
        """The drop in words, with the ends of its interval."""
        ends = ""
        if self.interval is not None:
            ends = f" [{', '.join(self.in_words(end).split()[0] for end in self.interval)}]"
        drop, *unit = self.in_words(self.drop).split()
        return " ".join((drop + ends, *unit))

    def __str__(self) -> str:
        way = "higher" if self.about.lower_is_better else "lower"
        on = f" on {plural(self.samples, 'held-out sample')}" if self.samples else ""
        before, after = (in_unit(value, self.about.unit) for value in (self.dense, self.score))
        what = self.dtype and f" in {self.dtype}"
        return f"{self.about.label} {before} -> {after}{what}: {self.with_interval} {way}{on}"


@dataclass(frozen=True, eq=False)
class HeldOutScores:
    """Counts or outputs of a model on the parts, from which its score on any of them is computed."""

    about: Score
    parts: int
    samples: tuple[int, ...]  # of each part; nothing if unknown
    spread: float  # range of the scores of single samples: 1 of a share, 0 if unknown
    of: Callable[[Sequence[int]], float]  # parts -> the score on them
    dtype: str = ""  # as of `Drop`


class HeldOut:
    """Held-out samples in parts, and the score of models on them; `score` is called for the dense model first."""

    def __init__(
        self, dense: nn.Module, samples: Any, evaluate: Evaluate | None, device: torch.device | None = None
    ) -> None:
        self.device = device or device_of(dense)
        self.function: Callable[[nn.Module], Any] | None = None
        self.task: Task | None = None
        if evaluate is not None and not isinstance(evaluate, (str, Task)):
            if not callable(evaluate):
                raise UsageError(f"evaluate: expected a function of a model, or a task, got {evaluate!r}")
            if samples is not None:
                raise UsageError("held_out: expected none beside a function, which reads its own samples, or a task")
            self.function, dense = evaluate, copied(dense)  # it may move or train what it is given
        else:
            if samples is None:
                raise UsageError(
                    "held_out: expected samples that the score is measured on, got none; give held_out=loader, or "
                    "evaluate, a function of the model that returns its score"
                )
            self.task = IMAGE_CLASSIFICATION if evaluate is None else get_task(evaluate).bound(dense)
            pieces = _pieces(dense, samples, None if evaluate is None else self.task)
            if evaluate is None:
                pieces = [(inputs, _answers(dense, inputs)) for inputs, _ in pieces]
            missing = next((inputs for inputs, targets in pieces if targets is None), None)
            if missing is not None:
                raise DataError(f"held_out: expected samples with targets, got {described(missing)} alone")
            most = PARTS if self.task.metric is None else PARTS_OF_METRIC
            self.batches, self.sizes = _dealt(pieces, min(most, len(pieces)))
        label = AGREEMENT if evaluate is None else "score"
        self.about = Score("agreement" if evaluate is None else "score", label, float, unit="%" if self.task else "")
        if self.task is not None and evaluate is not None:
            self.about = self.task.main
        self.dense = self.score(dense)
        if self.function is not None:
            self._require_sound(dense)

    def _require_sound(self, dense: nn.Module) -> None:
        """Raise if the function is not the same each time, does not depend on the model, or is lower if better."""
        again, every = self.score(dense), range(self.dense.parts)
        if again.parts != self.dense.parts or not all(
            math.isclose(self.dense.of([part]), again.of([part]), rel_tol=1e-6, abs_tol=1e-9) for part in every
        ):
            first, second = self.dense.of(every), again.of(range(again.parts))
            raise UsageError(
                f"evaluate: expected the same scores when the same model is given twice, got {first:.6g} and "
                f"{second:.6g}, or those of samples in another order; set the seed inside the function, and read the "
                "samples in one order"
            )
        broken = copied(dense)
        with torch.no_grad():
            for weight in broken.parameters():
                weight.zero_()
        try:
            found = self.drop(scores := self.score(broken))
        except Exception:  # the user's function on outputs of zeros: NaN, or a division by what it counts
            return
        constant = all(scores.of([part]) == self.dense.of([part]) for part in every)
        if constant or found.drop + 3 * (found.error or 0.0) < 0:
            same = "the same" if constant else f"a higher one, {found.score:.6g},"
            raise UsageError(
                f"evaluate: expected a score that is higher if the model is better, got {found.dense:.6g} of the dense "
                f"model and {same} of one whose weights are all zero; return minus a loss or an error, or a score that "
                "depends on the model it is given"
            )

    def score(self, model: nn.Module) -> HeldOutScores:
        """Return what a model's score on any of the parts is computed from.

        Raises:
            UsageError: the function returns something else than a finite number, or one for each sample.
        """
        if self.function is not None:
            with training_mode(model, False), torch.no_grad():
                return _of_values(self.function(model), self.about)
        task, number, home = self.task, len(self.batches), device_of(model)
        assert task is not None
        rows: list[list[tuple[Any, Any]]] = [[] for _ in range(number)]
        counted = [Measurement(task) for _ in range(number)]
        model.to(self.device)
        with training_mode(model, False), torch.inference_mode():
            for place, pair in ((place, pair) for place, part in enumerate(self.batches) for pair in part):
                inputs, targets = to_device(pair, self.device)
                found = task.scored(model, inputs, call(model, inputs))
                if task.metric is None:
                    counted[place].add(found, targets)
                else:
                    rows[place].append(to_device((found, targets), torch.device("cpu")))
        model.to(home)

        def of(chosen: Sequence[int]) -> float:
            if task.metric is None:
                return task.reached(torch.tensor([counted[at].counts for at in chosen], dtype=torch.float64).sum(0))
            whole = Measurement(task)
            for output, targets in (pair for at in chosen for pair in rows[at]):
                whole.add(output, targets)
            return task.reached(whole.result())

        return HeldOutScores(self.about, number, tuple(self.sizes), float(self.about.unit == "%"), of)

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
        spread = max(scores.spread, self.dense.spread)
        if error is not None and count:
            error = math.hypot(error, RULE_OF_THREE * spread / count)
        drop, about = self._lower(whole, before), self.about
        return Drop(whole, before, drop, error, len(chosen), count, spread, about, scores.dtype)

    @property
    def halves(self) -> tuple[Sequence[int], Sequence[int]]:
        """Two halves of the parts, in turn; both are all of them where a function returns one number."""
        every = range(self.dense.parts)
        return (every, every) if len(every) == 1 else (every[::2], every[1::2])

    def _lower(self, score: float, dense: float) -> float:
        if self.about.lower_is_better:
            return score / dense - 1 if dense else math.inf
        return (dense - score) / (100 if self.about.unit == "%" else 1)


def _pieces(dense: nn.Module, samples: Any, task: Task | None) -> list[InputsAndTargets]:
    """Return the samples, as many as may be kept, evenly spread, in pieces of which there are enough for an error."""
    if isinstance(samples, tuple) and len(samples) == 2 and (task is not None or not holds_all(dense, samples)):
        samples = TensorDataset(*samples)
    kept, every, taken = list[InputsAndTargets](), 1, 0
    for number, batch in enumerate(ModelBatches(dense, samples, task, where="held_out")):
        if number % every == 0:
            kept.append(batch)
            taken += sum(tensor.nbytes for tensor in gather(batch[0]))
        if taken > MOST_BYTES and len(kept) > 1:
            kept, every, taken = kept[::2], 2 * every, taken // 2
    total = sum(sample_count(inputs) for inputs, _ in kept)
    if total < FEWEST:
        raise DataError(f"held_out: expected at least {FEWEST} samples to tell a drop by, got {total}")
    found, most = list[InputsAndTargets](), max(1, min(32, total // PARTS))
    for inputs, targets in kept:
        count, whole = sample_count(inputs), targets is None or isinstance(targets, (Tensor, list, tuple))
        ends = np.linspace(0, count, (-(-count // most) if whole else 1) + 1).astype(int)
        for part in map(slice, ends[:-1].tolist(), ends[1:].tolist()):
            found.append((select_samples(inputs, part), targets if targets is None or not whole else targets[part]))
    if len(found) < PARTS_OF_METRIC:
        raise DataError(
            f"held_out: expected at least {PARTS_OF_METRIC} batches, as their targets cannot be split, got {len(found)}"
        )
    return found


def _dealt(pieces: Sequence[InputsAndTargets], number: int) -> tuple[list[list[InputsAndTargets]], list[int]]:
    """Return the pieces in parts of about as many samples each, so in two halves of them, and these numbers."""
    parts: list[list[InputsAndTargets]] = [[] for _ in range(number)]
    sizes, halves = [0] * number, [0, 0]
    for piece in pieces:
        place = min(range(number), key=lambda at: (halves[at % 2], sizes[at]))
        parts[place].append(piece)
        sizes[place] += sample_count(piece[0])
        halves[place % 2] += sample_count(piece[0])
    return parts, sizes


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
    right = values.ndim == 1 and (values.size == 1 or values.size >= FEWEST)
    if not right or not np.isfinite(values).all():
        got = described(found) if isinstance(found, Tensor) else repr(found)
        raise UsageError(
            f"evaluate: expected a function of a model that returns a finite number, higher if it is better, or one "
            f"for each of at least {FEWEST} samples, (N,), got {got if len(got) < 200 else f'{values.size} values'}"
        )
    number = min(len(values), PARTS)
    folded = [values[place::number] for place in range(number)]
    share = set(values.tolist()) <= {0.0, 1.0}
    return HeldOutScores(
        about,
        number,
        tuple(map(len, folded)) if number > 1 else (),
        1.0 if share else float(np.ptp(values)),
        lambda chosen: float(np.concatenate([folded[place] for place in chosen]).mean()),
    )


def _student(sure: float, freedom: int) -> float:
    """Return a quantile of Student's distribution, by the expansion of Cornish and Fisher (1938), two terms."""
    z = NormalDist().inv_cdf(sure)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
