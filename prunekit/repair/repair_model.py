"""Repair of a masked model from unlabeled images: its outputs are fitted to those of the dense model.

A walk goes through both models together, layer by layer, and each layer is fitted on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from prunekit.channels.cut.narrow_norms import NarrowNorms
from prunekit.channels.tracing.substitutes import substituted_copy
from prunekit.distributed.shared_work import agreed, batch_parts, dealt, workers
from prunekit.errors import DataError, NonFiniteError
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.planning.plan import Plan, require_plan
from prunekit.repair.held_out_images import Inputs, batches_of, difference, require_images
from prunekit.repair.layer_fit import LayerFitter
from prunekit.repair.layer_samples import LayerPass, LayerSample, SampleGatherer, SampleRequest, SourceRequest
from prunekit.repair.least_squares import NEGLIGIBLE
from prunekit.repair.memory_budget import (
    FIT,
    HELD,
    ROOM,
    SAMPLES,
    FitSize,
    batch_size,
    cuts,
    fit_size,
    held_bytes,
    kept_channels,
    pair_size,
    too_wide,
)
from prunekit.repair.repair_report import LayerRepair, RepairMemory, RepairReport, dropped
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.layer_graph import LayerGraph, calls_by_weight, find_layer_graph, merge_calls
from prunekit.statistics.linear_layers import LayerCall
from prunekit.statistics.output_error import OutputComparison
from prunekit.statistics.resumable_forward import Lifetimes
from prunekit.utils.context import release_memory, training_mode
from prunekit.utils.inputs import as_example, counted_positions, sample_count, select_samples
from prunekit.utils.progress import reporting, tracked
from prunekit.utils.tensors import gather, is_finite


def repair(
    dense: nn.Module,
    plan: Plan,
    images: Tensor | list[Tensor] | Inputs | Mapping[str, Any],
    settings: RepairSettings | None = None,
    *,
    running: Tensor | None = None,
    log: Callable[[str], None] | None = None,
    progress: bool | None = None,
) -> tuple[nn.Module, RepairReport]:
    """Return a masked copy of a model whose kept weights are fitted to the dense outputs, without training.

    Every convolution and linear layer whose weight is a parameter is refitted, in the order in which they run, and
    before them matrices in a stack: kept rows and columns change, removed entries are exactly zero. Images
    run in batches, and both models stop at each layer until all batches are there: live tensors are held there as far
    as `settings.memory_bytes` allow, and computed again beyond that.

    Images are inputs (B, ...) without labels, on the model's device, or a list of images (C, H, W) of any sizes as
    detectors take them, or all inputs as a tuple by position or as a mapping by name; the last `settings.held_out` of
    them are held out. `log` gets a line on the memory that the repair will take, before it starts.

    `running`, of the images' shape, is what the masked model reads in their place: the hidden states that reach a block
    of a network whose earlier blocks are pruned. Targets are the dense outputs on `images`.

    The copy is dense in size. If its output on held-out images is no nearer to the dense one's than without repair,
    only the first half of the layers is repaired, the first quarter and so on, down to none; the report says so.

    Raises:
        DataError: see `require_images`.
        NonFiniteError: a layer of the dense model computes NaN or Inf on them; the message names the layer.
        PlanError: the plan is that of another model.
    """
    settings = settings or RepairSettings()
    with RepairSetup.entered(dense, plan, images, "repair", progress, running) as setup:
        fitter = LayerFitter(setup.original, setup.masked, plan, settings)
        walk = LayerWalk(setup, settings, fitter)
        if log is not None:
            log(f"repair: {walk.memory}")
        before = setup.difference(walk)
        stacks = setup.fit_stacks(walk, fitter, before)
        walk.run()
        fitter.reports += stacks
        report = setup.keep_what_helps(walk, fitter, plan, before)
    return setup.repaired(dense), report


@dataclass(frozen=True, eq=False)
class RepairSetup:
    """Copies of a dense model, one of which is masked and fitted, and the layers that a walk through both fits."""

    original: nn.Module  # as the dense model computes
    masked: nn.Module  # removed channels are zero
    plan: Plan  # which channels are kept
    inputs: Inputs  # calibration images
    found: LayerGraph  # all layers
    layers: list[LayerCall]  # those that can be fitted
    skipped: list[LayerRepair]  # a report of each of the others, with the reason
    looping: bool  # whether the model loops over samples
    judge: OutputComparison  # compares outputs
    running: Inputs  # what the masked model reads in place of the calibration images

    @classmethod
    @contextmanager
    def entered(
        cls, dense: nn.Module, plan: Plan, images: Any, name: str, progress: bool | None, running: Tensor | None = None
    ) -> Iterator[Self]:
        """Yield the setup, with both copies in eval mode, without gradients, and with norms over kept channels.

        `name` is that of the job, for messages and bars; see `repair` for the rest.
        """
        require_plan(plan, dense)
        inputs = require_images(as_example(dense, images) if isinstance(images, (tuple, list, Mapping)) else images)
        plan.channel_map.require_plain_forward(name)
        parameters = {name for name, _ in dense.named_parameters(remove_duplicate=False)}
        original = substituted_copy(dense, own=lambda name: name not in parameters)  # only buffers may be written to
        masked = substituted_copy(dense, own=lambda name: True)
        plan.zero(masked)
        with training_mode(original, False), training_mode(masked, False), torch.no_grad():
            found = _surveyed(original, inputs, plan, SAMPLES)
            layers, skipped = _fitted_layers(found, plan)
            looping = bool(layers) and _is_looping(original, inputs, plan, found)
            axes = {layer.weight: layer.axes[0] for layer in found.layers}
            judge = OutputComparison.of(original, inputs, plan.channel_map.read)
            judge = judge.within({name: torch.from_numpy(plan.kept(name, axis)) for name, axis in axes.items()})
            with NarrowNorms(masked, plan.channel_map, plan.keep), reporting(progress, name):
                others = inputs if running is None else require_images(running)
                yield cls(original, masked, plan, inputs, found, layers, skipped, looping, judge, others)

    def difference(self, walk: LayerWalk, model: nn.Module | None = None) -> float:
        """Return the error of the masked model's output, or another's, on held-out images."""
        return difference(self.original, model or self.masked, walk.judging, self.judge, walk.running_judging)

    def fit_stacks(self, walk: LayerWalk, fitter: LayerFitter, before: float) -> list[LayerRepair]:
        """Fit stacks of matrices, as experts have them, where the model's output is nearer to the dense one's then."""
        found = fitter.fit_stacks([layer.weight for layer in self.skipped], *walk.batches)
        applied = [layer.weight for layer in found if layer.applied]
        if applied and not self.difference(walk) < before:
            walk.undo(applied)
            self.plan.zero(self.masked)
            return [dropped(layer) for layer in found]
        return found

    def keep_what_helps(self, walk: LayerWalk, fitter: LayerFitter, plan: Plan, before: float) -> RepairReport:
        """Undo fits, the last half of them each time, until the model's output is nearer to the dense one's."""
        plan.zero(self.masked)
        fitted = after = self.difference(walk)
        applied = [layer.weight for layer in fitter.reports if layer.applied]
        count = len(applied)
        while count and not (after < before or after <= NEGLIGIBLE):  # nothing of the output may depend on it
            count //= 2
            walk.undo(applied[count:])
            plan.zero(self.masked)
            after = self.difference(walk) if count else before
        done = [dropped(layer) if layer.weight in applied[count:] else layer for layer in fitter.reports]
        order = {name: i for i, (name, _) in enumerate(named_tensors(self.original))}
        others = [layer for layer in self.skipped if layer.weight not in {one.weight for one in done}]
        layers = tuple(sorted([*done, *others], key=lambda layer: order.get(layer.weight, 0)))
        kept = any(layer.applied for layer in done)
        return RepairReport(layers, before, after, kept, walk.memory, fitted, self.judge.selected)

    def repaired(self, dense: nn.Module) -> nn.Module:
        """Return a copy of the dense model with the masked one's tensors."""
        return with_tensors(dense, {name: tensor.detach() for name, tensor in named_tensors(self.masked)})


