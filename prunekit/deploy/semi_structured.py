"""Linear layers with 2:4 weights, packed for the sparse tensor cores of NVIDIA GPUs (Mishra et al., 2021)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from prunekit.compaction.zero_patterns import zero_pattern
from prunekit.errors import VerificationError
from prunekit.hooks.model_copy import copied
from prunekit.hooks.wrappers import unwrapped
from prunekit.measure.latency.timing_job import TOLERANCES
from prunekit.measure.verification import largest_difference
from prunekit.modes.public_call import public_call
from prunekit.utils.context import device_of, set_mode, training_mode
from prunekit.utils.display import listed
from prunekit.utils.inputs import as_example, call
from prunekit.utils.tensors import map_tensors

DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of weights that are packed; int8 needs activations in int8 too, and float32 would be rounded to TF32."""
CAPABILITY = (8, 0)
"""Oldest architecture with sparse tensor cores: Ampere."""


@dataclass(frozen=True, eq=False)
class SemiStructuredModel:
    """Result of `semi_structured`."""

    model: nn.Module  # a new one in eval mode; the given one if no layer was packed
    packed: tuple[str, ...]  # paths of the layers whose weights are packed
    dense: dict[str, str]  # path of each other layer with zeros -> why it is computed as it was
    backend: str = ""  # what computes the packed layers, "cusparselt" or "cutlass"; empty if there are none
    max_relative_difference: float = 0.0  # of the outputs on the example, in the model's dtype

    def __str__(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.dense.items():
            by_reason.setdefault(reason, []).append(path or "(root)")
        kernels = f" by {self.backend}" if self.backend else ""
        lines = [f"2:4: {len(self.packed)} layers packed{kernels}"]
        return "; ".join(lines + [f"{listed(paths, 3)} dense: {reason}" for reason, paths in by_reason.items()])


@public_call
def semi_structured(model: nn.Module, example: Any) -> SemiStructuredModel:
    """Return a copy whose 2:4 linear layers are computed by sparse tensor cores, where the model's device has them.

    Weights are packed as `torch.sparse.to_sparse_semi_structured` packs them: half of the numbers and their positions.
    Each is unpacked again and compared bit for bit, and outputs are compared in the model's dtype. Layers that cannot
    be packed stay as they are, with the reason; on a CPU, or a GPU without sparse tensor cores, these are all. The copy
    is for inference on this device, and is neither saved nor moved: save the model, and pack what was loaded. What it
    gains has not been measured yet.

    Args:
        model: on its device, in float16 or bfloat16; not changed.
        example: what it is called with: a tensor, a tuple of positional arguments or a mapping of arguments by name.

    Raises:
        UsageError: the example is none of these.
        VerificationError: a packed weight is another one, or the copy computes something else.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).half()
        >>> model[0].weight.data[:, ::2] = 0
        >>> found = pk.semi_structured(model, torch.randn(8, 64).half())
        >>> found.packed, found.dense  # on a CPU
        ((), {'0': 'on cpu: 2:4 kernels are those of NVIDIA GPUs from compute capability 8.0 on'})
    """
    model = unwrapped(model)
    given, device = as_example(model, example), device_of(model)
    kind = usable_backend(device)
    fitting, dense = packable(model, kind or SparseSemiStructuredTensorCUTLASS)
    if kind is None or not fitting:
        oldest = ".".join(map(str, CAPABILITY))
        missing = f"on {device}: 2:4 kernels are those of NVIDIA GPUs from compute capability {oldest} on"
        return SemiStructuredModel(model, (), dict.fromkeys(fitting, missing) if kind is None else dense)
    result = set_mode(pack(copied(model), fitting, kind), False)
    inputs = map_tensors(given, lambda tensor: tensor.to(device))
    difference = _compare(model, result, inputs)
    return SemiStructuredModel(result, fitting, dense, kind.BACKEND, difference)


def usable_backend(device: torch.device) -> type[SparseSemiStructuredTensor] | None:
    """Return the kernels for 2:4 that torch has on a device; None if it has none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        return None
    cusparselt = torch.backends.cusparselt.is_available()
    return SparseSemiStructuredTensorCUSPARSELT if cusparselt else SparseSemiStructuredTensorCUTLASS


def packable(model: nn.Module, kind: type[SparseSemiStructuredTensor]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the linear layers that kernels can compute packed, and why each other layer with zeros cannot be."""
    fitting, dense = [], {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | _ConvNd) and bool((module.weight == 0).any()):
            reason = _reason(module, kind)
            if reason:
                dense[path] = reason
            else:
                fitting.append(path)
    return tuple(fitting), dense


def _reason(module: nn.Linear | _ConvNd, kind: type[SparseSemiStructuredTensor]) -> str:
    """Return why a layer cannot be packed; empty if it can."""
    if isinstance(module, _ConvNd):
        return "a convolution: torch has 2:4 kernels for linear layers alone, TensorRT for both"
    weight = module.weight
    if weight.dtype not in DTYPES:
        return f"its weight is in {str(weight.dtype).removeprefix('torch.')}, expected float16 or bfloat16"
    found = zero_pattern(weight)
    if weight.shape[1] % 4 == 0 and not found.two_of_four:
        return f"not 2:4: {found.most[4]} of some 4 weights in a row are not zero"
    least = kind._DTYPE_SHAPE_CONSTRAINTS[weight.dtype]
    rows, columns = least.sparse_min_rows, least.sparse_min_cols
    if weight.shape[0] % rows or weight.shape[1] % columns:
        return (
            f"{weight.shape[0]} outputs and {weight.shape[1]} inputs, expected multiples of {rows} and {columns} "
            f"({kind.BACKEND}): prune channels with round_to={max(rows, columns)}"
        )
    return ""


@torch.no_grad()
def pack(model: nn.Module, paths: tuple[str, ...], kind: type[SparseSemiStructuredTensor]) -> nn.Module:
    """Pack the weights of linear layers in place, and return the model."""
    for path in paths:
        layer = model.get_submodule(path)
        weight = layer.get_parameter("weight").detach()
        packed = kind.from_dense(weight.contiguous())
        if not torch.equal(packed.to_dense(), weight):  # type: ignore[no-untyped-call]
            raise VerificationError(
                f"{path}: the weight that {kind.BACKEND} packed is another one when unpacked; run the model dense, and "
                "report the version of torch and the GPU"
            )
        layer.weight = nn.Parameter(packed, requires_grad=False)
    return model


def _compare(model: nn.Module, packed: nn.Module, inputs: tuple[Any, ...]) -> float:
    """Return the largest relative difference of the outputs, and raise if it is more than rounding."""
    with training_mode(model, False), torch.no_grad():
        found, reason = largest_difference(call(model, inputs), call(packed, inputs))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    tolerance = TOLERANCES.get(dtype, TOLERANCES["bfloat16"])
    if not found <= tolerance:
        raise VerificationError(
            f"{type(model).__name__} with packed 2:4 layers computes something else: {reason}, expected at most "
            f"{tolerance:g} in {dtype}; run it dense"
        )
    return found
