"""Inputs of models: one tensor, several, or tensors by the names of the arguments of `forward`.

An *example* is the one form of them that the package works with, a tuple of positional arguments with `Keywords` at its
end if there are any: `as_example` makes it of what a user gave, and `call` calls a model with it. Inputs of a batch are
any nesting of tensors with samples on their first axis, or of lists of samples (`prunekit.utils.tensors`): they
are counted, selected, concatenated and described here.
In sequences, padding is found by the `attention_mask`, and a decoder's by its own. Nested tensors in general are in
`prunekit.utils.tensors`.
"""

import inspect
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.errors import DataError, ModelError, PrunekitError, UsageError, reason_of, reraise_shortage
from prunekit.modes.public_call import callers_defaults, defaults_changed
from prunekit.utils.context import training_mode
from prunekit.utils.tensors import (
    IMAGE_AXES,
    count_samples,
    gather,
    leaves,
    map_samples,
    map_tensors,
    outside_inference,
    sample_parts,
)

MASK = "attention_mask"
"""The argument of `forward` that marks padding, in the convention of transformers."""
FLATTENED = (
    "patches of all images on one axis, as Qwen2-VL takes them, need an axis of samples, (N, patches, ...): prune a "
    "module around the model whose forward flattens them"
)
"""Advice about inputs whose first axis holds other things than samples."""
EXPECTED = "expected an example: a tensor, a tuple of positional arguments or a mapping of keyword arguments"


class Keywords(dict[str, Any]):
    """Arguments of `forward` that are given by name: the last entry of an example, after the positional ones.

    It is a class of its own to tell it from a dictionary that is itself a positional argument. A mapping that is given
    alone, not in a tuple, need not be one.

    Example:
        >>> import prunekit as pk, torch
        >>> class Scaled(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.wide, self.head = torch.nn.Linear(4, 16), torch.nn.Linear(16, 2)
        ...     def forward(self, x, *, scale):
        ...         return self.head(self.wide(x).relu() * scale)
        >>> x, scale = torch.randn(1, 4), torch.ones(1, 1)
        >>> pk.prune(Scaled(), (x, pk.Keywords(scale=scale)), macs=0.5).model.wide.out_features
        8
        >>> pk.prune(Scaled(), {"x": x, "scale": scale}, macs=0.5).model.wide.out_features
        8
    """


def as_example(model: nn.Module, given: Any) -> tuple[Any, ...]:
    """Return what a user gave as an example: a tuple, with `Keywords` at its end if there are any.

    A user gives a tensor, the only positional argument; a tuple of positional arguments; or a mapping of arguments by
    name. An example stays as it is. A list of images (C, H, W) becomes the first argument if `forward` takes a list, as
    torchvision's detectors do, and is stacked if not. Of a mapping that is a batch of images, as ultralytics' loaders
    make them, and not arguments by name, the images are taken.
    """
    if isinstance(given, Tensor):
        return (outside_inference(given),)
    if any(tensor.is_inference() for tensor in gather(given)):
        given = map_tensors(given, outside_inference)
    if isinstance(given, Mapping):
        images = images_in(model, given)
        return (_ordered_keywords(model, (), given),) if images is None else (images,)
    if are_images(model, given) and (isinstance(given, list) or takes_list(model, given[0])):
        return from_images(model, given)
    if not isinstance(given, tuple):
        advice = "give (value,) for one positional argument that is neither a tensor nor a tuple"
        if isinstance(given, np.ndarray):
            advice = "give torch.from_numpy(array)"
        elif isinstance(given, list):
            advice = "give tuple(list) for several positional arguments, or (list,) for one argument that is a list"
        raise UsageError(f"{EXPECTED}, got {described(given)}; {advice}")
    positional, named = split(given)
    if any(isinstance(value, np.ndarray) for value in leaves(given)) and not gather(given):
        raise UsageError(f"{EXPECTED}, got NumPy arrays {described(given)}; give torch.from_numpy(array)")
    if positional and isinstance(positional[0], tuple) and are_images(model, positional[0]):
        positional = tuple([*value] if isinstance(value, tuple) else value for value in positional)  # as zip gives them
    return (*positional, _ordered_keywords(model, positional, named)) if named else positional


