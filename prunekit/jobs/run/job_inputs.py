"""Where a job's images and dense model come from: its recipe, or the user's own code.

Models, data and optimizers of one's own are named on the command line only. What is registered by name (criteria,
tasks, ...) a recipe may name as `file.py:object`, which is run where it is allowed; see `prunekit.recipe.loading.load`.

What a job works on: its data, and the dense model before anything is trained.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.data.loader import Batches, batches
from prunekit.data.sources import Splits, load_splits, missing_data
from prunekit.data.user_data import load_own
from prunekit.errors import DataError, UsageError
from prunekit.models.state_dicts import load_weights
from prunekit.models.zoo import build_model, is_weights_file, load_factory, missing_weights
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.train import TrainSettings
from prunekit.tasks.task import get_task
from prunekit.training.optimizers import MakeOptimizer
from prunekit.utils.context import seeded
from prunekit.utils.inputs import inputs_as_example
from prunekit.utils.registry import Registry, registered_names
from prunekit.utils.user_code import ForbiddenReference, is_reference, run_factory


@dataclass(frozen=True)
class Own:
    """The user's own code, `file.py:factory` each; see `load_factory`, `load_own` and `job_optimizer`.

    Example:
        >>> import prunekit as pk
        >>> from pathlib import Path
        >>> _ = Path("mine.py").write_text('''
        ... from torch import nn
        ... def net():
        ...     return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))
        ... ''')
        >>> settings, data = pk.ModelSettings("mine.py:net", zoo="own"), pk.DataSettings(image_size=8)
        >>> job = pk.JobSettings("mine", settings, data=data, finetune=pk.TrainSettings(epochs=0), control=False)
        >>> result = pk.finetune(job, own=pk.Own(model="mine.py:nets"), log=lambda line: None)
        Traceback (most recent call last):
        prunekit.errors.ModelError: mine.py: there is no function or class 'nets' here; did you mean 'net'?
    """

    model: str | None = None
    data: str | None = None
    optimizer: str | None = None


RECIPE_ONLY = Own()


def job_splits(data: DataSettings, own: Own, task: str = "image_classification") -> Splits:
    """Return the data: of the user's factory where one is given, else images of the settings.

    Raises:
        DataError: it is missing, unreadable, or labels or samples do not fit.
        UsageError: there is no such task.
    """
    return load_splits(data) if own.data is None else load_own(own.data, data, get_task(task))


def job_model(job: JobSettings, own: Own, classes: int) -> nn.Module:
    """Return the dense model with the weights that the job gives, random ones from its seed where it gives none.

    Raises:
        ModelError: it cannot be built, or the weights do not fit.
    """
    with seeded(job.seed):
        if own.model is None:
            return build_model(job.model, num_classes=classes)
        model = load_factory(own.model)
    if job.model.weights is not None:
        load_weights(model, Path(job.model.weights))
    return model


def job_optimizer(own: Own) -> MakeOptimizer | None:
    """Return what the user's factory returns: an optimizer's class, or a function that is called as one; None without.

    Raises:
        UsageError: the factory is not there or raises, or what it returns cannot be called.
    """
    if own.optimizer is None:
        return None
    make = run_factory(own.optimizer, UsageError)
    if not callable(make):
        text = "expected the factory to return an optimizer's class, or a function of parameter groups and `lr`"
        raise UsageError(f"--optimizer {own.optimizer}: {text}, got {type(make).__name__}")
    return make  # type: ignore[no-any-return]


def own_source(reference: str | None) -> str | None:
    """Return a hash of the file that a reference names; the reference itself where it names an installed module."""
    path = Path((reference or "").rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else reference


def code_of_job(job: JobSettings) -> list[tuple[str, Registry[Any]]]:
    """Return what a job names as `file.py:object` in the place of a registered name, and of which registry."""
    return [(name, registry) for _, name, registry in registered_names(JobSettings, job) if is_reference(name)]


def renew_code(job: JobSettings) -> None:
    """Read the files that a job names anew, once for all that follows.

    Raises:
        UsageError: one is not there or raises, has no such object, or a figure means nothing for the budget in it.
    """
    for name, registry in code_of_job(job):
        if not isinstance(name, ForbiddenReference):
            registry.renew(name)
    job.prune.budget.require_sound()


def training_sections(job: JobSettings) -> dict[str, TrainSettings]:
    """Return the sections that say how to train, by name."""
    sections = {"baseline": job.baseline, "sparsify": job.sparsify, "finetune": job.finetune}
    return {name: settings for name, settings in sections.items() if settings is not None}


def require_optimizer(job: JobSettings, own: Own) -> None:
    """Checks that the user's own optimizer is given where a section asks for it.

    Raises:
        UsageError: it is not.
    """
    for name, settings in training_sections(job).items():
        if settings.optimizer == "own" and own.optimizer is None:
            raise UsageError(
                f"{name}.optimizer is 'own': expected --optimizer file.py:factory as well, which was not given"
            )


def own_structure(model: nn.Module, factory: str) -> list[str]:
    """Return what the user's model is, as plain data: its modules, and the files of the factory and of all their
    classes.

    The modules alone do not say what a `forward` computes.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    files.add(factory.rpartition(":")[0])
    paths = [Path(file) for file in files if file is not None and Path(file).is_file()]
    return [repr(model), *sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)]


