"""Class activation maps: where in an image a model sees a class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prunekit.channels.running import without_fast_path
from prunekit.context import training_mode
from prunekit.errors import ModelError, UsageError, nearest
from prunekit.inputs import running
from prunekit.visualize.activations import Call, Read, SpatialActivations
from prunekit.visualize.formulas import FORMULAS, METHODS, CamMethod, cam, eigen_cam
from prunekit.visualize.scores import ClassIndex, ClassMap, chosen, class_map, class_scores, require_images
from prunekit.wrappers import unwrapped


def class_activation_map(
    model: nn.Module,
    images: Tensor,
    layer: str | None = None,
    *,
    method: CamMethod = "grad_cam",
    target: ClassIndex = None,
) -> ClassMap:
    """Where in each image a model sees a class: one forward pass, and one backward pass down to the layer.

    On dense, masked and compact models, convolutional ones and those of tokens, whose tokens are put back into their
    places. In eval mode; modes, hooks, parameters and their gradients are afterwards what they were. See
    `prunekit.visualize.formulas` for the methods and where they are from.

    Args:
        model: returns class logits (B, classes).
        images: (B, C, H, W), on the model's device; may be float64, as the model's weights.
        layer: path of a module whose output has a height and width, or is the tokens of patches. None: the last one,
            for models of tokens the last whose patches the score depends on.
        method: `cam` needs a layer whose mean over all places is what the classifier, a linear layer, reads;
            `eigen_cam` looks at no class.
        target: the class, or one for each image; None: the one of the highest score.

    Raises:
        ModelError: there is no such layer, its output is no image, or the score does not depend on it; or the model is
            compiled, or returns no logits.
        UsageError: there is no such method or class.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 2)
        ... )
        >>> found = pk.class_activation_map(model, torch.randn(4, 3, 16, 16), layer="1", target=1)
        >>> tuple(found.values.shape), found.classes.tolist()
        ((4, 14, 14), [1, 1, 1, 1])
    """
    model = unwrapped(model, offloaded=True)
    if method not in METHODS:
        raise UsageError(f"method {method!r}: {nearest(method, METHODS)}")
    require_images(images)
    backward = method in FORMULAS
    kept = SpatialActivations(model, layer, images.shape)
    with training_mode(model, False), without_fast_path(), torch.enable_grad() if backward else torch.no_grad(), kept:
        # With frozen weights, too, there is a gradient; and a first layer may overwrite what it is given.
        with running(model, images):
            output = model(images.detach().requires_grad_(backward).clone())
        scores = class_scores(output)
        classes = chosen(scores, target)
        picked = scores.gather(1, classes[:, None])
        call = kept.backward(picked.sum()) if backward else kept.found()
        values = _values(call, method, kept.last_linear, scores, classes)
    return class_map(method, call.layer, values, scores, classes)


def _values(call: Call, method: CamMethod, read: Read | None, scores: Tensor, classes: Tensor) -> Tensor:
    activations = _wide(call.values)
    if method == "eigen_cam":
        return eigen_cam(activations)
    if method == "cam":
        return cam(activations, _classifier(call, read, scores)[classes])
    assert call.gradient is not None
    return FORMULAS[method](activations, _wide(call.gradient))


def _wide(values: Tensor) -> Tensor:
    """At least float32: sums over places overflow in float16."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _classifier(call: Call, read: Read | None, scores: Tensor) -> Tensor:
    """Weights (classes, C) of the linear layer that reads the mean of an output and gives the scores."""
    means = _wide(call.values).mean((2, 3))
    if read is not None and read.given.shape == means.shape and torch.equal(read.returned, scores.detach()):
        given = _wide(read.given)
        if bool(torch.allclose(given, means, rtol=1e-3, atol=1e-4 * float(means.abs().max()))):
            return _wide(read.linear.weight.detach())
    raise ModelError(
        f"layer {call.layer!r}: cam needs a linear classifier that reads the mean of this layer over all places, with "
        "nothing in between; use grad_cam, which needs neither and is the same up to a factor where both can be had"
    )


def correlation(first: Tensor, second: Tensor) -> list[float | None]:
    """Pearson correlation of two maps, image by image; None where one of them is the same everywhere.

    Args:
        first, second: (B, h, w).

    Raises:
        UsageError: they are not of one shape.
    """
    if first.shape != second.shape or first.ndim != 3:
        raise UsageError(
            f"expected two maps of one shape (B, h, w), got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    rows = torch.stack((first, second)).double().flatten(2)  # (2, B, h w)
    largest = rows.abs().amax(2)
    rows = rows - rows.mean(2, keepdim=True)
    norms = rows.norm(dim=2)
    flat = (norms <= 1e-9 * largest).any(0)
    values = (rows[0] * rows[1]).sum(1) / norms.prod(0).clamp_min(torch.finfo(torch.float64).tiny)
    return [None if empty else float(value) for value, empty in zip(values, flat.tolist(), strict=True)]
