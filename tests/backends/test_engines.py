"""Engines of TensorRT, run by a stand-in: what they are given, where they write, and what is said where they fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prunekit.backends import tensorrt
from prunekit.backends.backend import FORMATS
from prunekit.backends.files.export_source import ExportSource
from prunekit.backends.session import Setting, Source
from prunekit.errors import ArtifactError, RunError
from prunekit.models.interface import ModelInterface, TensorSpec

CPU = torch.device("cpu")
STAND_IN = Path(__file__).parent.parent / "stand_ins" / "tensorrt.py"
INPUTS = (TensorSpec("image", "float32", ("batch", 3, 4, 4)), TensorSpec("token", "int64", ("batch",)))
OUTPUTS = (TensorSpec("scores", "float32", ("batch", 5)), TensorSpec("sums", "float32", ("batch",)))


class Net(nn.Module):
    """Two inputs of different dtypes, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv2d(3, 5, 3), nn.Embedding(7, 5)

    def forward(self, image: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.conv(image).mean((2, 3)) + self.table(token)
        return scores, scores.sum(1)


def example(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 4, 4), torch.arange(samples) % 7


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


class OnCpu(TorchFunctionMode):
    """A mode in which tensors of CUDA are on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, named = [*args], dict(kwargs or {})
        for given, keys in ((found, range(len(found))), (named, [*named])):
            for key in keys:
                if isinstance(given[key], torch.device):
                    given[key] = CPU
        return func(*found, **named)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The backend, whose engines are on the CPU; the file that is built is the engine."""
    spec = spec_from_file_location("tensorrt", STAND_IN)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "tensorrt", module_from_spec(spec))
    spec.loader.exec_module(sys.modules["tensorrt"])
    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(tensorrt, "built_engine", lambda file, *_, **options: file.read_bytes())
    monkeypatch.setattr(tensorrt.TensorRt, "unusable", lambda self: "")
    with OnCpu():
        yield FORMATS.get("tensorrt")


def require_same(found: Any, net: nn.Module, given: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        for one, expected in zip(found, net(*given), strict=True):
            torch.testing.assert_close(one, expected)


@pytest.mark.slow
def test_a_file_is_built_and_timed(net: nn.Module, backend: Any, tmp_path: Path) -> None:
    given = example(2)
    file = FORMATS.get("onnx").write_fixed(net, given, tmp_path / "model.onnx")
    session = backend.session(Source(files={(2, "float32"): file}), given, Setting("tensorrt", "cuda", 2, 1))
    for _ in range(2):
        require_same(session.tensors(session.run()), net, given)


@pytest.mark.slow
def test_an_engine_runs_on_any_size_and_says_what_it_does_not_take(
    net: nn.Module, backend: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model.engine"
    backend.write(ExportSource(net, example(2), ModelInterface(INPUTS, OUTPUTS)), path)
    run = backend.open_trusted(path)
    found = [(given, run(given)) for given in map(example, (2, 5))]
    for given, outputs in found:  # those of the first run are not overwritten by the second
        require_same(outputs, net, given)
    with pytest.raises(RunError, match=r"model.engine: the engine takes no image of shape \(2, 3, 4, 5\): "):
        run((torch.randn(2, 3, 4, 5), torch.arange(2)))
    path.write_bytes(b"no engine")
    with pytest.raises(ArtifactError, match=r"model.engine: expected a TensorRT engine .* this GPU .*: .+"):
        backend.open_trusted(path)
