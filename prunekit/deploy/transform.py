"""What a deployment does to a model, done to many of its structure: for timing, where weights make no difference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from prunekit.deploy.foldable import Pair
from prunekit.deploy.folding import folded, to_fold
from prunekit.deploy.layout import laid_out
from prunekit.settings.deploy import DeploySettings


@dataclass(frozen=True, eq=False)
class Transform:
    """What `fold_batchnorm` and `channels_last` do to a model, as a function of it and of every compact model of it.

    Nothing is checked. Models without values, on the meta device, are taken too.

    Attributes:
        pairs: norms to fold and the layers before them.
    """

    settings: DeploySettings = field(default_factory=DeploySettings)
    pairs: tuple[Pair, ...] = ()

    def __call__(self, model: nn.Module) -> nn.Module:
        """A copy in eval mode; the model itself where there is nothing to do."""
        found = folded(model, self.pairs) if self.settings.fold_batchnorm else model
        return laid_out(found) if self.settings.channels_last else found

    def __str__(self) -> str:
        """What it does in words; empty where it does nothing."""
        norms = ["BatchNorm folded"] if self.settings.fold_batchnorm else []
        return " and ".join([*norms, *(["channels last"] if self.settings.channels_last else [])])


AS_IT_IS = Transform()


def transform_of(model: nn.Module, example: tuple[Any, ...], settings: DeploySettings) -> Transform:
    """Finds, once, in a dense model what of it and its compact models a deployment changes.

    Args:
        model: not changed.
        example_inputs: an example, see `prunekit.inputs.example`.
    """
    pairs = to_fold(model, example).pairs if settings.fold_batchnorm else ()
    return Transform(settings, tuple(replace(pair, output=None) for pair in pairs))
