"""The inputs of a job: its data and its dense model, from the recipe or from the user's own code.

The user's own models, data and optimizers are named on the command line alone. What is registered by name (criteria,
tasks, ...) can be `file.py:object` in a recipe, whose code runs if that is allowed; see `prunekit.recipe.loading.load`.
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

from prunekit.compaction.model_folder import load, save
from prunekit.data.datasets import SampleDataset
from prunekit.data.loader import Batches, batches
from prunekit.data.sources import load_splits, missing_data
from prunekit.data.splits import Splits
from prunekit.data.user_data import TaskSamples, load_own
from prunekit.errors import DataError, UsageError
from prunekit.hooks.model_copy import copied
from prunekit.models.state_dicts import load_weights
from prunekit.models.zoo import (
    build_model,
    is_weights_file,
    load_factory,
    missing_weights,
    model_arguments,
    with_head,
)
from prunekit.planning.plan import Plan
from prunekit.settings.inputs import BOXED, TEXTUAL, DataSettings, ModelSettings
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


@dataclass(frozen=True, eq=False)
class Prepared:
    """A job with its data and its dense model, before anything is trained.

    Attributes:
        job: the settings.
        splits: its data, with its task.
        model: the dense model as its constructor, weights file or factory gives it, on the CPU.
        device: where to train.
        structure: of the dense model as plain data, independent of its weights.
        own_optimizer: makes the user's own optimizer, if one is given.
        optimizer_source, task_source: hashes of the code of the user's own optimizer and task.
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
        """Return the factory of the user's own optimizer if a section asks for it, else None."""
        return self.own_optimizer if settings.optimizer == "own" else None

    @cached_property
    def example_inputs(self) -> tuple[Any, ...]:
        """The inputs of one training sample as a batch."""
        return example_of(self.model, self.splits)

    def save_model(self, model: nn.Module, folder: Path, plan: Plan) -> None:
        """Save a compact model of the job in a folder."""
        splits = self.splits
        save(
            model,
            folder,
            plan,
            build=self.build,
            preprocessing=splits.preprocessing,
            classes=splits.classes,
            task=splits.task.name,
            example=self.example_inputs,
            compress=self.job.compress,
        )

    def load_model(self, folder: Path, dense: nn.Module) -> nn.Module:
        """Load a compact model of the job from a folder; the dense one is needed if it is the user's own."""
        return load(folder, None if self.build else dense)

    @property
    def build(self) -> ModelSettings | None:
        """The settings that build the dense model; None for the user's own."""
        return build_of(self.job, self.splits)


def job_splits(data: DataSettings, own: Own, task: str = "image_classification") -> Splits:
    """Return the data of the user's factory, if one is given, or else the images of the settings."""
    return load_splits(data, task) if own.data is None else load_own(own.data, data, get_task(task))


def bound_splits(splits: Splits, dense: nn.Module) -> Splits:
    """Return data whose task is completed by what the dense model alone knows, see `Task.bound`.

    If the targets are that model's outputs, a copy gives them, because the model itself is pruned.
    """
    if splits.task.binding is None:
        return splits
    task = splits.task.bound(copied(dense) if splits.task.from_dense else dense)

    def bound(part: SampleDataset) -> SampleDataset:
        if not isinstance(part, TaskSamples):
            return part
        return replace(part, unpacking=replace(part.unpacking, unpack=task.unpack))

    train, validation, test = map(bound, (splits.train, splits.validation, splits.test))
    return replace(splits, train=train, validation=validation, test=test, task=task)


def job_model(job: JobSettings, own: Own, splits: Splits) -> nn.Module:
    """Return the dense model for the data, with the weights of the settings, or else random ones from the job's seed."""
    with seeded(job.seed):
        if own.model is None:
            settings = with_head(job.model, job.task)
            return build_model(settings, num_classes=len(splits.classes) or None, image_size=_image_size(splits))
        model = load_factory(own.model)
    if job.model.weights is not None:
        load_weights(model, Path(job.model.weights))
    return model


def dense_of(job: JobSettings, own: Own) -> nn.Module:
    """Return the dense model of a job whose data has no classes, with its weights."""
    with seeded(job.seed):
        found = build_model(with_head(job.model, job.task), num_classes=None) if own.model is None else None
    if found is None:
        found = load_factory(str(own.model))
        if job.model.weights is not None:
            load_weights(found, Path(job.model.weights))
    return found


def job_optimizer(own: Own) -> MakeOptimizer | None:
    """Return the optimizer class, or function that is called as one, of the user's factory; None without a factory."""
    if own.optimizer is None:
        return None
    make = run_factory(own.optimizer, UsageError)
    if not callable(make):
        text = "expected the factory to return an optimizer's class, or a function of parameter groups and `lr`"
        raise UsageError(f"--optimizer {own.optimizer}: {text}, got {type(make).__name__}")
    return make  # type: ignore[no-any-return]


def example_of(model: nn.Module, splits: Splits) -> tuple[Any, ...]:
    """Return the inputs of one training sample as a batch."""
    return inputs_as_example(model, next(iter(batches(splits.train, 1, shuffle_seed=None)))[0])


