"""Class maps: where in an image a model sees a class, by class activation maps or by gradients of pixels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.execution import without_fast_path
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.inspection.visualize.spatial_outputs import SpatialActivations
from prunekit.models.interface import logits
from prunekit.modes.public_call import public_call
from prunekit.utils.context import taking_gradients, training_mode
from prunekit.utils.display import Displayed, Table, plural, share
from prunekit.utils.inputs import running

LEAST_PLACES = 7
"""Fewest rows and columns of a map that shows places, as the last layers of networks for ImageNet have them."""
ClassIndex = int | Sequence[int] | Tensor | None
"""A class, or one for each image; None: the class of the highest score."""


@dataclass(frozen=True, eq=False, repr=False)
class ClassMap(Displayed):
    """Maps of where in each image a model sees a class, on the CPU."""

    method: str  # the method that computed the maps: `grad_cam`, or `gradient` for maps of pixels
    layer: str | None  # path of the layer whose activations were used; None for maps of pixels
    values: Tensor  # (B, h, w), float32 or float64, not negative
    classes: Tensor  # (B,) int64, the class of each map
    probabilities: Tensor  # (B,), softmax of these classes; of scores of pixels, its mean over pixels
    predicted: Tensor  # (B,) int64, the class of the highest score

    def rows(self) -> list[dict[str, Any]]:
        """Return for each image the class of its map, its probability, and the class of the highest score."""
        columns = (self.classes.tolist(), self.probabilities.tolist(), self.predicted.tolist())
        return [
            {"image": image, "class": of, "probability": probability, "predicted": predicted}
            for image, (of, probability, predicted) in enumerate(zip(*columns, strict=True))
        ]

    def _headline(self) -> str:
        maps, height, width = self.values.shape
        of = "" if self.layer is None else f" of {self.layer}"
        return f"{self.method}{of}, {plural(maps, 'map')} of {height}x{width}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Class map: {self._headline()}"
        cells = [(row["image"], row["class"], share(row["probability"]), row["predicted"]) for row in self.rows()]
        yield Table(("image", "class", "probability", "predicted"), cells)


@public_call
def class_activation_map(
    model: nn.Module, images: Tensor, layer: str | None = None, *, target: ClassIndex = None
) -> ClassMap:
    """Return where in each image a model sees a class, by one forward pass, and one backward pass to the layer.

    This is Grad-CAM (Selvaraju et al. 2017): relu(sum_c w_c A_c) of the layer's channels A_c, with w_c the mean over
    places of the score's gradient. Where a linear classifier reads the mean of the layer over all places, it is CAM
    (Zhou et al. 2016, "Learning deep features for discriminative localization") up to a factor (section 3.1).

    For dense, masked and compact models of classification and of segmentation, convolutional ones and those of tokens,
    which are put back into their places. The model runs in eval mode; modes, hooks, parameters and their gradients are
    afterwards what they were.

    Args:
        model: returns class logits (B, classes); or (B, classes, H, W), alone or as `out` of a mapping, of which the
            mean over the pixels is explained, as Seg-Grad-CAM does (Vinogradova et al. 2020).
        images: (B, C, H, W), on the model's device; may be float64, as the model's weights.
        layer: path of a module whose output has a height and width, or is the tokens of patches. None: the last one
            with at least 7 x 7 places, before the scores of pixels (the last one at all where none has as many); for
            models of tokens, the last one on whose patches the score depends.
        target: the class, or one for each image; None: the class of the highest score.

    Raises:
        ModelError: there is no such layer, its output is no image, or the score does not depend on it; or the model is
            compiled, or returns no logits.
        UsageError: there is no such class.

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
    require_trainable(model, "a class map")
    require_images(images)
    kept = SpatialActivations(model, layer, images.shape, LEAST_PLACES)
    with training_mode(model, False), without_fast_path(), torch.enable_grad(), kept:
        # The image requires a gradient in case all weights are frozen; a first layer may overwrite its input.
        with running(model, images):
            output = model(images.detach().requires_grad_().clone())
        found = class_scores(output)
        scores = found.values
        classes = class_indices(scores, target)
        picked = scores.gather(1, classes[:, None])
        if found.of_pixels:
            kept.step_back(scores.shape[1])
        call = kept.backward(picked.sum())
        assert call.gradient is not None
        values = grad_cam(_wide(call.values), _wide(call.gradient))
    return class_map("grad_cam", call.layer, values, found, classes)


