"""How a compact model is timed beside the dense one where a budget of time is to be met."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import nn

from prunekit.errors import RunError
from prunekit.measure.effort import current_effort
from prunekit.measure.latency import LatencyReport, ready
from prunekit.measure.runtimes import Inputs
from prunekit.measure.wording import failed
from prunekit.planning import PruneSettings
from prunekit.settings.budgets import facts_of
from prunekit.workflow.attempts import TOLERANCE, Timing
from prunekit.workflow.bench import devices
from prunekit.workflow.profiling import as_latency

CERTAIN = 0.0125
"""Half of the 95 % interval of the median over processes that is small enough, as a share of it. Beside a tolerance of
3 %."""
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""97.5 % of Student's distribution (1908) lie below, for 1, 2, ... degrees of freedom: a standard deviation of three
processes is often too small by half."""


def rounds_of(dense_ms: float) -> int:
    """As many as are wanted in each process, of a dense model that takes so long."""
    effort = current_effort()
    return min(max(effort.rounds, round(effort.rounds_ms / dense_ms)), effort.most_rounds)


def timed(
    model: nn.Module, compact: nn.Module, inputs: Inputs, settings: PruneSettings, rounds: int, most: int
) -> Timing:
    """Measures a compact model beside the dense one on the target of the settings, in several processes of their own.

    The same model differs by some percent from process to process, whatever its interval in one of them: where its
    memory lies is a matter of chance, and what else the machine does changes. The less they agree, the more of them
    measure.

    Args:
        rounds: in each process.
        most: processes.

    Raises:
        RunError: it cannot be measured there.
    """
    effort = current_effort()
    wanted, models = as_latency(settings.target), {"dense": model, "pruned": compact}
    with ready(models, inputs, wanted, devices(settings.target.device, wanted)) as measured:
        for tried in range(effort.tries):
            each: list[Timing] = []
            while len(each) < effort.processes or (len(each) < most and _uncertainty(each, settings) > CERTAIN):
                each.append(_timing(measured(rounds * 2**tried)))
            found = _median(each, _uncertainty(each, settings))
            if found.stable:
                break
    return found


def _uncertainty(found: Sequence[Timing], settings: PruneSettings) -> float:
    """Half of the 95 % interval of what counts, the median over processes, as a share of it; as of a normal
    distribution."""
    if len(found) < 2:
        return 0.0
    in_ms = any(one.measured and not one.share for one in map(facts_of, settings.budget.given))
    figures = np.array([one.ms if in_ms else one.speedup for one in found])
    error = math.sqrt(math.pi / 2 / len(found)) * figures.std(ddof=1)
    return float(STUDENT_T[min(len(found) - 1, len(STUDENT_T)) - 1] * error / np.median(figures))


def _median(found: Sequence[Timing], uncertainty: float = 0.0) -> Timing:
    """The medians over processes, with intervals that hold those of all; stable where most are, and agree."""
    most = sum(one.stable for one in found) > len(found) / 2
    doubts = [] if most else [doubt for one in found for doubt in one.doubts]
    if uncertainty > TOLERANCE:
        doubts.append(
            f"{len(found)} processes differ: the 95 % interval of their median is {100 * uncertainty:.1f} % wide to "
            f"either side, at most {100 * TOLERANCE:.0f} % supports a claim; to settle it: an idle machine"
        )
    return Timing(
        ms=float(np.median([one.ms for one in found])),
        ms_low=min(one.ms_low for one in found),
        ms_high=max(one.ms_high for one in found),
        speedup=float(np.median([one.speedup for one in found])),
        speedup_low=min(one.speedup_low for one in found),
        speedup_high=max(one.speedup_high for one in found),
        stable=not doubts,
        doubts=tuple(dict.fromkeys(doubts)),
        notes=tuple(dict.fromkeys(note for one in found for note in one.notes)),
        processes=len(found),
    )


def _timing(found: LatencyReport) -> Timing:
    if found.failures:
        raise RunError(f"latency not measured: {'; '.join(failed(found.failures))}")
    row, ratio = found.rows[1], found.speedup[0]
    doubts = tuple(dict.fromkeys([*row["doubts"], *ratio["doubts"]]))
    ms = (row["median_ms"], row["low_ms"], row["high_ms"])
    return Timing(*ms, ratio["median"], ratio["low"], ratio["high"], not doubts, doubts, found.not_apart)
