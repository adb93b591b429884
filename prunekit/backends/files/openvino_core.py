"""OpenVINO's core, one for the process, and its options for models in int8."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from prunekit.utils.availability import CPUINFO, int8_instructions

SPARSE_RATE = 0.5
"""Share of zeros from which int8 weights of fully connected layers stay packed in memory, on CPUs with AMX."""
MODULES = "prunekit_modules"
"""Key of the runtime information that names the module of each operator, as JSON."""


@cache
def openvino_core() -> Any:
    """Return OpenVINO's core, which lives until the process ends.

    Its CPU plug-in gives the thread that loads it a stack for signals, and frees it with the last reference: if a
    garbage collection in another thread does that, the next signal (a worker of a data loader that ends) kills the
    process.
    """
    import openvino

    return openvino.Core()


def sparse_options(cpuinfo: Path = CPUINFO) -> dict[str, float]:
    """Return the option of a compiled model by which int8 weights with many zeros are read packed; empty without AMX.

    It is OpenVINO's sparse weights decompression: for fully connected layers in int8 on CPUs with AMX alone, and for
    weights with at least `SPARSE_RATE` of zeros. The numbers stay the same.
    """
    able = "AMX" in (int8_instructions(cpuinfo) or ())
    return {"CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": SPARSE_RATE} if able else {}
