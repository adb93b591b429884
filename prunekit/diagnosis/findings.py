"""What a check finds, and the table of all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prunekit.diagnosis.observation import Observation

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


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a model and its data.

    Attributes:
        findings: root causes, in order of execution; empty where nothing is wrong.
        checked: kinds that were looked for.
        skipped: kinds that could not be looked for, each with the reason.
        images: how many the model saw.
        figures: what was measured on the way, such as `loss` and `sharpness`.
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

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON has it, with `healthy`."""
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
    """Registers a check.

    Raises:
        ValueError: there is one of that kind.
    """

    def register(run: Run) -> Run:
        if kind in CHECKS:
            raise ValueError(f"there is a check {kind!r} already")
        CHECKS[kind] = Check(kind, needs, run)
        return run

    return register


def listed(names: Iterable[str], most: int = 5) -> str:
    """A few names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
