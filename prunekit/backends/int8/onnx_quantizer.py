"""Static quantization of an ONNX file to int8, by ONNX Runtime: QDQ format, weights per channel."""

import io
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from prunekit.backends.files.onnx_program import NodeModules, graph_inputs, known_metadata, read_onnx
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
from prunekit.errors import RunError, raised_as, reason_of
from prunekit.utils.availability import int8_instructions, int8_note

WEIGHTED = ("Conv", "Gemm", "MatMul")
"""Operators with weights that have int8 kernels."""
JOINING = ("Add", "Concat")
"""Operators that join what layers compute, quantized in networks of convolutions."""
PASSING = (
    "Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool", "Reshape", "Transpose", "Squeeze", "Unsqueeze",
    "Flatten", "Slice", "Pad", "Split", "Resize",
)  # fmt: skip
"""Operators that are computed in int8 where their input is in int8."""
PRECISE = ("LayerNormalization", "RMSNormalization", "Attention", "GroupNormalization", "InstanceNormalization")
"""Operators of networks whose sums stay in float, as transformers' do: int8 is for layers with weights alone."""
COMPUTING = (*WEIGHTED, *PRECISE, "ConvTranspose", "LSTM", "GRU", "RNN", "Softmax", "Einsum")
"""Operators that a layer is named for if it computes in float."""
WAYS = ("MinMax", "Percentile")
"""Names of ONNX Runtime's ways of calibration, in the order in which they are tried."""


class OnnxQuantizer(Quantizer):
    """Quantizes an ONNX file, in a folder for files, which are left there."""

    ways = WAYS
    kinds = WEIGHTED

    def __init__(self, file: Path, folder: Path, batches: Iterable[Batch], images: int) -> None:
        self.file, self._folder, self._number = file, folder, 0
        model = read_onnx(file)
        self.notes = [int8_note()]
        self._metadata = known_metadata(model)
        self._large = any(weight.data_location for weight in model.graph.initializer)
        self._modules = NodeModules(file).of_nodes
        self._nodes = _nodes_by_layer(model, self._modules)
        self._kinds = (*WEIGHTED, *(() if _precise(model) else (*JOINING, *PASSING)))
        self.batches = calibration_batches(batches, _inputs(model), images, file.name)
        self._staged = self._prepared()
        self.layers = tuple(self._nodes)
        # Without VNNI, pairs of products of 8 bits are added in 16, which overflow: weights are kept in 7.
        self._narrow = platform.machine().lower() in ("x86_64", "amd64") and int8_instructions() == ()
        if self._narrow:
            self.notes.append("weights have 7 bits, as the sums of this CPU's 8-bit instructions may overflow")

    def _prepared(self) -> Path:
        """Return a copy with a name for every node, prepared by ONNX Runtime if it is not of torch's exporter."""
        import onnx

        path = self._folder / "float.onnx"
        # torch's exporter has folded constants and norms already, and the preparation would lose its metadata
        if self._modules:
            staged = onnx.load(self.file)
            _name_nodes(staged)
        else:
            staged = self._preprocessed()
            self._nodes = _nodes_by_layer(staged, {})
        if "onnx.quant.pre_process" not in known_metadata(staged):
            staged.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
        onnx.save(staged, path, save_as_external_data=self._large, location="float.data")
        return path

    def _preprocessed(self) -> Any:
        import onnx
        from onnxruntime.quantization.shape_inference import quant_pre_process

        path = self._folder / "prepared.onnx"
        try:
            quant_pre_process(str(self.file), str(path), skip_symbolic_shape=True, save_as_external_data=self._large)
            return onnx.load(path)
        except Exception as error:  # an operator that its shape inference does not know
            self.notes.append(f"ONNX Runtime could not prepare {self.file.name} ({reason_of(error)}): taken as it is")
            return onnx.load(self.file)

    def quantize(self, way: str, layers: frozenset[str]) -> Path:
        """Quantize some of the layers, and return the new file."""
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

        self._number += 1
        path = self._folder / f"{self._number}.onnx"
        excluded = [node for layer, nodes in self._nodes.items() if layer not in layers for node in nodes]
        extra = {
            "MatMulConstBOnly": True,
            # Gemm has a kernel that returns float, which spares the logits; MatMul has none.
            "OpTypesToExcludeOutputQuantization": ["Gemm"],
        }
        if way != "MinMax":
            extra["CalibStridedMinMax"] = 1  # one batch after the other: histograms would keep all activations
        failed = f"{self.file.name}: ONNX Runtime cannot quantize it: "
        with redirect_stdout(io.StringIO()), raised_as(RunError, failed, "; stay in float"):
            quantize_static(
                self._staged,
                path,
                CalibrationReader(self.batches),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(self._kinds),
                per_channel=True,
                reduce_range=self._narrow,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=excluded,
                use_external_data_format=self._large,
                calibrate_method=CalibrationMethod[way],
                extra_options=extra,
                calibration_cache_path=self._folder / f"{way}.json",
            )
        return path

    def outputs(self, file: Path) -> list[Array]:
        """Return what a file computes from the first calibration data."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        batches = with_samples(self.batches, SENSITIVITY_SAMPLES)
        return [np.asarray(one) for batch in batches for one in session.run(None, batch)]

    def described(self, file: Path, restored: Sequence[LayerError]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the layers of a file that compute in int8, and those in float with the reason."""
        import onnx

        nodes = onnx.load(file, load_external_data=False).graph.node
        dequantized = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
        returned, done, floats = returned_layers(restored), set[str](), dict[str, str]()
        for node in nodes:
            layer = self._modules.get(node.name, node.name)
            if layer in returned:
                floats[layer] = returned[layer]
            elif node.op_type in WEIGHTED and set(node.input[:2]) <= dequantized:
                done.add(layer)
            elif node.op_type in COMPUTING:
                product = node.op_type in ("MatMul", "Einsum")
                kind = "a product of two activations" if product else node.op_type
                floats.setdefault(layer, f"{kind} is computed in float")
            elif node.op_type in JOINING and layer in self._nodes:
                done.add(layer)
        return tuple(layer for layer in self.layers if layer in done), floats

    def finish(self, file: Path, path: Path) -> None:
        """Put a file into its place, with the metadata of the original."""
        import onnx

        folder = self._folder / "finished"
        folder.mkdir()
        model = onnx.load(file)
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, self._metadata)
        data = f"{path.name}.data"
        onnx.save(model, folder / path.name, save_as_external_data=self._large, location=data)
        if self._large:
            os.replace(folder / data, path.with_name(data))
        os.replace(folder / path.name, path)


