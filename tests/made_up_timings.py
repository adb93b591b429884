"""Made-up timings of a model beside a dense one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from torch import nn

from prunekit.backends.session import Inputs
from prunekit.measure.latency_profile.network_timing import LayerTimes, Network
from prunekit.measure.model_size import ModuleTable, module_table
from prunekit.pruning import latency_budget_search
from prunekit.pruning.latency import profiling
from prunekit.pruning.latency.device_clock import Timing

DENSE_MS = 10.0


def took(speedup: float) -> Timing:
    ms = DENSE_MS / speedup
    return Timing(ms, ms * 0.99, ms * 1.01, speedup, speedup * 0.99, speedup * 1.01, True, ())


def time_by_macs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let networks take the time of their multiply-accumulates, whatever else the machine does."""

    def table(model: nn.Module, inputs: Inputs) -> ModuleTable:
        return module_table(model, inputs.sample(1))

    def time_networks(
        dense: nn.Module, networks: Iterable[Network], inputs: Inputs, *_: object, **__: Any
    ) -> Iterator[LayerTimes]:
        unit = DENSE_MS / table(dense, inputs).macs
        for network in networks:
            found = table(network.build(), inputs)
            modules = {row.path: row.macs * unit for row in found.rows}
            yield LayerTimes(found.macs * unit, DENSE_MS, modules, 0.0)

    def time_pair(dense: nn.Module, compact: nn.Module, inputs: Inputs, *_: object, **__: object) -> Timing:
        return took(table(dense, inputs).macs / table(compact, inputs).macs)

    monkeypatch.setattr(profiling, "time_networks", time_networks)
    monkeypatch.setattr(latency_budget_search, "time_pair", time_pair)
