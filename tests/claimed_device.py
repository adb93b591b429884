"""A CUDA device that is none: tensors on the CPU that say they are on `cuda:0`, and are held to it.

`claimed_cuda()` runs code as if there were a GPU. Tensors that are made on, or moved to, "cuda" are tensors of the CPU
with real values whose storages are noted down: `tensor.device` says `cuda:0`, results of operators on them are noted
down too, and an operator that is given some of these and some of the CPU's raises what CUDA raises. What makes a CPU
wait for a GPU is counted, with the line that did it. Tensors keep their type, so that code sees no subclass.

What is not shown: kernels of CUDA, streams, memory, and `torch.compile`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TORCH = str(Path(torch.__file__).parent)
BETWEEN = (__file__, f"{TORCH}/_compile.py", f"{TORCH}/_dynamo/eval_frame.py")
PACKAGE = f"{Path(__file__).parent.parent / 'prunekit'}/"
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
CROSSING = {"aten.copy_", "aten._to_copy", "aten._foreach_copy_", "aten.set_", "aten._pin_memory"}
"""Operators whose arguments may be on different devices."""
INDEXED = {"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index"}
"""Operators that move their indices by themselves."""
WAITING = {
    "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.unique_dim", "aten._unique2",
    "aten.unique_consecutive", "aten.bincount", "aten._linalg_check_errors", "aten.is_nonzero", "aten.item",
    "aten.histc",
}  # fmt: skip
"""Operators that have a size or a number to wait for."""


@dataclass(frozen=True)
class Wait:
    """What made the CPU wait for the device, and the innermost line outside of torch."""

    what: str
    path: str
    line: int
    function: str

    @property
    def of_the_package(self) -> bool:
        return self.path.startswith(PACKAGE)

    def __str__(self) -> str:
        return f"{self.what} at {self.path.removeprefix(PACKAGE)}:{self.line} in {self.function}"


@dataclass
class Device:
    """What happens on the claimed device.

    Attributes:
        waits: what the CPU waited for, in order.
        uploads: copies from the CPU to the device, in order.
    """

    waits: list[Wait] = field(default_factory=list)
    uploads: list[Wait] = field(default_factory=list)
    _storages: dict[int, StorageWeakRef] = field(default_factory=dict)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        storage = storage_of(tensor)
        return storage is not None and storage._cdata in self._storages

    def place(self, tensor: Tensor, here: bool = True) -> Tensor:
        """Note down that a tensor's storage is on the device, or that it is not."""
        storage = storage_of(tensor)
        if storage is not None and here:
            if len(self._storages) % 4096 == 4095:
                self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
            self._storages[storage._cdata] = StorageWeakRef(storage)  # which keeps the address from being used again
        elif storage is not None:
            self._storages.pop(storage._cdata, None)
        return tensor

    def ours(self) -> list[str]:
        """What this package's own lines made the CPU wait for."""
        return [str(wait) for wait in self.waits if wait.of_the_package]

    def waited(self, what: str) -> None:
        self.waits.append(_wait(what))

    def uploaded(self, what: str) -> None:
        self.uploads.append(_wait(what))


def storage_of(tensor: Tensor) -> Any:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if _real_device(tensor).type != "cpu":
        return None
    if tensor.layout != torch.strided:
        with torch._C.DisableTorchFunction():
            tensor = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
    return tensor.untyped_storage() if torch._C._has_storage(tensor) else None


