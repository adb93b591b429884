"""The registry of operator rules: one small pure function per family of operators, registered by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from prunekit.channels.labels.label_flow import LabelFlow

Rule = Callable[[LabelFlow, "OperatorCall"], None]


class OperatorCall:
    """One operator call as a rule sees it: name, arguments and results."""

    __slots__ = ("args", "kwargs", "name", "out")

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.out = out

    @property
    def outs(self) -> Sequence[Any]:
        """The results, one or several."""
        return self.out if isinstance(self.out, (tuple, list)) else [self.out]

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


RULES: dict[str, Rule] = {}
"""Operator name without overload, such as `aten.add` or `mylib.scan`, to its rule."""


def aten(names: str, suffixes: Sequence[str] = ("",)) -> list[str]:
    """Return the full names of ATen operators, given with spaces between them; with `("", "_")` in-place ones too."""
    return [f"aten.{name}{suffix}" for name in names.split() for suffix in suffixes]


@cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="prunekit.rules")}


def rule_of(name: str) -> Rule | None:
    """Return the rule of an operator, if need be from an installed package's entry point; None without one."""
    if name not in RULES and (point := _installed().get(name)) is not None:
        point.load()
    return RULES.get(name)


def register_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators such as `aten.convolution`; in-place and out variants are separate names.

    Raises:
        ValueError: an operator has a rule already.

    Example:
        >>> import torch
        >>> import prunekit as pk
        >>> @torch.library.custom_op("mylib::amplify", mutates_args=())
        ... def amplify(x: torch.Tensor, gain: float) -> torch.Tensor:
        ...     return x * gain
        >>> @amplify.register_fake
        ... def shaped(x, gain):
        ...     return torch.empty_like(x)
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.wide, self.head = torch.nn.Linear(4, 16), torch.nn.Linear(16, 2)
        ...     def forward(self, x):
        ...         return self.head(amplify(self.wide(x), 2.0))
        >>> @pk.register_rule("mylib.amplify")
        ... def keeps_channels(flow, call):  # each channel of the output is that channel of the input
        ...     flow.set(call.out, flow.fields(call.args[0]))
        >>> pk.prune(Net(), torch.randn(1, 4), macs=0.5).model.wide.out_features
        8
    """

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"operator {name} already has a rule: {RULES[name].__module__}.{RULES[name].__name__}")
            RULES[name] = function
        return function

    return register
