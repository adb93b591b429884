"""Patterns of zeros in the weights of a finished model: N:M groups, whole blocks, or none."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.sparse import SparseSemiStructuredTensor

from prunekit.utils.display import listed, share

GROUPS = (4, 8, 16)
"""Sizes M of the groups of N:M patterns."""
BLOCKS = ((4, 1), (1, 4), (16, 16))
"""Blocks (outputs, inputs) that are looked for."""
NEARLY = 0.95
"""Share of a layer's zeros that must lie in blocks that are wholly zero for these to be its pattern."""
MOSTLY = 0.75
"""Share of a layer's zeros that groups must have by themselves for N:M to be its pattern: any layer is 15:16 or so."""
SOME = 0.3
"""Smallest share of zeros that is worth a word."""


@dataclass(frozen=True)
class ZeroPattern:
    """Zeros of one weight."""

    # zeros, size: how many of its numbers are 0, and how many there are
    zeros: int
    size: int
    # how many of the zeros are in output or input channels that hold nothing else, which compaction takes out
    in_channels: int
    # by size M, the most non-zeros in any group of M inputs, at each kernel position; without sizes that do not divide
    # the inputs
    most: Mapping[int, int]
    # by shape (outputs, inputs), the share of the zeros in blocks, at each kernel position, that are wholly zero;
    # without shapes that do not divide the weight
    blocks: Mapping[tuple[int, int], float]

    @property
    def share(self) -> float:
        """Share of the weight that is zero."""
        return self.zeros / max(1, self.size)

    @property
    def single_share(self) -> float:
        """Share of the weight that is zero and in no channel of zeros."""
        return (self.zeros - self.in_channels) / max(1, self.size)

    @property
    def two_of_four(self) -> bool:
        """True if no group of 4 inputs has more than 2 non-zeros: what sparse tensor cores compute."""
        return self.zeros > 0 and self.most.get(4, 4) <= 2

    @property
    def name(self) -> str:
        """The pattern: `N:M` (the sparsest), `blocks OxI` (the largest), `unstructured`, or `dense`."""
        if not self.zeros:
            return "dense"
        groups = [
            (count / size, size, count)
            for size, count in self.most.items()
            if 1 - count / size >= MOSTLY * self.share or (size == 4 and self.two_of_four)
        ]
        if groups:
            _, size, count = min(groups)
            return f"{count}:{size}"
        blocks = [shape for shape, part in self.blocks.items() if part >= NEARLY]
        if blocks:
            rows, columns = max(blocks, key=lambda shape: shape[0] * shape[1])
            return f"blocks {rows}x{columns}"
        return "unstructured"


def zero_pattern(weight: Tensor, *, groups: int = 1, transposed: bool = False) -> ZeroPattern:
    """Return which pattern the zeros of a weight have along its reduced axis.

    Groups of N:M and blocks run along input channels at each kernel position, within a group of a grouped convolution,
    as sparse tensor cores reduce (Mishra et al., 2021). The weight is (outputs, inputs of a group, *kernel), or, where
    it is transposed, (inputs, outputs of a group, *kernel).
    """
    if not weight.numel():
        return ZeroPattern(0, 0, 0, {}, {})
    by_group = weight.detach().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    zero = by_group.permute(0, 3, *((2, 1) if transposed else (1, 2))) == 0  # (groups, positions, outputs, inputs)
    zeros = int(zero.sum())
    dead = zero.all(3, keepdim=True).all(1, keepdim=True) | zero.all(2, keepdim=True).all(1, keepdim=True)
    in_channels = int(dead.expand_as(zero).sum())
    outputs, inputs = zero.shape[2:]
    sizes = [size for size in GROUPS if inputs % size == 0]
    most = {size: int((~zero).reshape(-1, size).sum(1).max()) for size in sizes}
    fitting = [shape for shape in BLOCKS if outputs % shape[0] == inputs % shape[1] == 0]
    blocks = {shape: _in_blocks(zero, shape) / max(1, zeros) for shape in fitting}
    return ZeroPattern(zeros, weight.numel(), in_channels, most, blocks)