def _wide(values: Tensor) -> Tensor:
    """Return values in float32 at least, as sums over places overflow in float16."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@public_call
def saliency(model: nn.Module, images: Tensor, *, target: ClassIndex = None) -> ClassMap:
    """Return the largest absolute gradient of a class's logit over the channels of each pixel.

    The saliency of Simonyan et al. 2014, "Deep inside convolutional networks". For every model whose logits have a
    gradient; it runs in eval mode. Modes, parameters and their gradients are afterwards what they were, and no hook is
    used.

    Args:
        model: returns class logits, as for `class_activation_map`.
        images: (B, C, H, W), on the model's device.
        target: the class, or one for each image; None: the class of the highest score.

    Raises:
        ModelError: the logits do not depend on the image, or there are none.
        UsageError: there is no such class.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
        >>> found = pk.saliency(model, torch.randn(2, 3, 8, 8), target=7)
        >>> tuple(found.values.shape), found.classes.tolist()
        ((2, 8, 8), [7, 7])
    """
    model = unwrapped(model, offloaded=True)
    require_trainable(model, "a class map")
    require_images(images)
    leaf = images.detach().clone().requires_grad_()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with training_mode(model, False), torch.enable_grad(), taking_gradients(learned, False):
        with running(model, images):
            output = model(leaf.clone())  # a first layer may overwrite its input
        found = class_scores(output)
        classes = class_indices(found.values, target)
        picked = found.values.gather(1, classes[:, None]).sum()
        if picked.requires_grad:
            picked.backward()  # type: ignore[no-untyped-call]  # reentrant checkpointing refuses torch.autograd.grad
    if leaf.grad is None:
        raise ModelError(
            f"{type(model).__name__}: the logits have no gradient with respect to the image; the model detaches "
            "something, or computes without gradients"
        )
    return class_map("gradient", None, leaf.grad.abs().amax(1), found, classes)


def class_map(method: str, layer: str | None, values: Tensor, scores: ClassScores, classes: Tensor) -> ClassMap:
    """Return a map with the probabilities of its classes (B,)."""
    probabilities = scores.probabilities.gather(1, classes[:, None])[:, 0]
    predicted = scores.values.detach().argmax(1)
    return ClassMap(method, layer, values.cpu(), classes.cpu(), probabilities.cpu(), predicted.cpu())


def require_images(images: Tensor) -> None:
    """Raise unless a tensor is a batch of images."""
    if images.ndim != 4 or not len(images):
        raise UsageError(f"images: expected one or more, (B, C, H, W), got a tensor of shape {tuple(images.shape)}")


@dataclass(frozen=True, eq=False)
class ClassScores:
    """The logits of images (B, classes), with their graph, and the probabilities; of pixels, the means of both."""

    values: Tensor
    probabilities: Tensor
    of_pixels: bool = False


def class_scores(output: Any) -> ClassScores:
    """Return the scores of classes in the output of a model."""
    scores = logits(output["out"] if isinstance(output, Mapping) and "out" in output else output)
    if scores.ndim not in (2, 4):
        raise ModelError(
            "expected a model of image_classification, which returns logits (B, classes), or of segmentation, (B, "
            f"classes, H, W), got {tuple(scores.shape)}; wrap the model so that it returns the scores to look at, one "
            "column for each"
        )
    probabilities = scores.detach().softmax(1)
    if scores.ndim == 2:
        return ClassScores(scores, probabilities)
    return ClassScores(scores.mean((2, 3)), probabilities.mean((2, 3)), of_pixels=True)


def class_indices(scores: Tensor, target: ClassIndex) -> Tensor:
    """Return the class of each image, (B,) int64, on the device of the scores (B, classes)."""
    if target is None:
        return scores.detach().argmax(1)
    images, classes = scores.shape
    found = torch.as_tensor(target, dtype=torch.int64, device=scores.device)
    found = found.expand(images) if found.ndim == 0 else found
    if found.shape != (images,):
        raise UsageError(f"target: expected a class, or one for each of {images} images, got {found.numel()}")
    wrong = found[(found < 0) | (found >= classes)]
    if len(wrong):
        raise UsageError(f"class {int(wrong[0])}: the model has {classes} classes, 0 to {classes - 1}")
    return found


def correlation(first: Tensor, second: Tensor) -> list[float | None]:
    """Return the Pearson correlation of two maps (B, h, w) for each image; None if one is constant."""
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


def grad_cam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Return relu(sum_c w_c A_c) of activations A (B, C, h, w), with w_c the mean of the gradient over places."""
    return torch.einsum("bchw,bc->bhw", activations, gradients.mean((2, 3))).relu()
