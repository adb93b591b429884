"""How large a model is: multiply-accumulates, parameters, bytes on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from prunekit.channels.copying import named_tensors
from prunekit.channels.running import plain_attention
from prunekit.context import training_mode


def count_macs(model: nn.Module, example_inputs: tuple[Tensor, ...]) -> int:
    """Multiply-accumulates of one sample's forward in eval mode, by torch's `FlopCounterMode` (which counts two each).

    Args:
        model: its train/eval mode is restored.
        example_inputs: what forward takes, batch first; the count is divided by the batch size.
    """
    with training_mode(model, False), torch.no_grad(), plain_attention(), FlopCounterMode(display=False) as counter:
        model(*example_inputs)
    return int(counter.get_total_flops()) // (2 * len(example_inputs[0]))


def count_parameters(model: nn.Module) -> int:
    """Number of parameter elements; a parameter that two modules share counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once: a weights file is larger by its header alone."""
    return sum(tensor.nbytes for _, tensor in named_tensors(model))


def size_bytes(path: Path) -> int:
    """Size of a file in bytes, or of all files in a folder together."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
