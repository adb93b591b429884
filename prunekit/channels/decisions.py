"""Where rounding or chance decides: equal scores come in any order, and both models go on with the order of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prunekit.channels.copying import has_gradients
from prunekit.channels.differences import relative_difference
from prunekit.nested import map_tensors, tensors_in

RANDOM = {f"aten.{name}{suffix}" for suffix in ("", "_") for name in
          ("bernoulli", "uniform", "normal", "rand", "randn", "rand_like", "randn_like", "exponential")}  # fmt: skip


def without_chance(name: str, out: Any) -> Any:
    """Random numbers and unwritten memory made equal: two models of different widths cannot have the same."""
    if isinstance(out, torch.Tensor):
        if name in RANDOM:
            out.fill_(1.0)
        elif name == "aten.randperm":
            torch.arange(out.numel(), out=out)
        elif "empty" in name:
            out.zero_()
    return out


@dataclass(frozen=True, eq=False)
class Decision:
    """One call that made whole numbers or booleans of floating-point values: a sort, a comparison, a suppression.

    What it says may jump when its arguments differ by rounding alone, and everything behind it with it.
    """

    tensors: list[torch.Tensor]
    settings: Any
    outs: list[torch.Tensor]

    def follow(self, arguments: Any, outs: Sequence[torch.Tensor], tolerance: float, peak: float) -> None:
        """Writes these results over another call's where that had the same arguments to the tolerance.

        Args:
            arguments: positional and named ones of the other call.
            outs: its results, written in place.
            peak: the largest value met so far in the run, see `relative_difference`.
        """
        if all(map(torch.equal, self.outs, outs)) or settings(arguments) != self.settings:
            return
        pairs = zip(self.tensors, tensors_in(arguments), strict=True)
        if all(relative_difference(want, got, peak)[0] <= tolerance for want, got in pairs):
            for want, got in zip(self.outs, outs, strict=True):
                if not has_gradients(want):
                    got.resize_(want.shape).copy_(want)


def settings(arguments: Any) -> Any:
    """The arguments with nothing left of their tensors but that they are some."""
    return map_tensors(arguments, lambda tensor: torch.Tensor)  # type: ignore[arg-type, return-value]


def decision(name: str, arguments: Any, outs: Sequence[torch.Tensor]) -> Decision | None:
    """A call as a decision; None where its results do not jump, or where it wrote over what it was given."""
    tensors = list(tensors_in(arguments))
    jumps = any(map(has_gradients, tensors)) and not all(map(has_gradients, outs))
    if not jumps or name.endswith("_") or any(tensor.is_meta for tensor in [*tensors, *outs]):
        return None
    return Decision([tensor.clone() for tensor in tensors], settings(arguments), [out.clone() for out in outs])
