"""Repair of a masked model from unlabeled images: its outputs are fitted to those of the dense model."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.cut.model_copy import named_tensors, with_tensors
from prunekit.channels.cut.narrow_norms import NarrowNorms
from prunekit.channels.rewrite.substitutes import substitute_all
from prunekit.errors import DataError, NonFiniteError
from prunekit.planning.plan import Plan, require_plan
from prunekit.repair.held_out_images import Inputs, batches_of, difference
from prunekit.repair.layer_fit import LayerFitter
from prunekit.repair.layer_samples import LayerPass, LayerSample, SampleGatherer, SampleRequest, SourceRequest
from prunekit.repair.least_squares import NEGLIGIBLE
from prunekit.repair.memory_budget import (
    HELD,
    ROOM,
    SAMPLES,
    batch_size,
    cuts,
    fit_size,
    held_bytes,
    kept_channels,
    pair_size,
    too_wide,
)
from prunekit.repair.repair_report import LayerRepair, RepairMemory, RepairReport, dropped
from prunekit.repair.tensor_lifetimes import Lifetimes
from prunekit.settings.calibration import FEWEST_IMAGES, RepairSettings
from prunekit.statistics.layers.layer_graph import LayerGraph, calls_by_weight, find_layer_graph, merge_calls
from prunekit.statistics.layers.linear_layers import LayerCall
from prunekit.statistics.layers.output_error import OutputComparison
from prunekit.utils.context import training_mode
from prunekit.utils.inputs import as_example, counted_positions, sample_count, sample_noun, select_samples, split
from prunekit.utils.progress import reporting, tracked
from prunekit.utils.sample_lists import has_sample_lists, holds_samples
from prunekit.utils.tensors import gather


def repair(
    dense: nn.Module,
    plan: Plan,
    images: Tensor | list[Tensor] | Inputs | Mapping[str, Any],
    settings: RepairSettings | None = None,
    *,
    log: Callable[[str], None] | None = None,
    progress: bool | None = None,
) -> tuple[nn.Module, RepairReport]:
    """Return a masked copy of a model whose kept weights are fitted to the dense outputs, without training.

    Every convolution and linear layer whose weight is a parameter is refitted, in the order in which they run: kept
    rows and kept columns change, removed entries are exactly zero. Images run in batches, and both models stop at each
    layer until all batches are there: live tensors are held there as far as `settings.memory_bytes` allow, and
    computed again beyond that.

    Args:
        dense: the dense model; only read.
        plan: which channels are kept.
        images: (B, ...) inputs without labels, on the model's device, or a list of images (C, H, W) of any sizes as
            detectors take them, or all inputs as a tuple by position or as a mapping by name; the last
            `settings.held_out` of them are held out.
        settings: of the fit.
        log: gets a line on the memory that the repair will take, before it starts.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Returns:
        The masked model, dense in size, and the report. If the repaired model's output on held-out images is no
        nearer to the dense one's than without repair, only the first half of the layers is repaired, the first
        quarter and so on, down to none; the report says so.

    Raises:
        DataError: see `require_images`.
        NonFiniteError: a layer of the dense model computes NaN or Inf on them; the message names the layer.
        PlanError: the plan is that of another model.
    """
    settings = settings or RepairSettings()
    require_plan(plan, dense)
    if isinstance(images, (tuple, list, Mapping)):
        images = as_example(dense, images)
    inputs = require_images(images)
    plan.channel_map.require_plain_forward("repair")
    original, masked = _copy(dense), _copy(dense)
    plan.zero(masked)
    shown = reporting(progress, "repair")
    with training_mode(original, False), training_mode(masked, False), torch.no_grad(), shown:
        found = _surveyed(original, inputs, plan, SAMPLES)
        layers, skipped = _fitted_layers(found, plan)
        looping = bool(layers) and _is_looping(original, inputs, plan, found)
        axes = {layer.weight: layer.axes[0] for layer in found.layers}
        judge = OutputComparison.of(original, inputs, plan.channel_map.read)
        judge = judge.within({name: torch.from_numpy(plan.kept(name, axis)) for name, axis in axes.items()})
        with NarrowNorms(masked, plan.channel_map, plan.keep):
            walk = LayerWalk(original, masked, plan, found, layers, inputs, settings, looping=looping)
            if log is not None:
                log(f"repair: {walk.memory}")
            before = difference(original, masked, walk.judging, judge)
            fitter = walk.run()
            plan.zero(masked)
            fitted = after = difference(original, masked, walk.judging, judge)
            applied = [layer.weight for layer in fitter.reports if layer.applied]
            count = len(applied)
            while count and not (after < before or after <= NEGLIGIBLE):  # nothing of the output may depend on it
                count //= 2
                walk.undo(applied[count:])
                plan.zero(masked)
                after = difference(original, masked, walk.judging, judge) if count else before
    done = [dropped(layer) if layer.weight in applied[count:] else layer for layer in fitter.reports]
    layers_done = _in_model_order(done, skipped, original)
    repaired = with_tensors(dense, {name: tensor.detach() for name, tensor in named_tensors(masked)})
    return repaired, RepairReport(layers_done, before, after, count > 0, walk.memory, fitted, judge.selected)


def require_images(images: Tensor | Inputs) -> Inputs:
    """Check calibration images, and return them as an example.

    Raises:
        DataError: no tensors, fewer than 8 images, different numbers for each input, or NaN or Inf in one of them.
    """
    inputs = images if isinstance(images, tuple) else (images,)
    positional, named = split(inputs)
    values, samples = (*positional, *named.values()), sample_count(inputs)
    for value in values:
        if not isinstance(value, Tensor) and not holds_samples(value, samples):
            raise DataError(
                "calibration: expected samples as one tensor (B, ...), a list of images (C, H, W), or a tuple of such; "
                f"got {type(value).__name__}"
                + ('; a datasets.Dataset gives tensors after .with_format("torch")' if isinstance(value, list) else "")
            )
    shapes = ", ".join(_shape(value) for value in values)
    few = any((isinstance(value, Tensor) and not value.dim()) or len(value) < FEWEST_IMAGES for value in values)
    if few or all(isinstance(value, Tensor) and value.dim() < 2 for value in values):
        raise DataError(
            f"calibration: expected at least {FEWEST_IMAGES} {sample_noun(inputs)} (B, ...), some of which only judge; "
            f"got {shapes if has_sample_lists(inputs) else f'a tensor of shape {shapes}'}; "
            "to prune without samples, an example is given by itself, prune(model, x, macs=0.5)"
        )
    if len({len(value) for value in values}) > 1:
        raise DataError(f"calibration: expected as many samples of each input, got tensors of shape {shapes}")
    for value in values:
        if (first := _first_not_finite(value)) is not None:
            raise DataError(f"calibration: sample {first} holds NaN or Inf; expected finite numbers")
    return inputs


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a list of {len(value)}"


def _first_not_finite(value: Any) -> int | None:
    """Return the index of the first sample with NaN or Inf in it; None if there is none."""
    if not isinstance(value, Tensor):
        return next((i for i, one in enumerate(value) if not all(bool(t.isfinite().all()) for t in gather(one))), None)
    wrong = (~torch.isfinite(value)).reshape(len(value), -1).any(1)
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None


class LayerWalk:
    """A walk through dense and masked model together, so that later layers correct the errors of earlier ones.

    Layers come in the order in which their targets are computed. A layer that is added to a shortcut is refitted to
    *dense branch + dense shortcut - this model's shortcut*. If the shortcut is computed later than the branch, the
    layer is refitted when both are there, and the branch runs again. Steps are planned to fit into memory.

    Attributes:
        judging: batches of held-out images.
        memory: that the walk takes at most.
    """

    def __init__(
        self,
        original: nn.Module,
        masked: nn.Module,
        plan: Plan,
        found: LayerGraph,
        layers: Sequence[LayerCall],
        inputs: Inputs,
        settings: RepairSettings,
        *,
        looping: bool,
    ) -> None:
        self._layers = sorted(layers, key=lambda layer: layer.ready)
        self._settings, self._fitter = settings, LayerFitter(original, masked, plan, settings)
        self._tensors = [dict(named_tensors(model)) for model in (original, masked)]
        models = [original, masked] if settings.sequential else [original]
        runs = [LayerPass(model, plan.channel_map.narrow(plan.keep)) for model in models]
        for run in runs:
            run.learn(select_samples(inputs, slice(SAMPLES)), found.end)
        count, limit = sample_count(inputs), settings.memory_bytes * HELD / len(runs)
        device = gather(inputs)[0].device
        item = max(tensor.element_size() for tensor in original.parameters())
        sizes = [fit_size(layer, plan, count, item, settings) for layer in self._layers]
        rows = [size.rows(settings) for size in sizes]
        sources = [self._source(layer, plan, item, count, device) for layer in self._layers]
        weights = [layer.weight for layer in self._layers]
        early = [one if source is None else source.layer.weight for one, source in zip(weights, sources, strict=True)]
        size = 1 if looping else batch_size([run.lifetimes for run in runs], count, settings)
        batches, fitted = batches_of(inputs, settings.held_out, size, counted_positions(original, inputs))
        self.judging = batches[fitted:]
        gatherers = [
            SampleGatherer(run, batches, fitted, partial(_cuts, firsts, count, limit), found)
            for firsts, run in zip((weights, early), runs, strict=False)  # the dense one need not go back to the source
        ]
        self._dense, self._running = gatherers[0], gatherers[1] if settings.sequential else None
        self.memory = RepairMemory(
            size,
            int(ROOM * size * max(run.lifetimes.peak_bytes() for run in runs)),
            sum(held_bytes(each.route.cuts, each.route.lifetimes, count) for each in gatherers),
            max((one.bytes(number, settings) for one, number in zip(sizes, rows, strict=True)), default=0),
            (min(rows, default=0), max(rows, default=0)),
        )
        self._requests = [
            SampleRequest(
                layer,
                number,
                kept_channels(layer, plan).to(device),
                centers=too_wide(layer, plan, settings),
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

    def run(self) -> LayerFitter:
        """Refit all layers, and return the fitter with their reports."""
        for layer, wanted, found in tracked(self._samples(), "repair", total=len(self._requests), unit="layer"):
            if wanted is not None:
                _require_finite(layer, wanted)
            self._fitter.refit(layer, wanted, found)
        return self._fitter

    def _samples(self) -> Iterator[tuple[LayerCall, LayerSample | None, LayerSample | None]]:
        """Yield each layer with its samples in the dense and the running model; refit it before asking for the next.

        If computed values select a layer's inputs, the running model has other positions than the dense one: then both
        samples are the dense model's.
        """
        for i, request in enumerate(self._requests):
            layer = request.layer
            if self._running is None or layer.selected or layer.recurrent:
                dense = running = self._dense_sample(i, request.channels)
            else:
                dense = self._dense_sample(i, None)
                running = self._running.take(replace(request, centers=False), i)
            if dense is None or running is None or dense.totals != running.totals:
                dense = running = None
            yield layer, dense, running

    def _dense_sample(self, i: int, channels: Tensor | None) -> LayerSample | None:
        """Return a sample of the dense model, which continues to where the next layer's pass will begin."""
        request = self._requests[i]
        source = None if request.source is None else request.source._replace(channels=None)
        request = replace(request, channels=channels, outputs=True, source=source)
        return self._dense.take(request, min(i + 1, len(self._requests) - 1), ahead=True)

    def undo(self, weights: Collection[str]) -> None:
        """Restore the weights that layers have in the dense model."""
        dense, masked = self._tensors
        for layer in (layer for layer in self._layers if layer.weight in weights):
            norm = [] if layer.norm is None else [f"{layer.norm}.bias", f"{layer.norm}.running_mean"]
            for name in (layer.weight, layer.bias, *norm):
                if name in masked:
                    masked[name].copy_(dense[name])


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy with its own tensors, in which attention calls its projections as layers."""
    copy = with_tensors(model, {name: tensor.detach().clone() for name, tensor in named_tensors(model)})
    substitute_all(copy)
    return copy


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
        if name not in reasons and name in plan.kept_indices and sum(axis is not None for axis in labels) > 1:
            by = " and ".join(sorted(set(found.readers.get(name, ()))))
            reasons[name] = f"read by {by}, not by a convolution or linear layer" if by else "not read on these images"
    skipped = [LayerRepair(name, note=reason) for name, reason in reasons.items() if reason]
    return [merge_calls(calls) for weight, calls in layers.items() if not reasons[weight]], skipped


def _reason(calls: Sequence[LayerCall], plan: Plan) -> str:
    first = calls[0]
    if first.calls != len(calls):
        return f"its weight is used {first.calls} times in a forward pass"
    if len({(call.bias, call.transposed, call.geometry.groups) for call in calls}) > 1:
        return f"its weight is used {first.calls} times in a forward pass, with another bias or in other groups"
    if first.weight in plan.element_masks:
        return "single weights of it are pruned"
    return ""


def _require_finite(layer: LayerCall, sample: LayerSample) -> None:
    if sample.outputs is not None and not bool(sample.outputs.isfinite().all()):
        raise NonFiniteError(
            f"repair: layer {layer.weight.rpartition('.')[0]!r} of the dense model gives NaN or Inf on the images; "
            "are they, and the weights, finite?"
        )


def _in_model_order(done: list[LayerRepair], skipped: list[LayerRepair], model: nn.Module) -> tuple[LayerRepair, ...]:
    order = Counter({name: -i for i, (name, _) in enumerate(named_tensors(model))})
    return tuple(sorted([*done, *skipped], key=lambda layer: -order[layer.weight]))
