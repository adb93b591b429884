"""Gram matrices of the patches that a model's layers read, streamed over batches.

A layer multiplies its weight with patches: with x_p, the values that position p of its output reads, and a constant 1.

    G = sum over sampled positions p of f_p [x_p, 1] [x_p, 1]^T / number of positions        (d + 1, d + 1)

    conv 3x3, C channels:  x_p has 9 C columns, channel by channel      linear, C features:  C columns
    f_p = 1, or 1 over the squared size by which a norm over channels divides position p

Second moments of all layers are what elimination, the shares of zeros and the fits of stacks know of the data.

1. Batches add up: a batch gives the share of positions that it has of all samples, drawn by its number and the call's.
2. Layers that read one tensor alike, as queries, keys and values do, draw the same positions, and have one matrix in
   memory; where in a later batch one of them reads something else, it gets a sum of its own from then on.
3. All calls of one weight are one layer; a stack of matrices has a Gram matrix for each, of the rows that it is given.
4. Matrices beyond `IN_MEMORY` are in a temporary file, and out of memory until their turn comes.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import add, length_hint
from typing import Any, Self

import torch
from torch import Tensor, nn

from prunekit.distributed.shared_work import (
    agreed,
    dealt,
    shared_count,
    shared_rows,
    shared_sum,
    shared_values,
    workers,
)
from prunekit.errors import NonFiniteError, UsageError
from prunekit.hooks.model_copy import named_tensors
from prunekit.statistics.layer_graph import ChainMark, LayerChain, LayerFinder, calls_by_use, find_layers, merge_calls
from prunekit.statistics.linear_layers import FunctionCall, LayerCall, Operands, WeightUse
from prunekit.statistics.observers import watch
from prunekit.statistics.patches import gram, gram_bytes, sample_rows, with_constant
from prunekit.statistics.reductions import VarianceSum
from prunekit.utils.context import training_mode
from prunekit.utils.inputs import (
    Counted,
    counted_positions,
    inputs_as_example,
    inputs_in,
    sample_count,
    select_samples,
)
from prunekit.utils.tensors import FileMemory, first_not_finite, in_parts, is_finite

VOCABULARY = 8
"""Outputs by inputs from which on a last layer's scores are not computed."""
RAISED = 10
"""Factor on the ridge of a Gram matrix of fewer positions than columns: its inverse is arbitrary along directions that
no position showed."""
FEW = 0.5
"""Positions, as a share of the columns, up to which they are kept beside their Gram matrix, which they determine."""
ROWS = 32768
"""Positions sampled of each layer over all samples, at least one of each, padding excluded."""


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Second moments of a layer's input, and the variance that its output errors are relative to."""

    layer: LayerCall  # the first call that uses a weight in one way: moments are summed over all of them
    # for each convolution group, or matrix of a stack, (d + 1, d + 1) mean products of the columns of a patch and a
    # constant last, float64; d is channels * taps, or channels where `taps` is 1. Where a norm over channels reads the
    # end of the chain, each position counts over the square of what the norm divides it by. Layers that read the same
    # tensor in the same way, as those of queries and keys do, have the same matrices in memory. So have the matrices of
    # a stack, where one for each would take too much memory: theirs is of the rows of all.
    grams: tuple[Tensor, ...]
    taps: int  # columns of each channel; 1 if only the centers of patches were taken, to save memory
    # (channels,) float64, by which squared errors at the end of the chain are divided: the variance there, or what the
    # gains of the norm give that reads the end. For a stack (matrices * channels,): the variance of all rows over the
    # share of rows that a matrix makes.
    variance: Tensor
    counts: tuple[int, ...]  # how many positions were sampled for each of `grams`
    mean: Tensor | None = None  # (channels,) at the end of the chain, float64; None where `variance` is not one of it
    output_gain: float = 1.0  # how much an error here changes the model's output, 1 for a usual layer; see `with_gains`
    # parts of (N, d + 1), the positions themselves, of a linear layer that reads at most `FEW` of its columns' number
    read: tuple[Tensor, ...] = ()

    @property
    def rows(self) -> int:
        """How many positions were sampled."""
        counts = {id(matrix): count for matrix, count in zip(self.grams, self.counts, strict=True)}
        return sum(counts.values()) if self.layer.stack else self.counts[0]

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        return len(self.variance) // max(1, self.layer.stack)


