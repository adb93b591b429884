"""The search for a training's largest learning rate, where its settings say `lr: auto`: short trials before it begins.

Idea: what a rate is worth shows only once it has come down. So each of a few rates has a whole training of its own,
small and from the same state: linear warm-up and cosine to zero. The one of lowest held-out loss is taken. (A range
test, Smith 2017, raises the rate within one run, and so says where losses explode, but not what is left at the end.)
Formula: together at most B = floor(0.05 * epochs * steps) steps; n = min(max(B // 8, 3), 6) rates of k = B // n steps,
rate i = low * (high / low)^(i / (n - 1)). With k < 8 there are no trials, as after a few steps no rate has helped yet,
and the middle rate is taken.
Invariants: every trial sees the same training batches, random numbers and held-out samples, and minimizes the loss that
is trained, masks, teacher and mixing included. After it everything is as before, bit for bit. No trial counts as a step
of the run; finished ones are in the run's position, so that a resumed run goes on with the next. No rate that makes the
held-out loss worse is preferred: where none is below the start's, the lowest is taken.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice

import torch

from prunekit.data.loader import Batch
from prunekit.data.splits import Splits
from prunekit.distributed.process_group import everyone, local_part
from prunekit.errors import NonFiniteError, UsageError
from prunekit.settings.train import OWN_RATES, REWOUND_RATES, TrainSettings
from prunekit.training.callbacks.callback import RateRow
from prunekit.training.optimizers import rate_factor, set_rate
from prunekit.training.run_state import RunState
from prunekit.utils.context import same_attributes, same_draws

SHARE = 0.05
"""The largest share of a training's steps that trials may take together."""
RATES = {"sgd": (3e-4, 1e-1), "adam": (1e-5, 3e-3), "adamw": (1e-5, 3e-3)}
"""The lowest and the highest rate that is tried with an optimizer."""
STEPS = 8
"""The least steps of a trial."""
HELD_OUT = 512
"""Validation samples, at most, on which the loss is measured."""
FEWEST = 8
"""Validation samples, at least."""


def planned_trials(settings: TrainSettings, steps: int) -> tuple[tuple[float, ...], int]:
    """Return the rates to try in a training of so many steps, ascending, and the steps of each; none if too few."""
    budget = math.floor(SHARE * steps)
    count = min(max(budget // STEPS, 3), 6)
    if settings.lr != "auto" or budget // count < STEPS:
        return (), 0
    low, high = RATES[settings.optimizer]
    return tuple(_rounded(low * (high / low) ** (place / (count - 1))) for place in range(count)), budget // count


def middle_rate(settings: TrainSettings) -> float:
    """Return the rate of the settings; for `auto` the middle of those that are tried."""
    return _rounded(math.sqrt(math.prod(RATES[settings.optimizer]))) if settings.lr == "auto" else settings.lr


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def taken_rate(settings: TrainSettings, rows: Sequence[RateRow]) -> float:
    """Return the rate to train with after the trials, of which the first row is the start; the middle without any."""
    if not rows:
        return middle_rate(settings)
    start, *losses = (math.inf if row.held_out_loss is None else row.held_out_loss for row in rows)
    best = min(losses)
    return rows[1 + losses.index(best) if best < start else 1].rate


def require_searchable(settings: TrainSettings, splits: Splits, steps: int, *, rewinds: bool = False) -> None:
    """Raise UsageError if no rate can be searched for: with an optimizer of one's own, rewinding, or few samples."""
    if settings.lr != "auto":
        return
    if settings.optimizer not in RATES:
        raise UsageError(f"lr: {OWN_RATES}")
    if rewinds:
        raise UsageError(f"lr: {REWOUND_RATES}")
    if planned_trials(settings, steps)[1] and len(splits.validation) < FEWEST:
        raise UsageError(
            f"lr: auto compares rates on validation samples: expected at least {FEWEST}, got {len(splits.validation)}; "
            "raise data.validation_share, or give lr a number"
        )


@dataclass(frozen=True)
class RateSearch:
    """The search of one run; what a trial does is the run's own."""

    state: RunState
    settings: TrainSettings
    train: Callable[[int], Iterable[Sequence[Batch]]]  # the batches of each step of an epoch
    # adds the gradient of a step; raises NonFiniteError in all processes alike if a loss is not finite
    add_gradients: Callable[[Sequence[Batch]], None]
    step: Callable[[], object]  # makes a step
    held_out_loss: Callable[[], float]  # returns that of the present weights
    say: Callable[[str], None]  # shows what is tried

    def run(self, steps: int) -> None:
        """Make the trials that are missing in a run of so many steps, and set the rate that is taken."""
        at, (rates, each) = self.state.position, planned_trials(self.settings, steps)
        for rate in (0.0, *rates)[len(at.rates) :] if rates else ():  # 0: the start itself
            self.say(f"lr {rate:g}" if rate else "lr")
            with unchanged(self.state):
                finite = not rate or self._train(rate, each)
                loss = self.held_out_loss() if finite else math.nan
            at.rates = (*at.rates, RateRow(rate, each if rate else 0, loss if math.isfinite(loss) else None))
            self.state.write_if_due()
        set_rate(self.state.optimizer, self.state.schedule, taken_rate(self.settings, at.rates))

    def _train(self, rate: float, steps: int) -> bool:
        """Make a trial's steps; return whether losses and weights are finite."""
        optimizer, factor = self.state.optimizer, rate_factor(steps, self.settings.warmup)
        epochs = (self.train(epoch) for epoch in range(1, steps + 2))
        try:
            for number, group in enumerate(islice(chain.from_iterable(epochs), steps)):
                for each in optimizer.param_groups:
                    each["lr"] = rate * factor(number)
                self.add_gradients(group)
                self.step()
                optimizer.zero_grad()
        except NonFiniteError:
            return False
        return everyone(self.state.non_finite_tensor() is None)


@contextmanager
def unchanged(state: RunState) -> Iterator[None]:
    """Train inside as before the first step; afterwards all that steps change is as it was, bit for bit.

    That is weights, buffers (also those that a model replaces), attributes of modules, optimizer, loss scale, random
    numbers, counts of clamps, and what callbacks keep.
    """
    model, optimizer, scaler = state.model, state.optimizer, state.scaler
    tensors = [
        (local_part(tensor), local_part(tensor).detach().clone())
        for tensor in chain(model.parameters(), model.buffers())
    ]
    clamps, scale = state.clamps.state_dict(), None if scaler is None else scaler.state_dict()
    try:
        with same_attributes(model), same_draws(model), state.callbacks.around_trial():
            yield
    finally:
        optimizer.zero_grad()
        optimizer.state.clear()
        state.clamps.load_state_dict(clamps)
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.copy_(value)
