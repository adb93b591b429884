"""Class maps: where in an image a model sees a class, by class activation maps or by gradients of pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.execution import without_fast_path
from prunekit.errors import ModelError, UsageError, nearest
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.inspection.visualize.spatial_outputs import SpatialActivations, SpatialCall
from prunekit.models.interface import logits
from prunekit.modes.public_call import public_call
from prunekit.utils.context import taking_gradients, training_mode
from prunekit.utils.display import Displayed, Table, plural, share
from prunekit.utils.inputs import running

CamMethod = Literal["grad_cam", "grad_cam_pp", "layer_cam", "eigen_cam"]
CAM_METHODS: tuple[CamMethod, ...] = get_args(CamMethod)
LEAST_PLACES = 7
"""Fewest rows and columns of a map that shows places, as the last layers of networks for ImageNet have them."""
SaliencyMethod = Literal["gradient", "smooth_grad"]
SALIENCY_METHODS: tuple[SaliencyMethod, ...] = get_args(SaliencyMethod)
SAMPLES, NOISE, TOGETHER = 25, 0.15, 8
"""Noisy copies of an image in SmoothGrad, their deviation as a share of its range, and images in a batch."""
ClassIndex = int | Sequence[int] | Tensor | None
"""A class, or one for each image; None: the class of the highest score."""
Formula = Callable[[Tensor, Tensor], Tensor]
"""A function of activations (B, C, h, w) and the score's gradients of them that returns maps (B, h, w)."""


@dataclass(frozen=True, eq=False, repr=False)
class ClassMap(Displayed):
    """Maps of where in each image a model sees a class, on the CPU."""

    method: str  # the method that computed the maps
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
    model: nn.Module,
    images: Tensor,
    layer: str | None = None,
    *,
    method: CamMethod = "grad_cam",
    target: ClassIndex = None,
) -> ClassMap:
    """Return where in each image a model sees a class, by one forward pass, and one backward pass to the layer.

    For dense, masked and compact models of classification and of segmentation, convolutional ones and those of tokens,
    which are put back into their places. The model runs in eval mode; modes, hooks, parameters and their gradients are
    afterwards what they were. See `prunekit.inspection.visualize.class_maps` for the methods and their papers.

    Args:
        model: returns class logits (B, classes); or (B, classes, H, W), alone or as `out` of a mapping, of which the
            mean over the pixels is explained, as Seg-Grad-CAM does (Vinogradova et al. 2020).
        images: (B, C, H, W), on the model's device; may be float64, as the model's weights.
        layer: path of a module whose output has a height and width, or is the tokens of patches. None: the last one
            with at least 7 x 7 places, before the scores of pixels (the last one at all where none has as many); for
            models of tokens, the last one on whose patches the score depends.
        method: `eigen_cam` depends on no class. CAM itself (Zhou et al. 2016, "Learning deep features for
            discriminative localization") is `grad_cam` up to a factor where a linear classifier reads the mean of the
            layer over all places (Selvaraju et al. 2017, section 3.1).
        target: the class, or one for each image; None: the class of the highest score.

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
    require_trainable(model, "a class map")
    if method not in CAM_METHODS:
        raise UsageError(f"method {method!r}: {nearest(method, CAM_METHODS)}")
    require_images(images)
    backward = method in FORMULAS
    kept = SpatialActivations(model, layer, images.shape, LEAST_PLACES)
    with training_mode(model, False), without_fast_path(), torch.enable_grad() if backward else torch.no_grad(), kept:
        # The image requires a gradient in case all weights are frozen; a first layer may overwrite its input.
        with running(model, images):
            output = model(images.detach().requires_grad_(backward).clone())
        found = class_scores(output)
        scores = found.values
        classes = class_indices(scores, target)
        picked = scores.gather(1, classes[:, None])
        if found.of_pixels:
            kept.step_back(scores.shape[1])
        call = kept.backward(picked.sum()) if backward else kept.found()
        values = _values(call, method)
    return class_map(method, call.layer, values, found, classes)


def _values(call: SpatialCall, method: CamMethod) -> Tensor:
    activations = _wide(call.values)
    if method == "eigen_cam":
        return eigen_cam(activations)
    assert call.gradient is not None
    return FORMULAS[method](activations, _wide(call.gradient))


def _wide(values: Tensor) -> Tensor:
    """Return values in float32 at least, as sums over places overflow in float16."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@public_call
