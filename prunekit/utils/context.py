"""Context managers that restore training mode, gradients, random state, threads and devices."""

import ctypes
import gc
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from prunekit.distributed.launcher import local_rank
from prunekit.distributed.process_group import size
from prunekit.errors import ModelError, UsageError
from prunekit.modes.public_call import ModuleState
from prunekit.utils.availability import UNKNOWN_DEVICE

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def set_mode(model: M, training: bool) -> M:
    """Put a model into train or eval mode, and return it.

    A module that `torch.export` made cannot change its mode: its operators are those of the mode it was exported in.
    """
    try:
        model.train(training)
    except NotImplementedError as error:
        if training:
            raise ModelError(
                f"{type(model).__name__} cannot be put into train mode: {error} Its operators are fixed, as those of a "
                "module that torch.export made; give the module that it was exported from, and export the result"
            ) from error
        for module in model.modules():
            module.training = False
    return model


@contextmanager
def restored(objects: Iterable[Any], *names: str) -> Iterator[None]:
    """Give attributes of objects, such as `training` of modules, the values back that they had before."""
    before = [(one, name, getattr(one, name)) for one in objects for name in names]
    try:
        yield
    finally:
        for one, name, value in before:
            setattr(one, name, value)


@contextmanager
def forward_replaced(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a model's forward for a while; its hooks still run around it."""
    own = vars(model)
    before = {name: own[name] for name in ("forward",) if name in own}
    try:
        own["forward"] = forward
        yield
    finally:
        own.pop("forward", None)
        own.update(before)


@contextmanager
def training_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into train or eval mode; afterwards every module has its former mode."""
    with restored(model.modules(), "training"):
        set_mode(model, training)
        yield


HOOKED = "_output_capturing_hooks_installed"
"""The remark of a model of transformers that its own hooks, which collect hidden states, are there."""
_OF_ALL = vars(nn.Module()).keys() - {"_buffers"} | {HOOKED}
"""Attributes of all modules that a forward pass does not change; and that remark, as hooks stay."""


@contextmanager
def same_attributes(model: nn.Module) -> Iterator[None]:
    """Give the modules of a model the attributes back that they had before.

    A detector, for example, keeps the anchors that belong to the size of the last images. Anchors of a pass that
    stopped early, or that left out what was not needed, would be wrong later. Dictionaries, lists and sets that are
    attributes, and the buffers, hold what they held; what was written into a tensor stays.
    """
    before = ModuleState(model, without=_OF_ALL)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def taking_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Turn the gradients of parameters on; afterwards each is as it was."""
    every = list(parameters)
    with restored(every, "requires_grad"):
        for parameter in every:
            parameter.requires_grad_()
        yield


def gradients_of(
    value: torch.Tensor, tensors: Sequence[torch.Tensor], *, create_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients as `torch.autograd.grad` does; of reentrant checkpoints by a backward pass, `.grad` kept."""
    if not is_reentrant(value):
        return torch.autograd.grad(value, tensors, allow_unused=True, create_graph=create_graph)
    if create_graph:
        raise ModelError(
            "second derivatives: reentrant activation checkpointing has none; use use_reentrant=False, or turn "
            "checkpointing off meanwhile"
        )
    with restored(tensors, "grad"):
        for tensor in tensors:
            tensor.grad = None
        value.backward()  # type: ignore[no-untyped-call]
        return tuple(tensor.grad for tensor in tensors)


def is_reentrant(value: torch.Tensor) -> bool:
    """Return whether a value comes from reentrant activation checkpointing, which only allows `value.backward()`."""
    checkpoint = CheckpointFunction._backward_cls
    seen, ahead = set(), [value.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, checkpoint):
            return True
        seen.add(node)
        ahead += [before for before, _ in node.next_functions]
    return False


def without_gradients(forward: Callable[[], T]) -> T:
    """Return the result of a forward pass run without gradients; with them if its code takes some, as for forces."""
    try:
        with torch.no_grad():
            return forward()
    except RuntimeError as error:
        if not takes_gradients(error):
            raise
    with torch.enable_grad():
        return forward()


def takes_gradients(error: BaseException) -> bool:
    """Return whether an error was raised by code that asked for gradients where none are recorded."""
    asking = {torch.autograd.grad.__code__, torch.autograd.backward.__code__}
    return any(frame.f_code in asking for frame, _ in traceback.walk_tb(error.__traceback__))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch (CPU and CUDA); afterwards their states are restored."""
    with same_random_state():
        seed_all(seed)
        yield


@contextmanager
def same_draws(model: nn.Module) -> Iterator[None]:
    """Make a forward pass draw the same random numbers as every other one that runs in this context.

    It begins with the same seeds (see `seeded`); generators that modules hold as attributes (Python's, NumPy's and
    torch's) are restored afterwards.
    """
    held = [value for module in model.modules() for value in vars(module).values()]
    restores: list[Callable[[], object]] = []
    for value in held:
        if isinstance(value, np.random.Generator):
            bits = value.bit_generator
            restores.append(partial(setattr, bits, "state", bits.state))
        elif isinstance(value, np.random.RandomState | torch.Generator):
            restores.append(partial(value.set_state, value.get_state()))  # type: ignore[arg-type]
        elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
            restores.append(partial(value.setstate, value.getstate()))
    try:
        with seeded(0):
            yield
    finally:
        for restore in restores:
            restore()


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the states of Python's, NumPy's and torch's generators afterwards."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators: on the CPU, and on CUDA where that is in use."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to the states that `random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch for the rest of the process.

    For each kind of device that is not in use, `torch.manual_seed` notes the seed for later, with the text of the whole
    stack: that takes a hundred times as long as to seed the CPU.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
        torch.default_generator.manual_seed(seed)
    elif _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.device_count() > 0


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause Python's cycle collector, which many new small objects would start again and again."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


LARGE = 2**26
"""Bytes of a model from which on memory counts more than the tenths of a second that it takes to save some."""
KEPT = 2**28
"""Bytes of freed memory that stay with the process."""


def is_large(model: nn.Module) -> bool:
    """Return whether a model's parameters take `LARGE` bytes."""
    return sum(tensor.nbytes for tensor in model.parameters()) >= LARGE


def release_memory(model: nn.Module, *, collect: bool = True) -> None:
    """Give the memory that earlier stages used back to the system, if the model is large.

    Tensors in cycles wait for Python's collector, and glibc keeps freed memory in pieces: after the trace and the
    statistics of a model of half a gigabyte it holds several.
    """
    if is_large(model):
        if collect:
            gc.collect()
        release_freed()


def release_freed() -> None:
    """Give freed memory back that glibc keeps, where that is more than `KEPT`: taking it again takes long."""
    if sys.platform != "linux":
        return
    trim, info = (getattr(ctypes.CDLL(None), name, None) for name in ("malloc_trim", "mallinfo2"))  # of glibc alone
    if info is not None:
        info.restype = _HeapInfo
    if trim is not None and (info is None or info().sizes[8] > KEPT):
        trim(0)


class _HeapInfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`: ten sizes in bytes, the ninth that of freed memory."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run with `count` intra-op CPU threads; `None` leaves them as they are."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def on_device(device: str | torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, whose streams and graphs are the default; does nothing for other devices."""
    found = torch.device(device)
    return torch.cuda.device(found) if found.type == "cuda" else nullcontext()


def device_of(model: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Return the given device, or the one that a model's parameters are on; the CPU if it has none.

    Parameters that Accelerate offloads, and that are on the meta device between their uses, do not count.
    """
    if device is not None:
        return torch.device(device)
    return next((one.device for one in model.parameters() if not one.is_meta), torch.device("cpu"))


def resolve_device(name: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda`, `cuda:n` or `mps` means for this process."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if size() > 1 and name not in ("cpu", "cuda"):
        raise UsageError(
            f"device: expected auto, cpu or cuda for {size()} processes, each of which has its own device, got {name!r}"
        )
    if size() > 1 and name == "cuda":
        name = f"cuda:{local_rank()}"
    unknown = f"device: {UNKNOWN_DEVICE}, got {name!r}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(unknown) from None
    if device.type == "cpu" and device.index is not None:
        raise UsageError(f"{unknown}; there is one cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UsageError(
            f"device {name!r} was asked for, but this machine's CUDA devices number {found}; use --device cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device 'mps' was asked for, but this machine has none; use --device cpu")
    if device.type not in {"cpu", "cuda", "mps"}:
        raise UsageError(unknown)
    return device