def require_sources(job: JobSettings, own: Own) -> None:
    """Checks, before anything is read or built, that data and weights are there.

    Raises:
        UsageError: the user's code is given and the job does not ask for it, or the other way round.
        DataError: something is missing; names all of it.
    """
    pairs = (
        ("model.zoo", job.model.zoo, own.model, "--model"),
        ("data.source", job.data.source, own.data, "--data"),
    )
    for key, value, reference, option in pairs:
        if (value == "own") != (reference is not None):
            given = f"{option} was not given" if reference is None else f"{option} is {reference}"
            raise UsageError(f"{key} is {value!r} and {given}: expected 'own' together with {option} file.py:factory")
    if job.task != "image_classification" and own.data is None:
        raise UsageError(
            f"task is {job.task!r} and data.source is {job.data.source!r}, which holds images with a label each: "
            "expected 'own' together with --data file.py:factory"
        )
    asked = [settings.optimizer for settings in training_sections(job).values()]
    if own.optimizer is not None and "own" not in asked:
        expected = "expected finetune.optimizer, or that of another section, to be 'own'"
        raise UsageError(f"--optimizer is {own.optimizer}: {expected}, got {' and '.join(map(repr, asked))}")
    if job.model.zoo == "own" and job.model.arguments:
        raise UsageError("model.arguments: expected none, because the model's factory takes no arguments")
    data, weights = missing_data(job.data), missing_weights(job.model)
    # Weights that torchvision knows are downloaded, but not for data that is not there.
    if data is not None or (weights is not None and is_weights_file(job.model)):
        missing = [text for text in (data, weights) if text is not None]
        raise DataError("\n  ".join([f"{len(missing)} things are missing:", *missing]) if missing[1:] else missing[0])


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a job works on, before anything is trained.

    Attributes:
        job: the settings.
        splits: its data, with its task.
        model: the dense model as its constructor, weights file or factory gives it, on the CPU.
        device: where to train.
        structure: what the dense model is, as plain data, whatever its weights are.
        own_optimizer: makes the user's own optimizer, where one is given.
        optimizer_source, task_source: tell one own optimizer or task from another.
    """

    job: JobSettings
    splits: Splits
    model: nn.Module
    device: torch.device
    structure: Any
    own_optimizer: MakeOptimizer | None = None
    optimizer_source: str | None = None
    task_source: str | None = None

    def optimizer_for(self, settings: TrainSettings) -> MakeOptimizer | None:
        """Return the user's own optimizer where a section asks for it."""
        return self.own_optimizer if settings.optimizer == "own" else None

    @cached_property
    def example_inputs(self) -> tuple[Any, ...]:
        """The inputs of one training sample as a batch."""
        return example_of(self.model, self.splits)

    @property
    def build(self) -> ModelSettings | None:
        """How the dense model is built, with the number of classes filled in; None when only its owner's code can."""
        return build_of(self.job, self.splits)


def example_of(model: nn.Module, splits: Splits) -> tuple[Any, ...]:
    """Return the inputs of one training sample as a batch."""
    return inputs_as_example(model, next(iter(batches(splits.train, 1, shuffle_seed=None)))[0])


def build_of(job: JobSettings, splits: Splits) -> ModelSettings | None:
    """Return how the dense model of a job is built; None when only its owner's code can."""
    if job.model.zoo == "own":
        return None
    classes = {"num_classes": len(splits.classes)} if splits.classes else {}
    return replace(job.model, arguments=classes | job.model.arguments, origin=None)


def chosen_batches(job: JobSettings, splits: Splits) -> Batches:
    """Return batches over the calibration samples of a job: a fixed random choice of training samples."""
    order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(job.seed))
    chosen = order[: job.calibration.images]
    return batches(splits.train, job.data.batch, shuffle_seed=None, workers=job.data.reading, indices=chosen)
