"""Files of a plan: every entry of `plan.json` and every array beside it is checked before anything is made of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from pydantic import Strict, TypeAdapter, ValidationError

from prunekit.channels.labels.branch import Branch, Branches, BranchLock, ModuleBody
from prunekit.channels.labels.constraint_solver import NOT_JOINT
from prunekit.channels.labels.label_flow import MacTerm, WidthMultiple
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap, Lock, SizeAttribute, Stored, group_labels
from prunekit.channels.tracing.channel_norms import Axes, ChannelNorm, NarrowBlock
from prunekit.channels.tracing.kept_state import KeptState
from prunekit.errors import cut_short
from prunekit.models.bitmask import unpack_bits
from prunekit.utils.inputs import InputSpec
from prunekit.utils.outputs import ReadOutputs

FORMAT, PACKED_FORMAT = 1, 2
"""Formats of the files: the second packs masks of single weights, which older versions must not read as the first."""
LIBRARY_CONFIG = "library_config"
"""Key in a plan's provenance: the entries of a configuration of transformers that say the widths."""
MOST_COLUMNS = 4
"""Columns of joint labels, see `ChannelMap.joint`."""
_Text = Annotated[str, Strict()]
_Flag = Annotated[bool, Strict()]
_Count = Annotated[int, Strict(), Ge(0), Le(2**48)]
_Axis = Annotated[int, Strict(), Ge(-64), Le(64)]
_Width = Annotated[int, Strict(), Ge(1), Le(2**31)]
_Number = Annotated[float, Strict()]
_Macs = Annotated[float, Strict(), Ge(0), Le(1e30)]
_Shape = tuple[_Count, ...]
_NormText = tuple[_Text, tuple[_Axis, ...], tuple[_Axis, ...]]


@dataclass(frozen=True)
class _Budget:
    """A budget as tables show it; further notes are those of `prunekit.register_budget`."""

    dense: _Number
    asked: _Number
    left: _Number
    unit: _Text = ""
    share: _Flag = False
    least: _Flag = False
    measured: _Flag = False


@dataclass(frozen=True)
class _Note:
    """The configuration of a compact model of transformers."""

    module: _Text
    config: dict[_Text, tuple[Any, Annotated[int, Strict()] | None]]


@dataclass(frozen=True)
class _Provenance:
    """Entries of the provenance that prunekit itself reads."""

    prune: dict[_Text, Any] = field(default_factory=dict)
    budgets: dict[_Text, _Budget] = field(default_factory=dict)
    binding: _Text | None = None


@dataclass(frozen=True)
class _Outputs:
    """The outputs that are read, as `ReadOutputs.as_text` writes them."""

    names: tuple[_Text, ...] = ()
    state: tuple[_Text, ...] = ()
    function: _Flag = False


@dataclass(frozen=True)
class _PlanText:
    """Entries of `plan.json`; those with a default are not in files of older versions."""

    provenance: dict[_Text, Any]
    shapes: dict[_Text, _Shape]
    locks: tuple[tuple[_Text, _Text, _Text, _Count], ...]
    activations: tuple[tuple[_Text, Literal["input", "output"], _Count], ...]
    macs: tuple[tuple[_Text, _Text, _Macs, _Count], ...]
    format: int = FORMAT
    element_masks: dict[_Text, _Shape] | None = None
    stored: dict[_Text, tuple[_Count, _Flag]] = field(default_factory=dict)
    sizes: tuple[tuple[_Text, _Text, _Count | None] | tuple[_Text, _Text, _Count | None, _Flag], ...] = ()
    norms: tuple[_NormText, ...] = ()
    blocks: tuple[_NormText, ...] = ()
    divided: tuple[tuple[_Text, _Count], ...] = ()
    multiples: tuple[tuple[_Width, _Width], ...] = ()
    branches: tuple[dict[str, Any], ...] = ()
    bodies: tuple[Any, ...] = ()
    branches_stay: tuple[tuple[_Text, _Text], ...] = ()
    state: tuple[tuple[_Text, _Text, _Count, _Axis], ...] = ()
    remade: tuple[tuple[_Text, _Text], ...] = ()
    inputs: tuple[tuple[_Shape, _Text, _Text | None], ...] = ()
    outputs: _Outputs = field(default_factory=_Outputs)


_TEXT, _PROVENANCE, _NOTE = TypeAdapter(_PlanText), TypeAdapter(_Provenance), TypeAdapter(_Note)


