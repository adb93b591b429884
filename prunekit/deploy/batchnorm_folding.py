"""BatchNorm folded into the convolution or linear layer before it (Jacob et al., 2018).

Which norms can be folded is found by running the model: a norm must be the only reader of a layer's output. Layers and
norms are identified by their tensors, not by names or classes of modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.channels.float64 import TOLERANCE, float64_copy, to_double
from prunekit.channels.tracing.execution import plain_attention
from prunekit.compaction.folded_norms import FoldedNorm, set_folds
from prunekit.hooks.model_copy import copied, named_tensors, with_tensors
from prunekit.hooks.wrappers import unwrapped
from prunekit.measure.verification import compare_outputs
from prunekit.modes.public_call import public_call
from prunekit.statistics.layer_errors import norm_affine
from prunekit.statistics.linear_layers import WEIGHT_FUNCTIONS, CallInterceptor, FunctionCall
from prunekit.utils.context import seeded, set_mode, training_mode
from prunekit.utils.inputs import as_example, call
from prunekit.utils.tensors import gather, is_subnormal


@dataclass(frozen=True, eq=False)
class FoldedModel:
    """Result of `fold_batchnorm`."""

    model: nn.Module  # a new one, in eval mode
    norms: dict[str, str]  # path of each folded norm -> path of the layer that does its work
    kept: dict[str, str]  # path of each other norm that ran -> why it was not folded
    max_relative_difference: float  # of the outputs on the example, in float64


@public_call
def fold_batchnorm(model: nn.Module, example: Any, *, tolerance: float = TOLERANCE) -> FoldedModel:
    """Fold every BatchNorm that alone reads a convolution's or a linear layer's output into that layer.

    The result computes the same in eval mode, with one operator and one pass over the activations less for each norm.
    Folded weights that are subnormal in their dtype, with which processors are slow, become 0. The model is for
    inference: it has no statistics that training could update. It is saved and loaded like any other; `prunekit.verify`
    compares with the masked model before folding, not after.

    Args:
        model: not changed.
        example: what the model is called with: a tensor, a tuple of positional arguments or a mapping of arguments by
            name; layers are found by running the model on it.
        tolerance: largest relative difference of the outputs, in float64, that counts as equal.

    Raises:
        UsageError: the example is none of these.
        VerificationError: the folded model computes something else.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> folded = pk.fold_batchnorm(model, torch.randn(1, 3, 8, 8))
        >>> folded.norms, folded.max_relative_difference < 1e-12
        ({'1': '0'}, True)
        >>> folded.model(torch.randn(1, 3, 8, 8)).shape
        torch.Size([1, 8, 6, 6])
    """
    model = unwrapped(model)
    given = as_example(model, example)
    found = foldable_norms(model, given)
    double = _fold_in_place(float64_copy(model, to_double), found.pairs)
    narrow = fold_copy(model, found.pairs)
    difference = compare_outputs(model, double, given, tolerance=tolerance, narrow=narrow)
    return FoldedModel(narrow, {pair.norm: pair.layer for pair in found.pairs}, found.kept, difference)


@dataclass(eq=False)
class FoldablePair:
    """A norm, and the layer whose output it reads."""

    norm: str  # path of the module that owns the running statistics
    shape: torch.Size  # of the norm's input
    layer: str = ""  # path of the module that owns the layer's weight; empty if the input is not the output of a layer
    transposed: bool = False  # whether the layer is a transposed convolution, whose weight is (inputs, outputs, ...)
    biased: bool = True  # whether the layer was called with its module's own bias, or with None if the module has none
    output: Tensor | None = None  # of the layer


@dataclass(frozen=True, eq=False)
class FoldableNorms:
    """The norms of a model that can be folded."""

    pairs: tuple[FoldablePair, ...]  # norms with their layers, in the order in which they run
    kept: dict[str, str] = field(default_factory=dict)  # path of every other norm -> why it cannot be folded


def foldable_norms(model: nn.Module, example: tuple[Any, ...]) -> FoldableNorms:
    """Return the norms that `fold_batchnorm` folds: they alone read a layer's output, and are plain BatchNorms."""
    found = norms_after_layers(model, example)
    reasons = {pair.norm: _more_than_a_norm(model.get_submodule(pair.norm), pair) for pair in found.pairs}
    more = {norm: reason for norm, reason in reasons.items() if reason}
    return FoldableNorms(tuple(pair for pair in found.pairs if pair.norm not in more), found.kept | more)


def norms_after_layers(model: nn.Module, example: tuple[Any, ...]) -> FoldableNorms:
    """Run a model once in eval mode, and return the norms that are the only readers of a layer's output."""
    watch = _FoldingWatch(model)
    with training_mode(model, False), plain_attention(), watch.intercepting():
        output = call(model, example)
    returned = {id(tensor) for tensor in gather(output)}
    tensors = {name.rpartition(".")[0]: Counter[str]() for name, _ in named_tensors(model)}
    for name, count in watch.readers.items():
        tensors[name.rpartition(".")[0]][name] = count
    found: list[FoldablePair] = []
    kept: dict[str, str] = {}
    for pair in watch.pairs:
        reason = next(_reasons(pair, watch, tensors, returned), "")
        if reason:
            kept.setdefault(pair.norm, reason)
        else:
            found.append(pair)
    return FoldableNorms(tuple(found), kept)


