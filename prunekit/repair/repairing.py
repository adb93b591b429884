"""Repair of a masked model from unlabelled images: what it computes comes near what the dense model does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from prunekit.calibration.collector import first_tensor
from prunekit.calibration.finding import find_layers
from prunekit.calibration.layers import Layer
from prunekit.calibration.patches import gram_bytes
from prunekit.channels.copying import named_tensors, with_tensors
from prunekit.channels.narrowed import NarrowNorms
from prunekit.channels.slicing import blank
from prunekit.channels.substitutes import substitute_all
from prunekit.context import training_mode
from prunekit.errors import DataError, NonFiniteError, UsageError
from prunekit.planning import Plan
from prunekit.repair.fitting import LayerFitter
from prunekit.repair.record import LayerRecorder, affordable_rows, recorded_bytes
from prunekit.repair.report import LayerRepair, RepairReport
from prunekit.repair.sequential import LayerWalk
from prunekit.repair.settings import FEWEST_IMAGES, RepairSettings

MOST_GROUPS = 32
"""Convolutions of more groups, depthwise ones above all, are left to the layers behind them."""


def repair(
    dense: nn.Module, plan: Plan, images: Tensor, settings: RepairSettings | None = None
) -> tuple[nn.Module, RepairReport]:
    """A masked copy of a model whose kept weights are fitted to the dense outputs, layer by layer, without training.

    Every convolution and linear layer whose weight is a parameter is refitted, in the order in which they run: kept
    rows and kept columns change, removed entries are exactly zero. All images run at once: memory is what the model's
    largest activations take for all of them, and what `settings.memory_bytes` allows beside that.

    Args:
        dense: the dense model; only read.
        plan: what is kept of it.
        images: (B, ...) inputs without labels, on the model's device; the last `settings.held_out` of them only judge.
        settings: what is fitted, and how.

    Returns:
        The masked model, dense in size, and what was done. Where the repaired model's output on held-out images is
        no nearer to the dense one's than without repair, it is the masked model without repair, and the report says so.

    Raises:
        DataError: see `require_images`.
        NonFiniteError: a layer of the dense model computes NaN or Inf on them; names the layer.
        UsageError: the plan does not belong to the model.
    """
    settings = settings or RepairSettings()
    require_images(images)
    norms = list(plan.channel_map.norms)
    original, masked = _copy(dense), _copy(dense)
    _mask(masked, plan)
    held = images[len(images) - max(1, round(len(images) * settings.held_out)) :]
    with training_mode(original, False), training_mode(masked, False):
        layers, skipped = _fitted_layers(find_layers(original, images[:2], norms), plan)
        settings = replace(settings, rows=affordable_rows(layers, plan.channel_map, settings))
        recorder = LayerRecorder(original, layers, settings, _too_wide(layers, plan, settings), norms)
        with recorder.watching():
            original(images)
        _require_finite(recorder, layers)
        fitter = LayerFitter(original, masked, plan, recorder.samples, settings)
        before = _difference(original, masked, plan, held)
        saved = {name: tensor.clone() for name, tensor in named_tensors(masked)}
        _walk(original, masked, plan, layers, fitter, images, settings)
        _mask(masked, plan)
        after = _difference(original, masked, plan, held)
    if not after < before:
        _restore(masked, saved)
    done = _in_model_order(fitter.done, skipped, original)
    report = RepairReport(done, before, after, after < before, recorded_bytes(recorder.samples.values()), settings.rows)
    return _as_given(dense, masked), report


def require_images(images: Tensor) -> None:
    """Checks calibration images before anything is computed on them.

    Raises:
        DataError: no tensor, or fewer than 8 images.
    """
    if not isinstance(images, Tensor):
        raise DataError(f"calibration: expected images as one tensor (B, ...), got {type(images).__name__}")
    if images.dim() < 2 or len(images) < FEWEST_IMAGES:
        raise DataError(
            f"calibration: expected at least {FEWEST_IMAGES} images (B, ...), some of which only judge; "
            f"got a tensor of shape {tuple(images.shape)}"
        )


def _copy(model: nn.Module) -> nn.Module:
    """A copy of its own tensors, in which attention calls its projections as layers."""
    copy = with_tensors(model, {name: tensor.detach().clone() for name, tensor in named_tensors(model)})
    substitute_all(copy)
    return copy


def _as_given(dense: nn.Module, repaired: nn.Module) -> nn.Module:
    return with_tensors(dense, {name: tensor.detach() for name, tensor in named_tensors(repaired)})


def _mask(model: nn.Module, plan: Plan) -> None:
    for name, tensor in named_tensors(model):
        if name in plan.kept_indices and not name.endswith("running_var"):
            blank(tensor, plan.kept_indices[name])
        if name in plan.element_masks:
            with torch.no_grad():
                tensor.masked_fill_(~plan.element_masks[name].to(tensor.device), 0)


def _fitted_layers(layers: tuple[Layer, ...], plan: Plan) -> tuple[tuple[Layer, ...], list[LayerRepair]]:
    shapes = plan.channel_map.shapes
    reasons = {
        layer.weight: reason
        for layer in layers
        for reason in [_reason(layer, plan)]
        if reason and layer.weight in shapes
    }
    skipped = [LayerRepair(name, note=reason) for name, reason in reasons.items()]
    unknown = [layer.weight for layer in layers if layer.weight not in shapes]
    if unknown:
        raise UsageError(f"repair: the plan knows no parameter {unknown[0]!r}; it belongs to another model")
    return tuple(layer for layer in layers if layer.weight not in reasons), skipped


def _reason(layer: Layer, plan: Plan) -> str:
    if layer.calls > 1:
        return f"its weight is used {layer.calls} times in a forward pass"
    if layer.reading.groups > MOST_GROUPS:
        return f"a convolution of {layer.reading.groups} groups, each too small to correct much: what follows it does"
    if layer.weight in plan.element_masks:
        return "single weights of it are pruned"
    return ""


def _too_wide(layers: Iterable[Layer], plan: Plan, settings: RepairSettings) -> list[str]:
    """Weights of layers that are fitted by channels: asked for, or because of the memory that patches would take."""
    found = []
    for layer in layers:
        columns = plan.channel_map.shapes[layer.weight][1] * layer.reading.taps
        if settings.fit == "channel" or (settings.fit == "patch" and gram_bytes(columns) > settings.memory_bytes):
            found.append(layer.weight)
    return found


def _require_finite(recorder: LayerRecorder, layers: Iterable[Layer]) -> None:
    for layer in layers:
        sample = recorder.samples.get(layer.call)
        if sample is not None and not bool(sample.outputs.isfinite().all()):
            raise NonFiniteError(
                f"repair: layer {layer.weight.rpartition('.')[0]!r} of the dense model gives NaN or Inf on the images; "
                "are they, and the weights, finite?"
            )


def _walk(
    original: nn.Module,
    masked: nn.Module,
    plan: Plan,
    layers: tuple[Layer, ...],
    fitter: LayerFitter,
    images: Tensor,
    settings: RepairSettings,
) -> None:
    runs = masked if settings.sequential else original
    walk = LayerWalk(runs, layers, fitter.refit, plan.channel_map.norms)
    if settings.sequential:
        with NarrowNorms(masked, plan.channel_map, plan.keep), walk.watching():
            masked(images)
    else:
        with walk.watching():
            original(images)


def _restore(model: nn.Module, saved: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in named_tensors(model):
            tensor.copy_(saved[name])


def _difference(original: nn.Module, masked: nn.Module, plan: Plan, images: Tensor) -> float:
    """Mean squared difference of the first output tensor, over its variance among samples."""
    with torch.no_grad(), NarrowNorms(masked, plan.channel_map, plan.keep):
        want, got = first_tensor(original(images)), first_tensor(masked(images))
    if want is None or got is None:
        raise UsageError("repair: the model's output holds no tensor of floating-point numbers to compare")
    want, got = want.double(), got.double()
    spread = (want - want.mean(0)).square().mean() if len(want) > 1 else want.square().mean()
    return float((got - want).square().mean() / spread.clamp(min=torch.finfo(torch.float64).tiny))


def _in_model_order(done: list[LayerRepair], skipped: list[LayerRepair], model: nn.Module) -> tuple[LayerRepair, ...]:
    order = Counter({name: -i for i, (name, _) in enumerate(named_tensors(model))})
    return tuple(sorted([*done, *skipped], key=lambda layer: -order[layer.weight]))