def as_examples(model: nn.Module, given: Any) -> Iterator[tuple[Any, ...]]:
    """Yield one example, or each of a list or another iterable of several, in the form of `as_example`."""
    single = isinstance(given, (Tensor, tuple, Mapping, np.ndarray)) or not isinstance(given, Iterable)
    single = single or (isinstance(given, list) and are_images(model, given))
    return (as_example(model, one) for one in ([given] if single else given))


def _ordered_keywords(model: nn.Module, positional: tuple[Any, ...], given: Mapping[Any, Any]) -> Keywords:
    """Return arguments by name in the order of `forward`; raise if its signature does not take them."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # of code that is not Python
        return Keywords(given)
    try:
        signature.bind(*positional, **given)
    except TypeError as error:
        taken = [one for one in signature.parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        message = (
            f"{type(model).__name__}: a mapping gives arguments of forward by name, got {', '.join(map(str, given))}, "
            f"and forward takes {', '.join(one.name for one in taken) or 'none'}: {error}"
        )
        required = [one for one in taken if one.default is one.empty and one.kind is not one.KEYWORD_ONLY]
        if not positional and len(required) == 1 and not set(given) & {one.name for one in taken}:
            message += f"; where {required[0].name} is this mapping itself, put it in a tuple: ({{...}},)"
        raise ModelError(message) from None
    order = {name: at for at, name in enumerate(signature.parameters)}
    return Keywords(sorted(given.items(), key=lambda item: order.get(item[0], len(order))))


def call(model: Callable[..., Any], example: tuple[Any, ...]) -> Any:
    """Return what a model returns for an example."""
    positional, named = split(example)
    if not defaults_changed():
        return model(*positional, **named)
    with callers_defaults(model):
        return model(*positional, **named)


def split(example: tuple[Any, ...]) -> tuple[tuple[Any, ...], Keywords]:
    """Return the positional arguments of an example, and the arguments by name."""
    if example and isinstance(example[-1], Keywords):
        return tuple(example[:-1]), example[-1]
    return tuple(example), Keywords()


@dataclass(frozen=True)
class InputSpec:
    """A tensor of an example, without its values."""

    shape: tuple[int, ...]  # with the batch
    dtype: str  # such as `float32`
    name: str | None = None  # of the argument that it is, or is part of; None for a positional one


MOST_VALUES = 2**30
"""Values of an example that is made by its shapes, which a file may name."""


def input_specs(example: tuple[Any, ...]) -> tuple[InputSpec, ...]:
    """Return the shapes, dtypes and names of the tensors of an example, in their order."""
    positional, named = split(example)
    return tuple(
        InputSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), name)
        for name, value in ((None, positional), *named.items())
        for tensor in gather(value)
    )


def zeros_of(specs: Sequence[InputSpec]) -> tuple[Any, ...]:
    """Return an example of zeros by the specifications of its tensors."""
    if sum(prod(spec.shape) for spec in specs) > MOST_VALUES:
        raise ValueError(f"expected at most {MOST_VALUES:,} values, got shapes {[spec.shape for spec in specs]!r:.99}")
    zeros = [(spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in specs]
    named = Keywords((name, zero) for name, zero in zeros if name is not None)
    given = [zero for name, zero in zeros if name is None]
    return (*given, named) if named else tuple(given)


def parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the arguments of a model's `forward` in their order; none if its code is not Python."""
    return [parameter.name for parameter in parameters_of(model)]


