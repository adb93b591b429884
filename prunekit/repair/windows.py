"""Windows of images in which two layers, one behind the other, are looked at together.

All positions of a window share what the first layer computes in it: to compute that for scattered positions one by one
takes as many times longer as the second layer has taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prunekit.calibration.patches import Reading, sampled_rows

Sizes = tuple[int, ...]


def convolving(reading: Reading) -> Reading:
    """A reading as one of a convolution that pads nothing; that of a linear layer has one tap along one axis."""
    if not reading.kernel:
        return Reading((1,), (1,), (0,), (1,))
    return Reading(reading.kernel, reading.stride, (0,) * len(reading.kernel), reading.dilation)


@dataclass(frozen=True, eq=False)
class Windows:
    """One window of the second layer's output in each of N samples, all of one size.

    A linear layer's samples are its rows, and have one position.

    Attributes:
        first, second: how the layers read.
        made, outputs: spatial sizes of what the first gives, and of what the second does.
        size: of a window, positions of the second's output along each axis.
        samples: (N,) which.
        starts: (N, axes) where each begins.
    """

    first: Reading
    second: Reading
    made: Sizes
    outputs: Sizes
    size: Sizes
    samples: Tensor
    starts: Tensor

    @classmethod
    def drawn(
        cls, first: Reading, second: Reading, inputs: Tensor, each: float, seed: int, among: Tensor | None = None
    ) -> Windows:
        """Windows of one size whatever the number of images.

        Args:
            inputs: of the first layer; an image may have several samples for a linear layer.
            each: positions of the second's output for each image, at most; below 1 for not every image.
            seed: of samples and places.
            among: (N,) samples that may be drawn; None: all.
        """
        made = first.spatial(inputs)
        outputs = second.spatial_of(made)
        samples = sampled_rows(first.rows_of(inputs) // prod(made), max(1, round(each * len(inputs))), seed, among)
        share = min(1.0, max(1.0, each) / prod(outputs)) ** (1 / max(1, len(outputs)))
        size = tuple(max(1, int(share * n + 1e-6)) for n in outputs)
        generator, number = torch.Generator().manual_seed(seed), (len(samples),)
        starts = [torch.randint(n - m + 1, number, generator=generator) for n, m in zip(outputs, size, strict=True)]
        at = torch.stack(starts, 1) if starts else torch.zeros(*number, 0, dtype=torch.int64)
        return cls(first, second, made, outputs, size, samples.to(inputs.device), at.to(inputs.device))

    def rows(self) -> Tensor:
        """(N * positions,) which rows of the second's output they are, window by window."""
        found = self.samples.view(-1, *[1] * len(self.size))
        for i, (size, total) in enumerate(zip(self.size, self.outputs, strict=True)):
            found = found * total + self._along(i, self.starts[:, i], size)
        return found.flatten()

    def inputs(self, inputs: Tensor) -> Tensor:
        """(N, channels, ...): what the first layer reads of them, with all padding that either layer puts there."""
        if not self.size:
            return inputs.reshape(-1, inputs.shape[-1])[self.samples][:, :, None]
        pads = [p + s * q for p, s, q in zip(self.first.padding, self.first.stride, self.second.padding, strict=True)]
        padded = F.pad(inputs, [pad for pad in reversed(pads) for _ in range(2)]) if any(pads) else inputs
        first, second = self.first, self.second
        where: list[Any] = [self.samples.view(-1, *[1] * len(self.size)), slice(None)]
        for i, size in enumerate(self._hidden()):
            span = (size - 1) * first.stride[i] + first.dilation[i] * (first.kernel[i] - 1) + 1
            where.append(self._along(i, self.starts[:, i] * second.stride[i] * first.stride[i], span))
        return padded[tuple(where)].movedim(-1, 1)

    def there(self) -> Tensor:
        """(N, 1, ...): False where what the second layer reads of them is padding."""
        shape = len(self.samples), *[1] * max(1, len(self.size))
        found = torch.ones(shape, dtype=torch.bool, device=self.samples.device)
        for i, (size, total) in enumerate(zip(self._hidden(), self.made, strict=True)):
            at = self._along(i, self.starts[:, i] * self.second.stride[i] - self.second.padding[i], size)
            found = found & (at >= 0) & (at < total)
        return found[:, None]

    def _hidden(self) -> Sizes:
        """Spatial sizes of what the second layer reads of a window."""
        second = self.second
        axes = zip(self.size, second.kernel, second.stride, second.dilation, strict=True)
        return tuple((m - 1) * step + wide * (k - 1) + 1 for m, k, step, wide in axes)

    def _along(self, axis: int, starts: Tensor, size: int) -> Tensor:
        """(N, 1.., size, ..1) positions along an axis."""
        shape = [1] * len(self.size)
        shape[axis] = size
        positions = torch.arange(size, device=starts.device)
        return starts.view(-1, *[1] * len(self.size)) + positions.view(shape)
