"""What is done to the compact model for running it."""

from __future__ import annotations

from dataclasses import dataclass

from prunekit.settings.checked import Checked


@dataclass(frozen=True)
class DeploySettings(Checked):
    """Changes to a copy of the compact model, which becomes a second model folder; each is verified.

    Budgets of time are then met by that model: every plan is timed as it would be deployed, beside the dense model with
    the same changes, so that a speedup is what pruning alone gives; `latency_ms` is of the deployed model. The table of
    speedups over the dense model as it is, in the report, holds what both give together.

    Example:
        >>> import prunekit as pk
        >>> deploy = pk.DeploySettings(fold_batchnorm=True)
        >>> pk.JobSettings("mine", pk.ModelSettings("resnet18"), deploy=deploy).deploy.wanted
        True
    """

    fold_batchnorm: bool = False
    """Whether every BatchNorm that can be is folded into the layer before it."""
    channels_last: bool = False
    """Whether weights are laid out with their channels last, and the model is timed on images that are."""

    @property
    def wanted(self) -> bool:
        """Whether there is anything to do."""
        return self.fold_batchnorm or self.channels_last
