"""Whether a model, its images and what training is asked to do fit together."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from prunekit.context import seeded, training_mode
from prunekit.data import Splits, batches
from prunekit.data.datasets import ImageDataset
from prunekit.errors import ModelError
from prunekit.models import logits


def two_images(dataset: ImageDataset) -> Tensor:
    """(2, C, H, W) The first two that can be read, or one of them twice.

    Raises:
        DataError: an image cannot be read, and none may be skipped.
    """
    images, _ = next(iter(batches(dataset, 2, shuffle_seed=None)))
    return images[torch.arange(2) % len(images)]


def check_fits(model: nn.Module, splits: Splits, device: torch.device) -> None:
    """Runs two images through the model as in training; its buffers and the random state are left alone.

    Raises:
        ModelError: the model does not take these images, or does not give one logit for each class.
        DataError: an image cannot be read.
    """
    images = two_images(splits.train)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with seeded(0), training_mode(model, True), torch.no_grad():
        try:
            shape = tuple(logits(functional_call(model, buffers, (images.to(device),))).shape)
        except ModelError:
            raise
        except Exception as error:  # a model's own code may raise anything
            raise ModelError(
                f"{type(model).__name__} does not take images of shape {tuple(images.shape[1:])}: "
                f"{type(error).__name__}: {error}; set data.image_size to what it was made for"
            ) from error
    classes = len(splits.classes)
    if shape != (2, classes):
        raise ModelError(
            f"{type(model).__name__}: expected logits of shape (2, {classes}) from two images of {classes} classes, "
            f"got {shape}; set model.arguments.num_classes"
        )