def saliency(
    model: nn.Module,
    images: Tensor,
    *,
    method: SaliencyMethod = "gradient",
    target: ClassIndex = None,
    seed: int = 0,
) -> ClassMap:
    """Return the largest absolute gradient of a class's logit over the channels of each pixel.

    `gradient` is that of the image (Simonyan et al. 2014, "Deep inside convolutional networks"), `smooth_grad` the mean
    gradient of noisy copies of it (Smilkov et al. 2017), with the same noise for the same seed. For every model whose
    logits have a gradient; it runs in eval mode. Modes, random states, parameters and their gradients are afterwards
    what they were, and no hook is used.

    Args:
        model: returns class logits, as for `class_activation_map`.
        images: (B, C, H, W), on the model's device.
        method: `gradient` or `smooth_grad`.
        target: the class, or one for each image; None: the class of the highest score of the image without noise.
        seed: of the noise of `smooth_grad`: 25 copies, with a deviation of 15 % of the range of the image's values.

    Raises:
        ModelError: the logits do not depend on the image, or there are none.
        UsageError: there is no such method or class.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
        >>> found = pk.saliency(model, torch.randn(2, 3, 8, 8), target=7)
        >>> tuple(found.values.shape), found.classes.tolist()
        ((2, 8, 8), [7, 7])
        >>> noisy = pk.saliency(model, torch.randn(2, 3, 8, 8), method="smooth_grad")
    """
    model = unwrapped(model, offloaded=True)
    require_trainable(model, "a class map")
    if method not in SALIENCY_METHODS:
        raise UsageError(f"method {method!r}: {nearest(method, SALIENCY_METHODS)}")
    require_images(images)
    with training_mode(model, False), torch.enable_grad():
        if method == "gradient":
            gradients, found, classes = _gradients(model, images, target)
        else:
            with torch.no_grad(), running(model, images):
                output = model(images.clone())
            found = class_scores(output)
            classes = class_indices(found.values, target)
            gradients = _smoothed(model, images, classes, seed)
    return class_map(method, None, gradients.abs().amax(1), found, classes)


def _gradients(model: nn.Module, images: Tensor, target: ClassIndex) -> tuple[Tensor, ClassScores, Tensor]:
    """Return gradients (B, C, H, W), scores and classes (B,)."""
    leaf = images.detach().clone().requires_grad_()
    with taking_gradients([parameter for parameter in model.parameters() if parameter.requires_grad], False):
        with running(model, images):
            output = model(leaf.clone())  # a first layer may overwrite its input
        found = class_scores(output)
        classes = class_indices(found.values, target)
        picked = found.values.gather(1, classes[:, None]).sum()
        if picked.requires_grad:
            picked.backward()  # type: ignore[no-untyped-call]  # reentrant checkpointing refuses torch.autograd.grad
    gradients = leaf.grad
    if gradients is None:
        raise ModelError(
            f"{type(model).__name__}: the logits have no gradient with respect to the image; the model detaches "
            "something, or computes without gradients"
        )
    return gradients, found, classes


def _smoothed(model: nn.Module, images: Tensor, classes: Tensor, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    flat = images.flatten(1)
    deviation = (NOISE * (flat.amax(1) - flat.amin(1)))[:, None, None, None]
    total = torch.zeros_like(images)
    for _ in range(SAMPLES):
        noise = torch.randn(images.shape, generator=draw, dtype=images.dtype).to(images.device)
        noisy = images + deviation * noise
        for start in range(0, len(images), TOGETHER):
            part = slice(start, start + TOGETHER)
            total[part] += _gradients(model, noisy[part], classes[part])[0]
    return total / SAMPLES


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


def _weighted(activations: Tensor, weights: Tensor) -> Tensor:
    """Return relu(sum_c w_c A_c) of activations A (B, C, h, w) and weights w (B, C)."""
    return torch.einsum("bchw,bc->bhw", activations, weights).relu()


def grad_cam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Return Grad-CAM: relu(sum_c w_c A_c), w_c the mean of the gradient over places (Selvaraju et al. 2017)."""
    return _weighted(activations, gradients.mean((2, 3)))


def grad_cam_pp(activations: Tensor, gradients: Tensor) -> Tensor:
    """Return Grad-CAM++: w_c = sum_ij a_ij relu(g_ij), a = g^2 / (2 g^2 + (sum A) g^3) (Chattopadhay et al. 2018).

    The score of the paper is exp(S) of the logit S, so that all its derivatives are powers of those of S;
    the factor exp(S) in the relu scales the whole map and is left out.
    """
    square = gradients.square()
    below = 2 * square + activations.sum((2, 3), keepdim=True) * square * gradients
    shares = torch.where(below != 0, square / torch.where(below != 0, below, 1), 0)
    return _weighted(activations, (shares * gradients.relu()).sum((2, 3)))


def layer_cam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Return Layer-CAM: relu(sum_c relu(g_c) A_c), with a weight for each place (Jiang et al. 2021)."""
    return (activations * gradients.relu()).sum(1).relu()


def eigen_cam(activations: Tensor) -> Tensor:
    """Return Eigen-CAM: activations projected on their first right singular vector (Muhammad & Yeasin 2020).

    It depends on no class. Places are the rows, channels the columns, and nothing is centered, as in the paper. The
    sign of a singular vector is arbitrary; here it makes the sum of the map positive.
    """
    rows = activations.flatten(2).transpose(1, 2)  # (B, h w, C)
    left, values, _ = torch.linalg.svd(rows, full_matrices=False)
    first = left[..., 0] * values[..., :1]  # (B, h w)
    sign = torch.where(first.sum(1, keepdim=True) < 0, -1, 1)
    maps: Tensor = (first * sign).reshape(len(first), *activations.shape[2:])
    return maps.relu()


FORMULAS: dict[CamMethod, Formula] = {"grad_cam": grad_cam, "grad_cam_pp": grad_cam_pp, "layer_cam": layer_cam}
"""The methods that need gradients."""
