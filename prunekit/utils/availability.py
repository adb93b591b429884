"""Availability on this machine: packages, devices, a compiler, int8 instructions; told without importing torch."""

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prunekit.errors import PrunekitError, UsageError

COMPILERS = {"darwin": "clang++", "win32": "cl"}
"""C++ compilers that torch takes where `$CXX` names none; on other platforms g++."""
CPUINFO = Path("/proc/cpuinfo")
"""Linux's description of the processors."""
DEVICES = ("auto", "cpu", "cuda", "mps")
"""Kinds of devices that a user can name."""
UNKNOWN_DEVICE = "expected auto, cpu, cuda, cuda:n or mps"
REPORT = 'pip install "prunekit[report]"'
"""The command that installs what draws figures and writes TensorBoard's events."""
ADAPTERS = 'pip install "prunekit[hf-train]"'
"""The command that installs what trains adapters."""
QAT = 'pip install "prunekit[qat]"'
"""The command that installs what training for int8 rounds with."""
INT8 = {
    "avx_vnni": "VNNI",
    "avx512_vnni": "VNNI",
    "avx_vnni_int8": "VNNI",
    "amx_int8": "AMX",
    "asimddp": "dot product",
    "i8mm": "int8 matrix multiplication",
}
"""Names of instructions that multiply bytes and add them in 32 bits, by the flag that Linux reports."""


def missing_packages(packages: Sequence[str], install: str = "") -> str:
    """Return which packages are not installed, and how to install them; empty if all are.

    `install` is the command for it; by default `pip install` with their names.
    """
    missing = [package for package in packages if find_spec(package.partition(".")[0]) is None]
    install = install or f"pip install {' '.join(missing)}"
    return f"needs {', '.join(missing)}, not installed here: {install}" if missing else ""


def package_folders(package: str) -> list[Path]:
    """Return the folders of a package, which is not imported; none if it is not installed."""
    spec = find_spec(package)
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]


def has_device(kind: str) -> bool:
    """Return whether torch has a device of a type; torch is imported only where there may be one."""
    if kind not in ("cuda", "mps"):
        return True
    if "torch" not in sys.modules and not (_has_gpu_driver() if kind == "cuda" else sys.platform == "darwin"):
        return False
    import torch

    return torch.cuda.is_available() if kind == "cuda" else torch.backends.mps.is_available()


def _has_gpu_driver() -> bool:
    """Return whether the driver of NVIDIA or AMD is there, without which torch finds no GPU."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def unusable(facts: Mapping[str, Any]) -> str:
    """Return why something cannot be used here, by the facts of its registration; empty if it can.

    Facts are `packages` with `install`, `devices` (types of which it needs one) and `compiler` (whether it needs one).
    """
    if missing := missing_packages(facts.get("packages", ()), facts.get("install", "")):
        return missing
    kinds = facts.get("devices", ("cpu",))
    if not any(map(has_device, kinds)):
        return f"runs on {' and '.join(kinds)}, and there is none here"
    compiler = os.environ.get("CXX", COMPILERS.get(sys.platform, "g++"))
    if facts.get("compiler") and shutil.which(compiler) is None:
        return "needs a C++ compiler, and none is found here: install g++ or clang++, or name one in $CXX"
    return ""


def int8_instructions(cpuinfo: Path = CPUINFO) -> tuple[str, ...] | None:
    """Return the instructions for int8 that the CPU has: VNNI and AMX on x86, two others on ARM; None if unknown."""
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


def import_of_extra(module: str, extra: str, use: str, raises: type[PrunekitError]) -> Any:
    """Return a module of a package that an extra of prunekit installs; raise what names its use if it is not there."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        advice = f"which is not installed: pip install prunekit[{extra}]"
        raise raises(f"{use} needs the package {package}, {advice}") from error


class MissingExtraError(UsageError, ModuleNotFoundError):
    """A library that an integration is for is not installed; the message says how to install it."""


def require_library(library: str, extra: str) -> None:
    """Raise an `ImportError`, which names the extra of prunekit to install, if a library is not installed."""
    if find_spec(library) is None:
        raise MissingExtraError(
            f"prunekit.integrations.{library} needs {library}, not installed here: pip install 'prunekit[{extra}]'",
            name=library,
        )
