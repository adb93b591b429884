"""Models that commands work on: a job's dense model, a model folder, a zoo's model, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from prunekit.backends.files.exported_model import is_exported, open_exported
from prunekit.backends.session import Inputs, inputs_like, inputs_of
from prunekit.compaction.model_folder import folder_interface, load, read_manifest
from prunekit.data.preprocessed_images import is_labeled_images, labeled_images
from prunekit.data.splits import Splits
from prunekit.data.user_data import load_own
from prunekit.errors import ArtifactError, ModelError, UsageError, nearest, reason_of, reraise_shortage
from prunekit.jobs.run.dense_model import prepare, train_baseline
from prunekit.jobs.run.job_inputs import (
    RECIPE_ONLY,
    Own,
    bound_splits,
    build_of,
    example_of,
    job_model,
    job_splits,
    require_sources,
)
from prunekit.models.detectors import made_for
from prunekit.models.interface import ModelInterface, TensorSpec
from prunekit.models.preprocessing import Preprocessing
from prunekit.models.state_dicts import load_weights
from prunekit.models.zoo import (
    ZOOS,
    as_build,
    build_model,
    has_weights,
    image_shape,
    is_detector,
    load_factory,
    load_with_example,
    published,
    zoo_names,
)
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import get_task
from prunekit.utils.context import seeded, training_mode
from prunekit.utils.inputs import MASK, InputSpec, call, described, zeros_of
from prunekit.utils.progress import Log
from prunekit.utils.tensors import gather

MANIFEST = "prunekit.json"


@dataclass(frozen=True)
class InputModel:
    """A model that is ready to run.

    Attributes:
        model: on the CPU.
        name: for tables.
        sample_shape: shape of one input without the batch, such as (3, 224, 224).
        splits: the data of the job, if it came from one.
        trained: whether weights were loaded; the accuracy of random ones means nothing.
        inputs: an example, samples first; None for models of one image.
        interface: how it is fed, if its folder, its file or its zoo says so.
        build: how the dense model is built, as model folders have it: name, zoo (`own` for `file.py:factory`) and
            arguments; None if its folder says so, or nobody knows.
    """

    model: nn.Module
    name: str
    sample_shape: tuple[int, ...]
    splits: Splits | None = None
    trained: bool = True
    inputs: tuple[Any, ...] | None = None
    interface: ModelInterface | None = None
    build: Mapping[str, Any] | None = None

    @property
    def knows_inputs(self) -> bool:
        """Whether shapes of its inputs are known: an exported file may take some of any size."""
        return self.inputs is not None or bool(self.sample_shape)

    def example_inputs(self) -> tuple[Any, ...]:
        """Return the arguments of one forward pass: the inputs, or zeros of shape (1, *sample_shape)."""
        return (torch.zeros(1, *self.sample_shape),) if self.inputs is None else self.inputs

    @property
    def timing_inputs(self) -> Inputs:
        """Inputs to time it on: random images, or a sample of other data."""
        if self.inputs is None:
            return inputs_of(self.sample_shape)
        return inputs_like(self.inputs, drawn=self.splits is None)


def resolve(
    target: str | Path | JobSettings | ModelSettings | None,
    *,
    factory: str | None = None,
    weights: str | None = None,
    input_shape: tuple[int, ...] | None = None,
    seed: int = 0,
    data: str | None = None,
    beside: Sequence[InputModel] = (),
    allow_code: bool = False,
) -> InputModel:
    """Build the model that a command line names.

    Args:
        target: a job (its dense model), a model folder, an exported file, the name of a model in torchvision or of a
            CIFAR ResNet, or settings with the zoo that a name is from; None: what `factory` builds.
        factory: `file.py:factory`, the user's own code, which is run. For a job whose model is the user's own it builds
            that; for a model folder it builds the dense model, if that is not from a zoo.
        input_shape: shape of one input with its batch, such as (1, 3, 224, 224); required if nothing else tells it.
        beside: models that it is compared with; the first of one image tells the shape of what `factory` builds, if
            nothing else does.
    """
    if target is None and factory is None:
        raise UsageError(
            "expected a model: a recipe, a model folder, a torchvision or CIFAR name, or --model file.py:factory"
        )
    shape = None if input_shape is None else _sample_shape(input_shape)
    with seeded(seed):
        if isinstance(target, JobSettings):
            _forbid_weights(weights, "a recipe", "set model.weights=... in it")
            return _from_job(target, Own(factory, data), shape)
        if target is None:
            return _from_factory(str(factory), weights, shape, beside)
        if isinstance(target, ModelSettings):
            return _from_zoo(replace(target, weights=weights), shape)
        if is_exported(Path(target)):
            _forbid_weights(weights, "an exported file", "it holds its own")
            return exported_target(Path(target), shape, allow_code=allow_code)
        if Path(target).exists():
            _forbid_weights(weights, "a model folder", "it holds its own")
            return _from_folder(Path(target), factory, shape)
        return _from_zoo(ModelSettings(str(target), _zoo_of(str(target)), weights=weights), shape)


def exported_target(path: Path, shape: tuple[int, ...] | None = None, *, allow_code: bool = False) -> InputModel:
    """Return the model in an exported file.

    Args:
        shape: of one input without the batch, for a file of one input with axes of any size.
    """
    model = open_exported(path, allow_code=allow_code)
    specs = model.interface.inputs
    alone = len(specs) == 1 and specs[0].dtype.startswith("float")
    sizes = shape or next((_sizes(spec) for spec in specs if _sizes(spec)), ()) or ()
    inputs = None if alone else _example_by(specs)
    return InputModel(model, str(path), sizes, inputs=inputs, interface=model.interface)


def trained_model(job: JobSettings, *, log: Log, progress: bool = False, own: Own = RECIPE_ONLY) -> InputModel:
    """Return a job's dense model with its weights: as given, from the cache, or trained now."""
    prepared = prepare(job, own)
    model = train_baseline(prepared, log=log, progress=progress).model
    splits = prepared.splits
    inputs, known = inputs_of_task(model, splits), interface_of_splits(splits)
    build = _build(job, splits, own)
    return InputModel(model, job.name, splits.sample_shape, splits, inputs=inputs, interface=known, build=build)


