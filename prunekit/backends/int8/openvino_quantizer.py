"""Post-training quantization of a model in OpenVINO's format to int8, by NNCF; and OpenVINO's core."""

import io
import json
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from prunekit.backends.files.onnx_program import NodeModules, name_of_node
from prunekit.backends.int8.quantizer import (
    SENSITIVITY_SAMPLES,
    Array,
    Batch,
    InputKinds,
    LayerError,
    Quantizer,
    calibration_batches,
    returned_layers,
    with_samples,
)
from prunekit.errors import ArtifactError, RunError, raised_as
from prunekit.utils.availability import CPUINFO, int8_instructions, int8_note

SPARSE_RATE = 0.5
"""Share of zeros from which int8 weights of fully connected layers stay packed in memory, on CPUs with AMX."""
MODULES = "prunekit_modules"
"""Key of the runtime information that names the module of each operator, as JSON."""
WEIGHTED = ("Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData", "MatMul")
"""Operators with weights that have int8 kernels."""
PRECISE = ("MVN", "ScaledDotProductAttention", "Softmax", "LSTMSequence", "GRUSequence", "RNNSequence")
"""Operators that a layer is named for as they compute in float."""
TRANSFORMER = ("MVN", "ScaledDotProductAttention")
"""Operators by which NNCF is told that a network is a transformer."""
SMOOTHED = ", SmoothQuant"
"""Suffix of the way in which outliers of activations are moved into weights (Xiao et al. 2023).

It is not the first, as NNCF 3.4 takes wrong channels in some attention: outputs of a block whose tokens are
on the first axis are off by half."""
WAYS, TRANSFORMER_WAYS = ("performance", "mixed"), ("mixed", f"mixed{SMOOTHED}")
"""Names of NNCF's presets: symmetric ranges, and asymmetric ones of activations; in the order of trial."""
OF_TORCH = re.compile(r"__module\.(?P<path>[^/]+)/.*")
"""Names of operators that OpenVINO gives where it has converted a torch module itself."""


@cache
def openvino_core() -> Any:
    """Return OpenVINO's core, which lives until the process ends.

    Its CPU plug-in gives the thread that loads it a stack for signals, and frees it with the last reference: if a
    garbage collection in another thread does that, the next signal (a worker of a data loader that ends) kills the
    process.
    """
    import openvino

    return openvino.Core()


def sparse_options(cpuinfo: Path = CPUINFO) -> dict[str, float]:
    """Return the option of a compiled model by which int8 weights with many zeros are read packed; empty without AMX.

    It is OpenVINO's sparse weights decompression: for fully connected layers in int8 on CPUs with AMX alone, and for
    weights with at least `SPARSE_RATE` of zeros. The numbers stay the same.
    """
    able = "AMX" in (int8_instructions(cpuinfo) or ())
    return {"CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": SPARSE_RATE} if able else {}


def _module_names(file: Path, model: Any) -> Mapping[str, str] | None:
    """Return the paths of modules by the names of nodes and results, as a file carries them; None if it has none."""
    if file.suffix == ".onnx":
        return NodeModules(file).of_names
    if not model.has_rt_info(MODULES):
        return None
    try:
        found = json.loads(str(model.get_rt_info(MODULES).value))
    except ValueError:  # of a file that was damaged, or made by others: names are for people
        return None
    return found if isinstance(found, dict) else None


