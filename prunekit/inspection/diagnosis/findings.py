"""What a check finds, and the table of all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prunekit.inspection.diagnosis.observation import Observation
from prunekit.utils.display import Displayed, digits, listed, plural

SHOWN = 10
"""Faults that a diagnosis shows."""
NAMED = 5
"""Names that a sentence gives."""
BEFORE = -1
"""Order of what is wrong before any module runs: the data."""
Need = Literal["data", "model", "forward", "gradients", "step"]
"""What a check looks at; it is skipped, with the reason, where an observation has none of that."""


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        kind: a key of `CHECKS`.
        module: path of the module; `data` for the images and labels, empty for the model as a whole.
        order: place of the module among those that ran, in order of execution, from 0; `BEFORE` for the data.
        expected: what a healthy model or healthy data would have shown.
        came: what was seen in its place.
        advice: what to do.
        evidence: the figures, and names, behind it.
        consequences: findings that this one is likely to have caused; gone when it is mended.
    """

    kind: str
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
    """What is wrong with a model and its data.

    Attributes:
        findings: root causes, in order of execution; empty where nothing is wrong.
        checked: kinds that were looked for.
        skipped: kinds that could not be looked for, each with the reason.
        images: how many the model saw.
        figures: what was measured on the way, such as `loss` and `sharpness`.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> torch.nn.init.constant_(model[0].bias, -100).shape  # what goes wrong: no channel ever passes the ReLU
        torch.Size([16])
        >>> found = pk.diagnose(model, [(x, torch.tensor([0, 1, 1, 0]))])
        >>> found
        <Diagnosis: 1 fault (4 training images, loss ...): dead_relu in 1>
        >>> print(found.findings[0].came)
        16 of 16 channels behind 0 are 0 for all 4 inputs
    """

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    skipped: Mapping[str, str]
    images: int
    figures: Mapping[str, float]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def rows(self) -> list[dict[str, Any]]:
        """Return every fault: its kind, module, what was expected, what came, and what to do."""
        names = ("kind", "module", "order", "expected", "came", "advice")
        return [{name: getattr(finding, name) for name in names} for finding in self.findings]

    @property
    def verdict(self) -> str:
        """Whether it is healthy, in a line."""
        checks = f"healthy: {plural(len(self.checked), 'check')} found nothing"
        said = plural(len(self.findings), "fault") if self.findings else checks
        figures = "".join(f", {key} {digits(value)}" for key, value in self.figures.items())
        return f"{said} ({plural(self.images, 'training image')}{figures})"

    def _headline(self) -> str:
        return self.verdict + (f": {listed(map(str, self.findings), NAMED)}" if self.findings else "")

    def _parts(self) -> Iterator[str]:
        yield self.verdict
        for number, finding in enumerate(self.findings[:SHOWN], 1):
            may = f"\n   may cause: {listed(map(str, finding.consequences), NAMED)}" if finding.consequences else ""
            yield (
                f"{number}. {finding}\n   expected: {finding.expected}\n   came:     {finding.came}\n"
                f"   to do:    {finding.advice}{may}"
            )
        if len(self.findings) > SHOWN:
            yield f"... {plural(len(self.findings) - SHOWN, 'more fault')}; .rows() has all"
        for reason in dict.fromkeys(self.skipped.values()):
            kinds = [kind for kind, why in self.skipped.items() if why == reason]
            yield f"not looked for, {reason}: {', '.join(kinds)}"

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it, with `healthy`."""
        return {"healthy": self.healthy, **asdict(self)}


Run = Callable[[Observation], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """One fault that is looked for.

    Attributes:
        kind: its name.
        needs: what it looks at.
        run: the check, a pure function.
    """

    kind: str
    needs: Need
    run: Run


CHECKS: dict[str, Check] = {}
"""By kind; filled as the files of checks are imported."""


def check(kind: str, needs: Need) -> Callable[[Run], Run]:
    """Register a check.

    Raises:
        ValueError: there is one of that kind.
    """

    def register(run: Run) -> Run:
        if kind in CHECKS:
            raise ValueError(f"there is a check {kind!r} already")
        CHECKS[kind] = Check(kind, needs, run)
        return run

    return register
