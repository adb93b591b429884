"""Scales that torch derives from a width: they change with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from prunekit.channels.constraints import LockRecord
from prunekit.channels.flow import Flow
from prunekit.channels.running import ModuleStack

REASON = "scaled_dot_product_attention derives its scale from this width, as none is given"


FUSED = "fused_attn"
"""Attribute of timm's attention modules: whether they call torch's attention, or do the same by operators, and with a
scale that is an attribute of theirs."""


def unfuse(model: nn.Module) -> set[str]:
    """Sets it to False wherever it is True, in place; returns where."""
    found = {path for path, module in model.named_modules() if vars(module).get(FUSED) is True}
    for path in found:
        setattr(model.get_submodule(path), FUSED, False)
    return found


class DefaultScale(TorchFunctionMode):
    """While active, queries and keys of attention without an explicit scale lose whole heads only.

    Args:
        flow: of the trace.
        stack: knows which module runs.
    """

    def __init__(self, flow: Flow, stack: ModuleStack) -> None:
        super().__init__()
        self.flow, self.stack = flow, stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and kwargs.get("scale") is None:
            given = {**dict(zip(("query", "key"), args, strict=False)), **kwargs}
            for name in ("query", "key"):
                self._fix_last_axis(given[name])
        return func(*args, **kwargs)

    def _fix_last_axis(self, tensor: torch.Tensor) -> None:
        last = tensor.dim() - 1
        for field in self.flow.fields(tensor):
            if last in field.span:
                labels = field.labels.reshape(-1)
                joint = field.span != (last,)
                self.flow.locks.append(
                    LockRecord(REASON, self.stack.current, "aten.scaled_dot_product_attention", labels, positions=joint)
                )
