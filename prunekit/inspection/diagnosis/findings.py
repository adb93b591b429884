"""Findings of a diagnosis, the report of all of them, and the registry of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from prunekit.inspection.diagnosis.observation import Observation
from prunekit.utils.display import Displayed, counted, digits, listed, plural

MAX_FAULTS = 10
"""Faults that a diagnosis prints."""
MAX_NAMES = 5
"""Names that a sentence lists."""
DATA_ORDER = -1
"""Order of faults of the data, which come before any module runs."""
Need = Literal["data", "model", "forward", "gradients", "step"]
"""What a check needs of an observation; without it the check is skipped, and the diagnosis says why."""


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        kind: a key of `CHECKS`; set by the check that found it.
        module: path of the module; `data` for the inputs and targets, empty for the model as a whole.
        order: place of the module in the order of execution, from 0; `DATA_ORDER` for the data.
        expected: what a healthy model or healthy data shows.
        came: what was observed instead.
        advice: what to do.
        evidence: the numbers and names behind it.
        consequences: findings that this one is likely to have caused, and that are gone once it is fixed.
    """

    kind: str = field(default="", kw_only=True)
    module: str
    order: int
    expected: str
    came: str
    advice: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    consequences: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} in {self.module or 'the model'}"


@dataclass(frozen=True, repr=False)
class Diagnosis(Displayed):
    """Faults of a model and its data.

    Attributes:
        findings: root causes, in order of execution; empty where nothing is wrong.
        checked: kinds of faults that were looked for.
        skipped: kinds that could not be looked for, each with the reason.
        images: number of samples that the model ran on.
        figures: numbers that were measured, such as `loss` and `sharpness`.
        samples: what its samples are called.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> torch.nn.init.constant_(model[0].bias, -100).shape  # the fault: no channel ever passes the ReLU
        torch.Size([16])
        >>> found = pk.diagnose(model, [(x, torch.tensor([0, 1, 1, 0]))])
        >>> found
        <Diagnosis: 1 fault (4 training samples, loss ...): dead_relu in 1>
        >>> print(found.findings[0].came)
        16 of 16 channels behind 0 are 0 for all 4 inputs
    """

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    skipped: Mapping[str, str]
    images: int
    figures: Mapping[str, float]
    samples: str = "samples"

    @property
    def healthy(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each fault: kind, module, order, what was expected, what came, and what to do."""
        names = ("kind", "module", "order", "expected", "came", "advice")
        return [{name: getattr(finding, name) for name in names} for finding in self.findings]

    @property
    def verdict(self) -> str:
        """One line: whether the model is healthy, and the numbers that were measured."""
        checks = f"healthy: {plural(len(self.checked), 'check')} found nothing"
        said = plural(len(self.findings), "fault") if self.findings else checks
        figures = "".join(f", {key} {digits(value)}" for key, value in self.figures.items())
        return f"{said} ({counted(self.images, f'training {self.samples}')}{figures})"

    def _headline(self) -> str:
        return self.verdict + (f": {listed(map(str, self.findings), MAX_NAMES)}" if self.findings else "")

    def _parts(self) -> Iterator[str]:
        yield self.verdict
        for number, finding in enumerate(self.findings[:MAX_FAULTS], 1):
            may = f"\n   may cause: {listed(map(str, finding.consequences), MAX_NAMES)}" if finding.consequences else ""
            yield (
                f"{number}. {finding}\n   expected: {finding.expected}\n   came:     {finding.came}\n"
                f"   to do:    {finding.advice}{may}"
            )
        if len(self.findings) > MAX_FAULTS:
            yield f"... {plural(len(self.findings) - MAX_FAULTS, 'more fault')}; .rows() has all"
        for reason in dict.fromkeys(self.skipped.values()):
            kinds = [kind for kind, why in self.skipped.items() if why == reason]
            yield f"not looked for, {reason}: {', '.join(kinds)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON has it, with `healthy`."""
        return {"healthy": self.healthy, **asdict(self)}


CheckFunction = Callable[[Observation], Iterable[Finding]]


@dataclass(frozen=True)
class FaultCheck:
    """A kind of fault, and the function that looks for it in an observation."""

    kind: str
    needs: Need
    function: CheckFunction

    def run(self, observation: Observation) -> Iterator[Finding]:
        """Yield what the function finds, with the kind."""
        return (replace(finding, kind=self.kind) for finding in self.function(observation))


CHECKS: dict[str, FaultCheck] = {}
"""Checks by kind; filled as the files of checks are imported."""


def check(kind: str, needs: Need) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function as the check of a kind of fault."""

    def register(function: CheckFunction) -> CheckFunction:
        if kind in CHECKS:
            raise ValueError(f"there is a check {kind!r} already")
        CHECKS[kind] = FaultCheck(kind, needs, function)
        return function

    return register