def build_of(job: JobSettings, splits: Splits) -> ModelSettings | None:
    """Return the settings that build a job's dense model, with the number of classes; None for the user's own."""
    if job.model.zoo == "own":
        return None
    arguments = model_arguments(job.model, len(splits.classes) or None, _image_size(splits))
    return replace(with_head(job.model, job.task), arguments=arguments, origin=None)


def _image_size(splits: Splits) -> int | None:
    """Return the height and width of the data's images; None if they are not square, or no images."""
    shape = splits.sample_shape
    return shape[1] if len(shape) == 3 and shape[1] == shape[2] else None


def chosen_batches(job: JobSettings, splits: Splits) -> Batches:
    """Return batches over the calibration samples of a job: a fixed random choice of training samples."""
    order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(job.seed))
    chosen = order[: job.calibration.images]
    return batches(splits.train, job.data.batch, shuffle_seed=None, workers=job.data.reading, indices=chosen)


def training_sections(job: JobSettings) -> dict[str, TrainSettings]:
    """Return the sections of a job that train a model, by name."""
    sections = {"baseline": job.baseline, "sparsify": job.sparsify, "finetune": job.finetune}
    return {name: settings for name, settings in sections.items() if settings is not None}


def require_sources(job: JobSettings, own: Own) -> None:
    """Raise if data or weights are missing, before anything is read or built."""
    pairs = (
        ("model.zoo", job.model.zoo, own.model, "--model", job.model.name),
        ("data.source", job.data.source, own.data, "--data", None),
    )
    for key, value, reference, option, named in pairs:
        if (value == "own") != (reference is not None):
            given = f"{option} was not given" if reference is None else f"{option} is {reference}"
            text = f"{key} is {value!r} and {given}: expected 'own' together with {option} file.py:factory"
            if reference is None and is_reference(named):
                text += f"; if you trust that code, add {option} {named}"
            raise UsageError(text)
    _require_source_of_task(job, own)
    asked = [settings.optimizer for settings in training_sections(job).values()]
    if own.optimizer is not None and "own" not in asked:
        expected = "expected finetune.optimizer, or that of another section, to be 'own'"
        raise UsageError(f"--optimizer is {own.optimizer}: {expected}, got {' and '.join(map(repr, asked))}")
    if job.model.zoo == "own" and job.model.arguments:
        raise UsageError("model.arguments: expected none, because the model's factory takes no arguments")
    data, weights = missing_data(job.data), missing_weights(job.model)
    # Weights that torchvision knows are downloaded, but not if the data is missing.
    if data is not None or (weights is not None and (is_weights_file(job.model) or job.model.folder is not None)):
        missing = [text for text in (data, weights) if text is not None]
        raise DataError("\n  ".join([f"{len(missing)} things are missing:", *missing]) if missing[1:] else missing[0])


def _require_source_of_task(job: JobSettings, own: Own) -> None:
    """Raise a `UsageError` if the data is of another task than the job."""
    if own.data is not None:
        return
    textual = get_task(job.task).texts is not None
    if job.data.source == "text" and not textual:
        raise UsageError(
            f"task is {job.task!r} and data.source is 'text': expected task {' or '.join(TEXTUAL)}, or one of your own "
            "with `texts`; or data.source 'own' together with --data file.py:factory"
        )
    if textual and job.data.source in ("text", "huggingface"):
        return
    wanted = "detection" if job.data.source in BOXED else "image_classification"
    if job.data.targets and wanted != "detection":
        raise UsageError(f"data.targets: source {job.data.source!r} has no boxes; expected one of {', '.join(BOXED)}")
    if job.task == wanted:
        return
    holds = "images with boxes" if wanted == "detection" else "images with a label each"
    others = f"one of {', '.join(BOXED)}, or 'own'" if job.task == "detection" else "'own'"
    others = "'text' or 'huggingface', or 'own'" if textual else others
    raise UsageError(
        f"task is {job.task!r} and data.source is {job.data.source!r}, which holds {holds}: expected data.source to be "
        f"{others} together with --data file.py:factory; or task {wanted!r}"
    )


def require_optimizer(job: JobSettings, own: Own) -> None:
    """Raise if a section asks for the user's own optimizer, and none is given."""
    for name, settings in training_sections(job).items():
        if settings.optimizer == "own" and own.optimizer is None:
            raise UsageError(
                f"{name}.optimizer is 'own': expected --optimizer file.py:factory as well, which was not given"
            )


def code_of_job(job: JobSettings) -> list[tuple[str, Registry[Any]]]:
    """Return each `file.py:object` that a job has in place of a registered name, with the registry."""
    return [(name, registry) for _, name, registry in registered_names(JobSettings, job) if is_reference(name)]


def renew_code(job: JobSettings) -> None:
    """Read the files again in which a job names code of the user's own."""
    for name, registry in code_of_job(job):
        if not isinstance(name, ForbiddenReference):
            registry.reload(name)
    job.prune.budget.require_sound()


def own_source(reference: str | None) -> str | None:
    """Return a hash of the file that a reference names, or the reference if it names an installed module."""
    path = Path((reference or "").rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else reference


def own_structure(model: nn.Module, factory: str) -> list[str]:
    """Return the structure of the user's own model: its modules, and hashes of the files with its factory and classes.

    The modules alone do not tell what a `forward` computes.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    files.add(factory.rpartition(":")[0])
    paths = [Path(file) for file in files if file is not None and Path(file).is_file()]
    return [repr(model), *sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)]