def _inputs(model: Any) -> InputKinds:
    import onnx

    kinds = {entry.name: entry.type.tensor_type for entry in graph_inputs(model)}
    return {
        name: (
            onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type),
            tuple(axis.dim_value if axis.HasField("dim_value") else None for axis in kind.shape.dim),
        )
        for name, kind in kinds.items()
    }


def _precise(model: Any) -> bool:
    return any(node.op_type in PRECISE for node in model.graph.node)


def _name_nodes(model: Any) -> None:
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"


def _nodes_by_layer(model: Any, modules: Mapping[str, str]) -> dict[str, list[str]]:
    """Name all nodes, and return those that are quantized by the path of their module, or by their own name."""
    _name_nodes(model)
    weights = {one.name for one in model.graph.initializer}
    kinds = WEIGHTED if _precise(model) else (*WEIGHTED, *JOINING)
    found: dict[str, list[str]] = {}
    for node in model.graph.node:
        product = node.op_type == "MatMul" and node.input[1] not in weights
        if node.op_type in kinds and not product:
            found.setdefault(modules.get(node.name, node.name), []).append(node.name)
    return found


class CalibrationReader:
    """Calibration data in the form that ONNX Runtime reads, which takes them in parts."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self.set_range(0, len(batches))

    def get_next(self) -> Batch | None:
        """Return the next batch; None at the end."""
        return next(self._rest, None)

    def __len__(self) -> int:
        return len(self._batches)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Start again, with some of the batches."""
        self._rest = iter(self._batches[start_index:end_index])
