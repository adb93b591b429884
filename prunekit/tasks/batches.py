"""Batches of any data: the inputs that a model is called with, and the targets that belong to them."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, default_collate

from prunekit.errors import DataError, reraise_shortage
from prunekit.tasks.task import Task, get_task
from prunekit.tasks.texts import LABELS, PaddedTexts
from prunekit.utils import inputs as model_inputs
from prunekit.utils.tensors import IMAGE_AXES, gather, leaves, sample_parts

BATCH = 128
"""Samples of a batch, of data that is not in batches yet."""
FROM_PILLOW = "give tensors, such as torchvision.transforms.v2.functional.pil_to_tensor(image) / 255"
"""Advice about images of Pillow."""
InputsAndTargets = tuple[tuple[Any, ...], Any]
"""What a model is called with, see `prunekit.utils.inputs.as_example`, and targets or None."""


@dataclass(frozen=True, eq=False)
class LabeledBatch:
    """The inputs that a model is called with, and their labels or other targets, if there are any."""

    inputs: tuple[Any, ...]
    labels: Any

    @property
    def samples(self) -> int:
        """Number of samples."""
        return model_inputs.sample_count(self.inputs)


@dataclass(frozen=True, eq=False)
class ModelBatches:
    """Batches of any data: examples that a model is called with, and targets or None.

    They can be iterated over as often as the data itself.
    """

    model: nn.Module  # whose `forward` names the inputs
    # all samples, as a tensor (N, ...), a list of images (C, H, W), a tuple of the tensors that `forward` requires,
    # if these are several, perhaps with targets behind them, or a mapping of tensors by the names of its arguments;
    # or a map-style data set of samples, torch's or a `datasets.Dataset`; or any iterable of batches, such as a
    # DataLoader or a generator; or an iterable data set, of batches or samples. A batch is a tensor, such a mapping,
    # or a tuple or list whose first entry is one of these or a tuple of all inputs, and whose second, if there is
    # one, holds the targets; or a tuple or list of the tensors that `forward` requires, if these are several, perhaps
    # with targets behind them. Images (C, H, W), of any sizes where the model takes a list of them, may come as a
    # list or a tuple, alone or with their targets, or one at a time. Of a mapping that comes without a task, `labels`
    # or `label` are the targets, and what `forward` does not take is left out; if that is all of it, as in a batch of
    # ultralytics, the entry with the images is the input.
    data: Any
    task: Task | str | None = None  # takes batches apart that come in another form; itself or its name
    where: str = "calibration"  # purpose of the data, for messages
    size: int = BATCH  # samples of a batch, of data that is not in batches
    count: int | None = None  # number of samples to take of a data set, evenly spread; None: all

    def __iter__(self) -> Iterator[InputsAndTargets]:
        task = None if self.task is None else get_task(self.task).bound(self.model)
        for number, batch in enumerate(self._batches(task), 1):
            yield _apart(self.model, batch, task, f"{self.where}, batch {number}")

    def __length_hint__(self) -> int:
        data = self.data
        if isinstance(data, Tensor) or is_sample_set(data):
            return -(-len(data) // self.size)
        if model_inputs.are_images(self.model, data):
            return -(-len(data) // IMAGES)
        if isinstance(data, tuple) and holds_all(self.model, data):
            return -(-len(data[0]) // self.size)
        return 1 if isinstance(data, Mapping) else length_hint(data)

    def _batches(self, task: Task | None) -> Iterable[Any]:
        data, model = self.data, self.model
        if isinstance(data, Tensor) and data.dim():
            return list(torch.split(data, self.size))
        if isinstance(data, Mapping):
            return _split(data, self.where, self.size) if model_inputs.images_in(model, data) is None else [data]
        if task is None and isinstance(data, tuple) and holds_all(model, data):
            return _parts(data, len(data[0]), self.size)
        if model_inputs.are_images(model, data):
            return [([*data[at : at + IMAGES]],) for at in range(0, len(data), IMAGES)]
        if is_sample_set(data):
            names = None if task is not None else {*inspect.signature(model.forward).parameters, *LABELS}
            alone = PaddedTexts() if model_inputs.MASK in model_inputs.parameter_names(model) else default_collate
            collate = alone if task is None else task.collate
            return samples_in_batches(model, data, names, self.where, self.size, self.count, collate)
        kinds = (Tensor, str, PathLike, nn.Module)
        if isinstance(data, kinds) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
            folder = "; a folder of images is read by torchvision.datasets.ImageFolder(folder, transform=...)"
            raise DataError(
                f"{self.where}: expected a tensor or a mapping of tensors with all samples, a data set, or batches, "
                f"such as a DataLoader; got {model_inputs.described(data)}"
                f"{folder if isinstance(data, (str, PathLike)) else ''}"
            )
        return data if task is not None else batches_among(model, data, self.where, self.size)


def holds_all(model: nn.Module, data: Any) -> bool:
    """Return whether data are tensors that hold all samples: one, a mapping, or a tuple of all that `forward` requires.

    A tuple of batches does not count: a model of several inputs cannot be called with one of its tensors.
    """
    if isinstance(data, tuple):
        every = all(isinstance(entry, Tensor) and entry.dim() and len(entry) == len(data[0]) for entry in data)
        return every and bool(_arguments(model, data))
    return isinstance(data, (Tensor, Mapping))


def joined_inputs(model: nn.Module, batches: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the inputs of all batches together; shorter ones are padded if the model takes an `attention_mask`.

    The mask then leaves the padding out; batches without one get ones. Lists of samples become one list. Images of
    ultralytics' loaders, of another size in each batch, are padded as those loaders pad images of one batch.
    """
    rows = [model_inputs.arguments_by_name(model, inputs) for inputs in batches]
    masked = model_inputs.MASK in model_inputs.parameter_names(model)
    uneven = len({tuple(tuple(tensor.shape[1:]) for tensor in gather(row)) for row in rows}) > 1
    if masked and (uneven or any(model_inputs.MASK in row for row in rows)):
        _fill_in_masks(rows)
        _pad(rows)
        _pad_decoded(model, rows)
    if uneven and type(model).__module__.startswith("ultralytics."):
        _pad_images(rows)
    wanted = {name: type(item) for name, item in rows[0].items()}
    count = len(sample_parts(rows[0]))
    for number, row in enumerate(rows, 1):
        if {name: type(item) for name, item in row.items()} != wanted or len(sample_parts(row)) != count:
            raise DataError(
                f"calibration, batch {number}: expected the same inputs as in the first one, "
                f"{model_inputs.described(batches[0])}, got {model_inputs.described(batches[number - 1])}; let every "
                "batch hold the same"
            )
    rows = [{name: row[name] for name in wanted} for row in rows]
    shapes = [tuple(tuple(part.shape[1:]) for part in sample_parts(row) if isinstance(part, Tensor)) for row in rows]
    for shape in shapes:
        if shape != shapes[0]:
            first, second = (" with ".join(map(str, each)) for each in (shapes[0], shape))
            raise DataError(
                f"calibration: expected {model_inputs.sample_noun(rows)} of one size, got batches of {first} and "
                f"{second}; bring all to one size; a model that takes an {model_inputs.MASK} (B, T), 1 where a "
                "position counts and 0 where it is padding, may be given texts of several"
            )
    whole = [(name, model_inputs.concatenate([row[name] for row in rows])) for name in wanted]
    positional = len(model_inputs.split(batches[0])[0])
    return model_inputs.as_example(
        model,
        (
            *(value for _, value in whole[:positional]),
            model_inputs.Keywords({str(name): value for name, value in whole[positional:]}),
        ),
    )


