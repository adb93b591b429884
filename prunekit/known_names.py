"""Known names of criteria, budgets, runtimes, tasks, formats, sections, commands and substitutes of layers.

The objects themselves are not imported. Types of settings that several modules share are here too.
"""

from importlib import import_module
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from prunekit.utils.registry import Registered, Registry


def _registry(name: str, plural: str, room: str, accept: str, also: str = "", kind: str = "") -> Registry[Any]:
    """Return the registry of a room; the function `accept` is imported when it is called."""

    def accepted(reference: str, found: Any) -> Any:
        module, _, function = f"prunekit.{accept}".rpartition(".")
        return getattr(import_module(module), function)(reference, found)

    return Registry(kind or name, plural, f"prunekit.{room}", f"register_{name}", accepted, also)


BUDGETS = _registry("budget", "budgets", "planning.budgets", "planning.budgets.budget.accept")
CRITERIA = _registry("criterion", "criteria", "criteria", "criteria.criterion.accept")
SECTIONS = _registry("section", "sections", "report.sections", "report.sections.section.accept", kind="report section")
TASKS = _registry("task", "tasks", "tasks", "tasks.task.accept")
RUNTIMES = _registry("runtime", "runtimes", "backends", "backends.backend.accept_runtime", "register_backend")
COMMANDS = _registry("command", "commands", "cli.commands", "cli.groups.accept")
SUBSTITUTES = _registry("substitute", "substitutes", "models", "channels.tracing.substitutes.accept")
FORMATS = _registry("format", "formats", "backends", "backends.backend.accept_format", "register_backend")


def is_export_name(name: str) -> bool:
    """Return whether a name ends as files of a format of exports do."""
    return name.endswith(tuple(str(end) for facts in FORMATS.facts().values() if (end := facts.get("suffix"))))


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
