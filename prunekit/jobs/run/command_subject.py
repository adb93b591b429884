"""Subjects: what a command works on, a model with an example of its input, and the data and task that go with it.

Every command has one, wherever its model is from: `subject_sources` makes it of a name, a folder, a file or code,
`job_subject` of a recipe; `dense_model` loads what a pruned one was made from.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.backends.files.exported_model import ExportedModel
from prunekit.backends.session import Inputs, inputs_like, inputs_of
from prunekit.data.datasets import AnsweredImages, DenseAnswers, ImageDataset, SampleDataset
from prunekit.data.loader import batches
from prunekit.data.roots import is_labeled_images
from prunekit.data.sources import labeled_images, load_splits
from prunekit.data.splits import Splits
from prunekit.data.user_data import TaskSamples, load_own
from prunekit.errors import ArtifactError, ModelError, UsageError, raised_as
from prunekit.hooks.model_copy import copied
from prunekit.measure.model_size import count_macs, count_parameters
from prunekit.models.interface import ModelInterface
from prunekit.models.preprocessing import Preprocessing
from prunekit.settings.inputs import DataSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import get_task
from prunekit.utils.context import training_mode
from prunekit.utils.files import sha256
from prunekit.utils.inputs import call, described, inputs_as_example


@dataclass(frozen=True)
class Own:
    """The user's own code, `file.py:factory` each; see `load_factory`, `load_own` and `job_optimizer`.

    Example:
        >>> import prunekit as pk
        >>> pk.Own(model="mine.py:net", data="mine.py:photos")  # as `own` of `prunekit.finetune` takes it
        Own(model='mine.py:net', data='mine.py:photos', optimizer=None)
    """

    model: str | None = None
    data: str | None = None
    optimizer: str | None = None


RECIPE_ONLY = Own()


@dataclass(frozen=True, eq=False)
class Subject:
    """A model that is ready to run, and what is known of its input, its data and its task."""

    model: nn.Module  # on the CPU
    name: str  # for tables
    sample_shape: tuple[int, ...]  # shape of one input without the batch, such as (3, 224, 224)
    splits: Splits | None = None  # its data with its task, if it came from a job or `with_data` has read it
    trained: bool = True  # whether weights were loaded; the accuracy of random ones means nothing
    inputs: tuple[Any, ...] | None = None  # an example, samples first; None for models of one image
    interface: ModelInterface | None = None  # how it is fed, if its folder, its file or its zoo says so
    # how the dense model is built, as model folders have it: name, zoo (`own` for `file.py:factory`) and arguments;
    # None if its folder says so, or nobody knows
    build: Mapping[str, Any] | None = None

    @property
    def knows_inputs(self) -> bool:
        """True if the shapes of the inputs are known; an exported file may take inputs of any size."""
        return self.inputs is not None or bool(self.sample_shape)

    @property
    def example_inputs(self) -> tuple[Any, ...]:
        """The arguments of one forward pass: the inputs, or zeros of shape (1, *sample_shape)."""
        return (torch.zeros(1, *self.sample_shape),) if self.inputs is None else self.inputs

    @property
    def timing_inputs(self) -> Inputs:
        """Inputs to time it on: random images, or a sample of other data."""
        if self.inputs is None:
            return inputs_of(self.sample_shape)
        return inputs_like(self.inputs, drawn=self.splits is None)

    @property
    def preprocessing(self) -> Preprocessing:
        """The way from an image to the model's input; raises a `UsageError` if it is not known."""
        found = None if self.interface is None else self.interface.preprocessing
        if found is None:
            raise UsageError(
                f"{self.name}: it does not say how images become its input: save it again with "
                "prunekit.save(..., preprocessing=prunekit.Preprocessing(...)), or give inputs that are ready"
            )
        return found

    def probe(self) -> Any:
        """Run the model once on its example, in eval mode, and return its output."""
        shape = "x".join(map(str, (1, *self.sample_shape))) if self.inputs is None else described(self.inputs)
        failed = f"{self.name}: the model does not run on an input of {shape}: "
        cure = "; --input-shape gives another, and a recipe has models of other inputs than one image"
        told = self.splits is not None or self.inputs is not None
        # an exported file is loaded when it is first run
        failing = raised_as(ModelError, failed, "" if told else cure, passing=ArtifactError)
        with failing, training_mode(self.model, False), torch.no_grad():
            return call(self.model, self.example_inputs)

    def figures(self) -> dict[str, Any]:
        """Return `params` and `macs` (one sample); of an exported file `file_bytes`, and None for these."""
        if isinstance(self.model, ExportedModel):
            return {"params": None, "macs": None, "file_bytes": self.model.file_bytes}
        return {"params": count_parameters(self.model), "macs": count_macs(self.model, self.example_inputs)}

    def require_module(self, purpose: str) -> None:
        """Raise if the model is an exported file, which has no modules that could be looked into."""
        if isinstance(self.model, ExportedModel):
            raise UsageError(
                f"{self.name}: a file of {self.model.form} has no modules to {purpose}: give the model folder that it "
                "was exported from; bench, evaluate, predict and inspect take the file"
            )

    def data(self, settings: DataSettings | None, own: Own, purpose: str, task: str | None = None) -> Splits:
        """Return the data of the model: that of its job, that of the settings, or the user's own."""
        if self.splits is not None:
            return self.splits
        known = self.interface
        task = task or (known.task if known else None) or IMAGE_CLASSIFICATION.name
        if own.data is not None and is_labeled_images(own.data):
            if task != IMAGE_CLASSIFICATION.name:
                raise UsageError(
                    f"{own.data}: images with a class each are for the task {IMAGE_CLASSIFICATION.name!r}, and "
                    f"{self.name} is for {task!r}: give its data as --data file.py:factory"
                )
            return labeled_images(Path(own.data), self.preprocessing, known.classes if known else ())
        if settings is None and own.data is not None:
            return load_own(own.data, DataSettings("own"), get_task(task), known.preprocessing if known else None)
        if settings is None:
            raise UsageError(
                f"{self.name}: expected images to {purpose}; name the recipe that has them: --recipe PATH, or give "
                "your own: --data with a folder that has one of images for each class, an .npz, or file.py:factory"
            )
        return job_splits(settings, own, task)

    def fed_by(self, splits: Splits) -> Subject:
        """Return the subject with data whose samples become its example inputs."""
        return replace(self, splits=splits, sample_shape=splits.sample_shape, inputs=inputs_of_task(self.model, splits))

    def with_data(self, settings: DataSettings | None, own: Own, purpose: str, task: str | None = None) -> Subject:
        """Return the subject with the data that is named, or as it is if none is."""
        if self.splits is not None or (settings is None and own.data is None):
            return self
        return self.fed_by(self.data(settings, own, purpose, task))


