"""The interface of a model: its inputs and outputs by name, logits among them, its classes and preprocessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from prunekit.errors import ArtifactError, ModelError, UsageError
from prunekit.hooks.model_copy import with_tensors
from prunekit.models.preprocessing import AttachedPreprocessing, Preprocessing
from prunekit.reading.text_files import as_record
from prunekit.utils.context import device_of, training_mode
from prunekit.utils.inputs import (
    InputSpec,
    arguments_by_name,
    as_example,
    call,
    is_batched,
    sample_count,
    to_device,
    zeros_of,
)
from prunekit.utils.tensors import gather
from prunekit.utils.user_code import from_file

BATCH = "batch"
"""Name of the axis of samples."""
ENTRY = "interface"
"""Key of the interface in the manifest of a model folder."""
ATTACHED = "prunekit_interface"
"""Attribute of a loaded model that holds its interface."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model takes or returns."""

    name: str  # of the argument of `forward`, or of the entry of the output
    dtype: str  # such as `float32`
    # a size of each axis, or a name for an axis of any size, such as `batch`
    shape: tuple[Annotated[int, Ge(0)] | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} ({', '.join(map(str, self.shape))})"


@dataclass(frozen=True)
class ModelInterface:
    """The way a model is fed, and what it returns; model folders and exported files carry it."""

    inputs: tuple[TensorSpec, ...]  # in the order of the example
    outputs: tuple[TensorSpec, ...]  # in the order in which the output nests them
    task: str | None = None  # name of the task, as in a recipe; None if unknown
    classes: tuple[str, ...] = ()  # name of each label; empty if there are none
    preprocessing: Preprocessing | None = None  # from an image to the input; None for other inputs, or if unknown

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "inputs": [asdict(one) | {"shape": list(one.shape)} for one in self.inputs],
            "outputs": [asdict(one) | {"shape": list(one.shape)} for one in self.outputs],
            "task": self.task,
            "classes": list(self.classes),
            "preprocessing": None if self.preprocessing is None else self.preprocessing.as_dict(),
        }

    @classmethod
    def from_dict(cls, given: Any, where: str) -> ModelInterface:
        """Return the interface of plain data; an `ArtifactError` says `where` it is damaged."""
        prepared = given.get("preprocessing") if isinstance(given, dict) else None
        found = as_record(cls, given if prepared is None else {**given, "preprocessing": None}, where)
        if found.task is not None:  # as it was given, because the text may know already which file it is from
            advice = "name it yourself: --task NAME (from Python: task=NAME)"
            found = replace(found, task=from_file(given["task"], f"{where}: task", advice))
        return found if prepared is None else replace(found, preprocessing=Preprocessing.from_dict(prepared, where))


def attach(model: nn.Module, interface: ModelInterface) -> None:
    """Set the interface on a model, as plain data, and its preprocessing as the attribute `preprocessing`.

    Neither is a tensor or a module: the state dict stays as it is. A model that has an attribute of that name keeps it.
    """
    vars(model)[ATTACHED] = interface.as_dict()
    own = interface.preprocessing
    if own is not None and isinstance(getattr(model, "preprocessing", own), Preprocessing):
        vars(model)["preprocessing"] = AttachedPreprocessing(**vars(own))


def attached(model: nn.Module) -> ModelInterface | None:
    """Return the interface that was set on a model; None if there is none."""
    given = vars(model).get(ATTACHED)
    return None if given is None else ModelInterface.from_dict(given, f"{type(model).__name__}.{ATTACHED}")


def interface_of(
    model: nn.Module,
    example: tuple[Any, ...],
    *,
    task: str | None = None,
    classes: Sequence[str] = (),
    preprocessing: Preprocessing | None = None,
) -> ModelInterface:
    """Return the interface of a model, which is run once, in eval mode.

    The first axis of an input or output is the batch if it has as many entries as there are samples.
    """
    # a copy, with the same weights: the first call of a model may add to it, such as hooks that no pickle can hold
    twin = with_tensors(model, {name: parameter.detach() for name, parameter in model.named_parameters()})
    with training_mode(twin, False), torch.no_grad():
        output = call(twin, example)
    batch, taken = sample_count(example) if is_batched(example) else None, set[str]()
    inputs = input_specs_of(model, example, taken)
    outputs = [_spec(name, tensor, batch) for name, tensor in named_tensors_of(output, "output")]
    return ModelInterface(inputs, _distinct(outputs, taken, "output"), task, tuple(classes), preprocessing)


def saved_interface(
    model: nn.Module,
    specs: Sequence[InputSpec],
    *,
    example: Any,
    preprocessing: Preprocessing | None,
    classes: Sequence[str],
    task: str | None,
) -> ModelInterface:
    """Return the interface of a model that is saved; what is not given is as the model was loaded with.

    The model is run once; if it does not run, the interface has its inputs alone.
    """
    if not isinstance(preprocessing, Preprocessing | None):
        raise UsageError(f"preprocessing: expected a prunekit.Preprocessing, got {type(preprocessing).__name__}")
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise UsageError(f"classes: expected the name of each label, such as ['cat', 'dog'], got {classes!r:.60}")
    if not isinstance(task, str | None):
        raise UsageError(f"task: expected its name, such as 'image_classification', got {type(task).__name__}")
    before = attached(model)
    if before is not None:
        preprocessing, classes = preprocessing or before.preprocessing, classes or before.classes
        task = task or before.task
    names = tuple(map(str, classes))
    inputs = zeros_of(specs) if example is None else as_example(model, example)
    inputs = to_device(inputs, device_of(model))
    try:
        return interface_of(model, inputs, task=task, classes=names, preprocessing=preprocessing)
    except Exception:  # a model's own code may raise anything, of zeros above all
        named = arguments_by_name(model, inputs) if len(inputs) == len(specs) else {}
        called = [str(name) if isinstance(name, str) else f"input_{name}" for name in named]
        found = _specs_of(specs, called if len(called) == len(specs) else [])
        return ModelInterface(found, (), task, names, preprocessing)


