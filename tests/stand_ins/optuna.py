"""What the guide uses of Optuna, with its signatures; as for a sweep whose second trial is not worth going on with."""

from __future__ import annotations

from collections.abc import Callable


class TrialPruned(Exception):
    """Raised by an objective that is not worth going on with."""


class Trial:
    def __init__(self, number: int) -> None:
        self.number = number
        self.reported: dict[int, float] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        return low + (high - low) * self.number / 10

    def report(self, value: float, step: int) -> None:
        self.reported[step] = float(value)

    def should_prune(self) -> bool:
        return self.number == 1


class Study:
    def __init__(self, direction: str | None) -> None:
        self.direction = direction
        self.trials: list[Trial] = []
        self.values: list[float | None] = []

    def optimize(self, func: Callable[[Trial], float], n_trials: int | None = None) -> None:
        for number in range(n_trials or 0):
            self.trials.append(Trial(number))
            try:
                self.values.append(func(self.trials[-1]))
            except TrialPruned:
                self.values.append(None)

    @property
    def best_value(self) -> float:
        return max(value for value in self.values if value is not None)


def create_study(*, direction: str | None = None) -> Study:
    return Study(direction)
