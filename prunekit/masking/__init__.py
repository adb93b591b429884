"""Masking: a plan in force on the dense model, by hooks that come and go."""

from prunekit.masking.combined import Sparsity, masked, sparsity
from prunekit.masking.gradients import GradientMasks
from prunekit.masking.weights import WeightMasks, inner_optimizer

__all__ = ["GradientMasks", "Sparsity", "WeightMasks", "inner_optimizer", "masked", "sparsity"]
