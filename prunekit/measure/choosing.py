"""From what is asked for to the settings that can be timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from prunekit.errors import UsageError
from prunekit.measure.runtimes import RUNTIMES, Setting
from prunekit.settings.latency import LatencySettings
from prunekit.vocabulary import DTYPES


def require_runtimes(names: Sequence[str]) -> None:
    """Checks that what the runtimes need is installed.

    Raises:
        UsageError: it is not, and the message says what brings it; or there is no such runtime.
    """
    for name in names:
        if missing := RUNTIMES.get(name).missing():
            raise UsageError(f"runtime {name!r} {missing}")


def choose(settings: LatencySettings, devices: Sequence[torch.device]) -> tuple[list[Setting], list[str]]:
    """Every setting that can be timed, runtime by runtime, and what was left out, with the reason.

    Runtimes, devices, dtypes and memory formats are combined as far as they go together. Threads apply to the CPU;
    another device is timed with the first thread count alone.

    Raises:
        UsageError: a runtime is not installed, or something that was named goes with nothing else that was.
    """
    require_runtimes(settings.runtimes)
    found, left_out = [], []
    for way in product(settings.runtimes, devices, settings.dtypes, settings.memory_formats):
        runtime, device, dtype, memory_format = way
        setting = Setting(runtime, str(device), 1, 1, DTYPES[dtype], memory_format)
        reason = _refusal(setting, device.type)
        if reason:
            left_out.append((way, f"{runtime} on {device}, {setting.dtype}, {memory_format}: not timed: {reason}"))
        else:
            found += [(way, each) for each in _sizes(setting, settings, device)]
    _all_used([way for way, _ in found], left_out)
    return [setting for _, setting in found], [text for _, text in left_out]


def _refusal(setting: Setting, kind: str) -> str:
    runtime = RUNTIMES.get(setting.runtime)
    return runtime.refuse(setting) if kind in runtime.devices else f"it runs on {' and '.join(runtime.devices)} here"


def _sizes(setting: Setting, settings: LatencySettings, device: torch.device) -> Iterator[Setting]:
    threads = settings.threads if device.type == "cpu" else settings.threads[:1]
    for count, batch in product(threads, settings.batches):
        yield Setting(setting.runtime, setting.device, batch, count, setting.dtype, setting.memory_format)


def _all_used(used: Sequence[tuple[object, ...]], left_out: Sequence[tuple[tuple[object, ...], str]]) -> None:
    """What is named and timed nowhere is a mistake; the rest of a product is left out with a note."""
    for position in range(4):
        timed = {way[position] for way in used}
        for way, text in left_out:
            if way[position] not in timed:
                raise UsageError(f"{text}; nothing was measured")
