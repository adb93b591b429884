"""Known names of criteria, budgets, runtimes, tasks, formats, sections, commands and substitutes of layers.

The objects themselves are not imported. Types of settings that several modules share are here too.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from prunekit.utils.registry import Registered, Registry


def _lazily(place: str) -> Callable[[str, Any], Any]:
    """Return a function of a module that is imported when it is called."""
    module, _, name = place.rpartition(".")
    return lambda reference, found: getattr(import_module(module), name)(reference, found)


BUDGETS: Registry[Any] = Registry(
    "budget",
    "budgets",
    "prunekit.planning.budgets",
    "register_budget",
    _lazily("prunekit.planning.budgets.budget.accept"),
)
CRITERIA: Registry[Any] = Registry(
    "criterion",
    "criteria",
    "prunekit.criteria",
    "register_criterion",
    _lazily("prunekit.criteria.criterion.accept"),
)
SECTIONS: Registry[Any] = Registry(
    "report section",
    "sections",
    "prunekit.report.sections",
    "register_section",
    _lazily("prunekit.report.sections.section.accept"),
)
TASKS: Registry[Any] = Registry(
    "task", "tasks", "prunekit.tasks", "register_task", _lazily("prunekit.tasks.task.accept")
)
RUNTIMES: Registry[Any] = Registry(
    "runtime",
    "runtimes",
    "prunekit.backends",
    "register_runtime",
    _lazily("prunekit.backends.backend.accept_runtime"),
    "register_backend",
)
COMMANDS: Registry[Any] = Registry(
    "command",
    "commands",
    "prunekit.cli.commands",
    "register_command",
    _lazily("prunekit.cli.groups.accept"),
)
SUBSTITUTES: Registry[Any] = Registry(
    "substitute",
    "substitutes",
    "prunekit.models",
    "register_substitute",
    _lazily("prunekit.channels.tracing.substitutes.accept"),
)
FORMATS: Registry[Any] = Registry(
    "format",
    "formats",
    "prunekit.backends",
    "register_format",
    _lazily("prunekit.backends.backend.accept_format"),
    "register_backend",
)


Count = Annotated[int, Ge(0)]
PositiveInt = Annotated[int, Ge(1)]
PositiveFloat = Annotated[float, Gt(0)]
RuntimeName = Annotated[str, Registered(RUNTIMES)]
FormatName = Annotated[str, Registered(FORMATS)]
FloatName = Literal["fp32", "bf16", "fp16"]
DtypeName = Literal["fp32", "bf16", "fp16", "int8"]
DTYPES: dict[DtypeName, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
"""Names of dtypes in torch, and in rows of results, by their names in settings; int8 is that of a quantized file."""
FLOAT_DTYPES: dict[FloatName, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The same of floating-point dtypes, which models can be cast to."""
MemoryFormat = Literal["contiguous", "channels_last"]