def interface_of_splits(splits: Splits) -> ModelInterface:
    """Return what the data of a job says on how its model is fed; inputs and outputs are not among it."""
    return ModelInterface((), (), splits.task.name, splits.classes, splits.preprocessing)


def splits_of(target: InputModel, data: DataSettings | None, own: Own, purpose: str, task: str | None = None) -> Splits:
    """Return the data of a model: that of its job, of the settings, or the user's own, fed as the model says."""
    if target.splits is not None:
        return target.splits
    known = target.interface
    task = task or (known.task if known else None) or IMAGE_CLASSIFICATION.name
    if own.data is not None and is_labeled_images(own.data):
        if task != IMAGE_CLASSIFICATION.name:
            raise UsageError(
                f"{own.data}: images with a class each are for the task {IMAGE_CLASSIFICATION.name!r}, and "
                f"{target.name} is for {task!r}: give its data as --data file.py:factory"
            )
        return labeled_images(Path(own.data), preprocessing_of(target), known.classes if known else ())
    if data is None and own.data is not None:
        feed = known.preprocessing if known else None
        return load_own(own.data, DataSettings("own"), get_task(task), feed)
    if data is None:
        raise UsageError(
            f"{target.name}: expected images to {purpose}; name the recipe that has them: --recipe PATH, or give your "
            "own: --data with a folder that has one of images for each class, an .npz, or file.py:factory"
        )
    return job_splits(data, own, task)


def preprocessing_of(target: InputModel) -> Preprocessing:
    """Return the way from an image to a model's input."""
    found = None if target.interface is None else target.interface.preprocessing
    if found is None:
        raise UsageError(
            f"{target.name}: it does not say how images become its input: save it again with "
            "prunekit.save(..., preprocessing=prunekit.Preprocessing(...)), or give inputs that are ready"
        )
    return found


def inputs_of_task(model: nn.Module, splits: Splits) -> tuple[Any, ...] | None:
    """Return the inputs of one sample; None for images, whose shape is enough."""
    return None if splits.task.labeled_images else example_of(model, splits)