class OpenvinoQuantizer(Quantizer):
    """Quantizes a model in OpenVINO's format, in a folder for files, which are left there.

    Correcting biases changes no time.
    """

    def __init__(
        self, file: Path, folder: Path, batches: Iterable[Batch], images: int, *, correct_biases: bool = True
    ) -> None:
        self.file, self._folder, self._number, self._correct = file, folder, 0, correct_biases
        self.notes = [int8_note()]
        model = self._read(file)
        self._modules = _module_names(file, model)
        self._nodes: dict[str, list[str]] = {}
        weighted = set[str]()
        for node in model.get_ordered_ops():
            if node.get_type_name() in ("Parameter", "Constant", "Result"):
                continue
            layer = self._layer(node)
            self._nodes.setdefault(layer, []).append(node.get_friendly_name())
            if _has_weights(node):
                weighted.add(layer)
        self.layers = tuple(layer for layer in self._nodes if layer in weighted)
        self._transformer = any(node.get_type_name() in TRANSFORMER for node in model.get_ops())
        self.ways = TRANSFORMER_WAYS if self._transformer else WAYS
        self.batches = calibration_batches(batches, _inputs(model), images, file.name)

    def _read(self, file: Path) -> Any:
        with raised_as(ArtifactError, f"{file}: expected a model that OpenVINO reads, but "):
            return openvino_core().read_model(file)

    def _layer(self, node: Any) -> str:
        name = str(node.get_friendly_name())
        if self._modules is not None:
            found, reader = self._modules.get(name_of_node(name)), node
            while found is None and len(readers := reader.output(0).get_target_inputs()) == 1:
                reader = next(iter(readers)).get_node()  # of an operator that was taken apart, the last has its name
                if not reader.get_output_size():
                    break
                found = self._modules.get(name_of_node(str(reader.get_friendly_name())))
            return name if found is None else found
        match = OF_TORCH.fullmatch(name)
        return name if match is None else match["path"]

    def quantize(self, way: str, layers: frozenset[str]) -> Path:
        """Quantize some of the layers, and return the new file."""
        with _quietly():
            import nncf
            import openvino

            excluded = [name for layer in self.layers if layer not in layers for name in self._nodes[layer]]
            if len(layers) < len(self.layers):  # operators without weights stay in float beside a single layer
                others = [names for layer, names in self._nodes.items() if layer not in self.layers]
                excluded += [name for names in others for name in names] if len(layers) == 1 else []
            self._number += 1
            path = self._folder / f"{self._number}.xml"
            smoothing = nncf.AdvancedSmoothQuantParameters()
            if not way.endswith(SMOOTHED):
                smoothing.matmul = smoothing.convolution = -1.0  # off
            with raised_as(RunError, f"{self.file.name}: NNCF cannot quantize it: ", "; stay in float"):
                quantized = nncf.quantize(
                    self._read(self.file),
                    nncf.Dataset(self.batches),
                    preset=nncf.QuantizationPreset(way.removesuffix(SMOOTHED)),
                    subset_size=len(self.batches),
                    model_type=nncf.ModelType.TRANSFORMER if self._transformer else None,
                    ignored_scope=nncf.IgnoredScope(names=excluded, validate=False),
                    advanced_parameters=nncf.AdvancedQuantizationParameters(
                        disable_bias_correction=not self._correct, smooth_quant_alphas=smoothing
                    ),
                )
            openvino.save_model(quantized, path, compress_to_fp16=False)
        return path

    def outputs(self, file: Path) -> list[Array]:
        """Return what a file computes from the first calibration data."""
        hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        compiled = openvino_core().compile_model(self._read(file), "CPU", hints)
        batches = with_samples(self.batches, SENSITIVITY_SAMPLES)
        return [np.array(found) for batch in batches for found in compiled(dict(batch)).to_tuple()]

    def described(self, file: Path, restored: Sequence[LayerError]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the layers of a file that compute in int8, and those in float with the reason."""
        done, floats = dict[str, None](), returned_layers(restored)
        for node in self._read(file).get_ordered_ops():
            layer, kind = self._layer(node), node.get_type_name()
            if _has_weights(node) and _in_bytes(node):
                done[layer] = None
            elif layer not in floats and (_has_weights(node) or kind in PRECISE):
                floats[layer] = f"{kind} is computed in float"
        return tuple(done), floats

    def finish(self, file: Path, path: Path) -> None:
        """Put a file into its place, the `.xml` last: with it the model is there."""
        for suffix in (".bin", ".xml"):
            os.replace(file.with_suffix(suffix), path.with_suffix(suffix))


def _has_weights(node: Any) -> bool:
    return node.get_type_name() in WEIGHTED and _weights(node)[-1].get_type_name() == "Constant"


def _in_bytes(node: Any) -> bool:
    """Return whether the weights of an operator are stored in bytes, or rounded to them when the file is compiled."""
    *steps, origin = _weights(node)
    rounded = any(step.get_type_name() == "FakeQuantize" for step in steps)
    return rounded or origin.get_output_element_type(0).get_type_name() in ("i8", "u8")


def _weights(node: Any) -> list[Any]:
    """Return the operators that the weights of an operator come through, from it on to the constant, or to an input."""
    found = [node.input(1).get_source_output().get_node()]
    while found[-1].get_type_name() in ("Convert", "Multiply", "Subtract", "Reshape", "Transpose", "FakeQuantize"):
        found.append(found[-1].input(0).get_source_output().get_node())
    return found


def _inputs(model: Any) -> InputKinds:
    return {
        entry.get_any_name(): (
            entry.get_element_type().to_dtype(),
            tuple(None if axis.is_dynamic else axis.get_length() for axis in entry.get_partial_shape()),
        )
        for entry in model.inputs
    }


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what NNCF prints, logs and warns of off the terminal."""
    logger = logging.getLogger("nncf")
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logger.level
        try:
            logger.setLevel(logging.ERROR)
            yield
        finally:
            logger.setLevel(before)