def _reasons(
    pair: FoldablePair, watch: _FoldingWatch, tensors: dict[str, Counter[str]], returned: set[int]
) -> Iterator[str]:
    """Yield the reasons why a norm cannot be folded."""
    if not pair.layer or pair.output is None:
        yield "what it reads is not the output of a convolution or a linear layer"
        return
    if max(tensors[pair.norm].values()) > 1:
        yield "it runs several times, or something else reads its parameters"
    if max(tensors[pair.layer].values()) > 1:
        yield f"{pair.layer} runs several times, or something else reads its parameters"
    if watch.made[id(pair.output)].reads > 1 or id(pair.output) in returned:
        yield f"something else reads the output of {pair.layer} too"
    if not pair.biased:
        yield f"{pair.layer} has no place for a bias"


@dataclass(eq=False)
class _LayerOutput:
    """An output of a layer; it is held so that its `id` is not reused."""

    tensor: Tensor
    weight: str
    transposed: bool
    biased: bool
    reads: int = 0


class _FoldingWatch(CallInterceptor):
    """Records layers, norms, and what reads which tensor, while a model runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.made: dict[int, _LayerOutput] = {}
        self.pairs: list[FoldablePair] = []
        self.readers: Counter[str] = Counter()
        self.norms: list[Any] = []
        self._own = {path: module._parameters for path, module in model.named_modules()}

    def call(self, call: FunctionCall) -> Any:
        inputs = gather((call.args, dict(call.named)))
        for tensor in inputs:
            if id(tensor) in self.names:
                self.readers[self.names[id(tensor)]] += 1
            if id(tensor) in self.made:
                self.made[id(tensor)].reads += 1
        if call.name == "batch_norm":
            self._norm(call)
        result = call.run()
        product = WEIGHT_FUNCTIONS.get(call.name)
        # of layers, channels are on axis 1 where there are as many axes: those that a norm scales
        if product is not None and product.is_layer and isinstance(result, Tensor) and product.axis(result) == 1:
            self._layer(call, result)
        return result

    def _layer(self, call: FunctionCall, result: Tensor) -> None:
        weight, bias = (call.argument(position, name) for position, name in ((1, "weight"), (2, "bias")))
        name = self.names.get(id(weight), "")
        owner = self._own.get(name.rpartition(".")[0], {})
        biased = owner.get("weight") is weight and "bias" in owner and owner["bias"] is bias
        self.made[id(result)] = _LayerOutput(result, name, "transpose" in call.name, biased)

    def _norm(self, call: FunctionCall) -> None:
        read, running = call.argument(0, "input"), call.argument(1, "running_mean")
        if id(running) not in self.names or call.argument(5, "training"):
            return
        made = self.made.get(id(read))
        pair = FoldablePair(self.names[id(running)].rpartition(".")[0], read.shape)
        if made is not None and made.weight:
            pair = FoldablePair(
                pair.norm, pair.shape, made.weight.rpartition(".")[0], made.transposed, made.biased, read
            )
        self.pairs.append(pair)


def _more_than_a_norm(module: nn.Module, pair: FoldablePair) -> str:
    """Return why a module is more than a norm and the modules inside it in sequence; empty if it is not."""
    if not isinstance(module, _BatchNorm):
        return f"{type(module).__name__} is no BatchNorm of torch"
    norm = copied(module, "cpu", torch.float64).eval()
    with seeded(0), torch.no_grad():
        values = torch.randn(pair.shape, dtype=torch.float64)
        want = norm(values.clone())
        scale, shift = norm_affine(norm)
        by_channel = [-1, *(1,) * (values.dim() - 2)]
        got = FoldedNorm(norm, pair.layer)(values * scale.view(by_channel) + shift.view(by_channel))
    same = isinstance(want, Tensor) and want.shape == got.shape and torch.allclose(want, got, rtol=1e-9, atol=1e-9)
    return "" if same else f"{type(module).__name__} does more than a norm and its parts behind it"


def fold_copy(model: nn.Module, pairs: Sequence[FoldablePair]) -> nn.Module:
    """Return a copy in eval mode with the norms of `foldable_norms` folded; it is not verified.

    The model may have other widths than the one that they were found in, fewer blocks, and may be on the meta device.
    """
    own = {name: tensor.detach().clone() for name, tensor in named_tensors(model)}
    left = {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    return set_mode(_fold_in_place(with_tensors(model, own), [pair for pair in pairs if pair.norm in left]), False)


@torch.no_grad()
def _fold_in_place(model: nn.Module, pairs: Sequence[FoldablePair]) -> nn.Module:
    """Fold norms in place, computing in float64."""
    norms = [model.get_submodule(pair.norm) for pair in pairs]
    set_folds(model, {pair.norm: pair.layer for pair in pairs})
    for pair, norm in zip(pairs, norms, strict=True):
        layer, (scale, shift) = model.get_submodule(pair.layer), norm_affine(norm)
        weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
        weight.copy_(_scaled(weight.double(), scale, transposed=pair.transposed))
        bias.copy_(bias.double() * scale + shift)
        for tensor in (weight, bias):  # small scales make subnormal numbers, which are slow
            tensor.masked_fill_(is_subnormal(tensor), 0)
    return model


def _scaled(weight: Tensor, scale: Tensor, *, transposed: bool) -> Tensor:
    """Return a weight with each output multiplied by its scale, (outputs, ...) or (inputs, outputs of a group, ...)."""
    if not transposed:
        return weight * scale.view(-1, *(1,) * (weight.dim() - 1))
    groups = scale.numel() // weight.shape[1]
    by_group = weight.reshape(groups, -1, *weight.shape[1:])  # (groups, inputs of one, outputs of one, ...)
    return (by_group * scale.view(groups, 1, -1, *(1,) * (weight.dim() - 2))).flatten(0, 1)