def probe(target: InputModel) -> Any:
    """Run a model once on its example, in eval mode, and return its output."""
    try:
        with training_mode(target.model, False), torch.no_grad():
            return call(target.model, target.example_inputs())
    except ArtifactError:  # of an exported file, which is loaded when it is first run
        raise
    except Exception as error:  # a model's own code may raise anything
        reraise_shortage(error)
        shape = "x".join(map(str, (1, *target.sample_shape))) if target.inputs is None else described(target.inputs)
        told = target.splits is not None or target.inputs is not None
        cure = "" if told else "; --input-shape gives another, and a recipe has models of other inputs than one image"
        raise ModelError(
            f"{target.name}: the model does not run on an input of {shape}: {reason_of(error)}{cure}"
        ) from error


def _from_job(job: JobSettings, own: Own, shape: tuple[int, ...] | None) -> InputModel:
    require_sources(job, own)
    splits = job_splits(job.known_data, own, job.task)
    model = job_model(job, own, splits)
    splits = bound_splits(splits, model)
    inputs = None if shape else inputs_of_task(model, splits)
    trained, known = has_weights(job.model), interface_of_splits(splits)
    build = _build(job, splits, own)
    return InputModel(model, job.name, shape or splits.sample_shape, splits, trained, inputs, known, build)


def _build(job: JobSettings, splits: Splits, own: Own) -> dict[str, Any] | None:
    """Return how a job's dense model is built."""
    settings = build_of(job, splits)
    if settings is None:
        return None if own.model is None else _own(own.model)
    return as_build(settings)


def _from_folder(folder: Path, factory: str | None, shape: tuple[int, ...] | None) -> InputModel:
    require_model_folder(folder)
    manifest = read_manifest(folder)
    dense = None
    if not manifest.get("build"):
        if factory is None:
            raise ModelError(
                f"{folder}: this model ({manifest.get('class')}) was built by its owner's code; give that as "
                f"--model file.py:factory, or in Python load it first: prunekit.load({str(folder)!r}, model=...)"
            )
        dense = load_factory(factory)
    found = folder_model(folder, dense, shape)
    return found if dense is None else replace(found, build=_own(str(factory)))


def folder_model(
    folder: Path, dense: nn.Module | Callable[[], nn.Module] | None = None, shape: tuple[int, ...] | None = None
) -> InputModel:
    """Return the model of a folder.

    Args:
        shape: of one input without the batch; None: what the manifest says.
    """
    require_model_folder(folder)
    manifest = read_manifest(folder)
    inputs = None if shape else _noted_inputs(folder, manifest)
    model, interface = load(folder, dense), folder_interface(folder)
    return InputModel(model, str(folder), shape or _noted_shape(folder, manifest), inputs=inputs, interface=interface)


def require_model_folder(folder: Path) -> None:
    """Raise a `ModelError` unless a folder is a model folder; names the one inside it that may be meant."""
    if not (folder / MANIFEST).is_file():
        inside = folder / "model"
        meant = f"; did you mean {inside}?" if (inside / MANIFEST).is_file() else ""
        raise ModelError(f"{folder}: expected a recipe (.yaml) or a model folder, which holds a {MANIFEST}{meant}")