def parameters_of(model: nn.Module) -> list[inspect.Parameter]:
    """Return the arguments of a model's `forward` in their order; none if its code is not Python."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # of code that is not Python
        return []


def arguments_by_name(model: nn.Module, example: tuple[Any, ...]) -> dict[str | int, Any]:
    """Return the arguments of an example by their names in `forward`; by position if they have none."""
    positional, named = split(example)
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    keys: list[str | int] = [one.name for one in parameters_of(model) if one.kind in kinds]
    keys += range(len(keys), len(positional))
    return dict(zip(keys, positional, strict=False)) | dict(named)


def inputs_in(batch: Any) -> Any:
    """Return the inputs of a batch: the first entry of a tuple or list, such as (inputs, targets), or all of it."""
    return batch[0] if isinstance(batch, (tuple, list)) and batch else batch


def inputs_as_example(model: nn.Module, inputs: Any) -> tuple[Any, ...]:
    """Return the inputs of a batch as an example: a list becomes a tuple, any other object is the only argument.

    Images (C, H, W) in a list are not arguments unless `forward` requires as many.
    """
    if isinstance(inputs, list) and are_images(model, inputs) and not 1 < len(inputs) == required_count(model):
        return from_images(model, inputs)
    if isinstance(inputs, (tuple, list)):
        return as_example(model, tuple(inputs))
    return as_example(model, inputs) if isinstance(inputs, Mapping) else (inputs,)


def takes_list(model: nn.Module, image: Tensor | None = None) -> bool:
    """Return whether `forward` takes its samples as a list, as its first argument's annotation says.

    A model without an annotation is tried: it takes lists if it runs on a list with the image (C, H, W) alone.
    """
    first = next(iter(parameters_of(model)), None)
    if first is not None and first.annotation is not inspect.Parameter.empty:
        text = first.annotation if isinstance(first.annotation, str) else inspect.formatannotation(first.annotation)
        return re.search(r"\b(list|Sequence|Iterable)\[[^\]]*Tensor", text, re.IGNORECASE) is not None
    if model not in _TAKING_LISTS and image is not None:
        like, runs = next(iter(model.parameters())), True
        with training_mode(model, False), torch.no_grad():
            try:
                model([image.to(like.device, like.dtype)])
            except Exception as error:  # whatever the model's own code raises
                reraise_shortage(error)
                runs = False
        _TAKING_LISTS[model] = runs
    return _TAKING_LISTS.get(model, False)


_TAKING_LISTS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Findings about models without annotations."""


def is_image(model: nn.Module, value: Any) -> bool:
    """Return whether a value is one image (C, H, W), with as many channels as the model's first layer, a Conv2d, reads.

    Models that take a list of samples may read other images too, and get their channels right by themselves.
    """
    if not isinstance(value, Tensor) or value.dim() != IMAGE_AXES:
        return False
    if not (value.is_floating_point() or value.dtype == torch.uint8):
        return False
    layers = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding)
    first = next((module for module in model.modules() if isinstance(module, layers)), None)
    return isinstance(first, nn.Conv2d) and (takes_list(model) or len(value) == first.in_channels)


def are_images(model: nn.Module, values: Any) -> bool:
    """Return whether values are images, see `is_image`, and at least one."""
    return isinstance(values, (list, tuple)) and len(values) > 0 and all(is_image(model, value) for value in values)


