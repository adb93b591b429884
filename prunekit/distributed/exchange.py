"""What the processes of a group tell each other. Every process must make the same calls in the same order."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prunekit.distributed.failing import require_no_failure, store
from prunekit.distributed.group import is_main, rank, size
from prunekit.distributed.launch import local_rank
from prunekit.errors import RunError

T = TypeVar("T")
LONGEST_NAP_S = 0.5
"""Between two looks at whether the main process is done: models may be timed on this machine meanwhile."""


def everyone(flag: bool) -> bool:
    """Whether it is so in every process."""
    return total(int(flag))[0] == size()


def main_says(flag: bool) -> bool:
    """Whether it is so in the main process."""
    return total(int(flag and is_main()))[0] > 0


def total(*numbers: float) -> tuple[float, ...]:
    """Sums over all processes, in float64: exact for whole numbers up to 2^53."""
    if size() == 1:
        return numbers
    sums = torch.tensor(numbers, dtype=torch.float64, device=_where())
    dist.all_reduce(sums)
    return tuple(sums.tolist())


def total_of(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes, entry by entry; without a gradient."""
    if size() == 1:
        return values.detach()
    sums = values.detach().to(_where(values), copy=True).contiguous()
    dist.all_reduce(sums)
    return sums.to(values.device)


def gather(value: T) -> list[T]:
    """The value of each process, in their order."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def gather_on_main(value: T) -> Iterator[T]:
    """The value of each process in their order, one at a time: they may be large. Elsewhere than on main nothing."""
    if is_main():
        return chain([value], (_received(other) for other in range(1, size())))
    dist.send_object_list([value], dst=0)
    return iter(())


def _received(source: int) -> Any:
    values: list[Any] = [None]
    dist.recv_object_list(values, src=source)
    return values[0]


def from_main(make: Callable[[], T]) -> T:
    """What the main process makes, in every process; those wait for it as long as it takes.

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
    found = gather(value)
    differing = [str(number) for number, other in enumerate(found) if other != found[0]]
    if differing:
        raise RunError(
            f"{what}: expected the same in all {size()} processes, but process {', '.join(differing)} has something "
            f"else than process 0 ({found[int(differing[0])][:60]} and {found[0][:60]}); check that all have the same "
            "versions, recipe and data"
        )


@torch.no_grad()
def share_tensors(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Writes the main process's values into every process's tensors of the same names.

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
    """Waits until every process is here, as long as it takes."""
    if size() == 1:
        return
    shared = store()
    key = f"here/{shared.add(f'turn/{rank()}', 1)}"
    shared.add(key, 1)
    while shared.add(key, 0) < size():
        require_no_failure()
        time.sleep(0.01)


def _where(tensor: Tensor | None = None) -> torch.device:
    """Where an exchange can be made: at the tensor, else on the CPU if the group's backends know it."""
    backends = str(dist.get_backend_config())
    if tensor is not None and tensor.device.type in backends:
        return tensor.device
    return torch.device("cpu" if "cpu" in backends else "cuda")