def _in_blocks(zero: Tensor, shape: tuple[int, int]) -> int:
    """Return how many zeros are in blocks that are wholly zero."""
    rows, columns = shape
    tiles = zero.reshape(-1, zero.shape[2] // rows, rows, zero.shape[3] // columns, columns)
    return int(tiles.all(4).all(2).sum()) * rows * columns


@dataclass(frozen=True)
class ModelZeros:
    """Zeros of the weights of a model's linear layers and convolutions."""

    layers: Mapping[str, ZeroPattern]  # by name of the weight

    @property
    def share(self) -> float:
        """Share of all these weights that is zero."""
        return sum(one.zeros for one in self.layers.values()) / max(1, sum(one.size for one in self.layers.values()))

    @property
    def single_share(self) -> float:
        """Share of all these weights that is zero and in no channel of zeros."""
        single = sum(one.zeros - one.in_channels for one in self.layers.values())
        return single / max(1, sum(one.size for one in self.layers.values()))

    @property
    def many(self) -> bool:
        """True if so many single weights are zero that it is worth a word."""
        return self.single_share >= SOME

    @property
    def two_of_four(self) -> tuple[str, ...]:
        """Names of the weights that are 2:4."""
        return tuple(name for name, one in self.layers.items() if one.two_of_four)

    @property
    def pattern(self) -> str:
        """The pattern that most of the zeros have, as `ZeroPattern.name` says it."""
        counts: Counter[str] = Counter()
        for one in self.layers.values():
            counts[one.name] += one.zeros
        found = [(count, name) for name, count in counts.items() if name != "dense"]
        return max(found)[1] if found else "dense"

    def __str__(self) -> str:
        held = [one for one in self.layers.values() if one.name == self.pattern]
        return (
            f"{share(self.share)} of the weights are zero, {self.pattern} in {len(held)} of {len(self.layers)} layers"
        )


def zero_patterns(model: nn.Module) -> ModelZeros:
    """Return which patterns the zeros of a model's linear layers and convolutions have.

    Example:
        >>> import torch
        >>> from prunekit.compaction.zero_patterns import zero_patterns
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> model[0].weight.data[:, ::2] = 0
        >>> model[2].weight.data[:, 1::2] = 0
        >>> print(zero_patterns(model))
        50.0 % of the weights are zero, 2:4 in 2 of 2 layers
    """
    return ModelZeros(dict(_layers(model)))


def _layers(model: nn.Module) -> Iterator[tuple[str, ZeroPattern]]:
    for path, module in model.named_modules():
        name = "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"
        weight = module._parameters.get(name)
        if weight is None or isinstance(weight, SparseSemiStructuredTensor):
            continue
        prefix = f"{path}." if path else ""
        if isinstance(module, _ConvNd):
            transposed = isinstance(module, _ConvTransposeNd)
            yield f"{prefix}{name}", zero_pattern(weight, groups=module.groups, transposed=transposed)
        elif isinstance(module, nn.Linear | nn.MultiheadAttention):
            yield f"{prefix}{name}", zero_pattern(weight)


CSR_FROM = 0.95
"""Share of zeros from which torch's CSR was faster for a linear layer: 3.1x on one vector, 1.2x at batch 64.

On one AMD EPYC, see `benchmarks/results/sparse_runtimes.json`.
"""
IGNORED = "no runtime on a CPU skips them in dense tensors, and no runtime of a GPU skips zeros without 2:4"


def users(zeros: ModelZeros) -> str:
    """Return what computes less for the zeros of a model, on which hardware, and how it is called, as one sentence."""
    found = zeros.two_of_four
    if found:
        return (
            f"{len(found)} of {len(zeros.layers)} layers are 2:4, which NVIDIA GPUs from Ampere on compute in fp16 and "
            "bf16: prunekit.semi_structured(model, example) for linear layers, --to tensorrt for convolutions too; no "
            "runtime on a CPU does"
        )
    sparse = [name for name, one in zeros.layers.items() if one.share >= CSR_FROM]
    csr = f"; weight.to_sparse_csr() may pay for single linear layers from {100 * CSR_FROM:.0f} % on" if sparse else ""
    return (
        f"nothing computes less for {zeros.pattern} zeros: {IGNORED}{csr}; they make files smaller, and whole channels "
        "(prunekit.prune, prunekit.compact) make models faster"
    )


def unused_zeros_notes(models: Mapping[str, ModelZeros], runtimes: tuple[str, ...]) -> list[str]:
    """Return a note for each model with many zeros of single weights that is timed in runtimes that do not use them."""
    notes = []
    for name, zeros in models.items():
        idle = [one for one in runtimes if one != "tensorrt" or not zeros.two_of_four]
        verb = "multiplies" if len(idle) == 1 else "multiply"
        if zeros.many and idle:
            notes.append(
                f"{name}: {zeros}, and {listed(idle, 3)} {verb} by them as by any other number; {users(zeros)}"
            )
    return notes


def exported_zeros_notes(zeros: ModelZeros, form: str) -> list[str]:
    """Return a note on a file with many zeros of single weights that its runtime does not use."""
    used = form == "tensorrt" and zeros.two_of_four
    return [f"{zeros}, and the file computes them; {users(zeros)}"] if zeros.many and not used else []