def inputs_of_task(model: nn.Module, splits: Splits) -> tuple[Any, ...] | None:
    """Return the inputs of one sample; None for images, whose shape is enough."""
    return None if splits.task.labeled_images else example_of(model, splits)


def example_of(model: nn.Module, splits: Splits) -> tuple[Any, ...]:
    """Return the inputs of one training sample as a batch."""
    return inputs_as_example(model, next(iter(batches(splits.train, 1, shuffle_seed=None)))[0])


def job_splits(data: DataSettings, own: Own, task: str = "image_classification") -> Splits:
    """Return the data of the user's factory, if one is given, or else the images of the settings."""
    return load_splits(data, task) if own.data is None else load_own(own.data, data, get_task(task))


def bound_splits(
    splits: Splits, dense: nn.Module, device: torch.device | None = None, classes: tuple[str, ...] = ()
) -> Splits:
    """Return data with a task that has got from the dense model what only that knows; see `Task.bound`.

    If the targets are that model's outputs, a copy of it gives them, because the model itself is pruned. Of images
    without labels the classes are then that model's, numbered unless `classes` has a name for each; it answers on the
    device.
    """
    if splits.task.binding is None:
        return splits
    dense = copied(dense) if splits.task.from_dense else dense
    task, answers = splits.task.bound(dense), DenseAnswers(dense, device or torch.device("cpu"))
    unlabeled = task.from_dense and task.labeled_images and not splits.classes

    def bound(part: SampleDataset) -> SampleDataset:
        if isinstance(part, TaskSamples):
            return replace(part, unpacking=replace(part.unpacking, unpack=task.unpack))
        return AnsweredImages.of(part, answers) if unlabeled and isinstance(part, ImageDataset) else part

    train, validation, test = map(bound, (splits.train, splits.validation, splits.test))
    if unlabeled:
        count = answers.scores(torch.zeros(1, *splits.sample_shape)).shape[1]
        splits = replace(splits, classes=classes if len(classes) == count else tuple(map(str, range(count))))
    return replace(splits, train=train, validation=validation, test=test, task=task)


def own_source(reference: str | None) -> str | None:
    """Return a hash of the file that a reference names, or the reference if it names an installed module."""
    path = Path((reference or "").rpartition(":")[0])
    return sha256(path) if path.is_file() else reference


def own_structure(model: nn.Module, factory: str) -> list[str]:
    """Return the structure of the user's own model: its modules, and hashes of the files with its factory and classes.

    The modules alone do not tell what a `forward` computes.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    files.add(factory.rpartition(":")[0])
    paths = [Path(file) for file in files if file is not None and Path(file).is_file()]
    return [repr(model), *sorted(map(sha256, paths))]
