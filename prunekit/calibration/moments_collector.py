"""Hooks that collect the second moments of every consumer's input while a model runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prunekit.calibration.consumers import Consumer
from prunekit.calibration.gram import Products, Sampling, mirrored, products
from prunekit.calibration.moments import InputMoments
from prunekit.calibration.read_hooks import ReadHooks, find_consumers
from prunekit.errors import UsageError
from prunekit.globs import matching
from prunekit.nested import tensors_in
from prunekit.settings.calibration import MOMENTS_LIMIT_MIB
from prunekit.wrappers import unwrapped

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


class MomentsCollector(ReadHooks):
    """Collects the Gram matrix and the mean of every consumer's input, as a context manager of hooks.

    A consumer is a layer that multiplies its input with a weight of the model, whatever its module. Every forward pass
    inside the `with` counts; a layer that is called more than once sums over its calls. Of an input with more than
    `positions` places or tokens for each image, so many are drawn at random, anew for each batch and the same for the
    same batches: neighboring places say nearly the same, and the products of all of them would cost more than the
    forward pass. `InputMoments.count` is how many there were.

    Products are computed in the activation's precision, float32 at least, and summed in float64; where a large mean
    would cost a variance its digits they are taken around the first batch's mean.

    Args:
        model: the model, not compiled.
        images: a few samples on the model's device, on which it runs once, so that the layers and the memory are known.
        ignore: globs over paths of consumers to leave out.
        limit_mib: memory that the sums may take, in MiB.
        positions: of each image, at most; None: all of them.

    Raises:
        UsageError: the sums need more; names the largest. Or a glob matches no consumer.
        ModelError: the model is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Any,
        *,
        ignore: Sequence[str] = (),
        limit_mib: int = MOMENTS_LIMIT_MIB,
        positions: int | None = None,
    ) -> None:
        model = unwrapped(model, offloaded=True, compiled=False)
        super().__init__(model)
        self.consumers = find_consumers(model, images)
        self._left_out = {path for glob in ignore for path in matching(glob, self.consumers, "moments_ignore")}
        wide = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        found = {path: consumer for path, consumer in self.consumers.items() if path not in self._left_out}
        self.bytes = {path: _bytes(consumer, wide) for path, consumer in found.items()}
        self._require_room(limit_mib)
        self.positions = positions
        self._sampling = Sampling()
        self._sums: dict[str, Products] = {}
        self._shifts: dict[str, Tensor | None] = {}
        self._running: dict[str, Products] = {}
        self._seen: dict[int, _Seen] = {}
        self._spare: dict[str, Tensor] = {}

    @property
    def memory(self) -> str:
        """What the sums take and what they are taken of, in words, known before anything is collected."""
        if not self.bytes:
            return "no layer reads channels through a weight"
        path, largest = max(self.bytes.items(), key=lambda item: item[1])
        sampled = "all positions" if self.positions is None else f"at most {self.positions} positions of each image"
        return (
            f"Gram matrices of {len(self.bytes)} layers' inputs, over {sampled}, take "
            f"{sum(self.bytes.values()) / MIB:.1f} MiB, the largest {largest / MIB:.1f} MiB ({path or 'the model'}, "
            f"{self.consumers[path].channels} channels)"
        )

    def moments(self) -> dict[str, InputMoments]:
        """The moments so far, by the consumer's path, in the order in which they first ran.

        Raises:
            UsageError: the model has not run inside the `with`.
        """
        self.require_passes()
        return {path: _unshifted(sums, self._shifts[path]) for path, sums in self._sums.items()}

    def begin(self) -> None:
        """Forgets what a pass that raised has left."""
        self._running.clear()
        self._seen.clear()

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self.inside:
            rows = None if self.positions is None else self.positions * _images(arguments, named)
            self._sampling = Sampling(rows, self.number)
        super()._enter(module, arguments, named)

    def see(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        """Adds an input's products to the running pass."""
        if consumer.path in self._left_out:
            return
        found = self._products(consumer, values, (axis, consumer.groups))
        known = self._running.get(consumer.path)
        self._running[consumer.path] = found if known is None else _added(known, found)

    def keep(self) -> None:
        """Adds the finished pass."""
        for path, found in self._running.items():
            known = self._sums.get(path)
            own = replace(found, blocks=found.blocks.to(found.total.dtype, copy=True)) if known is None else None
            self._sums[path] = own or self._sums[path].add_(found)
        once = {id(found.blocks): (path, found.blocks) for path, found in self._running.items()}  # some read the same
        self._spare = dict(once.values())
        self._running.clear()
        self._seen.clear()

    def _products(self, consumer: Consumer, values: Tensor, how: tuple[int, int]) -> Products:
        """Products of an input, computed, or looked up where another layer read the same tensor."""
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
        values, axis = self.without_padding(values, how[0])
        how = axis, how[1]
        if path not in self._shifts:
            first = products(values, *how, sampling=self._sampling)
            self._shifts[path] = first.total / first.count if first.doubtful else None
            if not first.doubtful:
                return first
        return products(values, *how, self._shifts[path], self._sampling, self._spare.pop(path, None))

    def _require_room(self, limit_mib: int) -> None:
        total = sum(self.bytes.values()) / MIB
        if total <= limit_mib:
            return
        path, largest = max(self.bytes.items(), key=lambda item: item[1])
        raise UsageError(
            f"moments: the Gram matrices of {len(self.bytes)} layers' inputs take {total:,.0f} MiB, more than the "
            f"limit of {limit_mib:,} MiB; the largest is that of {path!r}: {self.consumers[path].channels:,} channels, "
            f"{largest / MIB:,.0f} MiB. Leave it out with moments_ignore ([{path}]), or raise moments_limit_mib; both "
            "are keys of calibration in a recipe and arguments of calibrate"
        )


def _images(arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
    """How many samples a model is given: a list of them, as detection models take, or the first tensor's first axis."""
    if arguments and isinstance(arguments[0], (list, tuple)):
        return len(arguments[0])
    first = next(tensors_in((arguments, named)), None)
    return 1 if first is None or not first.dim() else len(first)


def _bytes(consumer: Consumer, wide: bool) -> int:
    """The sums in float64, and those of the running forward pass in the model's precision."""
    return int(consumer.channels**2 // consumer.groups * (8 + (8 if wide else 4)))


def _added(left: Products, right: Products) -> Products:
    return Products(left.count + right.count, left.total + right.total, left.blocks + right.blocks)


def _unshifted(sums: Products, shift: Tensor | None) -> InputMoments:
    """Sums around 0 from those around a shift."""
    total, blocks = sums.total.cpu().double(), mirrored(sums.blocks.cpu().double())
    if shift is not None:
        mean = shift.cpu().double().view(len(blocks), -1)
        parts = total.view(len(blocks), -1)
        cross = parts[:, :, None] * mean[:, None, :]
        blocks = blocks + cross + cross.mT + sums.count * mean[:, :, None] * mean[:, None, :]
        total = total + sums.count * mean.flatten()
    return InputMoments(sums.count, total.numpy().copy(), blocks.numpy().copy())
