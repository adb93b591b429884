"""Where runtimes of torch itself run a module: on the setting's device, in its dtype and memory format."""

from __future__ import annotations

import torch
from torch import nn

from prunekit.channels.copying import copied
from prunekit.context import set_mode
from prunekit.layout import lies_channels_last
from prunekit.measure.placing import Placement
from prunekit.measure.runtimes.setting import Sample, Setting, Source, in_dtype
from prunekit.nested import map_tensors

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def layout_of(module: nn.Module, asked: str) -> str:
    """The memory format that a module is run in: what is asked for, but a model with channels last stays so."""
    return "channels_last" if lies_channels_last(module) else asked


def placed(source: Source, sample: Sample, setting: Setting) -> tuple[nn.Module, Sample]:
    """A copy of the module in eval mode and the sample, as a setting asks for them."""
    assert source.module is not None
    form = FORMATS[layout_of(source.module, setting.memory_format)]
    device, dtype = torch.device(setting.device), setting.torch_dtype
    module = set_mode(copied(source.module, device, dtype).to(memory_format=form), False)
    # channels-last is a layout of images: other inputs stay as they are, as the parameters of other layers do
    return module, map_tensors(
        in_dtype(sample, dtype),
        lambda one: one.to(device, memory_format=form if one.dim() == 4 else torch.preserve_format),
    )


def on_cpu(setting: Setting) -> bool:
    """Whether a setting is one of the CPU, where modules are laid out anew while they are timed."""
    return setting.device == "cpu"


def move(module: nn.Module, setting: Setting) -> Placement | None:
    """What moves the weights of a module in a setting; None on another device than the CPU."""
    return Placement(module) if on_cpu(setting) else None
