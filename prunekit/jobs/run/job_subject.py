"""Subjects of jobs: the dense model of a recipe with its data, checked before anything is computed.

The user's own models, data and optimizers are named on the command line alone. What is registered by name (criteria,
tasks, ...) can be `file.py:object` in a recipe, whose code runs if that is allowed; see `prunekit.recipe.loading.load`.
"""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.compaction.model_folder import load, save
from prunekit.criteria.criterion import CRITERIA
from prunekit.data.datasets import SampleDataset
from prunekit.data.loader import Batches, batches
from prunekit.data.splits import Splits
from prunekit.distributed.process_group import in_turn, require_equal, share_tensors, wait_for_all
from prunekit.errors import UsageError
from prunekit.hooks.model_copy import named_tensors
from prunekit.hooks.wrappers import require_unfrozen
from prunekit.jobs.run.command_subject import (
    RECIPE_ONLY,
    Own,
    Subject,
    bound_splits,
    example_of,
    inputs_of_task,
    job_splits,
    own_source,
    own_structure,
)
from prunekit.jobs.run.early_checks import require_files, require_own
from prunekit.masks.thresholds import chosen_paths
from prunekit.measure.accuracy import Scores, evaluate
from prunekit.models import zoo
from prunekit.models.interface import ModelInterface
from prunekit.models.state_dicts import load_weights
from prunekit.planning.plan import Plan
from prunekit.pruning.sample_statistics import joined_samples
from prunekit.settings.inputs import BOXED, TEXTUAL, ModelSettings
from prunekit.settings.job import JobSettings, unlabeled_contradictions
from prunekit.settings.train import RANDOM_RATES, DistillSettings, TrainSettings, finetune_contradictions
from prunekit.tasks.task import Task, get_task
from prunekit.training.callbacks.distillation import feature_paths
from prunekit.training.callbacks.pruning_schedule import steps_per_epoch
from prunekit.training.callbacks.selection import needs_plan, task_loss
from prunekit.training.compatibility import check_fits
from prunekit.training.optimizers import MakeOptimizer, check_clamps
from prunekit.training.rate_search import require_searchable
from prunekit.utils.context import resolve_device, seeded
from prunekit.utils.inputs import to_device
from prunekit.utils.registry import Registry, registered_names
from prunekit.utils.user_code import ForbiddenReference, is_reference, run_factory


@dataclass(frozen=True, eq=False, kw_only=True)
class JobSubject(Subject):
    """The subject of a job: the dense model as its constructor, weights file or factory gives it, with the data."""

    splits: Splits  # the data of the job, with its task
    job: JobSettings  # the settings
    device: torch.device  # where to train
    structure: Any  # of the dense model as plain data, independent of its weights
    own_optimizer: MakeOptimizer | None = None  # makes the user's own optimizer, if one is given
    # optimizer_source, task_source: hashes of the code of the user's own optimizer and task
    optimizer_source: str | None = None
    task_source: str | None = None

    def optimizer_for(self, settings: TrainSettings) -> MakeOptimizer | None:
        """Return the factory of the user's own optimizer if a section asks for it, else None."""
        return self.own_optimizer if settings.optimizer == "own" else None

    @cached_property
    def example_inputs(self) -> tuple[Any, ...]:  # found once
        """The inputs of one training sample as a batch."""
        return example_of(self.model, self.splits) if self.inputs is None else self.inputs

    def calibration_batches(self) -> Batches:
        """Return batches over a fixed random choice of training samples."""
        return chosen_batches(self.job, self.splits.train)

    def calibration_images(self) -> Any:
        """Return the inputs (N, ...) of `calibration_batches` on the device; a tuple if the model takes several."""
        count = self.job.calibration.images
        return to_device(joined_samples(self.model, self.calibration_batches(), count), self.device)

    def tested(self, model: nn.Module) -> Scores:
        """Return the scores of a model on the test samples, which nothing has seen before; it is on the CPU then."""
        data = self.job.data
        test = batches(self.splits.test, data.batch, shuffle_seed=None, workers=data.reading)
        found = evaluate(model, test, self.splits.task, self.device)
        model.cpu()
        return found

    def save_model(self, model: nn.Module, folder: Path, plan: Plan) -> None:
        """Save a compact model of the job in a folder."""
        splits = self.splits
        save(
            model,
            folder,
            plan,
            build=build_of(self.job, splits),
            preprocessing=splits.preprocessing,
            classes=splits.classes,
            task=splits.task.name,
            example=self.example_inputs,
            compress=self.job.compress,
        )

    def load_model(self, folder: Path, dense: nn.Module) -> nn.Module:
        """Load a compact model of the job from a folder; the dense one is needed if it is the user's own."""
        return load(folder, None if build_of(self.job, self.splits) else dense)