IN_MEMORY = 2**28
"""Bytes of Gram matrices that are kept in memory; others are in a temporary file until a layer's turn comes."""


@dataclass(frozen=True, eq=False)
class PatchStats:
    """Moments of the patches that a model's layers read, in the order in which they run."""

    layers: tuple[LayerMoments, ...]  # one for each layer
    # results of criteria, which would compute them again for each budget
    computed: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    # where the matrices are; those in a file stay in memory from their use until `memory.release()`
    memory: FileMemory = field(default_factory=lambda: FileMemory(IN_MEMORY), repr=False)
    # those of most samples, and of the others: criteria tell by them how much smaller errors are on samples of the fit
    parts: tuple[Self, ...] = field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        """Memory of all Gram matrices."""
        return sum({id(matrix): matrix.nbytes for moments in self.layers for matrix in moments.grams}.values())


@dataclass(eq=False)
class _GramSum:
    """Sums of Gram matrices over positions, shared by all layers that have read the same so far."""

    grams: list[Tensor]  # a sum for each convolution group, or matrix of a stack
    counts: list[int]  # positions of each so far
    readers: set[WeightUse]  # the layers, by their uses of weights
    read: list[Tensor] | None = None  # the positions, while they are few


@dataclass(eq=False)
class _Reading:
    """Patches that some layers of a pass read of one tensor, in the same way and at the same positions."""

    key: Hashable  # the same for layers that read one tensor in one way; None if the matrix is this layer's alone
    patches: list[Tensor]  # (rows, columns) for each group, or matrix of a stack
    factors: Tensor | None  # of each position; None: 1
    readers: set[WeightUse]  # the layers, by their uses of weights


