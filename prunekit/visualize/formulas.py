"""Class activation maps as formulas: from what a layer returned, and its gradient, to one map for each image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

CamMethod = Literal["cam", "grad_cam", "grad_cam_pp", "layer_cam", "eigen_cam"]
METHODS: tuple[CamMethod, ...] = get_args(CamMethod)
Formula = Callable[[Tensor, Tensor], Tensor]
"""From activations A (B, C, h, w) and the score's gradient with respect to them, alike, to maps (B, h, w)."""


def cam(activations: Tensor, weights: Tensor) -> Tensor:
    """CAM (Zhou et al. 2016, "Learning deep features for discriminative localization"): sum_c w_c A_c.

    Args:
        activations: (B, C, h, w) of the layer that is averaged over its places and read by the classifier.
        weights: (B, C), the classifier's for the class of each image.
    """
    return torch.einsum("bchw,bc->bhw", activations, weights)


def grad_cam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Grad-CAM (Selvaraju et al. 2017): relu(sum_c w_c A_c), w_c the mean of the gradient over its places."""
    return cam(activations, gradients.mean((2, 3))).relu()


def grad_cam_pp(activations: Tensor, gradients: Tensor) -> Tensor:
    """Grad-CAM++ (Chattopadhay et al. 2018): w_c = sum_ij a_ij relu(g_ij), a = g^2 / (2 g^2 + (sum A) g^3).

    The score of the paper is exp(S) of the logit S, so that all its derivatives are powers of S's; exp(S) itself, in
    the relu, scales the whole map and is left out.
    """
    square = gradients.square()
    below = 2 * square + activations.sum((2, 3), keepdim=True) * square * gradients
    shares = torch.where(below != 0, square / torch.where(below != 0, below, 1), 0)
    return cam(activations, (shares * gradients.relu()).sum((2, 3))).relu()


def layer_cam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Layer-CAM (Jiang et al. 2021): relu(sum_c relu(g_c) A_c), a weight for each place."""
    return (activations * gradients.relu()).sum(1).relu()


def eigen_cam(activations: Tensor) -> Tensor:
    """Eigen-CAM (Muhammad & Yeasin 2020): activations projected on their first right singular vector; no class.

    Places are the rows, channels the columns, and nothing is centered, as in the paper. The sign, which a singular
    vector does not have, is the one that makes the sum of the map positive.
    """
    rows = activations.flatten(2).transpose(1, 2)  # (B, h w, C)
    left, values, _ = torch.linalg.svd(rows, full_matrices=False)
    first = left[..., 0] * values[..., :1]  # (B, h w)
    sign = torch.where(first.sum(1, keepdim=True) < 0, -1, 1)
    maps: Tensor = (first * sign).reshape(len(first), *activations.shape[2:])
    return maps.relu()


FORMULAS: dict[CamMethod, Formula] = {"grad_cam": grad_cam, "grad_cam_pp": grad_cam_pp, "layer_cam": layer_cam}
"""Those that need the gradient."""
