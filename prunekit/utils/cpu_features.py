"""Instructions of the CPU that speed up int8."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""Linux's description of the processors."""
INT8 = {
    "avx_vnni": "VNNI",
    "avx512_vnni": "VNNI",
    "avx_vnni_int8": "VNNI",
    "amx_int8": "AMX",
    "asimddp": "dot product",
    "i8mm": "int8 matrix multiplication",
}
"""Names of instructions that multiply bytes and add them in 32 bits, by the flag that Linux reports."""


def int8_instructions(cpuinfo: Path = CPUINFO) -> tuple[str, ...] | None:
    """Return the instructions for int8 that the CPU has: of VNNI and AMX on x86, of two more on ARM; None if unknown.

    Example:
        >>> from prunekit.utils.cpu_features import int8_instructions
        >>> set(int8_instructions() or ()) <= {"VNNI", "AMX", "dot product", "int8 matrix multiplication"}
        True
    """
    if not cpuinfo.is_file():
        return None
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = value.split()
            return tuple(dict.fromkeys(name for flag, name in INT8.items() if flag in flags))
    return None


def int8_note(cpuinfo: Path = CPUINFO) -> str:
    """Return a sentence on the instructions for int8 that this CPU has."""
    found = int8_instructions(cpuinfo)
    if found is None:
        return f"whether this CPU ({platform.machine()}) has instructions for int8 is unknown"
    if not found:
        return "this CPU has no instructions for int8 (VNNI or AMX on x86): it may well be slower than fp32 here"
    return f"this CPU has instructions for int8: {' and '.join(found)}"
