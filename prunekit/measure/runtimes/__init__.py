"""What runs models: each runtime registers itself in a file of its own here."""

from prunekit.measure.runtimes.exporting import exported
from prunekit.measure.runtimes.registry import RUNTIMES, Runtime, register_runtime
from prunekit.measure.runtimes.setting import (
    FileKey,
    Inputs,
    LayerClock,
    Sample,
    Session,
    Setting,
    Source,
    inputs_like,
    inputs_of,
    sample_of,
)
from prunekit.measure.runtimes.torch_modules import placed

__all__ = [
    "RUNTIMES",
    "FileKey",
    "Inputs",
    "LayerClock",
    "Runtime",
    "Sample",
    "Session",
    "Setting",
    "Source",
    "exported",
    "inputs_like",
    "inputs_of",
    "placed",
    "register_runtime",
    "sample_of",
]