def job_subject(
    job: JobSettings, own: Own, shape: tuple[int, ...] | None = None, device: torch.device | None = None
) -> Subject:
    """Return a job's dense model before any training, with its data; `shape` replaces the shape of a sample.

    Where targets are the dense model's answers, it gives them on the device, or on the CPU.
    """
    require_sources(job, own)
    splits = job_splits(job.known_data, own, job.task)
    model = job_model(job, own, splits)
    names = () if job.data.labels else zoo.published(job.model, model)[1]
    splits = bound_splits(splits, model, device, names)
    settings, build = build_of(job, splits), None if own.model is None else own_build(own.model)
    return Subject(
        model,
        job.name,
        shape or splits.sample_shape,
        splits,
        trained=zoo.has_weights(job.model),
        inputs=None if shape else inputs_of_task(model, splits),
        interface=ModelInterface((), (), splits.task.name, splits.classes, splits.preprocessing),
        build=build if settings is None else zoo.as_build(settings),
    )


def own_build(factory: str) -> dict[str, Any]:
    """Return how a model of the user's own is built, as model folders have it."""
    return {"name": factory, "zoo": "own", "arguments": {}}


def prepare(job: JobSettings, own: Own = RECIPE_ONLY) -> JobSubject:
    """Read the data and build the dense model, and raise for whatever is wrong with either.

    Several processes do this in turn, so that each file is downloaded once; all end with the same data and model.
    """
    with in_turn():
        prepared = _prepared(job, own)
    require_equal(prepared.splits.fingerprint, "the images (their fingerprint)")
    share_model(prepared.model, "the dense model")
    return prepared


def _prepared(job: JobSettings, own: Own) -> JobSubject:
    device = resolve_device(job.device)
    require_sources(job, own)
    renew_code(job)
    if not zoo.has_weights(job.model) and job.baseline is None and own.model is None:
        raise UsageError(
            "model.weights is not given, and nothing says how to train the dense model: "
            "set model.weights to a name or file, or add `baseline: {epochs: ...}`"
        )
    found = job_subject(job, own, device=device)
    model, splits = found.model, found.splits
    assert splits is not None
    require_unfrozen(model)
    _require_targets(job, splits.task)
    check_fits(model, splits, torch.device("cpu"))
    if job.activations is not None:
        chosen_paths(model, job.activations)
    if problems := [f"{'.'.join(path)}: {text}" for path, text in finetune_contradictions(asdict(job))]:
        raise UsageError("; ".join(problems))
    for name, settings in training_sections(job).items():
        _check_training(name, settings, model, splits.task)
        if settings.lr == "auto" and name == "baseline" and job.model.weights is None:
            raise UsageError(f"baseline.lr: {RANDOM_RATES}")
        rewinds = name == "finetune" and job.prune.schedule is not None and job.prune.schedule.rewind_lr
        steps = settings.epochs * steps_per_epoch(settings, len(splits.train), job.data.batch)
        require_searchable(settings, splits, steps, rewinds=rewinds)
    build = build_of(job, splits)
    structure = own_structure(model, str(own.model)) if build is None else asdict(replace(build, weights=None))
    return JobSubject(
        **vars(found) | {"trained": True},  # once its weights are there, which whoever prepares it sees to
        job=job,
        device=device,
        structure=structure,
        own_optimizer=job_optimizer(own),
        optimizer_source=own_source(own.optimizer),
        task_source=own_source(job.task) if is_reference(job.task) else None,
    )


def _require_targets(job: JobSettings, task: Task) -> None:
    """Raise a `UsageError` if a job needs more than a task's targets give that are the dense model's outputs."""
    if not task.from_dense:
        return
    if job.model.weights is None and job.baseline is not None:
        raise UsageError(
            f"baseline: expected none, because the targets of task {task.name!r} are the dense model's own outputs; "
            "give trained weights, a folder for model.name, or a factory that loads them"
        )
    needs = CRITERIA.get(job.prune.criterion).needs
    if "gradients" in needs and "curvature" not in needs:
        raise UsageError(
            f"prune.criterion: expected one without gradients of the loss, which are zero or say nothing at the dense "
            f"model whose outputs are the targets of task {task.name!r}, got {job.prune.criterion!r}; take elimination"
        )
    for path, text in unlabeled_contradictions(asdict(job)):
        raise UsageError(f"{'.'.join(path)}: {text}")


def _check_training(name: str, settings: TrainSettings, model: nn.Module, task: Task) -> None:
    check_clamps(model, settings)
    task_loss(task, settings)
    if isinstance(settings.distill, DistillSettings):
        if name == "baseline":
            raise UsageError("baseline.distill: expected none, the dense model is the teacher; distill `finetune`")
        feature_paths(model, settings.distill)
        if task.heads is not None:
            task.heads(model, model)  # raises where no teacher's can be compared with them
    if needs_plan(settings) and name != "sparsify":
        raise UsageError(
            f"{name}.regularize.method: 'growing' shrinks channels before a plan removes them; use it in `sparsify`"
        )