def _real_device(tensor: Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        return torch._C.TensorBase.device.__get__(tensor)  # type: ignore[attr-defined]


def _wait(what: str) -> Wait:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((TORCH, __file__)):
        frame = frame.f_back
    return Wait(what, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def _call() -> tuple[int, int]:
    """The line of Python, and the instruction in it, that called into torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in BETWEEN:
        frame = frame.f_back
    return id(frame), frame.f_lasti


class _Mode(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self._born: dict[int, tuple[StorageWeakRef, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in given if self.device.holds(tensor)]
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs["device"] = CPU
        name = str(func.overloadpacket)
        self._check(name, func, args, given, here)
        self._count(name, args, kwargs, here, asked)
        result = func(*args, **kwargs)
        if here or (asked is not None and torch.device(asked).type == "cuda"):
            known = {storage._cdata for tensor in given if (storage := storage_of(tensor)) is not None}
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and (own := storage_of(leaf)) is not None and own._cdata not in known:
                    self.device.place(leaf)
        elif not given and isinstance(result, Tensor) and (own := storage_of(result)) is not None:
            self._born[own._cdata] = (StorageWeakRef(own), _call())
            if len(self._born) > 64:
                del self._born[next(iter(self._born))]
        return result

    def _of_this_call(self, tensor: Tensor) -> bool:
        """Whether the same call into torch made a tensor: it is where the arguments are, as `self.options()` says."""
        storage = storage_of(tensor)
        if storage is None or self._born.get(storage._cdata, (None, None))[1] != _call():
            return False
        self.device.place(tensor)
        return True

    def _check(self, name: str, func: Any, args: Any, given: list[Tensor], here: list[Tensor]) -> None:
        if not here or name in CROSSING:
            return
        if name in INDEXED:
            if not self.device.holds(args[0]):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            given = [args[0], *args[2:3]]
        apart = [
            tensor
            for tensor in given
            if isinstance(tensor, Tensor)
            and tensor.dim()
            and tensor.numel()
            and _real_device(tensor).type == "cpu"
            and not self.device.holds(tensor)
            and not self._of_this_call(tensor)
        ]
        if apart:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({func}, {[tuple(tensor.shape) for tensor in apart]} on the CPU)"
            )

    def _count(self, name: str, args: Any, kwargs: Any, here: list[Tensor], asked: Any) -> None:
        if name in ("aten.copy_", "aten._foreach_copy_"):
            to, source = (tree_leaves(each)[0] for each in args[:2])
            if self.device.holds(source) and not self.device.holds(to):
                self.device.waited("copy_ to the CPU")
            elif self.device.holds(to) and not self.device.holds(source) and source.dim():
                self.device.uploaded("copy_")
        elif name == "aten._to_copy" and asked is not None and torch.device(asked).type == "cuda" and not here:
            self.device.uploaded("to")
        elif here and (name in WAITING or (name == "aten.repeat_interleave" and kwargs.get("output_size") is None)):
            self.device.waited(name.removeprefix("aten."))
        elif here and name in INDEXED:
            indices = [index for index in args[1] if index is not None]
            if name in ("aten.index", "aten._unsafe_index") and any(
                index.dtype in (torch.bool, torch.uint8) for index in indices
            ):
                self.device.waited("index by booleans")
            elif any(index.dim() and not self.device.holds(index) for index in indices):
                self.device.uploaded("indices of the CPU")


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: Device, there: bool) -> Tensor:  # type: ignore[override]
        ctx.device, ctx.back = device, not there
        return device.place(tensor.detach().clone(), there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Crossing.apply(gradient, ctx.device, ctx.back), None, None


def _moved(device: Device, tensor: Tensor, to_device: bool) -> Tensor:
    if to_device:
        device.uploaded("to")
    else:
        device.waited("to the CPU")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError("a move inside a transform of functions")
    moved: Tensor = _Crossing.apply(tensor, device, to_device)
    return moved


def _to(device: Device, raw: Any, self: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    rest, target = list(args), kwargs.pop("device", None)
    other = kwargs.pop("other", None)
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
    elif rest and not isinstance(rest[0], torch.dtype):
        target = rest.pop(0)
    if other is not None:
        target, kwargs["dtype"] = other.device, other.dtype
    names = ("non_blocking", "copy") if other is not None else ("dtype", "non_blocking", "copy")
    kwargs |= zip(names, rest, strict=False)
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    target = (
        None if target is None else torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
    )
    real = _real_device(self)
    if (
        target is None
        or target.type not in ("cpu", "cuda")
        or real.type != "cpu"
        or type(self).__name__ == "FakeTensor"
    ):
        if target is not None and target.type == "cuda" and real.type == "meta" and type(self).__name__ != "FakeTensor":
            target = CPU  # raises what a tensor without values raises
        return raw(self, **kwargs) if target is None else raw(self, target, **kwargs)  # type: ignore[no-any-return]
    if (target.type == "cuda") == device.holds(self):
        return raw(self, **kwargs) if kwargs.keys() - {"non_blocking"} else self
    moved = _moved(device, self, target.type == "cuda")
    kwargs = {key: value for key, value in kwargs.items() if key not in ("non_blocking", "copy")}
    return raw(moved, **kwargs) if kwargs else moved


def _made(device: Device, raw: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What `zeros_like` and `new_zeros` make: on the device of their tensor where none is named."""
    if not isinstance(self, Tensor) or type(self).__name__ == "FakeTensor" or self.device.type not in ("cpu", "cuda"):
        return raw(self, *args, **kwargs)
    target = kwargs.pop("device", None)
    there = device.holds(self) if target is None else torch.device(target).type == "cuda"
    if target is not None and torch.device(target).type not in ("cpu", "cuda"):
        return raw(self, *args, **kwargs, device=target)
    return device.place(raw(self, *args, **kwargs), there)


def _as_tensor(raw: Any, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    if isinstance(data, Tensor):
        return data.to(device=device or data.device, dtype=dtype or data.dtype)
    made: Tensor = raw(data, dtype=dtype)
    return made if device is None else made.to(device)


def _tensor(raw: Any, data: Any, *, device: Any = None, requires_grad: bool = False, **more: Any) -> Tensor:
    made: Tensor = raw(data, **more)
    return (made if device is None else made.to(device)).requires_grad_(requires_grad)


def _numpy(device: Device, raw: Any, self: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    if device.holds(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    return raw(self, *args, **kwargs)


def _tolist(device: Device, raw: Any, self: Tensor) -> Any:
    if device.holds(self):
        device.waited("tolist")
    return raw(self)


def _clone(device: Device, raw: Any, self: Any) -> Any:
    twin = raw(self)
    if self._cdata in device._storages:
        device._storages[twin._cdata] = StorageWeakRef(twin)
    return twin


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def synchronize(self) -> None: ...


def _patches(device: Device) -> Iterator[Any]:
    def method(owner: Any, name: str, function: Callable[..., Any], *first: Any) -> Any:
        raw = getattr(owner, name)
        return mock.patch.object(owner, name, wraps(raw)(_bound(partial(function, *first, raw))))

    def where(self: Tensor) -> torch.device:
        real = _real_device(self)
        return CUDA if real.type == "cpu" and device.holds(self) else real

    for name, value in {
        "device": property(where),
        "is_cuda": property(lambda self: self.device.type == "cuda"),
        "is_cpu": property(lambda self: self.device.type == "cpu"),
    }.items():
        yield mock.patch.object(Tensor, name, value, create=True)
    methods = {
        "cpu": lambda self, *a, **k: self.to("cpu"), "cuda": lambda self, *a, **k: self.to("cuda"),
        "get_device": lambda self: 0 if self.device.type == "cuda" else -1, "pin_memory": lambda self, *a, **k: self,
        "record_stream": lambda self, stream: None,
    }  # fmt: skip
    for name, replaced in methods.items():
        yield mock.patch.object(Tensor, name, replaced)
    yield method(Tensor, "to", _to, device)
    yield method(Tensor, "numpy", _numpy, device)
    yield method(Tensor, "tolist", _tolist, device)
    for name in NEW:
        yield method(Tensor, name, _made, device)
    for name in LIKE:
        yield method(torch, name, _made, device)
    yield method(torch, "as_tensor", _as_tensor)
    yield method(torch, "tensor", _tensor)
    yield method(torch.UntypedStorage, "clone", _clone, device)
    properties = SimpleNamespace(
        name="claimed", total_memory=8 << 30, major=8, minor=0, multi_processor_count=1, uuid="0"
    )
    cuda = {
        "is_available": lambda: True, "device_count": lambda: 1, "_lazy_init": lambda: None,
        "is_initialized": lambda: True, "current_device": lambda: 0, "empty_cache": lambda: None,
        "synchronize": lambda *a: device.waited("synchronize"), "get_rng_state_all": list,
        "set_rng_state_all": lambda states: None, "manual_seed_all": lambda seed: None,
        "mem_get_info": lambda *a: (8 << 30, 8 << 30), "get_device_name": lambda *a: "claimed",
        "get_device_properties": lambda *a: properties, "get_device_capability": lambda *a: (8, 0), "Event": _Event,
        "Stream": mock.MagicMock, "current_stream": lambda *a: mock.MagicMock(), "stream": lambda *a: nullcontext(),
        "device": lambda *a: nullcontext(), "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *a: True, "memory_allocated": lambda *a: 0,
        "max_memory_allocated": lambda *a: 1 << 20, "reset_peak_memory_stats": lambda *a: None,
    }  # fmt: skip
    for name, replaced in cuda.items():
        yield mock.patch.object(torch.cuda, name, replaced)
    idle = SimpleNamespace(is_capturing=lambda: False)
    for name, replaced in {"current_stream": lambda *a: idle, "current_device_index": lambda: 0}.items():
        yield mock.patch.object(torch.accelerator, name, replaced)


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)  # a function binds to its object


@contextmanager
def claimed_cuda() -> Iterator[Device]:
    """Run with a device `cuda:0` that the CPU plays."""
    device = Device()
    with ExitStack() as stack:
        for patch in _patches(device):
            stack.enter_context(patch)
        stack.enter_context(_Mode(device))
        yield device
