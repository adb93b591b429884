"""Second moments of what a layer reads: the C x C Gram matrix of its input's channels, and their means."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prunekit.calibration.layer_stats import FloatArray
from prunekit.errors import UsageError

RAISED = 10
"""Factor on the ridge of a Gram matrix of fewer positions than channels: along what nobody saw, its inverse says
nothing."""


@dataclass(frozen=True, eq=False)
class InputMoments:
    """First and second moments of the channels of a consumer's input, over all samples, places and tokens.

    Sums in float64, so that parts of a data set add up to the whole. A grouped convolution reads each group of
    channels for itself: only products within a group are kept, for a depthwise one the squares.
    """

    count: int
    """Positions summed over: samples, times places or tokens, times calls."""
    total: FloatArray
    """(channels,) Sums."""
    blocks: FloatArray
    """(groups, channels / groups, channels / groups) Sums of products, not centered."""

    def __post_init__(self) -> None:
        self.total.setflags(write=False)
        self.blocks.setflags(write=False)

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.total)

    @property
    def groups(self) -> int:
        """Number of groups; 1: the consumer reads all channels together."""
        return len(self.blocks)

    @property
    def mean(self) -> FloatArray:
        """(channels,)"""
        return self.total / max(self.count, 1)

    @property
    def rms(self) -> FloatArray:
        """(channels,) Root of the mean of x^2."""
        squares: FloatArray = self.blocks.diagonal(axis1=1, axis2=2).reshape(-1) / max(self.count, 1)
        return np.sqrt(squares)

    @property
    def gram(self) -> FloatArray:
        """(channels, channels) Sum of x x^T over all positions; 0 between groups, where it was not collected."""
        return _dense(self.blocks)

    @property
    def covariance(self) -> FloatArray:
        """(channels, channels) Population covariance, divided by `count`; 0 between groups."""
        return _dense(self.covariance_blocks)

    @property
    def covariance_blocks(self) -> FloatArray:
        """(groups, channels / groups, channels / groups) The same, group by group."""
        mean = self.mean.reshape(self.groups, -1)
        centered: FloatArray = self.blocks / max(self.count, 1) - mean[:, :, None] * mean[:, None, :]
        return centered

    @property
    def finite(self) -> bool:
        """Whether no NaN or Inf got in."""
        return bool(np.isfinite(self.total).all() and np.isfinite(self.blocks).all())

    def rank(self) -> int:
        """Numerical rank of the Gram matrix as far as float32 tells: at most `channels`, and `count` for each group.

        Below `channels` some are sums of others on the calibration data, or dead, and the inverse does not exist.
        """
        scale = np.sqrt(self.blocks.diagonal(axis1=1, axis2=2))
        scale = np.where(scale > 0, scale, 1)
        alike = self.blocks / (scale[:, :, None] * scale[:, None, :])
        tolerance = alike.shape[1] * float(np.finfo(np.float32).eps)
        ranks = np.linalg.matrix_rank(alike, rtol=tolerance, hermitian=True)
        return int(np.minimum(ranks, self.count).sum())

    @property
    def too_few(self) -> bool:
        """Whether there were fewer positions than channels in a group: then no inverse exists, whatever was seen."""
        return self.count < self.channels // self.groups

    def merge(self, other: InputMoments) -> InputMoments:
        """Moments of both together.

        Raises:
            UsageError: the number of channels or groups differs.
        """
        if self.blocks.shape != other.blocks.shape:
            raise UsageError(
                f"moments of {self.channels} channels in {self.groups} groups here, of {other.channels} in "
                f"{other.groups} there: not the same model"
            )
        return InputMoments(self.count + other.count, self.total + other.total, self.blocks + other.blocks)


def _dense(blocks: FloatArray) -> FloatArray:
    groups, size, _ = blocks.shape
    dense: npt.NDArray[np.float64] = np.zeros((groups, size, groups, size))
    dense[np.arange(groups), :, np.arange(groups)] = blocks
    return dense.reshape(groups * size, groups * size)
