"""The group of processes that work on one job: torch's default process group.

What the processes of a group tell each other. Every process must make the same calls in the same order.

One process fails, all do, and one of them says why.

Joining the group of processes that a launcher started.

Tensors of which each process has a part: the parameters of a sharded model, their gradients and momentum.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from prunekit.distributed.launcher import launched, local_rank
from prunekit.errors import PeerError, RunError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def rank() -> int:
    """Return the number of this process in the group, from 0."""
    return dist.get_rank() if grouped() else 0


def size() -> int:
    """Return how many processes work together; 1 without a group."""
    return dist.get_world_size() if grouped() else 1


def is_main() -> bool:
    """Return whether this is the process that writes, logs and measures: the first."""
    return rank() == 0


def grouped() -> bool:
    """Return whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


INTERRUPTED = 130
TOLD_S = 5.0
"""How long another process may take to say why it failed."""
GONE = ("by peer", "remote process exit")
"""What gloo and NCCL say where a process they talk to is no more."""
LOST = (
    "another process has ended without a word: killed, out of memory, or its machine is gone; a run that keeps "
    "checkpoints goes on with --resume"
)


def store() -> Store:
    """Return the small values that all processes of the group see."""
    return PrefixStore("prunekit", _get_default_store())


@contextmanager
def one_for_all(*passing: type[BaseException]) -> Iterator[None]:
    """Tell the other processes when this one fails; where another failed first, raise `PeerError` with its reason.

    A process that waits for another in an exchange fails because that is gone; it is not the one to say why.

    Args:
        passing: exceptions that are no failures.
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
    """Look whether a process has failed.

    Raises:
        PeerError: one has.
    """
    found = _failure(store(), 0.0) if store().check(["failed"]) else None
    if found is not None:
        raise found[1]


def _claim(error: BaseException) -> PeerError | None:
    """Note the first failure of the group; None where it is this process's, else the other's."""
    try:
        shared = store()
        if shared.add("failed", 1) == 1:
            text = str(error) or type(error).__name__
            code = getattr(error, "exit_code", INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
            told = rank(), code, f"process {rank()} of {size()} failed: {text}"
            shared.set("failure", json.dumps(told))
            return None
        found = _failure(shared, TOLD_S)
    except (RuntimeError, ValueError):  # torch: the store has gone with the process that held it
        return PeerError("process 0 has ended", 1)
    if found is None:
        return PeerError("another process failed and did not say why", 1)
    return None if found[0] == rank() else found[1]


def _failure(shared: Store, seconds: float) -> tuple[int, PeerError] | None:
    """Return who failed first, and how; None where it has not said so within some seconds."""
    end = time.monotonic() + seconds
    while not shared.check(["failure"]):
        if time.monotonic() >= end:
            return None
        time.sleep(0.01)
    number, code, text = json.loads(shared.get("failure"))
    return number, PeerError(text, code)


T = TypeVar("T")
LONGEST_NAP_S = 0.5
"""Between two looks at whether the main process is done: models may be timed on this machine meanwhile."""


def everyone(flag: bool) -> bool:
    """Return whether it is so in every process."""
    return total(int(flag))[0] == size()


def main_says(flag: bool) -> bool:
    """Return whether it is so in the main process."""
    return total(int(flag and is_main()))[0] > 0


def total(*numbers: float) -> tuple[float, ...]:
    """Sum over all processes, in float64: exact for whole numbers up to 2^53."""
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
    """Return the value of each process in their order, one at a time: they may be large. Elsewhere than on main
    nothing.
    """
    if is_main():
        return chain([value], (_received(other) for other in range(1, size())))
    dist.send_object_list([value], dst=0)
    return iter(())


def _received(source: int) -> Any:
    values: list[Any] = [None]
    dist.recv_object_list(values, src=source)
    return values[0]


def from_main(make: Callable[[], T]) -> T:
    """Return what the main process makes, in every process; those wait for it as long as it takes.

    Raises:
        Whatever `make` raises; in the other processes `PeerError`, once `one_for_all` has told them.
    """
    if size() == 1:
        return make()
    shared = store()
    key = f"value/{shared.add(f'turn/{rank()}', 1)}"
    if is_main():
        value = make()
        shared.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes are text to torch's stubs
        return value
    nap = 0.001
    while not shared.check([key]):
        require_no_failure()
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP_S)
    found: T = pickle.loads(shared.get(key))
    return found


def require_equal(value: str, what: str) -> None:
    """Checks that all processes have the same.

    Raises:
        RunError: they have not; names those that differ from the main one.
    """
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
    """Write the main process's values into every process's tensors of the same names.

    Raises:
        RunError: names, shapes or types differ.
    """
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
    """Main first, then one process of each machine, then the rest: what the first ones download the others find."""
    turn = 0 if is_main() else 1 if local_rank() == 0 else 2
    for _ in range(turn):
        wait_for_all()
    yield
    for _ in range(turn, 2):
        wait_for_all()


def wait_for_all() -> None:
    """Wait until every process is here, as long as it takes."""
    if size() == 1:
        return
    shared = store()
    key = f"here/{shared.add(f'turn/{rank()}', 1)}"
    shared.add(key, 1)
    while shared.add(key, 0) < size():
        require_no_failure()
        time.sleep(0.01)


def _where(tensor: Tensor | None = None) -> torch.device:
    """Return where an exchange can be made: at the tensor, else on the CPU if the group's backends know it."""
    backends = str(dist.get_backend_config())
    if tensor is not None and tensor.device.type in backends:
        return tensor.device
    return torch.device("cpu" if "cpu" in backends else "cuda")


TIMEOUT = timedelta(minutes=30)
"""Of one exchange between processes that are all at work; waiting for one that works alone has no limit."""


@contextmanager
def join_group() -> Iterator[None]:
    """Make the group that the environment describes, and leave it; nothing for a single process.

    gloo on the CPU, and nccl on CUDA where that is there. A group that exists already is used as it is, and stays.

    Raises:
        UsageError: the environment is incomplete.
        RunError: the others cannot be reached.
    """
    if grouped() or not launched():
        yield
        return
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())  # too few are an error once one is asked for
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunError(
            f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: expected to meet the others at {where}: "
            f"{error}; check MASTER_ADDR, MASTER_PORT and that all processes are started"
        ) from error
    try:
        wait_for_all()  # or one that fails at once would break what another is still setting up
        yield
    finally:
        dist.destroy_process_group()


def is_shard(tensor: Tensor) -> bool:
    """Return whether this is a DTensor; asked without an import of its module, which takes most of a second."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "placements")


def is_sharded(model: nn.Module) -> bool:
    """Return whether each process has only a part of the model's parameters."""
    return any(is_shard(parameter) for parameter in model.parameters())


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, in the same memory; the tensor itself where it is whole."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        return cast("Tensor", tensor.to_local())  # type: ignore[attr-defined]


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor put together from the parts of all processes, which must all ask; itself where it is whole."""
    return cast("Tensor", tensor.full_tensor()) if is_shard(tensor) else tensor  # type: ignore[attr-defined]


@torch.no_grad()
def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor in parts that lie where those of another do; itself where that is whole or of another
    shape.

    Args:
        tensor: the same in all processes; nothing is sent.
        like: on whose device the parts are.
    """
    if not is_shard(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
