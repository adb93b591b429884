"""Quantization-aware training: layers see their weights and inputs as int8 would hold them, by torchao's primitives."""

import logging
import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.errors import ModelError, UsageError, raised_as
from prunekit.hooks.hook import never_called
from prunekit.hooks.owner import HookOwner
from prunekit.training.callbacks.callback import Callback, TrainingRun
from prunekit.utils.availability import QAT, missing_packages

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that runtimes compute in int8."""


def require_quantizable(model: nn.Module) -> None:
    """Raise, before anything runs, if torchao is not installed, or a model has no layers for int8."""
    if missing := missing_packages(["torchao"], QAT):
        raise UsageError(f"fake_quantize {missing}")
    _primitives()
    if not quantizable(model):
        raise ModelError(
            f"fake_quantize: expected Linear layers or convolutions with weights of at most 32 bits, and "
            f"{type(model).__name__} has none; leave it out"
        )


def _primitives() -> tuple[Any, Any, Any]:
    """Return torchao's `IntxFakeQuantizer`, its settings, and the choice of scales; its code warns as it is read."""
    logger = logging.getLogger("torch.utils._pytree")
    before, logger.disabled = logger.disabled, True
    try:
        with (
            raised_as(UsageError, "fake_quantize needs torchao 0.18 or later (pip install 'prunekit[qat]'): "),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            from torchao.quantization import MappingType, choose_qparams_affine
            from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer
    finally:
        logger.disabled = before
    symmetric = {"mapping_type": MappingType.SYMMETRIC, "target_dtype": torch.int8, "quant_min": -127, "quant_max": 127}
    return IntxFakeQuantizer, IntxFakeQuantizeConfig, partial(choose_qparams_affine, **symmetric)


def quantizable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose weights and inputs are quantized, by their paths.

    Others stay in float: embeddings, norms, transposed convolutions and recurrent layers, as in exported files; also
    projections of `nn.MultiheadAttention`, which no hook sees, and weights that are computed, as by `weight_norm`.
    """

    def able(module: nn.Module) -> bool:
        weight = module._parameters.get("weight")
        return weight is not None and weight.is_floating_point() and weight.dtype.itemsize <= 4

    layers = {path: module for path, module in model.named_modules() if isinstance(module, LAYERS)}
    return {path: module for path, module in layers.items() if able(module) and not never_called(module)}


class FakeQuantization(Callback):
    """Quantization-aware training for int8, in every forward pass of a run, those of validation included.

    (Jacob et al. 2018, "Quantization and training of neural networks for efficient integer-arithmetic-only inference".)
    Each layer of `quantizable` computes with weights w and inputs x that were rounded to int8 and back:

    - weights symmetric, one scale for each output channel: s round(w / s), s = max |w| / 127;
    - inputs asymmetric, one scale and one zero point for each tensor, whose range contains 0.

    The float weights are what is trained and stored: gradients pass the rounding straight through, but for inputs at
    the two ends of their range, where torch's clamp has none. The best epoch, and whether it beats the start, are
    judged as int8 computes. The teacher of a distillation stays in float.

    It is the scheme of ONNX files for CPUs with 8-bit instructions, but for three things: ranges of inputs are those of
    the batch (in several processes of each one's share), where a file has fixed ones from calibration; what joins
    layers, as sums and concatenations, stays in float, and so do biases, which a file holds in 32 bits. OpenVINO tries
    symmetric ranges of inputs first, and an exporter may return layers to float. Weights ahead of BatchNorm are
    quantized before they are folded with it, which comes to the same integers: folding multiplies each output channel
    by a constant, and so its scale. Zero is exact on both scales, so that masked weights stay zero, and masked channels
    change no range: the masked model computes what the compact one does.

    Raises:
        UsageError: when the run begins, if torchao is not installed.
        ModelError: when the run begins, if the model has no such layers.
    """

    layers = 0  # how many were quantized in the run

    def active(self, run: TrainingRun) -> AbstractContextManager[Any]:
        """Return the hooks on the layers of the run's model."""
        require_quantizable(run.model)
        self.layers = len(quantizable(run.model))
        return _QuantizingHooks(run.model)


class _QuantizingHooks(HookOwner):
    """Hooks that put a quantized weight before the layer's own while the layer runs, and quantize its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        quantizer, settings, self._choose = _primitives()
        # by channel, torchao's own scales are max |w| / 127.5, which clips the largest weight; so they are given
        self._weights = quantizer(settings(torch.int8, "per_channel", is_dynamic=False))
        self._inputs = quantizer(settings(torch.int8, "per_token", is_symmetric=False))

    def register(self) -> None:
        """Register hooks around every layer."""
        for module in quantizable(self._model).values():
            self.own_undo(partial(vars(module).pop, "weight", None))  # of a pass that was interrupted
            self.own_forward_pre(module, self._before)
            self.own_forward(module, self._after, always=True)

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        weight = module._parameters["weight"]
        assert weight is not None
        vars(module)["weight"] = self._quantized_weight(weight)
        if arguments:
            return (self._quantized_input(arguments[0]), *arguments[1:]), named
        return arguments, {name: self._quantized_input(value) for name, value in named.items()}

    def _after(self, module: nn.Module, *_: Any) -> None:
        vars(module).pop("weight", None)

    def _quantized_weight(self, weight: Tensor) -> Tensor:
        """Return a weight (O, ...), rounded in each of its O channels."""
        rows = weight.flatten(1).float()
        if rows.shape[1] < 2:
            return weight  # a single number is one of the values on its scale
        self._weights.scale, _ = self._choose(rows, block_size=(1, rows.shape[1]))
        # torch's clamp has no gradient at its ends, -128 and 127: the largest weight's integer is moved off its end
        self._weights.zero_point = -(rows.amax(1) > -rows.amin(1)).int()
        rounded: Tensor = self._weights(rows)
        return rounded.view_as(weight).to(weight.dtype)

    def _quantized_input(self, values: Tensor) -> Tensor:
        """Return a layer's input, rounded as one row in its order in memory; an empty one as it is."""
        if not values.numel():
            return values
        order = sorted(range(values.ndim), key=values.stride, reverse=True)
        there = values.permute(order)
        rounded: Tensor = self._inputs(there.reshape(1, -1).float())  # its "token"
        return rounded.view(there.shape).permute([order.index(axis) for axis in range(len(order))]).to(values.dtype)
