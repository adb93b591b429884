"""What became of a budget of time: the frozen plan, and the figure that counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from prunekit.measure import LatencyReport
from prunekit.measure.choosing import choose
from prunekit.measure.wording import where
from prunekit.settings.budgets import facts_of
from prunekit.workflow.attempts import TOLERANCE, Attempt, Timing
from prunekit.workflow.bench import devices
from prunekit.workflow.goal import LatencyGoal
from prunekit.workflow.planned import Planned
from prunekit.workflow.profiling import as_latency


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
        found = f"{self.final.ms:.4g} ms, {self.final.speedup:.3g}x the dense model's speed"
        texts = []
        if self.excess > 1:
            texts.append(f"budget {asked}: delivered {found}: {100 * (self.excess - 1):.1f} % slower than asked for")
        elif not self.within:
            texts.append(f"budget {asked}: delivered {found}: {100 * (1 - self.excess):.1f} % faster than asked for")
        if not self.final.stable:
            texts.append(f"budget {asked}: the figure is unstable: {'; '.join(self.final.doubts)}")
        texts += [f"budget {asked}: {note}" for note in self.final.notes]
        return texts

    def in_place(self, report: LatencyReport, model: str) -> LatencyReport:
        """Return a report in which the figure that counts stands for the speedup of a model on the target.

        A report's own figures are of one process in each setting, whose memory lies by chance; two figures for the same
        thing, each certain to a percent, need not agree.
        """
        target = self.frozen.goal.settings.target
        asked = as_latency(target)
        (setting,) = choose(asked, devices(target.device, asked))[0]
        final, notes = self.final, list(report.notes)
        figures = {
            "median": final.speedup, "low": final.speedup_low, "high": final.speedup_high, "stable": final.stable,
            "doubts": list(final.doubts), "processes": final.processes,
        }  # fmt: skip

        def placed(row: Mapping[str, Any]) -> dict[str, Any]:
            if row["model"] != model or not _same(row, asdict(setting)):
                return dict(row)
            notes.append(
                f"speedup of {model} ({where(row)}): the figure of the budget of time, the median over as many "
                f"processes as it took ({final.processes}); times in ms are of one process each"
            )
            return {**row, **figures}

        speedup = tuple(placed(row) for row in report.speedup)
        return replace(report, speedup=speedup, notes=tuple(notes))

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
    return " and ".join(f"{name} {facts_of(name).in_words(value)}" for name, value in asked.items())


def _same(row: Mapping[str, Any], setting: Mapping[str, Any]) -> bool:
    """Whether a row of a report is of a setting; layouts are as models have them, not as they were asked for."""
    return all(row[key] == value for key, value in setting.items() if key != "memory_format")
