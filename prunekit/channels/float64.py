"""Models in float64: modes in which narrower floats act as float64, and weights that are converted while they run.

Results of two models that compute the same differ there by rounding alone, some 1e-15; so one method or module can be
tried in place of another on the arguments of a call (`first_calls`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from prunekit.channels.cut.shorter_model import ConstantModule
from prunekit.channels.cut.slicing import KeptIndices, blank
from prunekit.channels.tracing.execution import ModuleStack, as_in_trace
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.channels.tracing.storages import is_plain
from prunekit.channels.tracing.traced_run import TracedRun
from prunekit.hooks.model_copy import has_gradients, named_tensors, with_tensors
from prunekit.hooks.owner import HookOwner, after_forward, before_forward
from prunekit.utils.context import LARGE, release_freed
from prunekit.utils.inputs import call
from prunekit.utils.private_torch import without_torch_dispatch
from prunekit.utils.tensors import AT_ONCE, gather, in_parts, map_tensors

TOLERANCE = 1e-9
"""Largest difference over the largest reference value that float64 rounding explains."""

ROUNDING = {torch.float64: TOLERANCE, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The same by the precision of the computation, for models that do not run in float64."""

FILLER = 1e6
"""Larger values count as fillers, such as those that mask attention, and not for the scale of the run."""

CANCELED = 1e-4
"""Below this share of the largest value in the run, a sum may be rounding alone."""

NOT_FINITE = "NaN or Inf where the other model has none"
"""The difference where a masked model divides by zero."""

WIDE = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
WIDE[torch.complex64] = torch.complex128
NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}


class _Widened(OperatorMode):
    """A mode in which every operator that takes or makes narrower floats computes in float64."""

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator in float64."""
        name = func._schema.name
        if func.is_view and name != "aten::lift_fresh":  # the same memory, which is widened where it is computed with
            return func(*args, **kwargs)
        if name.endswith("_") and isinstance(args[0], torch.Tensor) and args[0].dtype in WIDE:
            own = {WIDE[args[0].dtype]: args[0].dtype}
            return func(args[0], *_changed(args[1:], own), **kwargs)
        # `x.float()` then rounds nothing, and masks made in float32 meet no float64 where torch requires one type
        wide = IN_FLOAT64.get(name, partial(run_operator, func))
        out = wide(_changed(args, WIDE), _changed(kwargs, WIDE))
        return out if func._schema.is_mutable else _changed(out, WIDE)


def _grouped_product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Compute `torch.nn.functional.grouped_mm` of two matrices, or stacks of matrices, part by part."""
    left, right, offsets, bias = (*args, *[kwargs.get(name) for name in ("offs", "bias")[len(args) - 2 :]])[:4]
    out = torch.bmm(left, right) if offsets is None else _product_of_parts(left, right, offsets.tolist())
    return out if bias is None else out + bias


def _product_of_parts(left: torch.Tensor, right: torch.Tensor, ends: list[int]) -> torch.Tensor:
    parts = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    if left.dim() == right.dim() == 2:
        return torch.stack([left[:, part] @ right[part] for part in parts])
    stack = left if left.dim() == 3 else right
    if len(stack) != len(parts):
        raise RuntimeError(f"grouped_mm: {len(parts)} offsets for a stack of {len(stack)} matrices")
    if left.dim() == 3:
        return torch.cat([one @ right[:, part] for one, part in zip(left, parts, strict=True)], 1)
    return torch.cat([left[part] @ one for one, part in zip(right, parts, strict=True)])


IN_FLOAT64: dict[str, Callable[[Any, Any], Any]] = {"aten::_grouped_mm": _grouped_product}
"""Operator that torch has for narrower floats alone -> the same in float64."""


def _changed(value: Any, dtypes: dict[torch.dtype, torch.dtype]) -> Any:
    """Return an operator's arguments or results with some types replaced by others."""
    if isinstance(value, torch.Tensor):
        return value.to(dtypes[value.dtype]) if value.dtype in dtypes else value
    if isinstance(value, torch.dtype):
        return dtypes.get(value, value)
    if isinstance(value, (tuple, list)):
        return type(value)([_changed(item, dtypes) for item in value])
    if isinstance(value, dict):
        return {key: _changed(item, dtypes) for key, item in value.items()}
    return value


class _ReportedNarrow(TorchFunctionMode):
    """A mode in which float64 tensors report that they are float32, for code that requires it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return NARROW.get(result, result) if isinstance(result, torch.dtype) else result


@contextmanager
def _reported_narrow() -> Iterator[None]:
    with _Widened(), _ReportedNarrow():
        yield


Precision = Callable[[], AbstractContextManager[Any]]
AS_DOUBLE: tuple[Precision, ...] = (_Widened, _reported_narrow)
"""Modes in which a model runs in float64 if its tensors and inputs do, to be tried in this order."""
OWN: Precision = nullcontext
"""No mode: a model's own precision, for operators that take only float32 or bfloat16."""
Convert = Callable[[str, torch.Tensor], torch.Tensor]


