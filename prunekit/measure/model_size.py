"""The size of a model: multiply-accumulates, parameters, bytes on disk and in memory, by module and by operator.

Bytes on disk are also those of weights with zeros as bits, and each compressed losslessly (`stored_sizes`).
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from prunekit.channels.labels.branch import is_inside
from prunekit.channels.memory_table import record_memory
from prunekit.channels.tracing.execution import ModuleStack, fused_away, plain_operators
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.channels.tracing.storages import parts_of, plain_in, shape_of, storage_of
from prunekit.compaction.model_folder import ModelWithPlan, folder_tensors, read_manifest, stored_tensors
from prunekit.errors import UsageError
from prunekit.hooks.hook import refuse_compiled
from prunekit.hooks.model_copy import named_tensors
from prunekit.hooks.wrappers import require_values, unwrapped
from prunekit.known_names import DtypeName
from prunekit.models.bitmask import write_tensors
from prunekit.modes.public_call import public_call
from prunekit.utils.context import seeded, training_mode, without_gradients
from prunekit.utils.display import Displayed, Table, share, size
from prunekit.utils.files import StrPath, folder_at
from prunekit.utils.inputs import call, running, sample_count
from prunekit.utils.tensors import gather, is_subnormal

aten = torch.ops.aten


def _grouped_product(left: Tensor, right: Tensor, *args: Any, **named: Any) -> int:
    """Count a product of matrices of which one is cut in parts, each for another matrix of a stack, as one product."""
    stacks = len(left) if left.dim() == right.dim() == 3 else 1
    return 2 * stacks * prod(left.shape[-2:]) * right.shape[-1]


_FLOPS = {aten._grouped_mm: _grouped_product, **flop_registry, aten._sparse_addmm: flop_registry[aten.addmm]}


class FlopCounter(OperatorMode):
    """Counts FLOPs (two for each multiply-accumulate) by the rules of torch's `FlopCounterMode`.

    `FlopCounterMode` itself tracks modules by hooks on the gradient functions of their inputs. It fails on the view of
    a parameter, such as a class token, which requires a gradient under `no_grad` and has no such function; and it
    doesn't look into higher-order operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operator and add its FLOPs."""
        packet = func.overloadpacket
        out = run_operator(func, args, kwargs)
        if packet in _FLOPS:
            self.flops += int(_FLOPS[packet](*args, **kwargs, out_val=out))
        return out

    @property
    def macs(self) -> int:
        """Multiply-accumulates so far."""
        return self.flops // 2


