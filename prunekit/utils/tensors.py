"""Tensors nested in the inputs and outputs of models, lists of samples among them, and tensors in temporary files.

Samples are on the first axis of a tensor, or the entries of a list, as images of different sizes are. Which lists hold
one sample in each entry, and which hold tensors that each have all samples on their first axis, as feature maps of
several levels do, is told by one rule, `holds_samples`. A tuple holds several arguments, and never samples.
"""

import copy
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.errors import ArtifactError, nearest
from prunekit.reading.text_files import require_parts

Whole = Callable[[Any], bool]
"""Function that tells whether a list or another nesting of tensors is taken as one thing."""


AT_ONCE = 2**22
"""Values of a large tensor that are worked on at a time, about."""


def in_parts(tensor: torch.Tensor, most: int = AT_ONCE) -> tuple[torch.Tensor, ...]:
    """Return a tensor in parts along its first axis, of at most that many values where a single index has fewer."""
    return torch.split(tensor, max(1, most // max(1, tensor[:1].numel())))


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite: by the extremes, without another tensor in memory."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or tensor.is_sparse or not tensor.numel():
        return bool(tensor.isfinite().all())
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def gather(value: Any) -> list[torch.Tensor]:
    """Return every tensor in nested tuples, lists, dicts, and attributes of dataclasses and other plain objects."""
    return gather_parts(value, None, [])


def gather_parts(value: Any, whole: Whole | None, found: list[Any]) -> list[Any]:
    """Add to a list every tensor that `gather` finds, and in their place the nestings of them that are one thing."""
    if isinstance(value, torch.Tensor) or (whole is not None and whole(value)):
        found.append(value)
    elif value is None or isinstance(value, (int, float, str, type, nn.Module)):
        pass
    elif isinstance(value, Mapping):
        for item in value.values():
            gather_parts(item, whole, found)
    elif isinstance(value, (tuple, list)):
        for item in value:
            gather_parts(item, whole, found)
    else:
        for item in _attributes(value).values():
            gather_parts(item, whole, found)
    return found


def outside_inference(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that autograd can work with: a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a complex tensor with one more axis, its real and imaginary parts; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the type that long sums are accumulated in: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same nesting with a function applied to every tensor that `gather` finds."""
    return map_parts(value, function, None)


def map_parts(value: Any, function: Callable[[Any], Any], whole: Whole | None) -> Any:
    """Return the same nesting with a function applied to everything that `gather_parts` finds."""
    if isinstance(value, torch.Tensor) or (whole is not None and whole(value)):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_parts(item, function, whole) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        outputs = copy.copy(value)  # an OrderedDict, or what is read by attribute as well
        for key, item in items.items():  # transformers' outputs refuse `update`
            outputs[key] = item
        return outputs
    if isinstance(value, (tuple, list)):
        parts = [map_parts(item, function, whole) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if gather(value):  # an object with tensors among its attributes
        twin = copy.copy(value)
        for name, item in _attributes(value).items():
            object.__setattr__(twin, name, map_parts(item, function, whole))
        return twin
    return value


def _attributes(value: Any) -> Mapping[str, Any]:
    """Return the attributes of dataclasses, also with slots, and of other plain objects; none of anything else."""
    if isinstance(value, (type, nn.Module)) or callable(value):
        return {}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return getattr(value, "__dict__", {})


def leaves(value: Any) -> Iterator[Any]:
    """Yield everything in nested tuples, lists and dicts that is none of these."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def is_subnormal(tensor: Tensor) -> Tensor:
    """Return which values of a floating-point tensor processors compute with slowly, bool of its shape.

    There are none in float16 and smaller types: these are computed in float32, where their smallest numbers are normal,
    or by units that are as fast with all numbers. bfloat16 has the range of float32.
    """
    tiny = torch.finfo(tensor.dtype).tiny
    if tiny > torch.finfo(torch.float32).tiny:
        return torch.zeros_like(tensor, dtype=torch.bool)
    size = tensor.detach().abs()
    return (size > 0) & (size < tiny)


def first_not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first tensor with a NaN or an Inf in it; None if all are finite."""
    return next((name for name, tensor in named if not is_finite(tensor)), None)


def occurrences(values: Tensor, kinds: int) -> Tensor:
    """Return how often each of 0 to `kinds` - 1 is among whole numbers, (kinds,) int64; others do not count.

    Unlike `bincount`, which has to find the size of its result, this does not wait for the device.
    """
    inside = (values >= 0) & (values < kinds)
    known = torch.where(inside, values, kinds).long().flatten()
    counts = torch.zeros(kinds + 1, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, known, torch.ones_like(known))[:-1]


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def with_channels_last(tensor: Tensor) -> Tensor:
    """Return a copy with channels last of images, volumes or their kernels; a plain copy of other tensors."""
    return tensor.clone(memory_format=FORMATS.get(tensor.dim(), torch.preserve_format))


def lies_channels_last(model: nn.Module) -> bool:
    """Return whether any kernel of a model is channels last, and not contiguous at the same time."""
    found = ((kernel, FORMATS.get(kernel.dim())) for kernel in model.parameters())
    return any(
        form is not None and kernel.is_contiguous(memory_format=form) and not kernel.is_contiguous()
        for kernel, form in found
    )


def as_it_lies(tensor: Tensor) -> Tensor:
    """Return a tensor as a vector in its order in memory; no copy if it is dense."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.detach().permute(order).reshape(-1)


def write_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to, by its version counter; 0 if it has none."""
    return 0 if tensor.is_inference() else tensor._version


def require_same_kind(found: Any, wanted: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Raise unless tensors of a file can take the place of others: by names, shapes, dtypes, and finite values.

    A value that is not finite in one of the wanted, as in a mask of minus infinity, need not be finite in the file.
    """
    there = dict(wanted)
    require_parts(found, (), where)
    for name in [*there, *found]:
        if name not in found or name not in there:
            what = "is not there" if name in there else f"is not the model's; {nearest(str(name), there)}"
            raise ArtifactError(f"{where}: tensor {name!r} {what}; the file is damaged")
    for name, tensor in there.items():
        if (problem := _difference(found[name], tensor)) is not None:
            raise ArtifactError(f"{where}: tensor {name!r}: {problem}; the file is damaged")


def _difference(found: Any, wanted: Tensor) -> str | None:
    """Return why a tensor cannot take the place of another; None if it can."""
    if not isinstance(found, Tensor):
        return f"expected a tensor, got {type(found).__name__}"
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"expected {tuple(wanted.shape)} of {wanted.dtype}, got {tuple(found.shape)} of {found.dtype}"
    if is_finite(found):
        return None
    bad = found.isfinite().logical_not_()
    if type(wanted) in (Tensor, torch.nn.Parameter):
        bad &= wanted.detach().isfinite().to(bad.device)
    return "it has NaN or Inf in it" if bool(bad.any()) else None


IMAGE_AXES = 3
"""Axes of an image, (C, H, W)."""


def holds_samples(values: Any, samples: int | None = None) -> bool:
    """Return whether each entry of a list is a sample: an image, or what belongs to it, such as its boxes.

    The rule: entries are samples if they are mappings, tensors of three axes as images (C, H, W) are, or tensors whose
    first axes differ in size, which cannot be the samples then. Other lists hold tensors with all samples on their
    first axis, such as feature maps (B, C, H, W) of several levels. Where the number of samples is known from another
    input, a list of that length holds samples unless the first axes of its tensors have that size too, and a list of
    another length does not.
    """
    if not isinstance(values, list) or not values or (samples is not None and len(values) != samples):
        return False
    if all(isinstance(value, Mapping) for value in values):
        return True
    if not all(isinstance(value, Tensor) for value in values):
        return False
    lengths = {value.shape[:1] for value in values}
    if samples is not None and lengths != {torch.Size([samples])}:
        return True
    return len(lengths) > 1 or {value.dim() for value in values} == {IMAGE_AXES}


def sample_parts(inputs: Any) -> list[Any]:
    """Return all lists of samples, and all tensors that are in none, in their order."""
    return gather_parts(inputs, partial(holds_samples, samples=count_samples(inputs)), [])


def count_samples(inputs: Any) -> int | None:
    """Return the number of samples, by the first list of them or the first tensor with an axis; None without either."""
    parts = gather_parts(inputs, holds_samples, [])
    return next((len(part) for part in parts if isinstance(part, list) or part.dim()), None)


def has_sample_lists(inputs: Any) -> bool:
    """Return whether any samples are the entries of a list."""
    return any(isinstance(part, list) for part in sample_parts(inputs))


def map_samples(inputs: Any, tensors: Callable[[Tensor], Any], lists: Callable[[list[Any]], Any]) -> Any:
    """Return the same nesting with functions applied to all lists of samples, and to all tensors that are in none."""

    def changed(part: Any) -> Any:
        return lists(part) if isinstance(part, list) else tensors(part)

    return map_parts(inputs, changed, partial(holds_samples, samples=count_samples(inputs)))


BLOCK = 2**28
"""Bytes of a file, unless a tensor is larger."""
ALIGNED = 64


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a SHA-256 hash of the names, shapes, types and bytes of tensors."""
    found = sha256()
    for name, tensor in tensors:
        found.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


class FileMemory:
    """Keeps tensors: the first in memory, those beyond a limit in temporary files.

    The system reads a file where a tensor is used, and writes it where memory is short. Files go with their tensors.
    """

    def __init__(self, limit: int) -> None:  # bytes in memory
        self._left = limit
        self._maps: list[mmap.mmap] = []
        self._used = 0

    def keep(self, tensor: Tensor, *, shared: bool = False) -> Tensor:
        """Return a strided tensor itself while there is memory, then a copy.

        On other devices than the CPU, and where there is no room for a file, it is the tensor itself.
        """
        found, size = None, tensor.nbytes
        if tensor.device.type == "cpu" and not tensor.requires_grad:
            if 0 < size <= self._left:
                self._left -= size
            elif size:
                found = self._mapped(tensor)
        if found is None:
            return tensor.clone() if shared else tensor
        return found.copy_(tensor)

    def release(self) -> None:
        """Give the memory of tensors in files back until they are used again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for one in self._maps:
                one.madvise(mmap.MADV_DONTNEED)

    def _mapped(self, like: Tensor) -> Tensor | None:
        """Return a tensor of zeros in a file; None if there is no room for it."""
        size, start = like.nbytes, -(-self._used // ALIGNED) * ALIGNED
        if not self._maps or start + size > len(self._maps[-1]):
            try:
                self._maps.append(mapped_file(max(size, BLOCK)))
            except OSError:
                return None
            start = 0
        self._used = start + size
        memory = torch.frombuffer(self._maps[-1], dtype=like.dtype, count=like.numel(), offset=start)
        return memory.view(like.shape)


def mapped_file(size: int) -> mmap.mmap:
    """Return a mapped file of zeros, whose room on the disk is reserved where the system can do that."""
    with tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return mmap.mmap(file.fileno(), size)
