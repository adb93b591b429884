"""Calibration of a model in training, for the stages of a schedule."""

from __future__ import annotations

from torch import nn

from prunekit.calibration import ChannelStats, TaylorTerms
from prunekit.context import seeded
from prunekit.criteria import get_criterion
from prunekit.training import share_buffers
from prunekit.workflow.calibrate import calibration_batches, collectors_for, gradients_of_all, seen_by_all
from prunekit.workflow.evidence import needs_activations
from prunekit.workflow.prepared import Prepared


def calibrate_again(prepared: Prepared, model: nn.Module) -> tuple[ChannelStats | None, TaylorTerms | None]:
    """Statistics and Taylor terms that the job's criterion needs, of a model in training; nothing is kept in files.

    Of several processes each looks at its share of the batches, and the main one is given what all found.

    Args:
        model: on the job's device, where it stays, under its masks; the process's random state stays as it is, and its
            buffers are those of the main process afterwards.

    Raises:
        NonFiniteError: an activation or a gradient is NaN or Inf.
    """
    needs, images, stats = get_criterion(prepared.job.prune.criterion).needs, calibration_batches(prepared), None
    share_buffers(model)  # BatchNorm statistics differ between two steps
    with seeded(prepared.job.seed):
        if needs_activations(prepared.job.prune.criterion):
            collectors = collectors_for(prepared.job, model, images, prepared.device)
            stats = seen_by_all(collectors, model, images, prepared.device)
            stats.require_finite()
        return stats, gradients_of_all(prepared, model, images) if "gradients" in needs else None
