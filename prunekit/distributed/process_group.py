"""The process group of a job: who is in it, values and sharded tensors it exchanges, and how it fails together.

It is torch's default process group. Every process must make the same calls in the same order. If one fails, all fail,
and the first says why.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from datetime import timedelta
from enum import Enum
from functools import wraps
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from prunekit.distributed.launcher import launched, local_rank
from prunekit.errors import PeerError, RunError, raised_as

BUILTINS = frozenset({
    "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice",
    "str", "tuple",
})  # fmt: skip
CLASSES = frozenset({
    ("collections", "Counter"), ("collections", "OrderedDict"), ("collections", "defaultdict"),
    ("collections", "deque"), ("datetime", "datetime"), ("datetime", "timedelta"), ("torch", "Size"),
    ("torch", "device"), ("numpy", "dtype"), ("numpy", "ndarray"),
})  # fmt: skip
PATHS = frozenset({"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"})
ARRAYS = frozenset({"_frombuffer", "_reconstruct", "scalar"})
"""Functions of NumPy that make arrays and numbers of bytes."""


def packed(value: Any) -> bytes:
    """Return a value as bytes; tensors are copied to the CPU."""
    buffer = io.BytesIO()
    _Writer(buffer, protocol=4).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value of bytes."""
    with raised_as(RunError, "process group: expected data from the main process, but ", passing=RunError):
        return _Reader(io.BytesIO(data)).load()


class _Writer(pickle.Pickler):
    """Writes tensors as bytes, which torch itself would write as a pickle in the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        plain = value.detach().cpu().contiguous()
        return _tensor, (plain.reshape(-1).view(torch.uint8).numpy().tobytes(), plain.dtype, tuple(plain.shape))


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` writes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _tensor.__name__):
            return _tensor
        root = module.partition(".")[0]
        if module in sys.modules and "." not in name:
            found = getattr(sys.modules[module], name, None)
            own = root == "prunekit" and isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
            known = (module, name) in CLASSES or (module == "builtins" and name in BUILTINS)
            path = root == "pathlib" and name in PATHS
            array = module.startswith(("numpy._core.", "numpy.core.")) and name in ARRAYS
            dtype = module == "torch" and isinstance(found, torch.dtype)
            if own or known or path or array or dtype:
                return found
        raise RunError(
            f"process group: expected data from the main process, got {module}.{name}; another program has written to "
            "the store of this run, or its processes have different versions"
        )


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

P = ParamSpec("P")
T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)
"""Of one exchange between processes that are all at work; waiting for a process that works alone has no limit."""
LONGEST_NAP_S = 0.5
"""The longest pause between two checks whether the main process is done, which may be timing models meanwhile."""
INTERRUPTED = 130
TOLD_S = 5.0
"""How long another process may take to say why it failed."""
GONE = ("by peer", "remote process exit")
"""Parts of the messages of gloo and NCCL about a process that has ended."""
LOST = (
    "another process has ended without a message: killed, out of memory, or its machine is gone; a run that keeps "
    "checkpoints goes on with --resume"
)


def rank() -> int:
    """Return the number of this process in the group, from 0."""
    return dist.get_rank() if grouped() else 0


def size() -> int:
    """Return how many processes work together; 1 without a group."""
    return dist.get_world_size() if grouped() else 1


def is_main() -> bool:
    """Return whether this is the main process, the first, which writes, logs and measures."""
    return rank() == 0


def grouped() -> bool:
    """Return whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


@contextmanager
def join_group() -> Iterator[None]:
    """Join the group that the environment describes, and leave it at the end; do nothing for a single process.

    Backends are gloo on the CPU, and nccl on CUDA if available. A group that exists already is used, and stays.
    """
    if grouped() or not launched():
        yield
        return
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())  # too few devices raise when one is used
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunError(
            f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: expected to meet the others at {where}: "
            f"{error}; check MASTER_ADDR, MASTER_PORT and that all processes are started"
        ) from error
    try:
        wait_for_all()  # else a process that fails at once would break the setup of another
        yield
    finally:
        dist.destroy_process_group()


def store() -> Store:
    """Return the store of small values that all processes of the group share."""
    return PrefixStore("prunekit", _get_default_store())


@contextmanager
def one_for_all(*passing: type[BaseException]) -> Iterator[None]:
    """Tell the other processes if this one fails; if another failed first, raise `PeerError` with its reason.

    A process that fails because another one is gone in an exchange does not count as the first.
    """
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        if size() == 1 or isinstance(error, PeerError):
            raise
        told = RunError(LOST) if isinstance(error, RuntimeError) and any(text in str(error) for text in GONE) else error
        failed = _claim(told)
        if isinstance(error, KeyboardInterrupt) and failed is not None and failed.exit_code == INTERRUPTED:
            raise  # a launcher interrupts all of them
        if failed is None and told is error:
            raise
        raise failed or told from error


def require_no_failure() -> None:
    """Raise if another process has failed."""
    found = _failure(store(), 0.0) if store().check(["failed"]) else None
    if found is not None:
        raise found[1]


