"""The module as it is; its layers by their ATen operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from prunekit.inputs import call
from prunekit.measure.runtimes.registry import register_runtime
from prunekit.measure.runtimes.setting import LayerClock, Sample, Session, Setting, Source
from prunekit.measure.runtimes.torch_modules import move, on_cpu, placed
from prunekit.nested import gather


@register_runtime(
    "eager",
    about="the PyTorch module as it is",
    devices=("cpu", "cuda", "mps"),
    times_layers=True,
    moves_weights=on_cpu,
)
def eager(source: Source, sample: Sample, setting: Setting) -> Session:
    """Calls the module."""
    module, inputs = placed(source, sample, setting)
    return Session(lambda: call(module, inputs), layers=lambda: _layers(module, inputs), move=move(module, setting))


def _layers(module: nn.Module, inputs: Sample) -> LayerClock:
    from prunekit.measure.operators import OperatorTimer, floor  # which other measurements start without

    device = gather(inputs)[0].device
    timer = OperatorTimer(module, inputs, device, floor(device).clock_ms)

    def passes(count: int) -> list[dict[str | None, float]]:
        return [_by_module(times) for times in timer.passes[-count:]]

    return LayerClock(timer, passes)


def _by_module(times: Mapping[tuple[str, str], float]) -> dict[str | None, float]:
    found: dict[str | None, float] = defaultdict(float)
    for (path, _), ms in times.items():
        found[path] += ms
    return dict(found)
