"""The registry of operator rules: one small pure function per family of operators, registered by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from prunekit.channels.labels.label_flow import LabelFlow

Rule = Callable[[LabelFlow, "OperatorCall"], None]


@dataclass(eq=False, slots=True)
class OperatorCall:
    """One operator call as a rule sees it: name, arguments and results."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

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


class Trait(Enum):
    """A fact about operators that others than their rules ask for, as in `name in Trait.COUNTED`.

    Each is declared beside the rules of the operators that have it.
    """

    COUNTED = "its multiply-accumulates count even if no argument has labels"
    MAKES = "makes a tensor of given sizes, which gets labels even if no argument has any"
    SIZED = "some arguments are sizes, or positions along an axis"
    DROPS_AXES = "reduces axes, also one that was made of several labeled ones"
    RESHAPES_IN_PLACE = "changes the shape of a tensor in place, and none of its values"
    COPIES = "returns the same values, so that a trial does not compare its result"
    MEETS = "a compact model may take one of its two tensors at stated positions"
    PICKS = "puts the positions of an axis in the order of an index"
    PICKS_FROM_STACK = "picks matrices from a stack, such as those of experts"
    RANDOM = "draws random numbers"
    NOISE = "draws random numbers around 0: those of a removed channel are removed with it"
    BELOW_ONE = "draws random numbers from 0 to 1"
    ADDS = "adds two tensors"
    SCALES = "multiplies or divides by a tensor"
    JOINS = "concatenates tensors"
    REARRANGES = "moves values to other positions, whatever they are"
    PASSES = "passes entries on, or some of them, and computes nothing of them"
    KEEPS_CONSTANTS = "changes no value of what is the same everywhere, so that the axis of channels can be followed"
    AFFINE = "returns its bias where the other weights of its module are zero"
    LAST_AXIS = "channels lie on the last axis of its result, and not on axis 1"

    def __init__(self, meaning: str) -> None:
        self.names: set[str] = set()

    def declare(self, *names: str) -> None:
        """Say that operators have this trait."""
        self.names.update(names)

    def __contains__(self, name: object) -> bool:
        return name in self.names


def aten(names: str, suffixes: Sequence[str] = ("",)) -> list[str]:
    """Return the full names of ATen operators, given with spaces between them; with `("", "_")` in-place ones too."""
    return [f"aten.{name}{suffix}" for name in names.split() for suffix in suffixes]


@cache
def installed_rules() -> dict[str, EntryPoint]:
    """Return the rules that other installed packages declare, by operator."""
    return {point.name: point for point in entry_points(group="prunekit.rules")}


def rule_of(name: str) -> Rule | None:
    """Return the rule of an operator, if need be from an installed package's entry point; None without one."""
    if name not in RULES and (point := installed_rules().get(name)) is not None:
        point.load()
    return RULES.get(name)


def register_rule(*names: str, traits: Sequence[Trait] = ()) -> Callable[[Rule], Rule]:
    """Register a rule for operators such as `aten.convolution`; in-place and out variants are separate names.

    Args:
        names: the operators, without overload.
        traits: what others than the rule should know about them.

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
        for trait in traits:
            trait.declare(*names)
        return function

    return register
