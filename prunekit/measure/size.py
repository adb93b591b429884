"""How large a model is: multiply-accumulates, parameters, bytes on disk and in memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from prunekit.artifacts import StrPath
from prunekit.channels.copying import named_tensors
from prunekit.channels.fusing import fused_away, is_inside
from prunekit.channels.recording import record
from prunekit.channels.running import ModuleStack, plain_attention
from prunekit.channels.storages import parts_of
from prunekit.context import training_mode, without_gradients
from prunekit.inputs import call, count_of
from prunekit.measure.operator_costs import FlopCounter
from prunekit.vocabulary import DtypeName


def count_macs(model: nn.Module, example_inputs: tuple[Tensor, ...]) -> int:
    """Multiply-accumulates of one sample's forward in eval mode, by torch's `FlopCounterMode` (which counts two each).

    Heads that the model's own `fuse()` takes out, as YOLO's that only training needs, do not count.

    Args:
        model: its train/eval mode is restored.
        example_inputs: what forward takes, batch first; the count is divided by the batch size.
    """

    parts = fused_away(model)

    def counted() -> int:
        running: list[int] = []
        aside = 0

        def enter(path: str, *_: Any) -> None:
            if is_inside(path, parts):
                running.append(counter.macs)

        def leave(path: str, *_: Any) -> None:
            nonlocal aside
            if is_inside(path, parts):
                start = running.pop()
                aside += 0 if running else counter.macs - start

        stack = ModuleStack(model, enter, leave) if parts else nullcontext()
        with FlopCounter() as counter, stack:
            call(model, example_inputs)
        return int((counter.macs - aside) // max(1, count_of(example_inputs)))

    with training_mode(model, False), plain_attention():
        return without_gradients(counted)


def count_parameters(model: nn.Module) -> int:
    """Number of parameter elements; a parameter that two modules share counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once: a weights file is larger by its header alone."""
    return sum(part.nbytes for _, tensor in named_tensors(model) for part in parts_of(tensor))


def count_memory(model: nn.Module, example_inputs: tuple[Any, ...], batch: int = 1, dtype: DtypeName = "fp32") -> int:
    """Bytes at the peak of a forward pass: parameters, buffers, inputs, and all results of operators that are alive.

    See `record` for what is counted. What a runtime takes is more: kernels have workspaces, and what is freed is kept.

    Args:
        model: not changed.
        example_inputs: what forward takes, batch first; of any batch.
        batch, dtype: that are counted for.

    Raises:
        ModelError: the model does not run on that.
    """
    return record(model, example_inputs, batch, dtype).peak_bytes


def size_bytes(path: StrPath) -> int:
    """Size of a file in bytes, or of all files in a folder together."""
    path = Path(path)
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
