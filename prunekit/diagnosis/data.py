"""What is wrong before the model runs: copies, labels, normalization."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prunekit.diagnosis.findings import BEFORE, Finding, check
from prunekit.diagnosis.images import IGNORED
from prunekit.diagnosis.observation import DataSeen, Observation

COPIES = 0.01
"""Share of a data set that are copies from which on it is a fault: the exact ones in well-known sets are far fewer
(Barz & Denzler 2020, "Do we train on test data?")."""
OFF_CENTER = 1.5
"""Mean of the inputs, in absolute value, from which on they are unlike normalized ones: mean 0 and standard deviation 1
(LeCun et al. 1998, "Efficient BackProp", section 4.3). Sets of other images than those of ImageNet are off a little."""
NARROW, WIDE = 0.3, 3.0
"""Standard deviations below and above which they are unlike normalized ones; pixels from 0 to 1 have about 0.25,
those from 0 to 255 about 60."""


@check("duplicated_data", "data")
def duplicated_data(seen: Observation) -> Iterator[Finding]:
    """Images that are equal bit for bit: among themselves, or to held-out ones."""
    data = seen.data
    share = _share(data.copies, data.images, data.images, data.total)
    leaked = _share(data.leaked, data.held_out, data.images, data.total)
    if data.copies > 1 and share >= COPIES:
        yield _copies(data, share)
    if data.leaked > 1 and leaked >= COPIES:
        yield Finding(
            "duplicated_data",
            "data",
            BEFORE,
            "held-out images that are not trained on",
            f"{data.leaked} of {data.held_out} held-out images are among {data.images} training images",
            "split the data anew, without copies in two splits: accuracy on these says nothing",
            {"leaked": data.leaked, "held_out": data.held_out, "share_of_the_set": leaked},
        )


def _copies(data: DataSeen, share: float) -> Finding:
    conflicting = f", {data.conflicting} of them with another label" if data.conflicting else ""
    about = f", about {share:.0%} of the data set" if data.images < data.total else ""
    return Finding(
        "duplicated_data",
        "data",
        BEFORE,
        f"fewer than {COPIES:.0%} of the images equal to another",
        f"{data.copies} of {data.images} are copies of one before{conflicting}{about}",
        "remove the copies, and look at how the images are listed and shuffled",
        {"copies": data.copies, "images": data.images, "conflicting": data.conflicting, "share_of_the_set": share},
    )


def _share(found: int, of: int, images: int, total: int) -> float:
    """Share in the whole set, where a random part was looked at: each copy is seen only if its original is as well."""
    return min(1.0, found / max(1, of) * (total / max(1, images)))


@check("labels_out_of_range", "data")
def labels_out_of_range(seen: Observation) -> Iterator[Finding]:
    """Class labels that the model has no score for."""
    labels, classes = seen.data.labels, seen.data.classes
    if labels is None or classes is None:
        return
    wrong = ((labels < 0) | (labels >= classes)) & (labels != IGNORED)
    if wrong.any():
        values = np.unique(labels[wrong])
        yield Finding(
            "labels_out_of_range",
            "data",
            BEFORE,
            f"labels from 0 to {classes - 1}, one for each of the model's {classes} scores",
            f"{wrong.sum()} of {len(labels)} are others: {', '.join(map(str, values[:8]))}",
            "number the classes from 0, or give the model as many outputs as there are classes",
            {"labels": values[:100].tolist(), "count": int(wrong.sum()), "classes": classes},
        )


@check("input_normalization", "data")
def input_normalization(seen: Observation) -> Iterator[Finding]:
    """Inputs whose mean and standard deviation are not those of normalized ones."""
    mean, std = seen.data.mean, seen.data.std
    off = (np.abs(mean) > OFF_CENTER) | (std < NARROW) | (std > WIDE)
    if off.any():
        yield Finding(
            "input_normalization",
            "data",
            BEFORE,
            f"channels with a mean within {OFF_CENTER:g} of 0 and a standard deviation from {NARROW:g} to {WIDE:g}",
            f"means {_numbers(mean)}, standard deviations {_numbers(std)}",
            "scale pixels to 0..1, then subtract the mean of this data and divide by its standard deviation, once",
            {"mean": mean.tolist(), "std": std.tolist()},
        )


def _numbers(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
    return ", ".join(f"{value:.3g}" for value in values[:4]) + (", ..." if len(values) > 4 else "")
