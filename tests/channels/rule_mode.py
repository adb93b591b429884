"""Applies the rules to every operator that runs, with nothing else around them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prunekit.channels.labels.label_flow import LabelFlow
from prunekit.channels.rules.rule import RULES, OperatorCall
from prunekit.channels.tracing.channel_norms import NormFinder


class RuleMode(TorchDispatchMode):
    """Runs an operator for real, then its rule where any of its inputs has fields."""

    def __init__(self, flow: LabelFlow) -> None:
        super().__init__()
        self.flow = flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func._schema.name).replace("::", ".")
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        fields = [field for value in flat for field in self.flow.fields(value)]
        for value in flat:
            if isinstance(value, torch.Tensor):
                self.flow.read(value)
        if fields and name in RULES:
            RULES[name](self.flow, OperatorCall(name, args, kwargs or {}, out))
            NormFinder(self.flow).abandon()  # there is no module that could be a norm
        else:
            self.flow.lock(fields, "no rule")
        return out
