"""Statistics of an activation in one pass over it, by kernels that TorchInductor, torch.compile's backend, writes.

One kernel serves every shape of its kind, in every layer and every model; the compiler's cache on disk shares it
between processes.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from prunekit.calibration.reduce import Sums, measure_eagerly, statistics

PAYS_OFF = 2**31
"""Values of one kind that are reduced eagerly before a kernel is compiled for the rest: on one core that took 2 to 4 s
longer than fused, about what compiling takes where the compiler's own cache is warm."""
LARGEST = 2**31
"""Values of an activation from which on 32-bit indices and counts do not reach."""
EXAMPLES = {2: (3136, 64), 3: (16, 64, 3136)}
"""Shapes to compile for, by number of axes: no two sizes are equal, or the compiler would take them for one."""


class Kind(NamedTuple):
    """What activations share a kernel."""

    ndim: int
    """3: (samples, channels, positions); 2: (samples, channels)."""
    dtype: torch.dtype
    device: str
    threads: int


@dataclass(frozen=True)
class Kernel:
    """What came of compiling for a kind of activation."""

    run: Callable[[Tensor], Tensor] | None
    """Does what `measure_eagerly` does; None where it could not be compiled."""
    seconds: float
    """What compiling took, once in a process."""
    error: str = ""
    """Why there is none."""


class Measure:
    """Measures activations, fused where that is possible and pays off, otherwise eagerly.

    Args:
        fused: True: from the first value; False: never; None: once `PAYS_OFF` values of a kind have been reduced.
    """

    def __init__(self, fused: bool | None) -> None:
        self._fused = fused
        self._seen: Counter[Kind] = Counter()
        self._kernels: dict[Kind, Kernel] = {}

    def __call__(self, values: Tensor) -> Tensor:
        """(arrays + 1, channels) What `measure_eagerly` returns."""
        kernel = self._kernel(values)
        return measure_eagerly(values) if kernel is None or kernel.run is None else kernel.run(values)

    def _kernel(self, values: Tensor) -> Kernel | None:
        kind = None if self._fused is False else kind_of(values)
        if kind is None:
            return None
        if self._fused is None:
            self._seen[kind] += values.numel()
            if self._seen[kind] <= PAYS_OFF:
                return None
        if kind not in self._kernels:
            self._kernels[kind] = compiled(kind)
        return self._kernels[kind]

    @property
    def form(self) -> str:
        """How values were reduced: "fused"; "eager, then fused", where that had to pay off first; or "eager", with the
        reason where it was not asked for."""
        kernels = self._kernels.values()
        if any(kernel.run for kernel in kernels):
            return "fused" if self._fused else "eager, then fused"
        if kernels:
            return f"eager ({next(iter(kernels)).error})"
        return "eager (too few values for compiling to pay off)" if self._seen else "eager"

    @property
    def compile_seconds(self) -> float:
        """What compiling the kernels in use took, once in this process."""
        return sum(kernel.seconds for kernel in self._kernels.values())


def kind_of(values: Tensor) -> Kind | None:
    """Which kernel measures values (samples, channels, positions) or (samples, channels); None: the eager form."""
    if type(values) is not Tensor or values.device.type not in ("cpu", "cuda") or values.numel() >= LARGEST:
        return None
    return Kind(values.ndim, values.dtype, values.device.type, torch.get_num_threads())


@cache
def compiled(kind: Kind) -> Kernel:
    """Compiles a kernel, once in a process; also that it failed is remembered."""
    start = time.perf_counter()
    try:
        run = _compile(torch.zeros(EXAMPLES[kind.ndim], dtype=kind.dtype, device=kind.device))
    except Exception as error:  # whatever a compiler does not like: the eager form gives the same
        reason = str(error).strip().partition("\n")[0]
        return Kernel(None, time.perf_counter() - start, f"compiling failed: {type(error).__name__}: {reason}")
    return Kernel(run, time.perf_counter() - start)


def _compile(example: Tensor) -> Callable[[Tensor], Tensor]:
    # Not through torch.compile itself: its guards cost as much as measuring a small activation, and it compiles again
    # for sizes of 1, for another grad mode, and after torch._dynamo.reset.
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch to itself, about what it imports
        from torch._inductor import standalone_compile
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(_measure_at_once, tracing_mode="symbolic")(example)
        run: Callable[[Tensor], Tensor] = standalone_compile(graph, [example], dynamic_shapes="from_graph")
        run(example)
    return run


def _measure_at_once(values: Tensor) -> Tensor:
    dims = (0,) if values.ndim == 2 else (0, 2)
    if values.dtype != torch.float64:
        values = values.float()  # comparisons of half precision are not vectorized
    wide = values.double()
    zeros = (values == 0).sum(dims, dtype=torch.int32).double()  # int32 is as wide as float32: as many to a vector
    low, high = values.amin(dims).double(), values.amax(dims).double()
    bad = torch.zeros_like(low)
    sums = Sums(wide.sum(dims), wide.square().sum(dims), wide.abs().sum(dims), zeros, bad, low, high)
    return statistics(sums, values.numel() // values.shape[1])
