"""Hooks that collect the second moments of every consumer's input while a model runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from prunekit.calibration.consumers import Consumer, ConsumerHooks, consumers_of
from prunekit.calibration.gram import Products, products
from prunekit.calibration.moments import InputMoments
from prunekit.calibration.settings import MOMENTS_LIMIT_MIB
from prunekit.errors import UsageError
from prunekit.globs import matching

MIB = 2**20


class _Seen(NamedTuple):
    """An input measured in the running forward pass; it is not kept alive by this."""

    tensor: weakref.ref[Tensor]
    version: int
    how: tuple[int, int]
    """Channel axis and groups."""
    shift: Tensor | None
    found: Products

    def fits(self, values: Tensor, how: tuple[int, int]) -> bool:
        """Whether it is of this tensor as it is now."""
        return self.tensor() is values and (self.version, self.how) == (values._version, how)


class MomentsCollector(ConsumerHooks):
    """Collects the Gram matrix and the mean of every consumer's input, as a context manager of hooks.

    A consumer is a convolution, a linear layer, or an attention's projection. Every forward pass of the model inside
    the `with` counts, in full; a layer that is called more than once sums over its calls. Products are computed in the
    activation's precision, float32 at least, and summed in float64; where a large mean would cost a variance its
    digits they are taken around the first batch's mean.

    Args:
        model: the model, not compiled.
        exclude: globs over module paths of consumers to leave out.
        limit_mib: memory that the sums may take, in MiB.

    Raises:
        UsageError: the sums need more; names the largest. Or a glob matches no consumer.
        ModelError: on enter, when the model is compiled.
    """

    def __init__(self, model: nn.Module, *, exclude: Sequence[str] = (), limit_mib: int = MOMENTS_LIMIT_MIB) -> None:
        every = consumers_of(dict(model.named_modules()))
        left_out = {path for pattern in exclude for path in matching(pattern, every, "moments_exclude")}
        super().__init__(model, left_out)
        wide = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        self.bytes = {path: _bytes(consumer, wide) for path, consumer in self.consumers.items()}
        _require_room(self.consumers, self.bytes, limit_mib)
        self._sums: dict[str, Products] = {}
        self._shifts: dict[str, Tensor | None] = {}
        self._running: dict[str, Products] = {}
        self._seen: dict[int, _Seen] = {}

    @property
    def memory(self) -> str:
        """What the sums take, in words, known before anything runs."""
        if not self.bytes:
            return "no layer reads channels through a weight"
        path, largest = max(self.bytes.items(), key=lambda item: item[1])
        return (
            f"Gram matrices of {len(self.bytes)} layers' inputs take {sum(self.bytes.values()) / MIB:.1f} MiB, the "
            f"largest {largest / MIB:.1f} MiB ({path or 'the model'}, {self.consumers[path].channels} channels)"
        )

    def moments(self) -> dict[str, InputMoments]:
        """The moments so far, by the consumer's module path, in the order in which they first ran.

        Raises:
            UsageError: the model has not run inside the `with`.
        """
        self.require_passes()
        return {path: _unshifted(sums, self._shifts[path]) for path, sums in self._sums.items()}

    def begin(self) -> None:
        """Forgets what a pass that raised has left."""
        super().begin()
        self._running.clear()
        self._seen.clear()

    def see(self, consumer: Consumer, values: Tensor) -> None:
        """Adds an input's products to the running pass."""
        found = self._products(consumer, values)
        known = self._running.get(consumer.path)
        self._running[consumer.path] = found if known is None else _added(known, found)

    def keep(self) -> None:
        """Adds the finished pass."""
        for path, found in self._running.items():
            known = self._sums.get(path)
            if known is None:
                self._sums[path] = replace(found, blocks=found.blocks.to(found.total.dtype, copy=True))
            else:
                blocks = known.blocks.add_(found.blocks)  # in place: a second matrix of this size is not counted in
                self._sums[path] = Products(known.count + found.count, known.total + found.total, blocks)
        self._running.clear()
        self._seen.clear()

    def _products(self, consumer: Consumer, values: Tensor) -> Products:
        """Products of an input, computed, or looked up where another layer read the same tensor."""
        how = consumer.axis(values.ndim), consumer.groups
        known = None if values.is_inference() else self._seen.get(id(values))
        if known is not None and not known.fits(values, how):
            known = None
        if known is not None and self._shifts.setdefault(consumer.path, known.shift) is known.shift:
            return known.found
        found = self._computed(consumer.path, values, how)
        if not values.is_inference():  # without a version counter nobody knows whether it was written to
            shift = self._shifts[consumer.path]
            self._seen[id(values)] = _Seen(weakref.ref(values), values._version, how, shift, found)
        return found

    def _computed(self, path: str, values: Tensor, how: tuple[int, int]) -> Products:
        """Products around 0, or around the first batch's mean, if that shows that those around 0 would not do."""
        if path not in self._shifts:
            first = products(values, *how)
            self._shifts[path] = first.total / first.count if first.doubtful else None
            if not first.doubtful:
                return first
        return products(values, *how, self._shifts[path])


def _bytes(consumer: Consumer, wide: bool) -> int:
    """The sums in float64, and those of the running forward pass in the model's precision."""
    return int(consumer.channels**2 // consumer.groups * (8 + (8 if wide else 4)))


def _require_room(consumers: Mapping[str, Consumer], sizes: Mapping[str, int], limit_mib: int) -> None:
    total = sum(sizes.values()) / MIB
    if total <= limit_mib:
        return
    path, largest = max(sizes.items(), key=lambda item: item[1])
    raise UsageError(
        f"moments: the Gram matrices of {len(sizes)} layers' inputs take {total:,.0f} MiB, more than the limit of "
        f"{limit_mib:,} MiB; the largest is that of {path!r}: {consumers[path].channels:,} channels, "
        f"{largest / MIB:,.0f} MiB. Leave it out with moments_exclude ([{path}]), or raise moments_limit_mib; both are "
        "keys of calibration in a recipe and arguments of calibrate"
    )


def _added(left: Products, right: Products) -> Products:
    return Products(left.count + right.count, left.total + right.total, left.blocks + right.blocks)


def _unshifted(sums: Products, shift: Tensor | None) -> InputMoments:
    """Sums around 0 from those around a shift."""
    total, blocks = sums.total.cpu().double(), sums.blocks.cpu().double()
    if shift is not None:
        mean = shift.cpu().double().view(len(blocks), -1)
        parts = total.view(len(blocks), -1)
        cross = parts[:, :, None] * mean[:, None, :]
        blocks = blocks + cross + cross.mT + sums.count * mean[:, :, None] * mean[:, None, :]
        total = total + sums.count * mean.flatten()
    return InputMoments(sums.count, total.numpy().copy(), blocks.numpy().copy())
