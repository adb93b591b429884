"""The result of one-shot pruning: a compact model with its plan, its proof, and what was left undone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from prunekit.models.vocabulary import NOTE, Vocabulary, noted_vocabulary
from prunekit.planning.candidates import Scores
from prunekit.planning.plan import Plan
from prunekit.utils.display import Displayed, Table, count, factor, plural, scientific, share, shares_left

if TYPE_CHECKING:
    from prunekit.measure.score_drop import Drop
    from prunekit.pruning.latency.latency_target import LatencyResult
    from prunekit.repair.repair_report import RepairReport

NOTES = 10
"""Notes of a result that are shown."""


@dataclass(frozen=True, eq=False, repr=False)
class Pruned(Displayed):
    """The result of `prune`.

    Attributes:
        model: the compact model, a new one of the same class.
        masked: the repaired model in its dense size, with zeros for removed channels; None without repair. Its norms
            see kept channels only, by hooks that its pickles and copies have too; so it computes what `model` does. Its
            `state_dict` is as the dense model's, in which plain norms would count the zeros: load that into a dense
            model and run it inside `prunekit.masked(dense, plan)`.
        plan: which channels are kept, and why.
        scores: (n_labels,) importance of every label.
        max_relative_difference: between the masked and the compact model in float64: over all operators in the trial,
            and of the outputs where it was repaired.
        repair: the report of the repair; None without.
        notes: in sentences, what the calibration was short of, channels that are always zero, what a repair could not
            fit or did not keep, subnormal numbers that were set to 0, what earlier calls left in the model, classes
            that are not the model's own any more, methods that no example runs and that may need other sizes, channels
            that only the trial found to be needed, whether all of the model is frozen, and budgets of time that were
            missed.
        delivered: the measured result of a budget of time; None without one.
        score: how much lower the score is than the dense model's, on the held-out samples that confirmed it; None
            without `max_drop`.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> result = pk.prune(model, x, macs=0.5)
        >>> print(result)
        Pruned: Sequential with MACs 50.0 %, parameters 50.6 %, channels 50.0 % left
        <BLANKLINE>
                      dense  pruned    left
          MACs          160      80  50.0 %
          parameters    178      90  50.6 %
          channels       16       8  50.0 %
        <BLANKLINE>
          budget    dense  asked for    left
          MACs    100.0 %     50.0 %  50.0 %  binds
        <BLANKLINE>
        masked against compact: relative difference ... at most
        <BLANKLINE>
        The layers are in .plan.
        >>> result.model(x).shape
        torch.Size([4, 2])
    """

    model: nn.Module
    plan: Plan
    scores: Scores
    max_relative_difference: float
    masked: nn.Module | None = None
    repair: RepairReport | None = None
    notes: tuple[str, ...] = ()
    delivered: LatencyResult | None = None
    score: Drop | None = None

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokens that are kept, if others were removed: it translates ids, and makes the smaller tokenizer."""
        return noted_vocabulary(self.plan.provenance.get(NOTE))

    def rows(self) -> list[dict[str, Any]]:
        """Return figures of the dense and the pruned model, and the share that is left.

        MACs for one sample, parameters and channels; with a budget of time also milliseconds of a forward pass on the
        target.
        """
        whole = self.plan.provenance.get(NOTE, {}).get("dense", {})  # with all tokens
        found: dict[str, tuple[float, float]] = {
            name: (whole.get(name, dense), kept) for name, (dense, kept) in self.plan.totals().items()
        }
        if self.delivered is not None:
            found["latency_ms"] = self.delivered.final.ms * self.delivered.final.speedup, self.delivered.final.ms
        return [
            {"figure": name, "dense": dense, "pruned": kept, "left": kept / (dense or 1)}
            for name, (dense, kept) in found.items()
        ]

    def _headline(self) -> str:
        kept = shares_left({row["figure"]: row["left"] for row in self.rows() if row["figure"] != "latency_ms"})
        final = None if self.delivered is None else self.delivered.final
        speed = "" if final is None else f"{factor(final.speedup)} as fast" if final.stable else "its time unstable"
        how = "; repaired" if self.repair is not None and self.repair.kept else ""
        return f"{type(self.model).__name__} with {kept}{speed and f', {speed}'}{how}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Pruned: {self._headline()}"
        cells = [
            (row["figure"], *(count(row[side]) for side in ("dense", "pruned")), share(row["left"]))
            for row in self.rows()
        ]
        yield Table(("", "dense", "pruned", "left"), cells)
        yield from self.plan.budgets()
        said = [f"masked against compact: relative difference {scientific(self.max_relative_difference)} at most"]
        if self.score is not None:
            said.insert(0, f"score: {self.plan.provenance['max_drop']['said']}")
        if self.delivered is not None:
            target, final = self.delivered.target, self.delivered.final
            asked = f"{target.in_words} asked for" if target.given else "as far as max_drop allows"
            where = f" on {target.settings.target.device}" if target.settings.target.elsewhere else ""
            said.append(f"time: {asked}, {final} measured{where}")
        if self.repair is not None:
            errors = f"{share(self.repair.before, 2)} -> {share(self.repair.after, 2)}"
            said.append(f"repair: error of the output on held-out samples {errors} of its variance")
        said += self.notes[:NOTES]
        if len(self.notes) > NOTES:
            said.append(f"... {plural(len(self.notes) - NOTES, 'more note')}; .notes has all")
        yield "\n".join(said)
        yield "The layers are in .plan."
