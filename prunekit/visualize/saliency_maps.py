"""Which pixels a class score depends on: its gradient with respect to the image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from prunekit.context import frozen, training_mode
from prunekit.errors import ModelError, UsageError, nearest
from prunekit.inputs import running
from prunekit.visualize.scores import ClassIndex, ClassMap, chosen, class_map, class_scores, require_images
from prunekit.wrappers import unwrapped

SaliencyMethod = Literal["gradient", "smooth_grad"]
METHODS: tuple[SaliencyMethod, ...] = get_args(SaliencyMethod)


@dataclass(frozen=True)
class Smoothing:
    """How SmoothGrad averages.

    Attributes:
        samples: noisy copies of each image.
        noise: standard deviation of the noise, as a share of the range of the image's values.
        seed: of the noise.
        batch: copies that go through the model at once.
    """

    samples: int = 25
    noise: float = 0.15
    seed: int = 0
    batch: int = 8


def saliency(
    model: nn.Module,
    images: Tensor,
    *,
    method: SaliencyMethod = "gradient",
    target: ClassIndex = None,
    smoothing: Smoothing | None = None,
) -> ClassMap:
    """The largest absolute gradient of a class's logit over the channels of each pixel.

    `gradient` is that of the image (Simonyan et al. 2014, "Deep inside convolutional networks"), `smooth_grad` the mean
    of those of noisy copies of it (Smilkov et al. 2017), the noise the same for the same seed. For every model whose
    logits have a gradient; in eval mode. Modes, random states, parameters and their gradients are afterwards what they
    were, and no hook is used.

    Args:
        model: returns class logits (B, classes).
        images: (B, C, H, W), on the model's device.
        target: the class, or one for each image; None: the one of the highest score of the image without noise.
        smoothing: of `smooth_grad`.

    Raises:
        ModelError: the logits do not depend on the image, or there are none.
        UsageError: there is no such method or class, or the smoothing is none.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
        >>> found = pk.saliency(model, torch.randn(2, 3, 8, 8), target=7)
        >>> tuple(found.values.shape), found.classes.tolist()
        ((2, 8, 8), [7, 7])
        >>> noisy = pk.saliency(model, torch.randn(2, 3, 8, 8), method="smooth_grad")
    """
    model = unwrapped(model, offloaded=True)
    if method not in METHODS:
        raise UsageError(f"method {method!r}: {nearest(method, METHODS)}")
    require_images(images)
    with training_mode(model, False), torch.enable_grad():
        if method == "gradient":
            gradients, scores, classes = _gradients(model, images, target)
        else:
            with torch.no_grad(), running(model, images):
                output = model(images.clone())
            scores = class_scores(output)
            classes = chosen(scores, target)
            gradients = _smoothed(model, images, classes, smoothing or Smoothing())
    return class_map(method, None, gradients.abs().amax(1), scores, classes)


def _gradients(model: nn.Module, images: Tensor, target: ClassIndex) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (B, C, H, W), scores (B, classes) and classes (B,)."""
    leaf = images.detach().clone().requires_grad_()
    with frozen(model):
        with running(model, images):
            output = model(leaf.clone())  # a first layer may overwrite what it is given
        scores = class_scores(output)
        classes = chosen(scores, target)
        picked = scores.gather(1, classes[:, None]).sum()
        if picked.requires_grad:
            picked.backward()  # type: ignore[no-untyped-call]  # reentrant checkpointing refuses torch.autograd.grad
    gradients = leaf.grad
    if gradients is None:
        raise ModelError(
            f"{type(model).__name__}: the logits have no gradient with respect to the image; the model detaches "
            "something, or computes without gradients"
        )
    return gradients, scores, classes


def _smoothed(model: nn.Module, images: Tensor, classes: Tensor, how: Smoothing) -> Tensor:
    if how.samples < 1 or how.batch < 1 or how.noise < 0:
        raise UsageError(f"expected samples >= 1, batch >= 1 and noise >= 0, got {how}")
    draw = torch.Generator().manual_seed(how.seed)
    flat = images.flatten(1)
    deviation = (how.noise * (flat.amax(1) - flat.amin(1)))[:, None, None, None]
    total = torch.zeros_like(images)
    for _ in range(how.samples):
        noise = torch.randn(images.shape, generator=draw, dtype=images.dtype).to(images.device)
        noisy = images + deviation * noise
        for start in range(0, len(images), how.batch):
            part = slice(start, start + how.batch)
            total[part] += _gradients(model, noisy[part], classes[part])[0]
    return total / how.samples