Row = dict[str | int, Any]


def _fill_in_masks(rows: list[Row]) -> None:
    """Give batches without a mask a mask of ones, as long as their first input, with the axes of the others' masks."""
    known = next((row[model_inputs.MASK] for row in rows if isinstance(row.get(model_inputs.MASK), Tensor)), None)
    for row in rows:
        first = next(tensor for tensor in gather(row))
        if row.get(model_inputs.MASK) is None and first.dim() > 1:
            kind, axes = (torch.int64, 2) if known is None else (known.dtype, known.dim())
            row[model_inputs.MASK] = torch.ones(first.shape[:axes], dtype=kind, device=first.device)


def _pad(rows: list[Row], side: str = "", more: int = 0) -> None:
    """Pad everything that is as long as a batch's mask, `more` than the longest one needs, on the side of padding.

    The arguments for a decoder, whose names begin with that, go by a mask of their own; all others by the samples'.
    """
    masks: list[Any] = [row.get(side + model_inputs.MASK) for row in rows]
    if not all(isinstance(each, Tensor) and each.dim() == masks[0].dim() >= 2 for each in masks):
        return
    axis = masks[0].dim() - 1
    longest = max(each.shape[axis] for each in masks) + more
    left = any(bool((each[..., 0] == 0).any()) for each in masks)
    for name in dict.fromkeys(name for row in rows for name in row):
        if str(name).startswith(model_inputs.OF_DECODER) != bool(side):
            continue
        fill = 0 if name == side + model_inputs.MASK else _filler([row.get(name) for row in rows], masks)
        for row, each in zip(rows, masks, strict=True):
            values = row.get(name)
            if isinstance(values, Tensor) and values.dim() > axis and values.shape[axis] == each.shape[axis]:
                size = (*values.shape[:axis], longest - each.shape[axis], *values.shape[axis + 1 :])
                ends = values.new_full(size, fill)
                row[name] = torch.cat([ends, values] if left else [values, ends], axis)