class _Collector(LayerFinder):
    """Sums the moments of layers over forward passes, and over all calls that use a weight alike."""

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[LayerCall],  # the first call of each use of a weight, with the chain and rows of all calls
        norms: Iterable[str],
        columns: Mapping[WeightUse, int],  # of the Gram matrices of each use
        pooled: Collection[WeightUse],  # stacks that have one Gram matrix for all of their matrices
        samples: int,  # in the pass that found the layers
        rows_of: Callable[[int], int],  # how many positions to sample of each layer, by the samples in a batch
        unused: WeightUse | None = None,  # a layer whose outputs nothing needs, see `_unused_end`
    ) -> None:
        super().__init__(model, norms, stacks=True)
        self._model, self._rows_of = model, rows_of
        self.memory = FileMemory(IN_MEMORY)
        self._sums: dict[WeightUse, _GramSum] = {}
        self._reading: _Reading | None = None
        self.batch_rows = 0
        self._step = workers()  # processes take turns at batches
        self.batch = next(dealt(range(self._step))) - self._step
        self.batch_samples = samples
        self.counted: Counted | None = None
        self._samples = samples
        self._ends: dict[WeightUse, VarianceSum] = {}
        self._waiting: dict[int, list[Tensor]] = {}
        self._taps: dict[WeightUse, int] = {}
        # by use: another batch may make other calls, whose chains are found again
        self._layers = {layer.use: layer for layer in layers}
        self._tensors = dict(named_tensors(model))
        self._columns, self._pooled, self._unused = columns, pooled, unused
        self._rows: dict[int, Tensor] = {}
        self._made: dict[WeightUse, Tensor] = {}

    @contextmanager
    def during(self, inputs: tuple[Any, ...]) -> Iterator[None]:
        """Intercept one forward pass over these inputs."""
        self.batch, self.batch_samples = self.batch + self._step, sample_count(inputs)
        self.batch_rows = self._rows_of(self.batch_samples)
        self.counted = counted_positions(self._model, inputs)
        self._rows.clear()
        self._waiting.clear()
        with self.intercepting():
            yield
        self._add_reading()

    def call(self, call: FunctionCall) -> Any:
        """Make a call, and collect a layer's input and the end of its chain."""
        operands = self.operands(call)
        if operands is not None and self._unused is not None and operands.weight == self._unused.weight:
            given, outputs = operands.inputs, operands.matrix.shape[int(operands.transposed)]
            # nothing writes to it, so that it takes no memory
            call = call._replace(compute=lambda *_, **__: given.new_empty(*given.shape[:-1], outputs))
        result = super().call(call)
        mark = self.mark(result) if isinstance(result, Tensor) else None
        if mark is None or mark.layer is None or mark.call != call.number:
            return result
        layer = self._layers.get(self.chains[mark.layer].layer.use)
        if layer is None:
            return result
        if mark.stage == "layer" and operands is not None:
            width = layer.width(operands.matrix)
            parts = self._sampled_parts(layer, mark.layer, operands)
            self._rows[mark.layer] = torch.cat(parts) if parts else self._sampled(layer, mark.layer, result)
            self._taps.setdefault(layer.use, self._columns[layer.use] // width)
            read, known = self.chains[mark.layer].layer.read, _way_of_reading(layer, width)
            key = None if read is None or known is None else (read, known, self._columns[layer.use])
            if key is not None and self._reading is not None and self._reading.key == key:
                self._reading.readers.add(layer.use)
            else:
                patches = self._patches(layer, mark.layer, operands, width, result, parts)
                if layer.row_norm is None:
                    self._add_reading(_Reading(key, patches, None, {layer.use}))
                else:
                    self._waiting[mark.layer] = patches
        if mark.stage == layer.end and not _is_product(layer):
            values = layer.geometry.outputs(result, self._rows[mark.layer])
            if layer.row_norm is None:
                ends = self._ends.setdefault(layer.use, VarianceSum())
                for part in in_parts(values) if len(values) else ():  # wide rows a part at a time
                    ends.add_rows(part.double())
            elif (waiting := self._waiting.pop(mark.layer, None)) is not None:
                factors = layer.row_norm.squared_sizes(values).rsqrt()
                self._add_reading(_Reading(None, waiting, factors, {layer.use}))
        return result

    def _find_row_norms(self, inputs: list[Tensor], marks: list[ChainMark | None], result: Any) -> None:
        """Leave them: they are known, and comparing whole batches takes long."""

    def _move(self, call: FunctionCall, mark: ChainMark, chain: LayerChain) -> tuple[int | None, str]:
        """Return no stage: the chain ends before values are moved."""
        return None, ""

    def _sampled(self, layer: LayerCall, place: int, output: Tensor) -> Tensor:
        """Return the rows of one call: its share of those of all calls of the weight."""
        total, count = layer.geometry.rows(output), self.batch_rows
        if layer.calls > 1:
            count = max(1, round(count * total * self._samples / (layer.rows * self.batch_samples)))
        earlier = sum(chain.layer.use == layer.use for chain in self.chains[:place])
        call = layer.call if layer.calls > 1 or layer.read is None else layer.read  # the same for all that read it
        seed = call + 100_003 * self.batch + 1_000_003 * earlier
        among = layer.geometry.counted(layer.geometry.positions(output), self.counted)
        return sample_rows(total, count, seed, among).to(output.device)

    def _sampled_parts(self, layer: LayerCall, place: int, operands: Operands) -> list[Tensor]:
        """Return the rows of one call for each matrix of a stack, none of other weights, and count all it makes."""
        if operands.numbers is None:
            return []
        numbers = operands.numbers.flatten()
        made = torch.bincount(numbers[numbers >= 0], minlength=layer.stack)
        self._made[layer.use] = self._made.get(layer.use, 0) + made
        count, device, rows = self.batch_rows, operands.inputs.device, numbers.argsort(stable=True)
        of = torch.split(rows[int((numbers < 0).sum()) :], made.tolist())
        seed = layer.call + 100_003 * self.batch + 1_000_003 * place
        # each has as many as a layer of its own; rows have no places in the samples, so padding counts
        return [sample_rows(len(among), count, seed, among).to(device) for among in of]

    def _patches(
        self, layer: LayerCall, place: int, operands: Operands, width: int, output: Tensor, parts: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return what the sampled positions of a call read, (rows, columns) for each group, or matrix of a stack."""
        geometry, inputs = self.chains[place].layer.geometry, operands.inputs
        spatial = tuple(output.shape[2:]) if geometry.kernel else ()
        if parts:
            sizes = output.shape[:-2] if geometry.kernel else output.shape[:-1]
            inputs = inputs.expand(*sizes, *inputs.shape[len(sizes) - output.dim() :])
            parts = [self._rows[place]] if layer.use in self._pooled else parts
            return [geometry.patches(inputs, rows, spatial) for rows in parts]
        read = geometry.patches if self._taps[layer.use] == geometry.taps else geometry.centers
        groups = torch.split(torch.arange(geometry.groups * width, device=inputs.device), width)
        return [read(geometry.channels(inputs, group), self._rows[place], spatial) for group in groups]

    def _add_reading(self, following: _Reading | None = None) -> None:
        """Add the last reading to the sums of its readers, now that all are known, and keep the one that follows."""
        reading, self._reading = self._reading, following
        if reading is None:
            return
        parts = [_summed(patch, reading.factors) for patch in reading.patches]
        counts = list(map(len, reading.patches))
        known = {id(total): total for total in map(self._sums.get, reading.readers)}
        for before in known.values():
            readers = {use for use in reading.readers if self._sums.get(use) is before}
            if before is None:
                own = [part.clone() for part in parts] if len(known) > 1 else parts
                total = _GramSum(list(map(self.memory.keep, own)), counts, readers, self._few(reading, []))
            elif before.readers == readers:
                grams = [a.add_(b) for a, b in zip(before.grams, parts, strict=True)]
                total = _GramSum(grams, list(map(add, before.counts, counts)), readers, self._few(reading, before.read))
            else:  # others have read something else this time
                before.readers -= readers
                sums = [self.memory.keep(a + b) for a, b in zip(before.grams, parts, strict=True)]
                total = _GramSum(sums, list(map(add, before.counts, counts)), readers)
            self._sums |= dict.fromkeys(readers, total)
        self.memory.release()

    def _few(self, reading: _Reading, before: list[Tensor] | None) -> list[Tensor] | None:
        """Return the positions so far, with a constant last; None where they are many, or not of a linear layer."""
        patch = reading.patches[0]
        if (
            before is None
            or not self._are_plain(reading.readers)
            or sum(map(len, [*before, patch])) > FEW * patch.shape[1]
        ):
            return None
        return [*before, self.memory.keep(with_constant(patch, reading.factors))]

    def _are_plain(self, readers: Iterable[WeightUse]) -> bool:
        """Return whether all are linear layers of one matrix."""
        return not any(self._layers[use].geometry.kernel or self._layers[use].stack for use in readers)

    def finished(self) -> tuple[LayerMoments, ...]:
        """Return the moments of all batches; once, at the end."""
        if self._step > 1:
            self._share()
        for total in {id(total): total for total in self._sums.values()}.values():
            for matrix, count in zip(total.grams, total.counts, strict=True):
                matrix.div_(max(1, count))  # in place: they are large
            self.memory.release()
        found = sorted(((self._layers[use], total) for use, total in self._sums.items()), key=lambda item: item[0].call)
        return tuple(
            self._moments(layer, total)
            for layer, total in found
            if layer.use in self._ends or layer.row_norm is not None or _is_product(layer)
        )

    def _share(self) -> None:
        """Add up the sums of all processes, in which other layers may have read the same."""
        widths = {use: end.mean.numel() for use, end in self._ends.items()}
        own = [total.readers for total in {id(total): total for total in self._sums.values()}.values()]
        found = shared_values((own, self._taps, widths, [*self._made]))
        for _, taps, others, _ in found:
            self._taps, widths = taps | self._taps, others | widths
        sums, self._sums = self._sums, {}
        zeros = next(iter(self._tensors.values())).new_zeros(())
        while uses := {use for sets, *_ in found for use in set().union(*sets)} - self._sums.keys():
            first = min(uses, key=lambda use: self._layers[use].call)
            alike = (next((one for one in sets if first in one), uses.difference(*sets)) for sets, *_ in found)
            readers = uses.intersection(*alike)  # that read the same in each process, or nothing
            known, size = sums.get(first), self._columns[first] + 1
            if known is None:
                blocks = 1 if first in self._pooled else self._layers[first].blocks
                known = _GramSum([zeros.double().expand(size, size)] * blocks, [0] * blocks, set())
            whole = map(shared_sum, known.grams)
            if known.readers == readers:
                grams = [matrix.copy_(by) for matrix, by in zip(known.grams, whole, strict=True)]
            else:
                grams = list(map(self.memory.keep, whole))
            counts = list(map(shared_count, known.counts))
            read, few = None, self._are_plain(readers) and counts[0] <= FEW * (size - 1)
            if few and agreed(known.read is not None or not known.counts[0]):
                rows = torch.cat(known.read) if known.read else zeros.new_empty(0, size)
                read = [self.memory.keep(shared_rows(rows))]
            total = _GramSum(grams, counts, readers, read)
            self._sums |= dict.fromkeys(readers, total)
            self.memory.release()
        for use in sorted(widths):
            self._ends.setdefault(use, VarianceSum()).share(zeros.double().expand(widths[use]))
        for use in sorted({use for *_, stacks in found for use in stacks}):
            self._made[use] = shared_sum(self._made.get(use, zeros.long().expand(self._layers[use].stack)))

    def _moments(self, layer: LayerCall, total: _GramSum) -> LayerMoments:
        """Return the moments of a layer; where a stack has one Gram matrix, each of its matrices has that one."""
        times = layer.blocks // len(total.grams)
        grams, counts = total.grams * times, total.counts * times
        mean = self._ends[layer.use].mean if layer.use in self._ends and not layer.stack else None
        if _is_product(layer):
            mean = layer.matrix(self._tensors[layer.weight]).detach().double() @ total.grams[0][-1, :-1].double()
        return LayerMoments(
            layer, tuple(grams), self._taps[layer.use], self._variance(layer, total), tuple(counts), mean=mean,
            read=tuple(total.read or ()),
        )  # fmt: skip

    def _variance(self, layer: LayerCall, total: _GramSum) -> Tensor:
        if _is_product(layer):
            return _variance_of_product(layer.matrix(self._tensors[layer.weight]), total.grams[0], total.counts[0])
        if layer.stack:
            made, variance = self._made[layer.use].double().clamp(min=1), self._ends[layer.use].variance()
            return (variance / (made / made.sum())[:, None].to(variance)).flatten()
        if layer.row_norm is None:
            return self._ends[layer.use].variance()
        scales = layer.row_norm.scales()
        return scales.clamp(min=1e-6 * float(scales.max())).square().reciprocal()


def _unused_end(layers: Sequence[LayerCall], tensors: Mapping[str, Tensor]) -> WeightUse | None:
    """Return the last layer of a pass if it is as wide as a vocabulary: its outputs need not be computed."""
    last = layers[-1] if layers else None
    if last is None or not _is_product(last) or sum(one.weight == last.weight for one in layers) > 1:
        return None
    outputs, inputs = last.matrix(tensors[last.weight]).shape
    return last.use if outputs >= VOCABULARY * inputs else None


def _is_product(layer: LayerCall) -> bool:
    """Return whether a layer's outputs are compared as they are, and are its weight times what it reads."""
    return layer.end == "layer" and not layer.geometry.kernel and not layer.stack and layer.row_norm is None


def _variance_of_product(weight: Tensor, matrix: Tensor, count: int) -> Tensor:
    """Return the variance of a linear layer's outputs by a Gram matrix of what it reads, (o,): W C W^T."""
    mean = matrix[-1, :-1]
    centered = (matrix[:-1, :-1] - torch.outer(mean, mean)).to(torch.promote_types(weight.dtype, torch.float32))
    parts = (part.detach().to(centered) for part in in_parts(weight))  # faster than outputs as wide as a vocabulary
    found = torch.cat([torch.linalg.vecdot(part @ centered, part) for part in parts])
    return found.double().clamp(min=0) * (count / max(1, count - 1))


def _summed(patch: Tensor, factors: Tensor | None) -> Tensor:
    """Return the products of the columns of a patch and a constant, summed over rows, of which there may be none."""
    return gram(patch, factors).mul_(len(patch)) if len(patch) else gram(patch.new_zeros(1, patch.shape[1])) * 0


def _way_of_reading(layer: LayerCall, width: int) -> Hashable:
    """Return a key that layers with one Gram matrix share; None for a layer whose matrix is its own."""
    if layer.read is None or layer.calls > 1 or layer.row_norm is not None or layer.stack:
        return None
    return layer.read, layer.geometry, layer.rows, width


def _readers(layers: Iterable[LayerCall], tensors: Mapping[str, Tensor]) -> list[tuple[int, list[LayerCall]]]:
    """Return the layers that share Gram matrices, with the width of what they read."""
    found: dict[Hashable, tuple[int, list[LayerCall]]] = {}
    for layer in layers:
        width = layer.width(tensors[layer.weight])
        found.setdefault(_way_of_reading(layer, width) or layer.use, (width, []))[1].append(layer)
    return list(found.values())


def _columns(
    layers: Iterable[LayerCall], tensors: Mapping[str, Tensor], limit: int
) -> tuple[dict[WeightUse, int], frozenset[WeightUse]]:
    """Return the columns of the Gram matrices of each use, and the stacks that have one for all of their matrices."""
    readers, pooled = _readers(layers, tensors), set[WeightUse]()
    found = [width * alike[0].geometry.taps for width, alike in readers]
    size = [alike[0].blocks * gram_bytes(columns) for columns, (_, alike) in zip(found, readers, strict=True)]
    # the largest have columns of the centers of patches alone, or one matrix, as far as memory is short
    for place in sorted(range(len(size)), key=size.__getitem__, reverse=True):
        if sum(size) <= limit:
            break
        found[place], first = readers[place][0], readers[place][1][0]
        pooled |= {first.use} if first.stack else set()
        size[place] = (1 if first.stack else first.blocks) * gram_bytes(found[place])
    columns = {layer.use: columns for columns, (_, alike) in zip(found, readers, strict=True) for layer in alike}
    return columns, frozenset(pooled)


def _memory_text(
    layers: Sequence[LayerCall],
    tensors: Mapping[str, Tensor],
    columns: Mapping[WeightUse, int],
    pooled: Collection[WeightUse],
) -> str:
    """Return the memory that the Gram matrices will take, in words."""
    if not layers:
        return "no layer that can be followed reads channels that may be removed"
    alone = [alike[0] for _, alike in _readers(layers, tensors)]
    blocks = [1 if layer.use in pooled else layer.blocks for layer in alone]
    sizes = [count * gram_bytes(columns[one.use]) / 2**20 for count, one in zip(blocks, alone, strict=True)]
    largest = alone[sizes.index(max(sizes))]
    return (
        f"Gram matrices of the patches of {len(layers)} layers take {sum(sizes):,.0f} MiB, the largest "
        f"{max(sizes):,.0f} MiB ({largest.weight.rpartition('.')[0]}, {columns[largest.use]:,} columns)"
    )


def collect_patches(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    norms: Iterable[str] = (),
    inputs: Collection[tuple[str, int]] | None = None,
    rows: int = ROWS,
    images: int = 1024,
    memory_bytes: int = 2**31,
    log: Callable[[str], None] | None = None,
) -> PatchStats:
    """Run a model over batches, in eval mode without gradients, and sum the Gram matrices of its layers' inputs.

    Memory: `gram_bytes(channels * taps)` for each layer and group, 8 * 4609^2 = 170 MB for 512 channels and a 3 x 3
    kernel, and for each matrix of a stack, such as those of experts. Where all would take more than `memory_bytes`, the
    largest have only the centers of their patches, 8 * 513^2 = 2 MB each, and one for a stack, until the rest fits.
    """
    rest = iter(batches)
    first = next(rest, None)
    if first is None:
        raise UsageError("patch statistics: expected at least one batch, got none")
    few, tensors = select_samples(inputs_as_example(model, inputs_in(first)), slice(2)), dict(named_tensors(model))
    with training_mode(model, False):
        every = find_layers(model, few, norms, stacks=True)
    layers = list(map(merge_calls, calls_by_use(every)))
    wanted = tuple(one for one in layers if inputs is None or (one.weight, one.axes[1]) in inputs)
    columns, pooled = _columns(wanted, tensors, memory_bytes)
    if log is not None:
        log(_memory_text(wanted, tensors, columns, pooled))
    if not wanted:
        return PatchStats(())

    def rows_of(samples: int) -> int:
        return max(samples, round(rows * samples / images))

    unused = _unused_end(every, tensors)
    collector = _Collector(model, wanted, norms, columns, pooled, sample_count(few), rows_of, unused)
    total = -(-length_hint(batches) // workers()) or None
    watch(model, dealt(chain([first], rest)), collector, title="patch statistics", total=total)
    found = collector.finished()
    for moments in found:
        if not all(map(is_finite, moments.grams)):
            name = first_not_finite(named_tensors(model))
            blamed = "" if name is None else f": {name!r} of the model is not finite"
            raise NonFiniteError(f"layer {moments.layer.weight.rpartition('.')[0]!r} reads NaN or Inf{blamed}")
        collector.memory.release()
    return PatchStats(found, memory=collector.memory)


def too_few(moments: LayerMoments) -> bool:
    """Return whether a layer reads more columns than positions were sampled."""
    return bool(_short(moments))


def too_few_rows(patches: PatchStats) -> list[str]:
    """Return one warning about all layers whose patches have more columns than positions were sampled; else none."""
    short = list(filter(too_few, patches.layers))
    if not short:
        return []
    worst = max(short, key=lambda moments: _width(moments) / max(1, min(moments.counts)))
    others = f", the worst of {len(short)}," if len(short) > 1 else ""
    alive = max(int((matrix.diagonal() > 0).sum()) for matrix in worst.grams)
    found = (
        f"the Gram matrix of the patches of {_named(worst)}{others} has rank {min(*worst.counts, alive)} at most for "
        f"{_width(worst)} columns: {min(worst.counts)} positions are too few, and its ridge is raised {RAISED} times; "
        "take more images"
    )
    patches.memory.release()
    return [found]


def dead_inputs(patches: PatchStats) -> list[str]:
    """Return one warning about all layers that read channels which were zero at every position; else none."""
    dead = {}
    for moments in patches.layers:
        dead[moments.layer.weight.rpartition(".")[0] or "the model", moments.layer.transposed] = _dead(moments)
        patches.memory.release()
    found = [f"{int(zero.sum())} of {len(zero)} that {path} reads" for (path, _), zero in dead.items() if zero.any()]
    text = "channels that are zero on all calibration images, so that they are removed first and cost nothing: "
    return [text + ", ".join(found)] if found else []


def shortfalls(patches: PatchStats) -> list[str]:
    """Return all warnings about samples that are too few, or that leave channels at zero."""
    return [*too_few_rows(patches), *dead_inputs(patches)]


def with_raised_ridge(patches: PatchStats, ridge: float) -> PatchStats:
    """Return the moments with a larger diagonal where positions are too few: `ridge` is raised `RAISED` times."""
    known: dict[int, Tensor] = {}
    layers = []
    for moments in patches.layers:
        short = _short(moments)
        for matrix in short:
            if id(matrix) not in known:
                raised = matrix.clone()
                diagonal = raised.diagonal()[:-1]
                diagonal.add_((RAISED - 1) * ridge * diagonal.mean())
                known[id(matrix)] = patches.memory.keep(raised)
                patches.memory.release()
        if short:
            moments = replace(moments, grams=tuple(known.get(id(matrix), matrix) for matrix in moments.grams))
        layers.append(moments)
    return replace(patches, layers=tuple(layers))


def _named(moments: LayerMoments) -> str:
    """Return the layer in words: of a stack its least filled matrix, and how many there are like it."""
    if not moments.layer.stack:
        return moments.layer.weight.rpartition(".")[0] or "the model"
    least, short = moments.counts.index(min(moments.counts)), len(_short(moments))
    others = f" (one of {short} in this stack)" if short > 1 else ""
    return f"{moments.layer.weight}[{least}]{others}"


def _width(moments: LayerMoments) -> int:
    return max((len(matrix) for matrix in moments.grams), default=0)


def _short(moments: LayerMoments) -> list[Tensor]:
    """Return the Gram matrices that are of fewer positions than they have columns."""
    return [matrix for matrix, rows in zip(moments.grams, moments.counts, strict=True) if rows < len(matrix)]


def _dead(moments: LayerMoments) -> Tensor:
    """Return whether a channel's columns have no product with any other one, or with the constant, (channels,)."""
    columns = [matrix.count_nonzero(0)[:-1] == (matrix.diagonal()[:-1] != 0) for matrix in moments.grams]
    read = torch.stack(columns).all(0) if moments.layer.stack else torch.cat(columns)
    return read.view(-1, moments.taps).all(1)