def to_double(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU, in float64 or complex128 if it is of such numbers."""
    wide = torch.float64.to_complex() if tensor.is_complex() else torch.float64
    return tensor.detach().to("cpu", wide if has_gradients(tensor) else None, copy=True)


def as_it_is(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU, in its own precision."""
    return tensor.detach().to("cpu", copy=True)


def with_zeros(convert: Convert, kept: KeptIndices, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a converted tensor with zeros in place of removed entries."""
    converted = convert(name, tensor)
    return blank(converted, kept[name]) if name in kept else converted


def float64_copy(model: nn.Module, convert: Convert) -> nn.Module:
    """Return a copy of a model with all its tensors converted."""
    return with_tensors(model, {name: convert(name, tensor) for name, tensor in named_tensors(model)})


def float64_inputs(
    example: tuple[Any, ...], dtype: torch.dtype | None = torch.float64, *, noise: bool = True
) -> tuple[Any, ...]:
    """Return the example in float64, or in its own precision with None; constant tensors become noise.

    Constant inputs would hide differences.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not has_gradients(tensor):
            return tensor.cpu()
        wanted = tensor.dtype if dtype is None else dtype.to_complex() if tensor.is_complex() else dtype
        known = is_plain(tensor) and tensor.numel() > 1 and not tensor.is_meta
        constant = known and bool((tensor == tensor.reshape(-1)[0]).all())
        if tensor.is_meta or (constant and noise):
            return torch.randn(tensor.shape, dtype=wanted, generator=torch.Generator().manual_seed(0))
        return tensor.detach().to("cpu", wanted)

    return tuple(map_tensors(value, convert) for value in example)


@dataclass(frozen=True)
class RunPrecision:
    """One precision in which two models are compared."""

    convert: Convert  # converts their tensors
    dtype: torch.dtype | None  # of the inputs; None for their own
    precision: Precision  # the mode in which they run

    def inputs(self, example: tuple[Any, ...], *, noise: bool = True) -> tuple[Any, ...]:
        """Return an example in this precision, see `float64_inputs`."""
        return float64_inputs(example, self.dtype, noise=noise)

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as equal for tensors of at least float32."""
        return ROUNDING[torch.float32] if self.dtype is None else TOLERANCE


RUN_PRECISIONS = (
    *(RunPrecision(to_double, torch.float64, precision) for precision in AS_DOUBLE),
    RunPrecision(as_it_is, None, OWN),
)
"""In the order in which they are tried: float64, and the model's own precision only if it does not run in that."""


class Float64WhileRunning(HookOwner):
    """Converts a module's own tensors when its forward begins and drops them when it ends; on a copy, `model`.

    It takes only the memory of the largest module. Modules in `whole` are converted together with all their parts,
    which a hook on them may run. Tensors that another module than their owner uses are converted only if `borrowed` has
    the paths of both (see `TracedRun`): otherwise such a model fails or differs, and is run again as a `float64_copy`.
    """

    def __init__(
        self, model: nn.Module, convert: Convert, whole: Iterable[str] = (), borrowed: Iterable[tuple[str, str]] = ()
    ) -> None:
        super().__init__()
        self._whole, self._borrowed = tuple(whole), tuple(borrowed)
        self.model = with_tensors(model, {name: tensor.detach() for name, tensor in named_tensors(model)})
        self.convert = convert
        self._names = {id(tensor): name for name, tensor in named_tensors(self.model)}
        self._users: Counter[int] = Counter()
        self._own: dict[int, dict[str, Any]] = {}

    def register(self) -> None:
        """Add a forward-pre and a forward hook to every module that owns or uses tensors."""
        modules = dict(self.model.named_modules())
        used = {path: [module] for path, module in modules.items()}
        for path in self._whole:
            used[path] = list(modules[path].modules())
        for path, owner in self._borrowed:
            if path in modules and owner in modules:  # branches that are gone are not there
                used[path].append(modules[owner])
        for path, module in modules.items():
            if isinstance(module, (torch.jit.ScriptModule, ConstantModule)):  # its parts run without their hooks
                used[path] = list(module.modules())
        for path, module in modules.items():
            tables = [table for one in used[path] for table in (one._parameters, one._buffers)]
            filled = [table for table in tables if any(tensor is not None for tensor in table.values())]
            if filled:
                self.own(before_forward(module, self._begin(filled)))
                self.own(after_forward(module, self._end(filled), always_call=True))

    def _begin(self, tables: list[dict[str, Any]]) -> Callable[..., None]:
        tensors = [tensor for table in tables for tensor in table.values() if tensor is not None]
        large = sum(tensor.numel() * tensor.element_size() for tensor in tensors) >= LARGE

        def hook(module: nn.Module, args: Any) -> None:
            if large:
                release_freed()
            with without_torch_dispatch():
                for table in tables:
                    self._users[id(table)] += 1
                    if self._users[id(table)] == 1:
                        self._own[id(table)] = dict(table.items())
                        named = {key: (self._names[id(t)], t) for key, t in table.items() if t is not None}
                        _write(table, {key: self.convert(*pair) for key, pair in named.items()})

        return hook

    def _end(self, tables: list[dict[str, Any]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for table in tables:
                self._users[id(table)] -= 1
                if not self._users[id(table)]:
                    _write(table, self._own.pop(id(table)))

        return hook


def _write(table: dict[str, Any], entries: dict[str, Any]) -> None:
    for key, value in entries.items():  # one by one, as the table of a scripted module requires
        table[key] = value


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode and in float64, by operators that the trace knows."""
    with as_in_trace(model, False), AS_DOUBLE[0]():
        yield


@dataclass(frozen=True)
class ForwardCall:
    """One call of a module."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    outputs: list[torch.Tensor]

    def gives(self, run: Callable[..., Any]) -> bool:
        """Return whether a function of these arguments returns the same but for rounding; False if it fails."""
        args, named = map_tensors((self.args, self.named), torch.clone)
        with suppress(Exception):
            return same_tensors(self.outputs, gather(run(*args, **named)))
        return False


def first_calls(
    model: nn.Module, paths: Iterable[str], example: tuple[Any, ...], run: TracedRun, *, partly: bool = False
) -> dict[str, ForwardCall]:
    """Return the first call of each of some modules; `partly`, those before an error of the model, if it raises one."""
    given: dict[str, Any] = {}
    found: dict[str, ForwardCall] = {}
    wanted = set(paths)

    def enter(path: str, module: nn.Module, inputs: Any) -> None:
        if path in wanted and path not in given:
            given[path] = map_tensors(inputs, torch.clone)

    def leave(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if path in given and path not in found:
            args, named = given[path]
            found[path] = ForwardCall(args, named, [tensor.clone() for tensor in gather(output)])

    with Float64WhileRunning(model, to_double, borrowed=run.borrowed) as running:
        stack = ModuleStack(running.model, enter, leave)
        errors = [Exception] if partly else []
        with suppress(*errors), evaluating(running.model), stack:
            call(running.model, float64_inputs(example))
    return found


def same_tensors(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> bool:
    """Return whether two lists of tensors are equal but for rounding."""
    pairs = zip(want, got, strict=False)
    return len(want) == len(got) and all(relative_difference(a, b, 0.0)[0] <= TOLERANCE for a, b in pairs)


def largest_value(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, ten times faster than the infinity norm does."""
    low, high = torch.aminmax(tensor)
    return abs(max(-float(low), float(high))) if low == low else float("nan")  # not -0.0


def largest_gap(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest absolute difference, NaN if there is one; of wide outputs some rows at a time."""
    if want.numel() <= AT_ONCE or not want.dim():
        return largest_value(want - got)
    gaps = [largest_value(a - b) for a, b in zip(in_parts(want), in_parts(got), strict=True)]
    return max(gaps) if all(gap == gap for gap in gaps) else float("nan")


def relative_difference(want: torch.Tensor | None, got: torch.Tensor, peak: float) -> tuple[float, str, float]:
    """Return the relative difference, its description, and the largest value so far in the run.

    Values that cancel to less than `CANCELED` of that largest value are rounding, and are measured against it.
    """
    if want is None:
        return 0.0, "", peak
    if want.shape != got.shape:
        return float("inf"), f"shape {tuple(got.shape)}, expected {tuple(want.shape)}", peak
    if not want.numel() or want.is_meta:
        return 0.0, "", peak
    if want.is_complex() and got.is_complex():
        want, got = torch.view_as_real(want.resolve_conj()), torch.view_as_real(got.resolve_conj())
    if not want.is_floating_point():
        same = torch.equal(want, got)
        return (0.0, "", peak) if same else (float("inf"), "integer or boolean values differ", peak)
    largest = largest_value(want)
    peak = max(peak, largest) if largest < FILLER else peak
    scale = max(largest, CANCELED * peak, torch.finfo(want.dtype).tiny)
    difference = largest_gap(want, got) / scale
    if difference != difference or largest == float("inf"):
        finite = want.isfinite()
        if finite.all() or not torch.equal(want[~finite].nan_to_num(), got[~finite].nan_to_num()):
            return float("inf"), NOT_FINITE, peak
        return relative_difference(want[finite], got[finite], peak)
    return difference, f"values differ by {difference:.3g} of the largest", peak


def rounding(tensors: Iterable[torch.Tensor]) -> float:
    """Return the relative difference that rounding explains in the tensor of lowest precision."""
    dtypes = {tensor.dtype.to_real() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    return max((ROUNDING.get(dtype, ROUNDING[torch.bfloat16]) for dtype in dtypes), default=0.0)