def _pad_decoded(model: nn.Module, rows: list[Row]) -> None:
    """Pad what a decoder reads to the longest; where that is as long as the samples, pad these by one position more.

    So shapes tell activations of the encoder from those of the decoder, whose padding is elsewhere.
    """
    ids: list[Any] = [row.get(model_inputs.DECODER) for row in rows]
    if not all(isinstance(each, Tensor) and each.dim() == 2 for each in ids):
        return
    if len(
        {each.shape[1] for each in ids}
    ) > 1 and model_inputs.OF_DECODER + model_inputs.MASK in model_inputs.parameter_names(model):
        for row, each in zip(rows, ids, strict=True):
            there = model_inputs.decoder_positions(model, row)
            row[model_inputs.OF_DECODER + model_inputs.MASK] = (
                torch.ones_like(each) if there is None else there.to(each.dtype)
            )
        _pad(rows, model_inputs.OF_DECODER)
    shape, most = rows[0][model_inputs.DECODER].shape, getattr(model, "config", None)
    room = shape[1] < getattr(most, "max_position_embeddings", shape[1] + 1)
    alike = isinstance(rows[0].get(model_inputs.MASK), Tensor) and rows[0][model_inputs.MASK].shape[1:] == shape[1:]
    examples = ((model_inputs.Keywords({str(name): item for name, item in row.items()}),) for row in rows)
    if room and alike and any(model_inputs.counted_positions(model, one) is not None for one in examples):
        _pad(rows, more=1)


GRAY = 114 / 255
"""Gray value of ultralytics' padding around images."""


def _pad_images(rows: list[Row]) -> None:
    """Pad images of several sizes to the largest height and width."""
    names = [name for name, value in rows[0].items() if isinstance(value, Tensor) and value.dim() == 1 + IMAGE_AXES]
    for name in names:
        sizes = [row[name].shape[2:] for row in rows]
        height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
        for row, size in zip(rows, sizes, strict=True):
            row[name] = F.pad(row[name], (0, width - size[1], 0, height - size[0]), value=GRAY)


def _filler(columns: Sequence[Any], masks: Sequence[Any]) -> Any:
    """Return the value that batches have where they are padded, such as the id of a token; 0 if none is padded."""
    for values, mask in zip(columns, masks, strict=True):
        if isinstance(values, Tensor) and values.shape == mask.shape and bool((mask == 0).any()):
            return values[mask == 0][0].item()
    return 0


def _split(data: Mapping[str, Any], where: str, size: int) -> Iterator[Any]:
    tensors = {name: item for name, item in data.items() if isinstance(item, Tensor) and item.dim()}
    lengths = {len(tensor) for tensor in tensors.values()}
    if len(lengths) != 1:
        raise DataError(
            f"{where}: expected a mapping of tensors with as many samples each, got {model_inputs.described(data)}; a "
            f'tokenizer returns such with return_tensors="pt"; {model_inputs.FLATTENED}'
        )
    yield from _parts(tensors, lengths.pop(), size)