def macs_of(operator: Any, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> int | None:
    """Return the multiply-accumulates of one call, by the rules of torch's `FlopCounterMode` and those below.

    0 for an operator that is no layer; None for one of attention or recurrence without a rule.
    """
    packet = operator.overloadpacket
    if packet in _FLOPS:
        return int(_FLOPS[packet](*args, **named, out_val=result)) // 2
    if packet in _RULES:
        return _RULES[packet](args)
    return None if any(part in packet.__name__ for part in ("attention", "encoder_layer", "lstm", "gru", "rnn")) else 0


def _scaled_dot_product(args: Sequence[Any]) -> int:
    """Count scores and values, for query (..., L, E), key (..., S, E) and value (..., S, F)."""
    query, key, value = args[:3]
    return int(prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _fused_layer(args: Sequence[Any]) -> int:
    """Count an attention or encoder layer in one operator: its matrices on every token of (B, L, D), and scores."""
    batch, tokens, width = args[0].shape
    matrices = sum(part.numel() for part in args if isinstance(part, Tensor) and part.dim() == 2)
    return int(batch * tokens * (matrices + 2 * tokens * width))


_RULES: dict[Any, Callable[[Sequence[Any]], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _scaled_dot_product,
    aten._scaled_dot_product_attention_math_for_mps: _scaled_dot_product,
    aten._native_multi_head_attention: _fused_layer,
    aten._transformer_encoder_layer_fwd: _fused_layer,
}


def is_idle(operator: Any) -> bool:
    """Return whether an operator neither computes nor moves anything: a view, or memory that is not filled."""
    aliases = [value.alias_info for value in operator._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return is_view or operator.overloadpacket in _UNFILLED


_UNFILLED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}


def bytes_moved(operator: Any, args: Any, named: Any, result: Any) -> int:
    """Return the bytes of all inputs, parameters and results, each counted once."""
    if is_idle(operator):
        return 0
    return sum(_bytes(tensor) for part in (args, named, result) for tensor in gather(part))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, without the repetitions along expanded axes."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return 0
    sizes = (size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return int(prod(sizes) * tensor.element_size())


def subnormals(value: Any) -> int:
    """Return how many numbers of float32 or float64 in nested tensors are subnormal, below full precision."""
    found = 0
    for tensor in gather(value):
        if tensor.dtype in (torch.float32, torch.float64) and tensor.layout == torch.strided and not tensor.is_nested:
            found += int(is_subnormal(tensor).sum())
    return found


def count_macs(model: nn.Module, example_inputs: tuple[Tensor, ...]) -> int:
    """Return the multiply-accumulates of one sample's forward pass in eval mode, by torch's rules for FLOPs.

    Heads that only training needs and the model's own `fuse()` removes, as in YOLO, do not count. `example_inputs` is
    what forward takes, batch first.
    """
    parts = fused_away(model)

    def counted() -> int:
        running: list[int] = []
        aside = 0

        def enter(path: str, *_: Any) -> None:
            if is_inside(path, parts):
                running.append(counter.macs)

        def leave(path: str, *_: Any) -> None:
            nonlocal aside
            if is_inside(path, parts):
                start = running.pop()
                aside += 0 if running else counter.macs - start

        stack = ModuleStack(model, enter, leave) if parts else nullcontext()
        with FlopCounter() as counter, stack:
            call(model, example_inputs)
        return int((counter.macs - aside) // max(1, sample_count(example_inputs)))

    with training_mode(model, False), plain_operators(model):
        return without_gradients(counted)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameter elements; a parameter that two modules share counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, shared ones once; a weights file has only a header more."""
    return sum(part.nbytes for _, tensor in named_tensors(model) for part in parts_of(tensor))


def count_memory(model: nn.Module, example_inputs: tuple[Any, ...], batch: int = 1, dtype: DtypeName = "fp32") -> int:
    """Return the bytes of parameters, buffers, inputs and live results of operators at the peak of a forward pass.

    See `record_memory` for what is counted. A runtime takes more: kernels have workspaces, and freed memory is kept.

    `example_inputs` is what forward takes, batch first, of any batch; `dtype` is that of all floating-point tensors.

    Raises:
        ModelError: the model does not run on that.
        UsageError: the dtype is int8, which only files have, and their memory is not counted.
    """
    if dtype == "int8":
        raise UsageError("memory: expected a floating-point dtype, got 'int8': the memory of files is not counted")
    return record_memory(model, example_inputs, batch, dtype).peak_bytes


def size_bytes(path: StrPath) -> int:
    """Return the size of a file in bytes, or of all files in a folder together."""
    path = Path(path)
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ModuleRow:
    """The figures of one module, without those of modules inside it, which have rows of their own."""

    path: str  # its first path in the model; empty for the model itself
    kind: str  # its class
    # inputs, outputs: shapes of the tensors of its first call, with the batch
    inputs: Shapes
    outputs: Shapes
    params: int  # parameter elements; those of an earlier row are only in `shared_params`
    shared_params: int
    trainable: int  # of `params`, those with `requires_grad`
    macs: int  # multiply-accumulates for one sample, over all calls
    # of the tensors that its calls returned, for the whole batch, shared memory once: none for modules that work in
    # place or return a view
    activation_bytes: int
    calls: int  # in one forward pass; 0: it never runs, or another module computes with its parameters


@dataclass(frozen=True)
class ModuleTable:
    """The rows of a model, and its MACs for one sample, as `count_macs` counts them."""

    rows: tuple[ModuleRow, ...]
    macs: int
    batch: int


@dataclass
class _PassRecord:
    """The record of a forward pass, by module path."""

    order: dict[str, int] = field(default_factory=dict)  # of first calls
    inputs: dict[str, Shapes] = field(default_factory=dict)
    outputs: dict[str, Shapes] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    macs: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    # one for each storage, kept so that no other storage gets its address
    tensors: dict[int, Tensor] = field(default_factory=dict)

    def add(self, tensors: list[Tensor]) -> int:
        """Return the bytes of storages that are new, and keep them."""
        found = 0
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in self.tensors:
                self.tensors[storage._cdata] = tensor.detach()
                found += storage.nbytes()
        return found


def module_table(model: nn.Module, example_inputs: tuple[Any, ...]) -> ModuleTable:
    """Return the figures of each module in a forward pass, in eval mode without gradients.

    MACs are those of torch's `FlopCounterMode` (which counts two each), at the innermost module that runs. All outputs
    are kept until the pass has ended, which takes their memory. There are rows for modules without children that run,
    and for others with parameters, multiplications or results of their own. A module whose parameters are used although
    it is not called, as in attention, comes after the module around it, and an unused one last.
    """
    refuse_compiled(model, "summary")
    seen, batch = _run(model, example_inputs), max(1, sample_count(example_inputs))
    counted: set[int] = set()
    rows = [_row(path, module, seen, counted, batch) for path, module in _ordered(model, seen)]
    return ModuleTable(tuple(rows), sum(seen.macs.values()) // batch, batch)


def _run(model: nn.Module, example_inputs: tuple[Any, ...]) -> _PassRecord:
    seen, counter, counted = _PassRecord(), FlopCounter(), 0

    def run() -> None:
        nonlocal seen, counter, counted
        seen, counter, counted = _PassRecord(), FlopCounter(), 0
        seen.add(plain_in([*model.parameters(), *model.buffers(), example_inputs]))
        with stack, counter:
            call(model, example_inputs)

    def since() -> int:
        """Return the multiply-accumulates since the last call of this."""
        nonlocal counted
        before, counted = counted, counter.macs
        return counted - before

    def enter(path: str, module: nn.Module, given: Any) -> None:
        seen.macs[stack.paths[-2]] += since()
        seen.order.setdefault(path, len(seen.order))
        seen.inputs.setdefault(path, _shapes(given))
        seen.calls[path] += 1

    def leave(path: str, module: nn.Module, given: Any, result: Any) -> None:
        seen.macs[path] += since()
        seen.outputs.setdefault(path, _shapes(result))
        seen.bytes[path] += seen.add(plain_in(result))

    stack = ModuleStack(model, enter, leave)
    with (
        running(model, example_inputs, where=lambda: f" (in {stack.current})" if stack.current else ""),
        seeded(0), training_mode(model, False), plain_operators(model),
    ):  # fmt: skip
        without_gradients(run)
    seen.macs[""] += since()  # of hooks on the model that run after ours
    return seen


def _shapes(value: Any) -> Shapes:
    return tuple(tuple(shape_of(tensor)) for tensor in gather(value))


def _ordered(model: nn.Module, seen: _PassRecord) -> list[tuple[str, nn.Module]]:
    """Return the modules that have a row, in the order of their first calls."""
    found = []
    for index, (path, module) in enumerate(model.named_modules()):
        own = next(module.parameters(recurse=False), None) is not None
        leaf = next(module.children(), None) is None and path in seen.order
        if own or leaf or seen.macs[path] or seen.bytes[path]:
            found.append((_place(path, seen), index, path, module))
    return [(path, module) for _, _, path, module in sorted(found, key=lambda row: row[:2])]


def _place(path: str, seen: _PassRecord) -> tuple[int, int]:
    """Return a key to sort by: a module that is not called comes after the one around it, or last."""
    around = path
    while around and around not in seen.order:
        around = around.rpartition(".")[0]
    return seen.order[around] if around or not path else len(seen.order), int(around != path)


def _row(path: str, module: nn.Module, seen: _PassRecord, counted: set[int], batch: int) -> ModuleRow:
    own = list(module.parameters(recurse=False))
    fresh = [parameter for parameter in own if id(parameter) not in counted]
    counted.update(map(id, own))
    params = sum(parameter.numel() for parameter in fresh)
    return ModuleRow(
        path,
        type(module).__name__,
        seen.inputs.get(path, ()),
        seen.outputs.get(path, ()),
        params=params,
        shared_params=sum(parameter.numel() for parameter in own) - params,
        trainable=sum(parameter.numel() for parameter in fresh if parameter.requires_grad),
        macs=seen.macs[path] // batch,
        activation_bytes=seen.bytes[path],
        calls=seen.calls[path],
    )


ZSTD_LEVEL = 3
"""The level of zstd, its own default; higher ones gain little on weights."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False, repr=False)
class StoredSizes(Displayed):
    """The bytes of one model's weights file in each form."""

    plain_bytes: int  # of plain safetensors
    bitmask_bytes: int  # with zeros as bits, as `prunekit.save(..., compress=True)` writes it
    # plain_compressed_bytes, bitmask_compressed_bytes: of both after the compressor
    plain_compressed_bytes: int
    bitmask_compressed_bytes: int
    compressor: str  # its name: `zstd`, or `zlib` where no zstd is installed
    zeros: float  # share of entries whose bits are all 0, of all tensors, 0..1

    def rows(self) -> list[dict[str, Any]]:
        """Return the bytes of each form, before and after the compressor."""
        return [
            {"form": "plain", "bytes": self.plain_bytes, "compressed_bytes": self.plain_compressed_bytes},
            {"form": "bitmask", "bytes": self.bitmask_bytes, "compressed_bytes": self.bitmask_compressed_bytes},
        ]

    def figures(self) -> dict[str, Any]:
        """Return what `metrics.json` and `results.csv` hold of a model."""
        return {name: value for name, value in vars(self).items() if name != "zeros"}

    def _headline(self) -> str:
        return f"{size(self.plain_bytes)} plain, {size(self.bitmask_bytes)} as bitmask, {share(self.zeros)} zeros"

    def _parts(self) -> Iterable[str | Table]:
        yield f"Weights file: {self._headline()}"
        rows = [
            (row["form"], size(row["bytes"]), share(row["bytes"] / self.plain_bytes), size(row["compressed_bytes"]))
            for row in self.rows()
        ]
        yield Table(("form", "size", "of plain", f"by {self.compressor}"), rows)


@public_call
def stored_sizes(model: nn.Module | ModelWithPlan | StrPath) -> StoredSizes:
    """Return the bytes of a model's weights file, plain and with zeros as bits, and of both compressed losslessly.

    The compressor is zstd at its default level where Python (3.14) or the package `zstandard` (in the extra `report`)
    has it, or else zlib, which the result names. Files are written to a temporary folder, one at a time.

    Args:
        model: any model; the result of `prunekit.prune`; or the path of a model folder, compressed or not.

    Raises:
        ArtifactError: the folder is missing or damaged.
        UsageError: it is none of these.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Linear(256, 256)
        >>> with torch.no_grad():
        ...     _ = model.weight[:, ::2].zero_()
        >>> sizes = pk.stored_sizes(model)
        >>> sizes
        <StoredSizes: 263 kB plain, 141 kB as bitmask, 49.8 % zeros>
        >>> [row["form"] for row in sizes.rows() if row["compressed_bytes"] < sizes.plain_bytes]
        ['plain', 'bitmask']
    """
    tensors = _tensors(model)
    entries = sum(tensor.numel() for tensor in tensors.values())
    nonzero = sum(_nonzero(tensor) for tensor in tensors.values())
    name, make = _compressor()
    with TemporaryDirectory() as place:
        plain, bits = (_measured(tensors, Path(place, "weights"), make, compress) for compress in (False, True))
    return StoredSizes(plain[0], bits[0], plain[1], bits[1], name, 1 - nonzero / max(1, entries))


def _tensors(model: Any) -> dict[str, Tensor]:
    if isinstance(model, (str, PathLike)):
        folder = folder_at(model)
        return folder_tensors(folder, read_manifest(folder))
    found = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(found, nn.Module):
        raise UsageError(f"model: expected a model, or the path of its folder, got {type(model).__name__}")
    found = unwrapped(found)
    require_values(found, "a file")
    return stored_tensors(found)[0]


def _nonzero(tensor: Tensor) -> int:
    """Return the number of entries with any bit set."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1, 1)
    return int((flat.view(torch.uint8) != 0).any(dim=1).sum())


def _measured(tensors: dict[str, Tensor], path: Path, make: Callable[[], Any], compress: bool) -> tuple[int, int]:
    """Return the bytes of a file, and after the compressor."""
    write_tensors(tensors, path, compress=compress)
    compressor, found = make(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found += len(compressor.compress(chunk))
    return path.stat().st_size, found + len(compressor.flush())


def _compressor() -> tuple[str, Callable[[], Any]]:
    """Return the name of the compressor, and a function that makes one with `compress(chunk)` and `flush()`."""
    try:
        zstd: Any = import_module("compression.zstd")  # Python 3.14
        return "zstd", lambda: zstd.ZstdCompressor(level=ZSTD_LEVEL)
    except ImportError:
        pass
    try:
        zstandard: Any = import_module("zstandard")
        return "zstd", lambda: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
    except ImportError:
        return "zlib", zlib.compressobj