class LayerWalk:
    """A walk through dense and masked model together, so that later layers correct the errors of earlier ones.

    Layers come in the order in which their targets are computed. A layer that is added to a shortcut is refitted to
    *dense branch + dense shortcut - this model's shortcut*. If the shortcut is computed later than the branch, the
    layer is refitted when both are there, and the branch runs again. Steps are planned to fit into memory: `memory` is
    the most that they take. `batches` are those to fit on, and those of held-out images, which `judging` are, too; of
    these and of samples each process that shares the work has its part.
    """

    def __init__(self, setup: RepairSetup, settings: RepairSettings, fitter: LayerFitter) -> None:
        original, masked, plan, inputs = setup.original, setup.masked, setup.plan, setup.inputs
        self._layers = sorted(setup.layers, key=lambda layer: layer.ready)
        self._settings, self._fitter, self._original = settings, fitter, original
        self._tensors = [dict(named_tensors(model)) for model in (original, masked)]
        models = [original, masked] if settings.sequential else [original]
        runs = [LayerPass(model, plan.channel_map.narrow(plan.keep)) for model in models]
        end = max((layer.ready for layer in self._layers), default=setup.found.end) + 2
        for run in runs:
            run.learn(select_samples(inputs, slice(SAMPLES)), end)
        count, limit = sample_count(inputs), settings.memory_bytes * HELD / len(runs)
        device = gather(inputs)[0].device
        item = max(tensor.element_size() for tensor in original.parameters())
        sizes = [fit_size(layer, plan, count, item, settings) for layer in self._layers]
        rows = [size.rows(settings) for size in sizes]
        sources = [self._source(layer, plan, item, count, device) for layer in self._layers]
        weights = [layer.weight for layer in self._layers]
        early = [one if source is None else source.layer.weight for one, source in zip(weights, sources, strict=True)]
        size = 1 if setup.looping else batch_size([run.lifetimes for run in runs], count, settings)
        drawn = any(sources) or any(each.most > number for each, number in zip(sizes, rows, strict=True))
        least = batch_parts() if drawn else workers()
        size = min(size, -(-count // least))
        batches, fitted = batches_of(inputs, settings.held_out, size, counted_positions(original, inputs), least)
        running = setup.running
        others = batches if running is inputs else batches_of(running, settings.held_out, size, None, least)[0]
        if fitted < workers():
            raise DataError(
                f"repair: expected a sample to fit on for each of {workers()} processes, got {fitted}; give more "
                "samples, or start fewer processes"
            )
        self.batches = batches[:fitted], batches[fitted:]
        own, masked_own = (([*dealt(each[:fitted])], [*dealt(each[fitted:])]) for each in (batches, others))
        self.judging, self.running_judging = own[1], masked_own[1]
        gatherers = [
            SampleGatherer(run, [*some[0], *some[1]], len(some[0]), partial(_cuts, firsts, count, limit), setup.found)
            for firsts, run, some in zip((weights, early), runs, (own, masked_own), strict=False)
        ]  # the dense one need not go back to the source
        self._dense, self._running = gatherers[0], gatherers[1] if settings.sequential else None
        self._together = fitted_together(self._layers, sources, sizes, rows, settings)
        self._ahead = self._read_ahead(sizes, rows)
        self.memory = RepairMemory(
            size,
            int(ROOM * size * max(run.lifetimes.peak_bytes() for run in runs)),
            sum(held_bytes(each.route.cuts, each.route.lifetimes, count) for each in gatherers),
            max((_bytes_together(sizes[some], rows[some], settings) for some in self._ahead), default=0),
            (min(rows, default=0), max(rows, default=0)),
        )
        self._requests = [
            SampleRequest(
                layer,
                number,
                kept_channels(layer, plan).to(device),
                centers=too_wide(layer, plan, count, settings),
                source=source,
            )
            for layer, number, source in zip(self._layers, rows, sources, strict=True)
        ]

    def _source(
        self, layer: LayerCall, plan: Plan, item: int, images: int, device: torch.device
    ) -> SourceRequest | None:
        """Return the request for the layer before, if both are fitted together."""
        rows = pair_size(layer, plan, item, layer.rows * images // SAMPLES, self._settings).rows
        if layer.source is None or not rows or layer.source.weight not in {each.weight for each in self._layers}:
            return None
        return SourceRequest(layer.source, rows / images, kept_channels(layer.source, plan).to(device))

    def run(self) -> None:
        """Refit all layers; the fitter has their reports."""
        for layer, wanted, found in tracked(self._samples(), "repair", total=len(self._requests), unit="layer"):
            if wanted is not None and wanted.outputs is not None and not is_finite(wanted.outputs):
                raise NonFiniteError(
                    f"repair: layer {layer.weight.rpartition('.')[0]!r} of the dense model gives NaN or Inf on the "
                    "images; are they, and the weights, finite?"
                )
            self._fitter.refit(layer, wanted, found)
            del wanted, found

    def _read_ahead(self, sizes: Sequence[FitSize], rows: Sequence[int]) -> list[slice]:
        """Return the layers that the dense model is sampled for in one pass, which no fit changes, as memory allows."""
        found = list[slice]()
        for some in self._together:
            both = slice(found[-1].start if found else 0, some.stop)
            alone = self._running is None or any(map(_takes_dense_inputs, self._layers[both]))
            within = _bytes_together(sizes[both], rows[both], self._settings) <= self._settings.memory_bytes * FIT
            if found and within and not alone:
                found[-1] = both
            else:
                found.append(some)
        return found

    def _samples(self) -> Iterator[tuple[LayerCall, LayerSample | None, LayerSample | None]]:
        """Yield each layer with its samples in the dense and the running model; refit it before asking for the next."""
        stops, dense = {some.start: some.stop for some in self._ahead}, list[LayerSample | None]()
        for some in self._together:
            requests = self._requests[some]
            if not dense:  # not behind each fit: taking memory again takes long
                release_memory(self._original, collect=False)
            if self._running is None or _takes_dense_inputs(requests[0].layer):
                # computed values select other positions in the running model, so both samples are the dense model's
                dense = self._dense_samples(some, inputs=True)
                running = list(dense)
            else:
                if not dense:
                    stop = stops.get(some.start, some.stop)
                    dense = self._dense_samples(slice(some.start, stop), inputs=False)
                    if stop > some.stop and not any(dense):  # it takes another path, but perhaps behind these layers
                        stops, dense = {}, self._dense_samples(some, inputs=False)
                # where nothing is added to what they return, none of them need be computed
                first = None if any(one.layer.other is not None for one in requests) else requests[0].layer
                asked = [replace(one, centers=False, first=first) for one in requests]
                running = self._running.take(asked, some.start)
            for request in requests:
                one, other = dense.pop(0), running.pop(0)
                if one is None or other is None or not agreed(one.totals == other.totals):
                    one = other = None
                yield request.layer, one, other

    def _dense_samples(self, some: slice, *, inputs: bool) -> list[LayerSample | None]:
        """Return samples of the dense model, which continues to where the next layers' pass will begin."""
        requests = [
            replace(
                request,
                channels=request.channels if inputs else None,
                outputs=True,
                source=None if request.source is None else request.source._replace(channels=None),
            )
            for request in self._requests[some]
        ]
        return self._dense.take(requests, min(some.stop, len(self._requests) - 1), ahead=True)

    def undo(self, weights: Collection[str]) -> None:
        """Restore the weights that layers have in the dense model."""
        dense, masked = self._tensors
        for layer in (layer for layer in self._layers if layer.weight in weights):
            norm = [] if layer.norm is None else [f"{layer.norm}.bias", f"{layer.norm}.running_mean"]
            for name in (layer.weight, layer.bias, *norm):
                if name in masked:
                    masked[name].copy_(dense[name])
        for name in {*weights} - {layer.weight for layer in self._layers}:
            masked[name].copy_(dense[name])


def _takes_dense_inputs(layer: LayerCall) -> bool:
    """Return whether a layer is fitted to what it reads in the dense model."""
    return layer.selected or layer.recurrent


def fitted_together(
    layers: Sequence[LayerCall],
    sources: Sequence[SourceRequest | None],
    sizes: Sequence[FitSize],
    rows: Sequence[int],
    settings: RepairSettings,
) -> list[slice]:
    """Return the layers that are sampled in one pass, as slices: they read one tensor, so that no fit changes others.

    Their samples and the largest fit have to be within the limit of memory.
    """
    found = list[slice]()
    for i, layer in enumerate(layers):
        some = slice(found[-1].start if found else i, i + 1)
        first = layers[some.start]
        alike = layer.read is not None and layer.read == first.read and layer.calls == first.calls == 1
        alone = any(
            each.deferred or source is not None or _takes_dense_inputs(each) or (each.other or 0) >= first.call
            for each, source in zip(layers[some], sources[some], strict=True)
        )
        within = _bytes_together(sizes[some], rows[some], settings) <= settings.memory_bytes * FIT
        if i and alike and not alone and within:
            found[-1] = some
        else:
            found.append(slice(i, i + 1))
    return found


def _bytes_together(sizes: Sequence[FitSize], rows: Sequence[int], settings: RepairSettings) -> int:
    """Return the bytes of the samples of some layers and of the largest fit."""
    samples = [size.sample_bytes(number, settings) for size, number in zip(sizes, rows, strict=True)]
    fits = (size.bytes(number, settings) - held for size, number, held in zip(sizes, rows, samples, strict=True))
    return sum(samples) + max(fits)


def _surveyed(model: nn.Module, inputs: Inputs, plan: Plan, samples: int) -> LayerGraph:
    return find_layer_graph(model, select_samples(inputs, slice(samples)), plan.channel_map.narrow(plan.keep))


def _is_looping(model: nn.Module, inputs: Inputs, plan: Plan, found: LayerGraph) -> bool:
    """Return whether the model loops over samples: more of them are more calls, so that one at a time is no slower."""
    if all(layer.calls == 1 for layer in found.layers):
        return False
    return len(_surveyed(model, inputs, plan, SAMPLES + 1).layers) > len(found.layers)


def _cuts(
    firsts: Sequence[str], images: int, limit: float, layers: Mapping[str, tuple[LayerCall, ...]], lifetimes: Lifetimes
) -> list[int]:
    """Return `cuts` before the first call of each step's weight, where it has one."""
    calls = [layers[weight][0].call if weight in layers else sys.maxsize for weight in firsts]
    return cuts(calls, lifetimes, images, limit)


def _fitted_layers(found: LayerGraph, plan: Plan) -> tuple[list[LayerCall], list[LayerRepair]]:
    layers = calls_by_weight(found.layers)
    reasons = {weight: _reason(calls, plan) for weight, calls in layers.items()}
    for name, labels in plan.channel_map.labels.items():
        shrinks = name in plan.kept_indices and name not in plan.lost
        if name not in reasons and shrinks and sum(axis is not None for axis in labels) > 1:
            by = " and ".join(sorted(set(found.readers.get(name, ()))))
            reasons[name] = f"read by {by}, not by a convolution or linear layer" if by else "not read on these images"
    skipped = [LayerRepair(name, note=reason) for name, reason in reasons.items() if reason]
    return [merge_calls(calls) for weight, calls in layers.items() if not reasons[weight]], skipped


def _reason(calls: Sequence[LayerCall], plan: Plan) -> str:
    first = calls[0]
    if first.calls != len(calls):
        return f"its weight is used {first.calls} times in a forward pass"
    if len({(call.bias, call.transposed, call.geometry.groups) for call in calls}) > 1:
        how = "with another bias, in other groups or the other way round"
        return f"its weight is used {first.calls} times in a forward pass, {how}"
    if first.weight in plan.element_masks:
        return "single weights of it are pruned"
    own = first.bias, None if first.norm is None else f"{first.norm}.bias"  # what a constant may be in
    if first.weight in plan.lost and plan.constants.get(first.weight, "") not in own:
        return "its block is gone"
    return ""
