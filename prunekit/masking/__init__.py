"""Masking: a plan in force on the dense model, masked activations and clamped gradients, by hooks that come and go."""

from prunekit.masking.activations import ActivationMasks, ActivationSparsity
from prunekit.masking.clamps import clamp_activation_grad, clamp_weight_grad
from prunekit.masking.combined import ChangingMasks, Sparsity, masked, sparsity
from prunekit.masking.gradients import GradientMasks
from prunekit.masking.thresholds import ActivationThresholds, calibrate_thresholds
from prunekit.masking.weights import WeightMasks, inner_optimizer
from prunekit.settings.masking import ActivationSettings, ClampSettings

__all__ = [
    "ActivationMasks",
    "ActivationSettings",
    "ActivationSparsity",
    "ActivationThresholds",
    "ChangingMasks",
    "ClampSettings",
    "GradientMasks",
    "Sparsity",
    "WeightMasks",
    "calibrate_thresholds",
    "clamp_activation_grad",
    "clamp_weight_grad",
    "inner_optimizer",
    "masked",
    "sparsity",
]