def from_files(
    text: Mapping[str, Any], tensors: Mapping[str, np.ndarray[Any, Any]]
) -> tuple[ChannelMap, np.ndarray[Any, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """Return the parts of a plan: its channel map, the kept labels, its provenance, and masks of single weights."""
    try:
        known = _TEXT.validate_python(text)
        _PROVENANCE.validate_python(known.provenance)
        if known.provenance.get(LIBRARY_CONFIG):
            _NOTE.validate_python(known.provenance[LIBRARY_CONFIG])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {_shown(first['input'])}") from error
    arrays = _Arrays(tensors)
    channel_map = _read_map(known, arrays)
    return channel_map, arrays.keep, dict(known.provenance), _read_element_masks(known, tensors)


def _shown(value: Any) -> str:
    return cut_short(ascii(value))


class _Arrays:
    """Arrays of a plan by name, each checked where it is taken: its kind, its axes, and that its labels are known."""

    def __init__(self, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self._tensors = tensors
        self.keep = self._found("keep")
        if self.keep.dtype != np.bool_ or self.keep.ndim != 1 or not self.keep.size:
            raise ValueError(f"keep: expected bool of one axis, got {self.keep.dtype} {self.keep.shape}")

    def _found(self, name: str) -> np.ndarray[Any, Any]:
        if name not in self._tensors:
            raise ValueError(f"{name} is missing in plan.safetensors")
        return self._tensors[name]

    def labels(self, name: str, *, axes: int | None = 1) -> Labels:
        """Return labels, all below the number of labels; None: of any number of axes."""
        return self.numbers(name, self.keep.size, axes=axes)

    def numbers(self, name: str, below: int, *, axes: int | None = 1) -> Labels:
        """Return whole numbers from 0 to below a bound."""
        array = self._found(name)
        if array.dtype.kind not in "iu" or (axes is not None and array.ndim != axes):
            raise ValueError(f"{name}: expected whole numbers of {axes or 'any'} axes, got {array.dtype} {array.shape}")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < below:
            raise ValueError(f"{name}: expected numbers below {below}, got {array.min()} to {array.max()}")
        return array.astype(np.int64, copy=False)

    def has(self, name: str) -> bool:
        """Return whether there is an array of this name."""
        return name in self._tensors


def _read_map(text: _PlanText, arrays: _Arrays) -> ChannelMap:
    labels = {
        name: tuple(_axis(arrays, name, axis, size) for axis, size in enumerate(shape))
        if any(arrays.has(f"labels/{name}/{axis}") for axis in range(len(shape)))
        else (None,) * len(shape)  # of whole numbers or sparse, which are never cut
        for name, shape in text.shapes.items()
    }
    if text.stored and text.stored.keys() != text.shapes.keys():
        odd = min(text.stored.keys() ^ text.shapes.keys())
        raise ValueError(f"stored: expected the names in shapes, {_shown(odd)} is only in one of them")
    for name, axis in text.divided:
        if axis >= len(text.shapes.get(name, ())):
            raise ValueError(f"divided: there is no axis {axis} of {_shown(name)}")
    n_labels = int(arrays.keep.size)
    joint = arrays.labels("joint", axes=2) if arrays.has("joint") else NOT_JOINT
    if not 3 <= joint.shape[1] <= MOST_COLUMNS:
        raise ValueError(f"joint: expected 3 or {MOST_COLUMNS} columns, got {joint.shape[1]}")
    return ChannelMap(
        labels=labels,
        shapes=text.shapes,
        n_labels=n_labels,
        groups=group_labels(labels, n_labels, joint),
        locks=tuple(Lock(*lock) for lock in text.locks),
        activations={key: arrays.labels(f"activation/{i}") for i, key in enumerate(text.activations)},
        mac_terms=tuple(
            MacTerm(module, operator, constant, tuple(arrays.labels(f"macs/{i}/{j}", axes=None) for j in range(count)))
            for i, (module, operator, constant, count) in enumerate(text.macs)
        ),
        source=None,
        norms={
            path: ChannelNorm(*_read_axes(f"norm/{i}", inputs, outputs, arrays))
            for i, (path, inputs, outputs) in enumerate(text.norms)
        },
        blocks={
            path: NarrowBlock(*_read_axes(f"block/{i}", inputs, outputs, arrays), arrays.labels(f"block/{i}"))
            for i, (path, inputs, outputs) in enumerate(text.blocks)
        },
        sizes=tuple(_read_size(i, size, arrays) for i, size in enumerate(text.sizes)),
        joint=joint,
        divided=frozenset(text.divided),
        multiples=tuple(
            WidthMultiple(arrays.labels(f"multiple/{i}", axes=None), number, least)
            for i, (number, least) in enumerate(text.multiples)
        ),
        stored={name: Stored(size, parameter) for name, (size, parameter) in text.stored.items()},
        inputs=tuple(InputSpec(shape, dtype, name) for shape, dtype, name in text.inputs),
        read=ReadOutputs.from_text(vars(text.outputs)),
        branches=_read_branches(text, arrays),
        state=KeptState(
            {
                (path, name, index): tuple(
                    arrays.labels(key) if arrays.has(key) else None for key in (f"state/{i}/{j}" for j in range(axes))
                )
                for i, (path, name, index, axes) in enumerate(text.state)
            },
            frozenset(text.remade),
        ),
    )


def _axis(arrays: _Arrays, name: str, axis: int, size: int) -> Labels | None:
    """Return the labels of an axis, as many as its size; None for an axis without labels, whose size is 1."""
    key = f"labels/{name}/{axis}"
    if not arrays.has(key):
        if size > 1:
            raise ValueError(f"{cut_short(ascii(key))} is missing in plan.safetensors, for an axis of size {size}")
        return None
    labels = arrays.labels(key)
    if labels.size != size:
        raise ValueError(f"{cut_short(ascii(key))}: expected {size} labels, as the axis is long, got {labels.size}")
    return labels


def _read_axes(key: str, inputs: tuple[int, ...], outputs: tuple[int, ...], arrays: _Arrays) -> tuple[Axes, Axes]:
    axes = tuple((axis, arrays.labels(f"{key}/{j}")) for j, axis in enumerate([*inputs, *outputs]))
    return axes[: len(inputs)], axes[len(inputs) :]


def _read_size(number: int, found: tuple[Any, ...], arrays: _Arrays) -> SizeAttribute:
    path, name, position, *whole = found
    labels = arrays.labels(f"size/{number}", axes=2)
    order = None
    if arrays.has(f"order/{number}"):
        order = arrays.numbers(f"order/{number}", 2**48 if any(whole) else len(labels))
        if len(order) != len(labels):
            raise ValueError(f"order/{number}: expected {len(labels)} positions, got {len(order)}")
    return SizeAttribute(path, name, position, labels, order, any(whole))


def _read_branches(text: _PlanText, arrays: _Arrays) -> Branches:
    bodies = {body.module: body for body in map(ModuleBody.from_json, text.bodies)}
    found = []
    for i, known in enumerate(text.branches):
        count = known.get("parts")
        if type(count) is not int or count < 1:
            raise ValueError(f"branches.{i}.parts: expected at least 1, got {_shown(count)}")
        parts = tuple(arrays.labels(f"branch/{i}/{j}") for j in range(count))
        branch = Branch.from_json(known, parts, arrays.labels(f"branch/{i}/last"))
        body = bodies.get(branch.body or "")
        if branch.body is not None and (body is None or not all(0 <= step < len(body.steps) for step in branch.steps)):
            raise ValueError(f"branches.{i}: its body has no such code: {_shown(branch.body)}, {_shown(branch.steps)}")
        named = branch.layers if branch.constant is None else (*branch.layers, branch.constant)
        unknown = next((name for name in named if name not in text.shapes), None)
        if unknown is not None:
            raise ValueError(f"branches.{i}: expected names of tensors, got {_shown(unknown)}")
        found.append(branch)
    return Branches(tuple(found), bodies, tuple(BranchLock(name, reason) for name, reason in text.branches_stay))


def _read_element_masks(text: _PlanText, tensors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
    """Return the masks of single weights: packed bits, or, in plans of format 1, one byte for each weight."""
    masks = {}
    if text.format == FORMAT:
        prefix = "element/"
        masks = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    elif text.element_masks is None:
        raise ValueError("element_masks is missing")
    for name, shape in (text.element_masks or {}).items() if text.format != FORMAT else ():
        try:
            masks[name] = unpack_bits(tensors[f"bits/{name}"], shape)
        except (KeyError, ValueError) as error:
            raise ValueError(f"element_masks: {name}: {error}") from error
    for name, mask in masks.items():
        whole = text.shapes.get(name, ())
        pairs = zip(reversed(mask.shape), reversed(whole), strict=False)
        if mask.dtype != np.bool_ or mask.ndim > len(whole) or any(size not in (1, most) for size, most in pairs):
            raise ValueError(f"element_masks: {name}: {mask.dtype} {mask.shape} does not fit a tensor of {whole}")
    return {name: torch.from_numpy(mask) for name, mask in masks.items()}