def job_model(job: JobSettings, own: Own, splits: Splits | None = None) -> nn.Module:
    """Return the dense model for the data, with the weights of the settings, or random ones from the job's seed.

    Without data it has as many classes as its constructor gives it.
    """
    classes, side = (None, None) if splits is None else (len(splits.classes) or None, _image_size(splits))
    with seeded(job.seed):
        if own.model is None:
            return zoo.build_model(zoo.with_head(job.model, job.task), num_classes=classes, image_size=side)
        model = zoo.load_factory(own.model)
    if job.model.weights is not None:
        load_weights(model, Path(job.model.weights))
    return model


def job_optimizer(own: Own) -> MakeOptimizer | None:
    """Return the optimizer class, or function that is called as one, of the user's factory; None without a factory."""
    if own.optimizer is None:
        return None
    make = run_factory(own.optimizer, UsageError)
    if not callable(make):
        text = "expected the factory to return an optimizer's class, or a function of parameter groups and `lr`"
        raise UsageError(f"--optimizer {own.optimizer}: {text}, got {type(make).__name__}")
    return make  # type: ignore[no-any-return]


def build_of(job: JobSettings, splits: Splits) -> ModelSettings | None:
    """Return the settings that build a job's dense model, with the number of classes; None for the user's own."""
    if job.model.zoo == "own":
        return None
    arguments = zoo.model_arguments(job.model, len(splits.classes) or None, _image_size(splits))
    return replace(zoo.with_head(job.model, job.task), arguments=arguments, origin=None)


def _image_size(splits: Splits) -> int | None:
    """Return the height and width of the data's images; None if they are not square, or no images."""
    shape = splits.sample_shape
    return shape[1] if len(shape) == 3 and shape[1] == shape[2] else None


def chosen_batches(job: JobSettings, data: SampleDataset, *, in_order: bool = False) -> Batches:
    """Return batches over a fixed random choice of samples, as many as a job calibrates on, shuffled or in order."""
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(job.seed))[: job.calibration.images]
    chosen = chosen.sort().values if in_order else chosen
    return batches(data, job.data.batch, shuffle_seed=None, workers=job.data.reading, indices=chosen)


def training_sections(job: JobSettings) -> dict[str, TrainSettings]:
    """Return the sections of a job that train a model, by name."""
    sections = {"baseline": job.baseline, "sparsify": job.sparsify, "finetune": job.finetune}
    return {name: settings for name, settings in sections.items() if settings is not None}


def require_sources(job: JobSettings, own: Own) -> None:
    """Raise if data or weights are missing, before anything is read or built."""
    require_own(job, own.model, own.data)
    _require_source_of_task(job, own)
    asked = [settings.optimizer for settings in training_sections(job).values()]
    if own.optimizer is not None and "own" not in asked:
        expected = "expected finetune.optimizer, or that of another section, to be 'own'"
        raise UsageError(f"--optimizer is {own.optimizer}: {expected}, got {' and '.join(map(repr, asked))}")
    if job.model.zoo == "own" and job.model.arguments:
        raise UsageError("model.arguments: expected none, because the model's factory takes no arguments")
    require_files(job, zoo.missing_weights(job.model))


def _require_source_of_task(job: JobSettings, own: Own) -> None:
    """Raise a `UsageError` if the data is of another task than the job."""
    source, textual = job.data.source, get_task(job.task).texts is not None
    if own.data is not None or (textual and source in ("text", "huggingface")):
        return
    if job.data.targets and source not in (*BOXED, "text"):
        raise UsageError(f"data.targets: source {source!r} has no boxes; expected one of {', '.join(BOXED)}")
    holds, tasks = "images with a label each", repr("image_classification")
    if source in BOXED:
        holds, tasks = "images with boxes", repr("detection")
    elif source == "text":
        holds, tasks = "texts", f"{' or '.join(TEXTUAL)}, or one of your own with `texts`"
    if repr(job.task) == tasks:
        return
    others = f"one of {', '.join(BOXED)}, or 'own'" if job.task == "detection" else "'own'"
    others = "'text' or 'huggingface', or 'own'" if textual else others
    raise UsageError(
        f"task is {job.task!r} and data.source is {source!r}, which holds {holds}: expected data.source to be {others} "
        f"together with --data file.py:factory; or task {tasks}"
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


def share_model(model: nn.Module, what: str) -> None:
    """Give every process the main one's weights and buffers, once the main one has them."""
    wait_for_all()
    share_tensors(named_tensors(model), what)
