"""Agreement of a pruned network's outputs with the dense model's, in percent, for each kind of output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from mobile_inputs import Split
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 32
FACE = 0.35
"""Value of CenterFace's map from which a peak is a face."""
BOX = 0.7
"""Probability from which O-Net says face."""
TEXT = 0.3
"""Value of the detector's map from which a pixel is text."""
SPEECH = NOTE = 0.5
"""Probability from which a chunk is speech, and a cell a note."""
CENTS = 50 / 20
"""Bins of CREPE, 20 cents each, within which two pitches are the same."""
MOS = 0.1
"""Points within which two scores are the same."""


def first(found: Any) -> Tensor:
    """The first of several outputs."""
    return found[0] if isinstance(found, (tuple, list)) else found


def side_by_side(found: tuple[Tensor, ...]) -> Tensor:
    """All of several outputs, flattened."""
    return torch.cat([some.flatten(1) for some in found], 1)


@dataclass(frozen=True, eq=False)
class Subject:
    """A dense network in eval mode, its inputs, and the agreement in percent of two outputs, the dense one first."""

    model: nn.Module
    inputs: Split
    agreement: Callable[[Tensor, Tensor], float]
    read: Callable[[Any], Tensor] = first

    def output(self, model: nn.Module) -> Tensor:
        """Values that are read of the outputs for the held-out inputs."""
        with torch.inference_mode():
            return torch.cat([self.read(model(some)) for some in torch.split(self.inputs[1], BATCH)])


def error(dense: Tensor, other: Tensor) -> float:
    """Squared error of an output as a share of its variance."""
    return float((dense - other).square().sum() / (dense - dense.mean(0)).square().sum())


def same_class(dense: Tensor, other: Tensor) -> float:
    """Samples with the same class."""
    return 100 * float((dense.argmax(1) == other.argmax(1)).double().mean())


def f1(dense: Tensor, other: Tensor) -> float:
    """Harmonic mean of precision and recall of bool tensors."""
    both = float((dense & other).sum())
    return 100 * 2 * both / max(1.0, float(dense.sum() + other.sum()))


def same_text(dense: Tensor, other: Tensor) -> float:
    """F1 of the pixels that are text."""
    return f1(dense > TEXT, other > TEXT)


def same_speech(dense: Tensor, other: Tensor) -> float:
    """F1 of the chunks that are speech."""
    return f1(dense > SPEECH, other > SPEECH)


def same_notes(dense: Tensor, other: Tensor) -> float:
    """F1 of the cells of pitch and time that are notes, onsets or contours."""
    return f1(dense > NOTE, other > NOTE)


def same_boxes(dense: Tensor, other: Tensor) -> float:
    """F1 of the crops that are faces, by the last number."""
    return f1(dense[:, -1] > BOX, other[:, -1] > BOX)


def same_pitch(dense: Tensor, other: Tensor) -> float:
    """Frames whose pitches are at most half a semitone apart."""
    return 100 * float(((dense.argmax(1) - other.argmax(1)).abs() <= CENTS).double().mean())


def same_score(dense: Tensor, other: Tensor) -> float:
    """Samples with the same score."""
    return 100 * float(((dense - other).abs() <= MOS).double().mean())


def same_letters(dense: Tensor, other: Tensor) -> float:
    """Lines with the same text: the best class of each column, repeats and blanks taken out."""
    one, two = _letters(dense), _letters(other)
    return 100 * sum(a == b for a, b in zip(one, two, strict=True)) / len(one)


def _letters(columns: Tensor) -> list[list[int]]:
    return [[int(c) for c in some.unique_consecutive() if c] for some in columns.argmax(2)]


def cosine(dense: Tensor, other: Tensor) -> float:
    """Mean cosine of vectors."""
    return 100 * float(F.cosine_similarity(dense, other).mean())


def centered_cosine(dense: Tensor, other: Tensor) -> float:
    """Mean cosine of what vectors differ by from the mean of the dense ones."""
    return cosine(dense - dense.mean(0), other - dense.mean(0))


def same_faces(dense: Tensor, other: Tensor) -> float:
    """F1 of faces: peaks of both maps that are at most one cell apart."""
    one, two = _peaks(dense), _peaks(other)
    matched = min(float((one & _wide(two)).sum()), float((two & _wide(one)).sum()))
    return 100 * 2 * matched / max(1.0, float(one.sum() + two.sum()))


def _peaks(heat: Tensor) -> Tensor:
    return (heat > FACE) & (heat == F.max_pool2d(heat, 3, 1, 1))


def _wide(peaks: Tensor) -> Tensor:
    return F.max_pool2d(peaks.float(), 3, 1, 1) > 0
