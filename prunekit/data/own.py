"""The user's own data: what a function in a Python file returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from prunekit.data.datasets import SampleDataset
from prunekit.data.samples import sample_splits
from prunekit.data.sources import source_of_parts, splits_of
from prunekit.data.splits import Splits, fingerprint
from prunekit.errors import DataError, UsageError
from prunekit.settings.data import DataSettings
from prunekit.tasks import IMAGE_CLASSIFICATION, Task
from prunekit.user_code import code_of, run_factory

_ADVICE = "return other data sets as a tuple (train, test)"
PARTS = ("train", "test", "validation")
READING = ("batch", "workers", "prefetch", "persistent_workers", "pin_memory")
FOR_SPLITS = ("source", "root", "name", "columns", "download", "origin", *READING)
"""Settings that may stand beside images which are split and fed already."""


def load_own(reference: str, settings: DataSettings, task: Task = IMAGE_CLASSIFICATION) -> Splits:
    """Runs `file.py:factory`, or `python:module:factory`, and returns its data, split.

    The file's code is run: name only files you trust.

    The factory takes no arguments and returns `Splits`, or map-style data sets of (image, label): a tuple (train, test)
    or (train, test, validation), or a mapping with these names. Without validation images, they are drawn from the
    training images. See `MappedImages` for what an image may be. Of another task a sample is whatever that can unpack
    once samples are collated, see `sample_splits`.

    `Splits` are taken as they are. The fingerprint, by which earlier results are found again, is taken from the file,
    all labels and a few images; of `Splits` from the file and their own fingerprint.

    Raises:
        DataError: no such file or name, the code raises, or it returns something else.
        UsageError: it returns `Splits`, and the settings say how to split or feed, or they are of another task.
    """
    made = run_factory(reference, DataError)
    code = code_of(reference)
    if isinstance(made, Splits):
        for part in (made.train, made.validation, made.test):
            if not isinstance(part, SampleDataset):
                found = type(part).__name__
                raise DataError(f"{reference}: expected Splits of prunekit.data.ImageDataset, got {found}; {_ADVICE}")
        _refuse_changes(settings, reference)
        if made.task.name != task.name:
            raise UsageError(
                f"{reference}: expected Splits of the task {task.name!r}, as the recipe's `task` says, got "
                f"{made.task.name!r}; make the two the same"
            )
        return replace(made, fingerprint=fingerprint([code, made.fingerprint.encode()]))
    parts = _parts(made, reference)
    if task is not IMAGE_CLASSIFICATION:
        return sample_splits(parts, task, settings=settings, where=reference, content=code)
    return splits_of(source_of_parts(parts, settings, reference, code), settings)


def _refuse_changes(settings: DataSettings, reference: str) -> None:
    keys = [field for field in fields(settings) if field.name not in FOR_SPLITS]
    changed = [f"data.{key.name}" for key in keys if getattr(settings, key.name) != key.default]
    if changed:
        raise UsageError(
            f"{reference}: the factory returned Splits, which are split and fed already: {', '.join(changed)} would "
            f"change nothing; leave that out, or {_ADVICE}"
        )


def _parts(made: Any, reference: str) -> dict[str, Any]:
    """The data sets by name."""
    parts = dict(zip(PARTS, made, strict=False)) if isinstance(made, tuple) else made
    if isinstance(parts, Mapping) and (not isinstance(made, tuple) or len(made) in (2, 3)):
        names = set(map(str, parts))
        if {"train", "test"} <= names <= set(PARTS):
            return dict(parts)
    got = f"a mapping with {', '.join(map(str, made)) or 'nothing'}" if isinstance(made, Mapping) else _kind(made)
    raise DataError(
        f"{reference}: expected the factory to return prunekit.data.Splits, or data sets as (train, test), as (train, "
        f"test, validation) or as a mapping with these names, got {got}"
    )


def _kind(made: Any) -> str:
    return f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
