"""Which BatchNorms alone read what a convolution or a linear layer computes: seen while the model runs.

Layers and norms are known by the identity of their tensors, not by names or classes of modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.calibration.consumers import PRODUCTS
from prunekit.calibration.layers import Call, CallWatch
from prunekit.channels.copying import named_tensors
from prunekit.channels.running import plain_attention
from prunekit.context import training_mode
from prunekit.inputs import call
from prunekit.nested import gather


@dataclass(eq=False)
class Pair:
    """A norm, and the layer whose output it reads.

    Attributes:
        norm: path of the module that owns the running statistics.
        shape: of what it reads.
        layer: path of the module that owns the weight; empty where nothing with a weight of its own computed it.
        transposed: whether that is a transposed convolution, whose weight lies as (inputs, outputs).
        biased: whether the layer was called with its module's own bias, or with none where the module has none.
        output: of the layer.
    """

    norm: str
    shape: torch.Size
    layer: str = ""
    transposed: bool = False
    biased: bool = True
    output: Tensor | None = None


@dataclass(eq=False)
class _Made:
    """An output of a layer; kept, so that nothing else gets its identity."""

    tensor: Tensor
    weight: str
    transposed: bool
    biased: bool
    reads: int = 0


class _Watch(CallWatch):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.made: dict[int, _Made] = {}
        self.pairs: list[Pair] = []
        self.readers: Counter[str] = Counter()
        self.norms: list[Any] = []
        self._own = {path: module._parameters for path, module in model.named_modules()}

    def call(self, call: Call) -> Any:
        inputs = gather((call.args, dict(call.named)))
        for tensor in inputs:
            if id(tensor) in self.names:
                self.readers[self.names[id(tensor)]] += 1
            if id(tensor) in self.made:
                self.made[id(tensor)].reads += 1
        if call.name == "batch_norm":
            self._norm(call)
        result = call.run()
        product = PRODUCTS.get(call.name)
        # of layers, channels are on axis 1 where there are as many axes: those that a norm scales
        if product is not None and product.is_layer and isinstance(result, Tensor) and product.axis(result) == 1:
            self._layer(call, result)
        return result

    def _layer(self, call: Call, result: Tensor) -> None:
        weight, bias = (call.argument(position, name) for position, name in ((1, "weight"), (2, "bias")))
        name = self.names.get(id(weight), "")
        owner = self._own.get(name.rpartition(".")[0], {})
        biased = owner.get("weight") is weight and "bias" in owner and owner["bias"] is bias
        self.made[id(result)] = _Made(result, name, "transpose" in call.name, biased)

    def _norm(self, call: Call) -> None:
        read, running = call.argument(0, "input"), call.argument(1, "running_mean")
        if id(running) not in self.names or call.argument(5, "training"):
            return
        made = self.made.get(id(read))
        pair = Pair(self.names[id(running)].rpartition(".")[0], read.shape)
        if made is not None and made.weight:
            pair = Pair(pair.norm, pair.shape, made.weight.rpartition(".")[0], made.transposed, made.biased, read)
        self.pairs.append(pair)


@dataclass(frozen=True, eq=False)
class Foldable:
    """What of a model's norms can be folded.

    Attributes:
        pairs: in the order in which they run.
        kept: path of every other norm -> why it stays.
    """

    pairs: tuple[Pair, ...]
    kept: dict[str, str] = field(default_factory=dict)


def foldable(model: nn.Module, example: tuple[Any, ...]) -> Foldable:
    """Runs a model once in eval mode and finds the norms that alone read the output of a layer of their own.

    Args:
        model: its mode is restored.
        example: see `prunekit.inputs.example`.
    """
    watch = _Watch(model)
    with training_mode(model, False), plain_attention(), watch.watching():
        output = call(model, example)
    returned = {id(tensor) for tensor in gather(output)}
    tensors = {name.rpartition(".")[0]: Counter[str]() for name, _ in named_tensors(model)}
    for name, count in watch.readers.items():
        tensors[name.rpartition(".")[0]][name] = count
    found: list[Pair] = []
    kept: dict[str, str] = {}
    for pair in watch.pairs:
        reason = next(_reasons(pair, watch, tensors, returned), "")
        if reason:
            kept.setdefault(pair.norm, reason)
        else:
            found.append(pair)
    return Foldable(tuple(found), kept)


def _reasons(pair: Pair, watch: _Watch, tensors: dict[str, Counter[str]], returned: set[int]) -> Iterator[str]:
    """What keeps a norm from being folded."""
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