def read_interface(manifest: Mapping[str, Any], where: str) -> ModelInterface:
    """Return the interface in a manifest; that of an older folder has its inputs, and classes if there are any."""
    if ENTRY in manifest:
        return ModelInterface.from_dict(manifest[ENTRY], f"{where}: {ENTRY}")
    example = manifest["example"]
    shapes = example.get("shapes", [])
    names, dtypes = example.get("names", [None] * len(shapes)), example.get("dtypes", ["float32"] * len(shapes))
    try:
        specs = [
            InputSpec(tuple(shape), str(dtype), name) for shape, dtype, name in zip(shapes, dtypes, names, strict=True)
        ]
        return ModelInterface(_specs_of(specs, []), (), None, tuple(map(str, manifest.get("classes") or ())))
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{where}: example: expected shapes, dtypes and names; it is damaged: {error}") from error


def _specs_of(specs: Sequence[InputSpec], names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Return specifications whose first axis is the batch."""
    several = len(specs) > 1
    called = names or [spec.name or (f"input_{index}" if several else "input") for index, spec in enumerate(specs)]
    return tuple(
        TensorSpec(name, spec.dtype, (BATCH, *spec.shape[1:]) if spec.shape else ())
        for name, spec in zip(called, specs, strict=True)
    )


def with_batch(interface: ModelInterface, batch: int) -> ModelInterface:
    """Return an interface with this batch size alone."""
    inputs, outputs = (
        tuple(replace(one, shape=tuple(batch if axis == BATCH else axis for axis in one.shape)) for one in specs)
        for specs in (interface.inputs, interface.outputs)
    )
    return replace(interface, inputs=inputs, outputs=outputs)


def input_specs_of(model: nn.Module, example: tuple[Any, ...], taken: set[str] | None = None) -> tuple[TensorSpec, ...]:
    """Return the inputs of a model by the names of its arguments, without running it."""
    batch = sample_count(example) if is_batched(example) else None
    inputs = [
        _spec(name, tensor, batch)
        for argument, value in arguments_by_name(model, example).items()
        for name, tensor in named_tensors_of(value, _text(argument, "input"))
    ]
    return _distinct(inputs, set() if taken is None else taken, "input")


def _distinct(specs: Sequence[TensorSpec], taken: set[str], kind: str) -> tuple[TensorSpec, ...]:
    """Return tensors by names that no other has: graphs of exported files have one name for each tensor."""
    found = []
    for spec in specs:
        name, count = spec.name, 1
        while name in taken:
            name, count = f"{kind}_{spec.name}" + (f"_{count}" if count > 1 else ""), count + 1
        taken.add(name)
        found.append(replace(spec, name=name))
    return tuple(found)


def named_tensors_of(value: Any, name: str) -> list[tuple[str, Tensor]]:
    """Return the tensors in a nesting, in the order of `gather`, by names of what holds them.

    A tensor alone has the given name; entries of a mapping their keys, those of a sequence the name and a number.
    """
    if isinstance(value, Tensor):
        return [(name, value)]
    tensors = gather(value)
    names = _leaf_names(value, name)
    if len(names) != len(tensors) or len(set(names)) != len(names):
        names = [name if len(tensors) == 1 else f"{name}_{index}" for index in range(len(tensors))]
    return list(zip(names, tensors, strict=True))


def _leaf_names(value: Any, name: str) -> list[str]:
    if isinstance(value, Tensor):
        return [name]
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _leaf_names(item, _text(key, name))]
    if isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None)
        keys = fields or [f"{name}_{index}" for index in range(len(value))]
        several = len(gather(value)) > 1
        return [
            found
            for key, item in zip(keys, value, strict=True)
            for found in _leaf_names(item, key if fields or several else name)
        ]
    return []


def _text(key: Any, name: str) -> str:
    return key if isinstance(key, str) else f"{name}_{key}"


def _spec(name: str, tensor: Tensor, batch: int | None) -> TensorSpec:
    shape: list[int | str] = [int(size) for size in tensor.shape]
    if shape and shape[0] == batch:
        shape[0] = BATCH
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(shape))


def logits(output: Any) -> Tensor:
    """Return the class logits, (N, classes), of a model's output: a tensor, or an object with `.logits`."""
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise ModelError(
            f"expected a model that returns class logits as a tensor, or an output with .logits; got "
            f"{type(output).__name__}; wrap the model so that it returns its logits"
        )
    return found


def auxiliary(output: Any) -> tuple[tuple[float, Tensor], ...]:
    """Return the auxiliary logits that a training output carries, each with the weight of its loss.

    The weights are 0.3 for GoogLeNet (Szegedy et al. 2015, section 5) and 0.4 for Inception v3, as in torchvision's
    training reference.
    """
    if isinstance(output, Tensor):
        return ()
    # not above: torchvision imports torch's compiler, longer than all that loads or times a model
    from torchvision.models.googlenet import GoogLeNetOutputs
    from torchvision.models.inception import InceptionOutputs

    heads: tuple[tuple[float, Tensor | None], ...] = ()
    if isinstance(output, GoogLeNetOutputs):
        heads = ((0.3, output.aux_logits1), (0.3, output.aux_logits2))
    elif isinstance(output, InceptionOutputs):
        heads = ((0.4, output.aux_logits),)
    return tuple((weight, head) for weight, head in heads if head is not None)
