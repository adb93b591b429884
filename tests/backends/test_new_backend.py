"""A new backend is one file: its models are exported, opened, timed as files and as a runtime, quantized and listed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import prunekit as pk
from prunekit.backends.backend import FORMATS, RUNTIMES
from prunekit.backends.files.exported_model import open_exported
from prunekit.cli import cli
from prunekit.errors import RecipeError, UsageError
from prunekit.measure.latency.comparison import measure_latency
from prunekit.recipe.loading import load
from prunekit.settings.deployment import LatencySettings, QuantizeSettings
from prunekit.utils import user_code

OWN = '''
import shutil
import torch
from torch import nn
from prunekit.backends.backend import FileBackend, register_backend
from prunekit.backends.int8.quantizer import Quantizer
from prunekit.models.interface import ModelInterface
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather


def read(path):
    return torch.load(path, weights_only=False)


@register_backend(
    format="pickled", runtime="pickle", about="a pickle of the module", runs="the module of a pickle",
    suffix=".pickled", quantizer="pickle",
)
class Pickled(FileBackend):
    def write(self, source, path):
        torch.save((source.model, source.interface.as_dict()), path)
        return []

    def open(self, path, *, threads=1):
        model, _ = read(path)
        return lambda example: gather(call(model, example))

    def interface(self, path):
        return ModelInterface.from_dict(read(path)[1], str(path))

    def quantizer_of(self, file, folder, batches, images, *, only_timed=False):
        return Rounded(file, folder, list(batches))


class Rounded(Quantizer):
    """Weights are rounded to 255 numbers."""

    ways = ("rounding",)

    def __init__(self, file, folder, batches):
        self.file, self.folder, self.batches, self.notes = file, folder, batches, ["rounded"]
        self.layers = tuple(name for name, one in read(file)[0].named_modules() if isinstance(one, nn.Linear))

    def quantize(self, way, layers):
        model, interface = read(self.file)
        with torch.no_grad():
            for name in layers:
                weight = model.get_submodule(name).weight
                step = weight.abs().max() / 127
                weight.copy_((weight / step).round() * step)
        path = self.folder / "rounded.pickled"
        torch.save((model, interface), path)
        return path

    def outputs(self, file):
        model, _ = read(file)
        with torch.no_grad():
            return [model(*map(torch.from_numpy, batch.values())).numpy() for batch in self.batches]

    def described(self, file, restored):
        return self.layers, {}

    def finish(self, file, path):
        shutil.copyfile(file, path)
'''
X = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a backend, in the working directory; what it registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    user_code.load_object("mine.py:Pickled", UsageError)
    yield file
    for registry in (FORMATS, RUNTIMES):
        for name in {*registry._items} - {*registry.declared}:
            del registry._items[name]


def quiet(text: str) -> None:
    pass


def test_models_are_exported_to_it_and_its_files_are_models() -> None:
    found = pk.export(net(), X, to="pickled", timed=(1,), log=quiet)
    assert (found.path, found.format) == (Path("model.pickled"), "pickled")
    assert found.max_relative_difference == 0
    assert torch.equal(open_exported(found.path)(X), net()(X))


def test_its_files_are_quantized_in_exports() -> None:
    found = pk.export(net(), X, to="pickled", quantize=QuantizeSettings(), timed=(), log=quiet)
    assert found.int8 is not None
    assert found.int8.path == Path("model-int8.pickled")
    assert found.int8.quantized is not None
    assert found.int8.quantized["layers"] == ["0", "2"]
    assert 0 < found.int8.quantized["error"] < 0.02
    assert found.int8.notes == ("rounded",)


@pytest.mark.slow
def test_it_times_models_in_float_and_in_int8_as_a_runtime() -> None:
    settings = LatencySettings((1, 2), (1,), 5, ("eager", "pickle"), ("fp32", "int8"))
    report = measure_latency({"dense": net()}, (12,), settings, [torch.device("cpu")])
    assert report.failures == ()
    timed = {(row["runtime"], row["dtype"], row["batch"]) for row in report.rows}
    assert timed == {("eager", "float32", 1), ("eager", "float32", 2)} | {
        ("pickle", dtype, batch) for dtype in ("float32", "int8") for batch in (1, 2)
    }
    assert not any("in this process" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [(), ("--runtime", "pickle")])
def test_its_files_are_timed_in_it(asked: tuple[str, ...]) -> None:
    pk.export(net(), X, to="pickled", timed=(), log=quiet)
    found = CliRunner().invoke(cli, ["bench", "model.pickled", "--batch", "1", "--repeats", "5", "--json", *asked])
    assert found.exit_code == 0, found.output
    assert '"runtime": "pickle"' in found.stdout
    refused = CliRunner().invoke(cli, ["bench", "model.pickled", "--batch", "1", "--runtime", "onnxruntime"])
    assert refused.exit_code == 2
    assert "times it in its own, or pickle" in refused.output


def test_recipes_and_lists_know_it() -> None:
    listed = {kind: CliRunner().invoke(cli, ["list", kind]).stdout for kind in ("formats", "runtimes")}
    assert "a pickle of the module" in listed["formats"]
    assert "the module of a pickle" in listed["runtimes"]
    recipe = Path("recipe.yaml")
    recipe.write_text(
        "name: own\nmodel: {name: resnet8, zoo: cifar, weights: none.pt}\nexport: [pickled]\nquantize: int8\n"
    )
    assert load(recipe).export == ("pickled",)
    with pytest.raises(RecipeError, match="expected null, or onnx or openvino or pickled among the formats"):
        load(recipe, ["export=[pt2]"])
