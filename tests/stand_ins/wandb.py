"""What the guide uses of Weights & Biases, with its signatures; nothing goes to a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RUNS: list[Run] = []
_SWEEPS: dict[str, dict[str, Any]] = {}
_GIVEN: dict[str, Any] = {}


class Run:
    def __init__(self, project: str | None, config: dict[str, Any] | None) -> None:
        self.project = project
        self.config = {**(config or {}), **_GIVEN}
        self.summary: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.logged.append(dict(data))

    def __enter__(self) -> Run:
        RUNS.append(self)
        return self

    def __exit__(self, *raised: object) -> None: ...


def init(*, project: str | None = None, config: dict[str, Any] | None = None) -> Run:
    return Run(project, config)


def sweep(sweep: dict[str, Any], entity: str | None = None, project: str | None = None) -> str:
    _SWEEPS[f"sweep{len(_SWEEPS)}"] = sweep
    return f"sweep{len(_SWEEPS) - 1}"


def agent(
    sweep_id: str,
    function: Callable[[], object] | None = None,
    entity: str | None = None,
    project: str | None = None,
    count: int | None = None,
) -> None:
    assert function is not None
    for _ in range(count or 0):
        _GIVEN.update({name: values["min"] for name, values in _SWEEPS[sweep_id]["parameters"].items()})
        function()
