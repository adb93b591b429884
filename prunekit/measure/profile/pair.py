"""What happens inside the process that profiles: a network, whole and by layers, alternated with the dense one."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunekit.context import on_device
from prunekit.context import threads as with_threads
from prunekit.measure.beside import ready
from prunekit.measure.evidence import Contention, Times, doubts
from prunekit.measure.machine import Load
from prunekit.measure.measuring import Failed, check, laid_out_anew, line_of
from prunekit.measure.profile.layer_times import LayerTimes
from prunekit.measure.runtimes import Inputs, Runtime, Session, Setting, Source
from prunekit.measure.timing import Timer, alternate, warm_up

Pass = Mapping[str | None, float]


@dataclass(frozen=True, eq=False)
class Ready:
    """A network that is ready to be measured: what it is run from, and the tensors that it returns in eager float32."""

    name: str
    source: Source
    expected: list[Tensor]


@dataclass(eq=False)
class Pair:
    """Called with a network, it measures it beside the dense one, whose session it keeps from the first call on.

    Attributes:
        repeats: rounds, at least; as many more as it takes to measure for `least_ms` milliseconds.
    """

    runtime: Runtime
    dense: Ready
    inputs: Inputs
    setting: Setting
    repeats: int
    least_ms: float = 0.0
    dense_session: Session | None = None

    def __call__(self, network: Ready) -> LayerTimes | Failed:
        """The network's times, or what it failed of."""
        try:
            with with_threads(self.setting.threads), on_device(self.setting.device), torch.inference_mode():
                return self._measure(network)
        except Exception as error:  # a runtime's own errors, and whatever a model's code raises
            return Failed(self.setting, line_of(error))
        finally:
            gc.collect()

    def _measure(self, network: Ready) -> LayerTimes:
        device = torch.device(self.setting.device)
        if self.dense_session is None:
            self.dense_session = self._open(self.dense)
            warm_up(Timer(self.dense_session.run, device), device.type)
        session = self._open(network)
        assert session.layers is not None
        clock = session.layers()
        timers = [Timer(run, device) for run in (self.dense_session.run, session.run, clock.run)]
        for timer in timers[1:]:
            ready(timer)
        rounds = max(self.repeats, ceil(self.least_ms / sum(timer() for timer in timers)))
        load = Load()
        with load.watched():
            times = alternate(timers, rounds, laid_out_anew(self.dense_session, session))
        contention = load.contention(self.setting.threads) if self.setting.device == "cpu" else None
        return _together(times, clock.passes(rounds), contention)

    def _open(self, network: Ready) -> Session:
        sample = self.inputs.sample(self.setting.batch)
        session = self.runtime.open(network.source, sample, self.setting)
        check(network.name, session, self.setting, network.expected)
        return session


def _together(times: Times, passes: Sequence[Pass], contention: Contention | None) -> LayerTimes:
    places = dict.fromkeys(place for found in passes for place in found)
    modules = {place: _undisturbed([found.get(place, 0.0) for found in passes]) for place in places}
    return LayerTimes(
        whole_ms=_undisturbed(times[1]),
        dense_ms=_undisturbed(times[0]),
        modules_ms={place: ms for place, ms in modules.items() if place is not None},
        rest_ms=modules.get(None, 0.0),
        doubts=tuple(doubts(times[0] / times[1], contention)),
    )


def _undisturbed(times: Any) -> float:
    """The lower quartile: what other processes add, they add to whole passes more than to single layers."""
    return float(np.percentile(times, 25))