def _noted_inputs(folder: Path, manifest: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return zeros like the inputs in a manifest; None for a model that takes one float32 tensor."""
    example = manifest["example"]
    shapes, dtypes = example.get("shapes"), example.get("dtypes")
    if dtypes is None:
        return None
    try:
        names = example.get("names", [None] * len(shapes))
        return zeros_of([InputSpec(*one) for one in zip(shapes, dtypes, names, strict=True)])
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        reraise_shortage(error)
        raise ArtifactError(
            f"{folder / MANIFEST}: example: expected shapes such as [1, 16] and as many dtypes such as int64, got "
            f"{shapes!r} and {dtypes!r}; the manifest is damaged"
        ) from error


def _noted_shape(folder: Path, manifest: dict[str, Any]) -> tuple[int, ...]:
    match manifest["example"].get("shapes"):
        case [[int(), *sizes], *_] if sizes and all(type(size) is int and size > 0 for size in sizes):
            return tuple(sizes)
        case shapes:
            raise ArtifactError(
                f"{folder / MANIFEST}: example.shapes: expected a list of shapes such as [1, 3, 224, 224], "
                f"got {shapes!r}; the manifest is damaged"
            )


def _from_zoo(settings: ModelSettings, shape: tuple[int, ...] | None) -> InputModel:
    model = build_model(settings, num_classes=None)
    shape = shape or _usual_shape(settings, model)
    preprocessing, classes = published(settings, model)
    task = "detection" if is_detector(settings) else IMAGE_CLASSIFICATION.name
    known = ModelInterface((), (), task, classes, preprocessing)
    return InputModel(
        model, settings.name, shape, trained=settings.weights is not None, interface=known, build=as_build(settings)
    )


def _zoo_of(name: str) -> Literal["torchvision", "cifar"]:
    zoo = next((zoo for zoo in ZOOS if name in zoo_names(zoo)), None)
    if zoo is None:
        raise ModelError(
            f"{name!r}: expected a recipe, a model folder, or the name of a torchvision or CIFAR model; {_hint(name)}"
        )
    return zoo


def _hint(name: str) -> str:
    if ".py" in name:
        return "give your own model as --model file.py:factory"
    names = nearest(name, [known for zoo in ZOOS for known in zoo_names(zoo)])
    # If no name is near, it was a path: a list of model names would not help.
    return names if names.startswith("did you mean") else "there is no such file, folder or model"


def _from_factory(
    factory: str, weights: str | None, shape: tuple[int, ...] | None, beside: Sequence[InputModel]
) -> InputModel:
    model, example = load_with_example(factory)
    if shape is None and example is None:
        shape = next((one.sample_shape for one in beside if one.sample_shape and one.inputs is None), None)
    if shape is None and example is None:
        raise UsageError(
            "--model: expected --input-shape with it, such as --input-shape 1x3x224x224, or a factory that returns "
            "(model, example)"
        )
    if weights is not None:
        load_weights(model, Path(weights))
    # It counts as trained: a factory may load weights itself.
    name = factory.rpartition(":")[2]
    if shape is not None:
        return InputModel(model, name, shape, build=_own(factory))
    assert example is not None
    first = next((tensor for tensor in gather(example) if tensor.dim()), None)
    if first is None:
        raise ModelError(f"{factory}: expected an example with a tensor of samples, got {described(example)}")
    return InputModel(model, name, tuple(first.shape[1:]), inputs=example, build=_own(factory))


def _own(factory: str) -> dict[str, Any]:
    return {"name": factory, "zoo": "own", "arguments": {}}


def _sample_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2 or min(shape) < 1:
        got = "x".join(map(str, shape))
        raise UsageError(f"input shape: expected a batch and at least one more size, such as 1x3x224x224, got {got}")
    return tuple(shape[1:])


def _usual_shape(settings: ModelSettings, model: nn.Module) -> tuple[int, ...]:
    """Return the shape of the images that a model, or torchvision's weights of it, was made for."""
    if settings.zoo == "cifar":
        return (3, 32, 32)
    if (side := made_for(model)) is not None:
        return (3, side, side)
    if settings.zoo != "torchvision":
        return image_shape(model) or (3, 224, 224)
    from torchvision.models import get_model_weights

    presets = [weights.transforms for weights in get_model_weights(settings.name)]
    size = presets[0].keywords.get("crop_size", 224) if presets else 224
    return (3, size, size)


def _forbid_weights(weights: str | None, kind: str, instead: str) -> None:
    if weights is not None:
        raise UsageError(f"--weights goes with a zoo's name or --model, and this is {kind}: {instead}")


def _sizes(spec: TensorSpec) -> tuple[int, ...] | None:
    """Return the shape of one sample; None if an axis is of any size."""
    sizes = tuple(size for size in spec.shape[1:] if isinstance(size, int))
    return sizes if len(sizes) == len(spec.shape) - 1 else None


def _example_by(specs: Sequence[TensorSpec]) -> tuple[Any, ...] | None:
    """Return an example of zeros by name, of ones for the mask of padding; None if some shape has an unknown size."""
    shapes = [_sizes(spec) for spec in specs]
    if any(shape is None for shape in shapes):
        return None
    named = zeros_of(
        [InputSpec((1, *(shape or ())), spec.dtype, spec.name) for spec, shape in zip(specs, shapes, strict=True)]
    )
    for tensor in (value for name, value in named[-1].items() if name == MASK):
        tensor.fill_(1)  # no position is padding
    return named
