"""What became of a budget of time: the frozen plan, and the figure that counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from prunekit.planning.budgets import as_given, in_words
from prunekit.workflow.attempts import TOLERANCE, Attempt, Timing
from prunekit.workflow.goal import LatencyGoal
from prunekit.workflow.planned import Planned


@dataclass(frozen=True, eq=False)
class Frozen:
    """A plan that was measured and is not changed any more.

    Attributes:
        goal: what it was made for.
        planned: the plan; its provenance has the budgets of time as they were asked for.
        attempts: all plans that were measured on the way, in order.
        binding: whether time is what the plan is limited by; if not, it may be faster than asked for.
    """

    goal: LatencyGoal
    planned: Planned
    attempts: tuple[Attempt, ...]
    binding: bool

    @property
    def asked(self) -> dict[str, float]:
        """The budgets of time."""
        return self.goal.asked


@dataclass(frozen=True, eq=False)
class Delivered:
    """A frozen plan, and the figure that counts: of the model that is handed over, measured last."""

    frozen: Frozen
    final: Timing

    @property
    def excess(self) -> float:
        """The time it takes over the time asked for."""
        return self.final.excess(self.frozen.asked)

    @property
    def within(self) -> bool:
        """Whether what is delivered is within the tolerance, or faster where another budget binds."""
        return abs(self.excess - 1) <= TOLERANCE or (self.excess < 1 and not self.frozen.binding)

    @property
    def shortfalls(self) -> list[str]:
        """What was promised and not delivered, in sentences: each figure that is slower than asked for among it."""
        asked = in_words_all(self.frozen.asked)
        found = f"{in_words('latency_ms', self.final.ms)}, {self.final.speedup:.3g}x the dense model's speed"
        texts = []
        if self.excess > 1:
            texts.append(f"budget {asked}: delivered {found}: {100 * (self.excess - 1):.1f} % slower than asked for")
        elif not self.within:
            texts.append(f"budget {asked}: delivered {found}: {100 * (1 - self.excess):.1f} % faster than asked for")
        if not self.final.stable:
            texts.append(f"budget {asked}: the figure is unstable: {'; '.join(self.final.doubts)}")
        texts += [f"budget {asked}: {note}" for note in self.final.notes]
        return texts

    def summary(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "asked": self.frozen.asked,
            "deployed": str(self.frozen.goal.transform),
            "target": self.frozen.planned.plan.provenance["prune"]["target"],
            "final": asdict(self.final),
            "excess": self.excess,
            "within": self.within,
            "tolerance": TOLERANCE,
            "binding": self.frozen.binding,
            "attempts": [asdict(attempt) for attempt in self.frozen.attempts],
        }


def in_words_all(asked: dict[str, float]) -> str:
    """Budgets of time with their units."""
    return " and ".join(f"{name} {in_words(name, as_given(name, value))}" for name, value in asked.items())