def from_images(model: nn.Module, images: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return images (C, H, W) as the example of a model: a list if it takes one, else stacked."""
    if takes_list(model, images[0]):
        return ([*images],)
    sizes = dict.fromkeys(" x ".join(map(str, image.shape)) for image in images)
    if len(sizes) > 1:
        raise DataError(
            f"images: {type(model).__name__} takes images of one size as one tensor, got {described(list(images))}, "
            f"{len(sizes)} sizes; bring all to one size, or pad them; where forward takes images of any size, annotate "
            "its first argument: list[torch.Tensor]"
        )
    return (torch.stack([*images]),)


IMAGE_NAMES = frozenset(
    {"img", "image", "images", "pixel_values", "jpg", "jpeg", "png", "webp", "x", "input", "inputs"}
)
"""Names of images in batches and samples: of ultralytics, datasets, transformers, webdataset."""
PACKAGE_KEYS = {"batch_idx", "im_file", "bboxes", "ori_shape"}
"""Entries that mark a batch, or a sample, of ultralytics, whose uint8 images its trainers scale to 0..1."""


def images_in(model: nn.Module, batch: Mapping[Any, Any]) -> Any:
    """Return the images of a batch or sample whose names are not those of the arguments of `forward`.

    Images of ultralytics' loaders are scaled to 0..1, as its trainers do.
    """
    names = {one.name for one in parameters_of(model) if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    if not names.isdisjoint(batch) or required_count(model) > 1:
        return None
    keys = [key for key in batch if isinstance(key, str) and not IMAGE_NAMES.isdisjoint(key.split(";"))]
    images = batch[keys[0]] if len(keys) == 1 else None
    first = images[0] if isinstance(images, Tensor) and images.dim() == IMAGE_AXES + 1 and len(images) else images
    if not (is_image(model, first) or are_images(model, images)):
        return None
    if isinstance(images, Tensor) and images.dtype == torch.uint8 and not PACKAGE_KEYS.isdisjoint(batch):
        return images.to(next((one.dtype for one in model.parameters()), torch.float32)) / 255
    return images


def required_count(model: nn.Module) -> int:
    """Return the number of arguments that `forward` requires."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return sum(one.default is one.empty and one.kind not in kinds for one in parameters_of(model))


@contextmanager
def running(model: nn.Module, given: Any, *, called: str = "", where: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turn errors of a model's own code into a `ModelError` that describes what the model was given."""
    try:
        yield
    except PrunekitError:
        raise
    except Exception as error:
        reraise_shortage(error)
        shown = given[0] if isinstance(given, tuple) and len(given) == 1 else given
        raise ModelError(
            f"{called or type(model).__name__} does not run on {described(shown)}{where()}: {reason_of(error)}; "
            "expected samples as its forward takes them"
        ) from error


OTHER_TYPES = re.compile("same dtype|should be the same|mixed dtype|(expected|to have) scalar type (of )?[A-Z]")
"""Torch's words where operands have other types than the weights."""


def example_advice(model: nn.Module, examples: Sequence[tuple[Any, ...]], reason: str) -> str:
    """Return advice about examples that a model does not run on, for a reason in torch's words."""
    named = set().union(*(split(one)[1] for one in examples))
    kinds = inspect.Parameter
    alone = [one.name for one in parameters_of(model) if one.kind is kinds.KEYWORD_ONLY and one.default is one.empty]
    if missing := [name for name in alone if name not in named]:
        given = ", ".join(f'"{name}": {name}' for name in missing)
        return f"its forward takes {', '.join(missing)} only by name: give a mapping, {{{given}}}"
    if any(isinstance(value, np.ndarray) for one in examples for value in leaves(one)):
        return "expected tensors, got NumPy arrays; give torch.from_numpy(array)"
    if examples and all(one and all(isinstance(value, int) for value in one) for one in examples):
        sizes = ", ".join(map(str, examples[0]))
        return f"expected tensors, got a shape; give torch.randn({sizes})"
    own = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    for tensor in gather(list(examples)) if OTHER_TYPES.search(reason) else ():
        if tensor.dtype != own and (tensor.dtype == torch.uint8 or tensor.is_floating_point()):
            wanted, got = (str(one).removeprefix("torch.") for one in (own, tensor.dtype))
            change = f".to(torch.{wanted})" + " / 255" * (tensor.dtype == torch.uint8 and tensor.dim() >= IMAGE_AXES)
            return f"expected {wanted}, which its weights are, got {got}; give example{change}"
    return "expected the arguments of its forward: a tensor, a tuple of them by position, or a mapping of them by name"


def described(value: Any) -> str:
    """Return a description for messages: `(float32 (8, 3, 32, 32), int64 (8,))`, `{input_ids: int64 (8, 16)}`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {described(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        if not gather(value) and any(isinstance(item, (tuple, list)) for item in value):
            return f"nested {type(value).__name__}"  # of numbers, as of JSON
        items = [described(item) for item in value[:4]] + ["..."] * (len(value) > 4)
        return f"({', '.join(items)})" if isinstance(value, tuple) else f"[{', '.join(items)}]"
    return type(value).__name__


def to_device(values: Any, device: torch.device) -> Any:
    """Return the same nesting with every tensor on a device."""
    return map_tensors(values, lambda tensor: outside_inference(tensor).to(device, non_blocking=True))


def sample_count(inputs: Any, default: int = 0) -> int:
    """Return the number of samples: entries of the first list of them, or the first axis of the first tensor."""
    count = count_samples(inputs)
    return default if count is None else count


def is_batched(example: tuple[Any, ...]) -> bool:
    """Return whether every tensor of an example has the samples on its first axis; entries of a list are samples."""
    count, (positional, named) = sample_count(example), split(example)
    lists = any(isinstance(value, list) for value in (*positional, *named.values()))
    return count > 0 and not lists and all(tensor.dim() and len(tensor) == count for tensor in gather(example))


def sample_noun(inputs: Any) -> str:
    """Return what messages call samples: images, if the first tensor has their shape."""
    first = next(iter(gather(inputs)), None)
    return "images" if first is not None and first.dim() == 4 and first.is_floating_point() else "samples"


def select_samples(inputs: Any, index: slice | Tensor) -> Any:
    """Return the same nesting with some of the samples: of the first axis of each tensor, or of lists of samples."""

    def some(samples: list[Any]) -> list[Any]:
        return samples[index] if isinstance(index, slice) else [samples[number] for number in index.tolist()]

    return map_samples(inputs, lambda tensor: tensor[index], some)


def repeated_samples(inputs: Any, count: int) -> Any:
    """Return the same nesting with `count` samples, its own again and again; what holds no sample each is as it was."""
    own = sample_count(inputs, 1)
    index = torch.arange(count) % own

    def of_tensor(tensor: Tensor) -> Tensor:
        each = bool(tensor.dim()) and tensor.shape[0] == own
        return tensor.index_select(0, index.to(tensor.device)) if each else tensor

    return map_samples(inputs, of_tensor, lambda samples: [samples[number] for number in index.tolist()])


def concatenate(parts: Sequence[Any]) -> Any:
    """Return inputs of the same nesting, concatenated along their first axes; lists of samples become one list."""
    found = iter(zip(*map(sample_parts, parts), strict=True))
    return map_samples(parts[0], lambda _: torch.cat(next(found)), lambda _: [*chain.from_iterable(next(found))])


@dataclass(frozen=True, eq=False)
class Counted:
    """Positions that are not padding, in masks (B, ..., T) bool: of the samples, and of what a decoder reads of them.

    Values belong to the mask that their shape fits. Where encoder and decoder read as many positions, their shapes do
    not tell them apart, and those count that do on both sides.
    """

    masks: tuple[Tensor, ...]

    def __getitem__(self, samples: slice) -> "Counted":
        return Counted(tuple(mask[samples] for mask in self.masks))

    def of(self, positions: Sequence[int]) -> Tensor | None:
        """Return the mask of positions of the shape (B, ..., T, ...), or (B * ... * T,); None if none fits.

        Several sequences of a sample may be on one axis of the positions, and of the mask then, or on their own.
        """
        for whole in self.masks:
            for mask in (whole, whole.flatten(0, -2)):
                if tuple(positions[: mask.dim()]) == mask.shape:
                    return mask
        return next((mask.flatten() for mask in self.masks if tuple(positions) == (mask.numel(),)), None)


def counted_positions(model: nn.Module, example: tuple[Any, ...]) -> Counted | None:
    """Return which positions are not padding, by the `attention_mask` and `decoder_positions`; None if all count.

    A mask is understood if it has zeros and ones (B, T) with a one in each row, as tokenizers of transformers give it;
    or the like for several sequences in each sample, such as (B, 2, T) of pairs and (B, choices, T).
    """
    given = _padding_mask(model, example), decoder_positions(model, arguments_by_name(model, example))
    masks = [mask != 0 for mask in given if mask is not None and bool(((mask == 0) | (mask == 1)).all())]
    if len(masks) == 2 and masks[0].shape == masks[1].shape:
        masks = [masks[0] & masks[1]]
    masks = [mask for mask in masks if bool(mask.any(-1).all())]
    return None if all(bool(mask.all()) for mask in masks) else Counted(tuple(masks))


OF_DECODER = "decoder_"
"""The beginning of the names of arguments that are for the decoder, in the convention of transformers."""
DECODER = OF_DECODER + "input_ids"
"""The argument with the token numbers that a decoder reads."""


def decoder_positions(model: nn.Module, arguments: Mapping[str | int, Any]) -> Tensor | None:
    """Return a mask of what a decoder reads (B, T): its own, or of ids that end in padding by the configuration."""
    mask, ids = arguments.get(OF_DECODER + MASK), arguments.get(DECODER)
    if isinstance(mask, Tensor):
        return mask if mask.dim() == 2 and not mask.is_complex() else None
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not isinstance(pad, int):
        return None
    there = ids != pad
    there[:, :1] = True  # the decoder's start, for which T5 takes the padding too
    return there.flip(1).cummax(1).values.flip(1)


def decoder_shape(model: nn.Module, example: tuple[Any, ...]) -> tuple[int, int] | None:
    """Return (B, T) of the token numbers that a decoder reads beside an encoder; None without any."""
    ids = arguments_by_name(model, example).get(DECODER)
    return (ids.shape[0], ids.shape[1]) if isinstance(ids, Tensor) and ids.dim() == 2 else None


def sequence_shape(model: nn.Module, example: tuple[Any, ...]) -> tuple[int, int] | None:
    """Return (B, T) if samples are sequences, with an `attention_mask` or of token numbers; None otherwise.

    With a mask of several sequences for each sample, (B, ..., T), those of all samples are counted.
    """
    mask = _padding_mask(model, example)
    if mask is not None:
        return prod(mask.shape[:-1]), mask.shape[-1]
    first = next(iter(gather(example)), None)
    masked = isinstance(arguments_by_name(model, example).get(MASK), Tensor)
    if first is None or first.dim() != 2 or first.is_floating_point() or masked:
        return None
    return first.shape[0], first.shape[1]


def _padding_mask(model: nn.Module, example: tuple[Any, ...]) -> Tensor | None:
    """Return a mask with one value for each position of the first input; None of other forms, such as (B, T, T)."""
    mask = arguments_by_name(model, example).get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.is_complex():
        return None
    first = next((tensor for tensor in gather(example) if tensor is not mask), mask)
    return mask if mask.dim() == 2 or first.shape[: mask.dim()] == mask.shape else None


def rows_of(values: Tensor, counted: Counted | None) -> Tensor:
    """Return the positions that count, (N, ..., channels), see `counted_positions`; None: all count.

    Values are (B, T, ..., channels), (B * T, channels), or (B, heads, T, channels) as keys and values of attention in a
    cache; those of another shape, such as class scores (B, classes), are returned as they are.
    """
    if counted is None:
        return values
    mask = counted.of(values.shape[:-1])
    if mask is None and values.dim() == 4 and (mask := counted.of((values.shape[0], values.shape[2]))) is not None:
        values = values.transpose(1, 2)
    return values if mask is None else values[mask.to(values.device)]


def blank_padding(values: Tensor, counted: Counted | None) -> Tensor:
    """Return values (B, T, ..., channels) with zeros at padding; values of another shape as they are."""
    mask = None if counted is None else counted.of(values.shape[:-1])
    if mask is None:
        return values
    return values.masked_fill(~mask.to(values.device).view(*mask.shape, *[1] * (values.dim() - mask.dim())), 0)


def checksum(sample: tuple[Any, ...], counted: Counted | None = None) -> int:
    """Return a number of what a sample holds, whatever its place among others and its padding."""
    masks = ((tensor, None if counted is None else counted.of(tensor.shape)) for tensor in gather(sample))
    there = (tensor if mask is None else tensor[mask.to(tensor.device)] for tensor, mask in masks)
    parts = (tensor.detach().cpu().contiguous() for tensor in there)
    return zlib.crc32(b"".join(part.flatten().view(torch.uint8).numpy().tobytes() for part in parts))