def _parts(tensors: Any, count: int, size: int) -> Iterator[Any]:
    """Yield batches of all samples."""
    for start in range(0, count, size):
        yield model_inputs.select_samples(tensors, slice(start, start + size))


def _apart(model: nn.Module, batch: Any, task: Task | None, where: str) -> InputsAndTargets:
    targets = None
    if task is not None:
        inputs, targets = task.unpacking(batch, where)
    elif inputs := _arguments(model, batch):
        targets = next(iter(batch[len(inputs) :]), None)
        if len(batch) > len(inputs) + 1 and len(model_inputs.parameter_names(model)) > len(inputs):
            raise DataError(
                f"{where}: expected {len(inputs)} inputs and targets, got {model_inputs.described(batch)}, of which "
                f"some may be for the optional arguments of {type(model).__name__}; say how it comes apart: task=..."
            )
    elif isinstance(batch, (tuple, list)) and batch and not is_image_batch(model, batch):
        inputs, targets = batch[0], batch[1] if len(batch) > 1 else None
    else:
        inputs = batch
    if model_inputs.are_images(model, inputs):
        inputs = [*inputs]  # tuple(zip(*samples)) gives tuples
    if isinstance(inputs, Mapping) and (images := model_inputs.images_in(model, inputs)) is not None:
        found = next((inputs[name] for name in LABELS if name in inputs), None)
        inputs, targets = images, found if targets is None else targets
    elif isinstance(inputs, Mapping):
        inputs, labels = _by_name(model, inputs, where)
        targets = labels if targets is None else targets
    if not gather(inputs):
        raise DataError(
            f"{where}: expected batches of tensors, (inputs, targets), or mappings by the names of the model's "
            f"arguments, got {model_inputs.described(batch)}; {_advice(inputs)}"
        )
    return model_inputs.inputs_as_example(model, inputs), targets


def _arguments(model: nn.Module, batch: Any) -> tuple[Tensor, ...]:
    """Return all arguments that a model of several requires, as ids and mask of (ids, mask, labels); else nothing."""
    count = model_inputs.required_count(model)
    found = tuple(batch[:count]) if isinstance(batch, (tuple, list)) and 1 < count <= len(batch) else ()
    alike = all(isinstance(entry, Tensor) and entry.dim() for entry in found) and len({len(one) for one in found}) == 1
    return found if alike else ()


def _advice(inputs: Any) -> str:
    """Return what to do about inputs that are no tensors."""
    found = inputs.values() if isinstance(inputs, Mapping) else leaves(inputs)
    for value in found:
        if isinstance(value, np.ndarray):
            return "give tensors: torch.from_numpy(array)"
        if type(value).__module__.partition(".")[0] == "PIL":
            return FROM_PILLOW
    return "say how it comes apart: task=..."


def _by_name(model: nn.Module, batch: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Any]:
    """Return the entries of a mapping that `forward` takes, and the labels; inputs only if it requires them."""
    known = inspect.signature(model.forward).parameters
    label = next((name for name in LABELS if name in batch), None)
    names = [n for n in batch if n in known and (n not in LABELS or known[n].default is inspect.Parameter.empty)]
    if not names and any(one.kind is one.VAR_KEYWORD for one in known.values()):
        names = [name for name in batch if name not in LABELS]
    wrong = [name for name in names if not gather(batch[name]) and batch[name] is not None]
    if not names or wrong:
        takes = ", ".join(known)
        reason = f"{wrong[0]} holds no tensor" if wrong else f"{type(model).__name__} takes {takes}, and none of these"
        raise DataError(
            f"{where}: expected tensors by the names of the model's arguments, got {type(batch).__name__} "
            f"{model_inputs.described(batch)}; say how it comes apart: task=... ({reason}; a datasets.Dataset gives "
            'tensors after .with_format("torch"))'
        )
    return {name: batch[name] for name in names}, None if label is None else batch[label]


IMAGES = 16
"""Images of a batch in which each is a tensor of its own: those of detectors are large."""


def is_sample_set(data: Any) -> bool:
    """Return whether data is a map-style data set of samples: torch's, or one with its protocol."""
    if isinstance(data, Dataset):
        return not isinstance(data, IterableDataset) and hasattr(data, "__len__")
    return hasattr(data, "__getitems__") and hasattr(data, "__len__")


