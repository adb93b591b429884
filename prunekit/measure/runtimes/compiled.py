"""`torch.compile` with its defaults and fixed shapes."""

from __future__ import annotations

import torch

from prunekit.inputs import call
from prunekit.measure.runtimes.registry import register_runtime
from prunekit.measure.runtimes.setting import Sample, Session, Setting, Source
from prunekit.measure.runtimes.torch_modules import move, on_cpu, placed

MOST_MODELS = 64
"""Of one class that are compiled beside each other."""


@register_runtime(
    "compile",
    about="torch.compile with its defaults and fixed shapes",
    devices=("cpu", "cuda"),
    measures_memory=False,
    moves_weights=on_cpu,
    forget=torch.compiler.reset,
)
def compiled(source: Source, sample: Sample, setting: Setting) -> Session:
    """Compiles the module, as part of starting the session."""
    module, inputs = placed(source, sample, setting)
    compiled = torch.compile(module, dynamic=False)
    # Each model is a recompilation of the same code, and past a limit torch goes back to eager without an error.
    with torch._dynamo.config.patch(recompile_limit=MOST_MODELS, fail_on_recompile_limit_hit=True):
        call(compiled, inputs)
    return Session(lambda: call(compiled, inputs), move=move(module, setting))