def _claim(error: BaseException) -> PeerError | None:
    """Record a failure if it is the first of the group; return that of another process if it was first, else None."""
    try:
        shared = store()
        if shared.add("failed", 1) == 1:
            text = str(error) or type(error).__name__
            code = getattr(error, "exit_code", INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
            told = rank(), code, f"process {rank()} of {size()} failed: {text}"
            shared.set("failure", json.dumps(told))
            return None
        found = _failure(shared, TOLD_S)
    except (RuntimeError, ValueError):  # torch: the store is gone with the process that held it
        return PeerError("process 0 has ended", 1)
    if found is None:
        return PeerError("another process failed and did not say why", 1)
    return None if found[0] == rank() else found[1]


def _failure(shared: Store, seconds: float) -> tuple[int, PeerError] | None:
    """Return the rank and the failure of the process that failed first; None if it is not told within some seconds."""
    end = time.monotonic() + seconds
    while not shared.check(["failure"]):
        if time.monotonic() >= end:
            return None
        time.sleep(0.01)
    number, code, text = json.loads(shared.get("failure"))
    return number, PeerError(text, code)


def on_one_machine() -> bool:
    """Return whether all processes run on one machine, and so can map the same files."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return len({*gather_values((platform.node(), boot.read_text() if boot.is_file() else ""))}) == 1


def everyone(flag: bool) -> bool:
    """Return whether a flag is true in every process."""
    return total(int(flag))[0] == size()


def main_says(flag: bool) -> bool:
    """Return whether a flag is true in the main process."""
    return total(int(flag and is_main()))[0] > 0


def total(*numbers: float) -> tuple[float, ...]:
    """Return sums over all processes, in float64: exact for whole numbers up to 2^53."""
    if size() == 1:
        return numbers
    sums = torch.tensor(numbers, dtype=torch.float64, device=_where())
    dist.all_reduce(sums)
    return tuple(sums.tolist())


def total_of(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes, entry by entry; without a gradient."""
    if size() == 1:
        return values.detach()
    sums = values.detach().to(_where(values), copy=True).contiguous()
    dist.all_reduce(sums)
    return sums.to(values.device)


def gather_values(value: T) -> list[T]:
    """Return the value of each process, in their order."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def gather_on_main(value: T) -> Iterator[T]:
    """Return the value of each process in their order, one at a time, as they may be large; nothing except on main."""
    if is_main():
        return chain([value], (_received(other) for other in range(1, size())))
    dist.send_object_list([value], dst=0)
    return iter(())


def _received(source: int) -> Any:
    values: list[Any] = [None]
    dist.recv_object_list(values, src=source)
    return values[0]


def from_main(make: Callable[[], T]) -> T:
    """Return in every process what the main process makes; the others wait as long as it takes."""
    if size() == 1:
        return make()
    shared = store()
    key = f"value/{shared.add(f'turn/{rank()}', 1)}"
    if is_main():
        value = make()
        shared.set(key, packed(value))  # type: ignore[arg-type]  # bytes are text to torch's stubs
        return value
    nap = 0.001
    while not shared.check([key]):
        require_no_failure()
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_S)
    found: T = unpacked(shared.get(key))
    return found


def require_equal(value: str, what: str) -> None:
    """Raise if a value is not the same in all processes."""
    found = gather_values(value)
    differing = [str(number) for number, other in enumerate(found) if other != found[0]]
    if differing:
        raise RunError(
            f"{what}: expected the same in all {size()} processes, but process {', '.join(differing)} has something "
            f"else than process 0 ({found[int(differing[0])][:60]} and {found[0][:60]}); check that all have the same "
            "versions, recipe and data"
        )


@torch.no_grad()
def share_tensors(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Copy the main process's values into the tensors of the same names in every process."""
    if size() == 1:
        return
    named = list(tensors)
    described = "; ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named)
    require_equal(sha256(described.encode()).hexdigest(), f"names, shapes and types of {what}")
    for _, tensor in named:
        values = tensor.detach().to(_where(tensor)).contiguous()
        dist.broadcast(values, src=0)
        tensor.copy_(values)


@contextmanager
def in_turn() -> Iterator[None]:
    """Run the main process first, then one of each machine, then the others, which find what the first downloaded."""
    turn = 0 if is_main() else 1 if local_rank() == 0 else 2
    for _ in range(turn):
        wait_for_all()
    yield
    for _ in range(turn, 2):
        wait_for_all()


def wait_for_all() -> None:
    """Wait until every process has called this, as long as it takes."""
    if size() == 1:
        return
    shared = store()
    key = f"here/{shared.add(f'turn/{rank()}', 1)}"
    shared.add(key, 1)
    while shared.add(key, 0) < size():
        require_no_failure()
        time.sleep(0.01)


def _where(tensor: Tensor | None = None) -> torch.device:
    """Return the device for an exchange: that of the tensor, or else the CPU, if the group has a backend for it."""
    backends = str(dist.get_backend_config())
    if tensor is not None and tensor.device.type in backends:
        return tensor.device
    return torch.device("cpu" if "cpu" in backends else "cuda")


def main_process_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Make a function run in the main process alone; in the others it returns None at once."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_main() else None

    return run


def computed_by_main(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function run in the main process alone; the others wait for it, and return what it returned there.

    It raises in the main process what the function raises, and `PeerError` in the others.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return from_main(lambda: function(*args, **kwargs))

    return run


@computed_by_main
def main_has(value: object) -> bool:
    """Return whether the main process has a value, such as a cached result, that is not None."""
    return value is not None


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing its module, which takes most of a second."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "placements")


def is_sharded(model: nn.Module) -> bool:
    """Return whether each process has only a part of the model's parameters."""
    return any(is_shard(parameter) for parameter in model.parameters())


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, in the same memory; the tensor itself if it is not sharded."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        return cast("Tensor", tensor.to_local())  # type: ignore[attr-defined]


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, from all processes, which must all call this; itself if it is not sharded."""
    return cast("Tensor", tensor.full_tensor()) if is_shard(tensor) else tensor  # type: ignore[attr-defined]


@torch.no_grad()
def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor sharded like another one; itself if that is not sharded or has another shape."""
    if not is_shard(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
