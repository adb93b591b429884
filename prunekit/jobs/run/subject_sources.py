"""Sources of subjects: a job's dense model, a model folder, an exported file, a zoo's model, or the user's own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.backends.files.exported_model import is_exported, open_exported
from prunekit.compaction.model_folder import folder_interface, load, read_manifest
from prunekit.errors import ArtifactError, ModelError, UsageError, reraise_shortage
from prunekit.jobs.run.command_subject import Own, Subject
from prunekit.jobs.run.early_checks import MANIFEST, require_model_folder
from prunekit.jobs.run.job_subject import job_subject, own_build
from prunekit.models import zoo
from prunekit.models.detectors import made_for
from prunekit.models.interface import ModelInterface, TensorSpec
from prunekit.models.names import zoo_of
from prunekit.models.state_dicts import load_weights
from prunekit.settings.inputs import ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.utils.context import seeded
from prunekit.utils.inputs import MASK, InputSpec, described, zeros_of
from prunekit.utils.tensors import gather


def resolve(
    target: str | Path | JobSettings | ModelSettings | None,
    *,
    factory: str | None = None,
    weights: str | None = None,
    input_shape: tuple[int, ...] | None = None,
    seed: int = 0,
    data: str | None = None,
    beside: Sequence[Subject] = (),
    allow_code: bool = False,
) -> Subject:
    """Build the model that a command line names.

    The target is a job (its dense model), a model folder, an exported file, the name of a model in torchvision or of a
    CIFAR ResNet, or settings with the zoo that a name is from; None: what `factory` builds, the user's own code, which
    is run. That also builds the model of a job, or the dense one of a folder, that is not from a zoo. The shape of one
    input has its batch; where nothing else tells it, the first model of one image `beside` this one does.
    """
    if target is None and factory is None:
        raise UsageError(
            "expected a model: a recipe, a model folder, a torchvision or CIFAR name, or --model file.py:factory"
        )
    shape = None if input_shape is None else _sample_shape(input_shape)
    with seeded(seed):
        if isinstance(target, JobSettings):
            _forbid_weights(weights, "a recipe", "set model.weights=... in it")
            return job_subject(target, Own(factory, data), shape)
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
        return _from_zoo(ModelSettings(str(target), zoo_of(str(target)), weights=weights), shape)


def exported_target(path: Path, shape: tuple[int, ...] | None = None, *, allow_code: bool = False) -> Subject:
    """Return the model in an exported file; `shape` is that of a sample, for a file of one input of any size."""
    model = open_exported(path, allow_code=allow_code)
    specs = model.interface.inputs
    alone = len(specs) == 1 and specs[0].dtype.startswith("float")
    sizes = shape or next((_sizes(spec) for spec in specs if _sizes(spec)), ()) or ()
    inputs = None if alone else _example_by(specs)
    return Subject(model, str(path), sizes, inputs=inputs, interface=model.interface)


def _from_folder(folder: Path, factory: str | None, shape: tuple[int, ...] | None) -> Subject:
    require_model_folder(folder)
    manifest = read_manifest(folder)
    dense = None
    if not manifest.get("build"):
        if factory is None:
            raise ModelError(
                f"{folder}: this model ({manifest.get('class')}) was built by its owner's code; give that as "
                f"--model file.py:factory, or in Python load it first: prunekit.load({str(folder)!r}, model=...)"
            )
        dense = zoo.load_factory(factory)
    found = folder_model(folder, dense, shape)
    return found if dense is None else replace(found, build=own_build(str(factory)))


def folder_model(
    folder: Path, dense: nn.Module | Callable[[], nn.Module] | None = None, shape: tuple[int, ...] | None = None
) -> Subject:
    """Return the model of a folder; `shape` is that of a sample, None: what the manifest says."""
    require_model_folder(folder)
    manifest = read_manifest(folder)
    inputs = None if shape else _noted_inputs(folder, manifest)
    model, interface = load(folder, dense), folder_interface(folder)
    return Subject(model, str(folder), shape or _noted_shape(folder, manifest), inputs=inputs, interface=interface)


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


def _from_zoo(settings: ModelSettings, shape: tuple[int, ...] | None) -> Subject:
    model = zoo.build_model(settings, num_classes=None)
    shape = shape or _usual_shape(settings, model)
    preprocessing, classes = zoo.published(settings, model)
    task = "detection" if zoo.is_detector(settings) else IMAGE_CLASSIFICATION.name
    known = ModelInterface((), (), task, classes, preprocessing)
    return Subject(
        model, settings.name, shape, trained=settings.weights is not None, interface=known, build=zoo.as_build(settings)
    )


def _from_factory(
    factory: str, weights: str | None, shape: tuple[int, ...] | None, beside: Sequence[Subject]
) -> Subject:
    model, example = zoo.load_with_example(factory)
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
        return Subject(model, name, shape, build=own_build(factory))
    assert example is not None
    first = next((tensor for tensor in gather(example) if tensor.dim()), None)
    if first is None:
        raise ModelError(f"{factory}: expected an example with a tensor of samples, got {described(example)}")
    return Subject(model, name, tuple(first.shape[1:]), inputs=example, build=own_build(factory))


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
        return zoo.image_shape(model) or (3, 224, 224)
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