def is_image_batch(model: nn.Module, batch: Any) -> bool:
    """Return whether a batch is images (C, H, W) and nothing else.

    A tuple of two is an image with one to compare with, where the model takes no list.
    """
    pair = isinstance(batch, tuple) and len(batch) == 2
    return model_inputs.are_images(model, batch) and (not pair or model_inputs.takes_list(model, batch[0]))


def samples_in_batches(
    model: nn.Module,
    data: Any,
    names: Set[str] | None,
    where: str,
    size: int,
    count: int | None,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Iterator[Any]:
    """Yield batches of a map-style data set."""
    total = len(data)
    chosen = torch.linspace(0, total - 1, min(total, count or total)).round().long().tolist() if total else []
    size = min(size, IMAGES) if model_inputs.takes_list(model) else size
    for start in range(0, len(chosen), size):
        samples = [_named(data[index], names, where) for index in chosen[start : start + size]]
        yield together(model, samples, where, collate)


def batches_among(model: nn.Module, data: Iterable[Any], where: str, size: int) -> Iterator[Any]:
    """Yield batches of an iterable; its items are batches, or samples, which are put together.

    An item is a sample if its input is an image (C, H, W), or, in an iterable data set, has one axis or none.
    """
    size = min(size, IMAGES) if model_inputs.takes_list(model) else size
    rest, flat = iter(data), isinstance(data, IterableDataset)
    for first in rest:
        if _is_sample(model, first, flat=flat):
            yield together(model, [first, *islice(rest, size - 1)], where)
        else:
            yield first


def _is_sample(model: nn.Module, item: Any, *, flat: bool) -> bool:
    if is_image_batch(model, item):
        return False
    first = item[0] if isinstance(item, (tuple, list)) and item else item
    if isinstance(first, Mapping):
        found = model_inputs.images_in(model, first)
        tensors = gather(first) if found is None else [found]
    else:
        tensors = [first] if isinstance(first, Tensor) else []
    images = any(model_inputs.is_image(model, tensor) for tensor in tensors)
    return images or (flat and bool(tensors) and all(tensor.dim() <= 1 for tensor in tensors))


def together(
    model: nn.Module, samples: list[Any], where: str, collate: Callable[[list[Any]], Any] = default_collate
) -> Any:
    """Return samples as one batch: stacked, or as lists of images and of what belongs to each."""
    images: list[Any] = []
    for sample in samples:
        first = sample[0] if isinstance(sample, (tuple, list)) and sample else sample
        images.append(model_inputs.images_in(model, sample) if isinstance(sample, Mapping) else first)
    listed = model_inputs.are_images(model, images)
    try:
        if not (listed and model_inputs.takes_list(model, images[0])):
            return collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        reraise_shortage(error)
        if not listed:
            kind = type(samples[0]).__name__
            parts = samples[0].values() if isinstance(samples[0], Mapping) else samples[0]
            parts = parts if isinstance(samples[0], Mapping | tuple | list) else [parts]
            advice = "give a DataLoader with a collate_fn, for texts transformers.DataCollatorWithPadding"
            if any("PIL." in type(part).__module__ + "." for part in parts):
                advice = FROM_PILLOW
            raise DataError(
                f"{where}: expected samples of the same shapes, of which torch's default_collate makes a batch, got "
                f"{kind} such as {model_inputs.described(samples[0])}: {error}; {advice}"
            ) from error
    if isinstance(samples[0], Tensor):
        return (images,)
    if isinstance(samples[0], Mapping):
        return images, list(samples)
    return images, *([*column] for column in zip(*(sample[1:] for sample in samples), strict=True))


def _named(sample: Any, names: Set[str] | None, where: str) -> Any:
    """Return the entries of a sample that have one of these names; all if it has none of them."""
    if names is None or not isinstance(sample, Mapping) or names.isdisjoint(sample):
        return sample
    found = {name: item for name, item in sample.items() if name in names}
    if found.keys() <= set(LABELS):  # the inputs have other names
        return sample
    plain = next((name for name, item in found.items() if isinstance(item, list)), None)
    if plain is not None:
        raise DataError(
            f"{where}: expected samples of tensors, got a list in {plain!r}; a datasets.Dataset gives tensors after "
            f'.with_format("torch")'
        )
    return found
