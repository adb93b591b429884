"""Outputs of modules in the channels that a plan keeps, as a student and its teacher compute them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels import channel_axis
from prunekit.errors import ModelError
from prunekit.hooks import HookOwner, recomputing
from prunekit.masking.selection import paths_matching
from prunekit.planning import Plan
from prunekit.settings.training import DistillSettings

PlanInForce = Callable[[], Plan | None]
"""The plan that masks a model now; None: the model is whole."""

Call = tuple[str, int]
"""Path of a module, and the how-manieth call in a forward pass."""


class Features(HookOwner):
    """Keeps the kept channels of the outputs of some modules while gradients or a teacher are computed.

    Args:
        model: its modules are hooked.
        paths: which.
        plan: what is kept.
        trained: whether outputs must carry a gradient.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], plan: PlanInForce, *, trained: bool) -> None:
        super().__init__()
        self._model, self._paths, self._plan, self._trained = model, paths, plan, trained
        self._found: dict[Call, Tensor] = {}
        self._kept: dict[tuple[str, int, torch.device], Tensor | None] = {}
        self._known: Plan | None = None

    def register(self) -> None:
        for path in self._paths:
            self.own_forward(self._model.get_submodule(path), partial(self._see, path), again=True)

    def taken(self) -> dict[Call, Tensor]:
        """What came since the last time, by path and call."""
        found, self._found = self._found, {}
        return found

    def _see(self, path: str, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        if recomputing() or (self._trained and not torch.is_grad_enabled()):
            return  # the second pass of activation checkpointing, or validation
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise ModelError(f"distill.features: {path} gives a {type(output).__name__}; expected one tensor of floats")
        if self._trained and not output.requires_grad:
            raise ModelError(
                f"distill.features: the output of {path} carries no gradient, because it is frozen or is checkpointed "
                "with use_reentrant=True; choose other modules, or use_reentrant=False"
            )
        call = sum(key[0] == path for key in self._found)
        axis = channel_axis(module, output.ndim)
        kept = self._index(path, call, output.shape[axis], output.device)
        # A copy either way: whatever reads the output may overwrite it.
        self._found[path, call] = output.clone() if kept is None else output.index_select(axis, kept)

    def _index(self, path: str, call: int, channels: int, device: torch.device) -> Tensor | None:
        """Kept channels of an output; None where all are, or the plan knows none there."""
        if (plan := self._plan()) is not self._known:
            self._kept, self._known = {}, plan
        if plan is None:
            return None
        key = path, call, device
        if key not in self._kept:
            labels = plan.channel_map.activations.get((path, "output", call))
            keep = None if labels is None or labels.size != channels else plan.keep[labels]
            self._kept[key] = None if keep is None or keep.all() else torch.from_numpy(np.flatnonzero(keep)).to(device)
        return self._kept[key]


def feature_paths(model: nn.Module, settings: DistillSettings) -> list[str]:
    """Module paths whose outputs are compared.

    Raises:
        UsageError: a glob matches nothing.
    """
    wanted = settings.features
    return [] if wanted is None else paths_matching(model, wanted.modules, "distill.features.modules")


def not_alike(given: Collection[Call], taught: Collection[Call]) -> str:
    """What to say where student and teacher did not call the same modules."""
    alone = sorted({path for path, _ in set(given) ^ set(taught)})
    if not alone:
        return "distill.features: none of the modules ran; choose modules that do"
    return (
        f"distill.features: {', '.join(alone[:4])} did not run as often in the student, in train mode, as in the "
        "teacher, in eval mode; choose other modules (checkpointed with use_reentrant=True they record nothing)"
    )
