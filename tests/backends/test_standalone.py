"""Standalone folders: the model that `model.py` rebuilds without prunekit is the same, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import nn

import prunekit as pk
from prunekit.backends.files.export_source import ExportSource
from prunekit.backends.folders.included_parts import image_input
from prunekit.backends.standalone import Standalone, imported
from prunekit.cli.commands.export import export_command
from prunekit.deploy.batchnorm_folding import fold_batchnorm
from prunekit.errors import ArtifactError, ModelError, RunError, UsageError
from prunekit.hooks.model_copy import copied
from prunekit.models.interface import interface_of
from prunekit.models.zoo import build_model, load_factory
from prunekit.settings.inputs import ModelSettings
from prunekit.utils.inputs import as_example, call
from prunekit.utils.tensors import gather

WITHOUT_PRUNEKIT = """
import importlib.abc, importlib.util, sys, torch

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "prunekit":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
torch.set_num_threads(1)
for number, folder in enumerate(sys.argv[2:]):
    sys.path.append(sys.argv[1])
    spec = importlib.util.spec_from_file_location(f"model_{number}", f"{folder}/model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    model = module.load()
    known = torch.load(f"{folder}.pt", weights_only=True)
    state = model.state_dict()
    assert list(state) == list(known["state"]), folder
    assert all(torch.equal(state[name], tensor) for name, tensor in known["state"].items()), folder
    with torch.no_grad():
        output = model(*known["args"])
    output = output if isinstance(output, torch.Tensor) else output["logits"]
    assert torch.equal(output, known["output"]), folder
    assert not [name for name in sys.modules if name.partition(".")[0] == "prunekit"]
    print("same")
"""

NETS = '''
import torch
from torch import nn
from torchvision.models.swin_transformer import SwinTransformer


class Net(nn.Module):
    """Attention that divides its width by the number of heads; a table, a bare norm, and two calls of super."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.embed = nn.Conv2d(3, 32, 4, 4)
        self.qkv = nn.Linear(32, 96)
        self.proj = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32, elementwise_affine=False)
        self.head = nn.Linear(32, 10)
        self.__hidden = 1.5

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        assert super().extra_repr() == "" and __class__ is Net
        B, N, C = x.shape  # a comment with "quotes" and ünïcode
        q, k, v = self.qkv(x * self.__hidden).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-2, -1) / 3).softmax(-1)
        x = x + self.proj((attention @ v).transpose(1, 2).reshape(B, N, C))
        return self.head(self.norm(x).mean(1))


def swin():
    return SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=10)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    return nn.Sequential(nn.Flatten(2), nn.Linear(64, 16), encoder, nn.Flatten(), nn.Linear(48, 5))


def within():
    class Local(Net):
        def forward(self, x):
            x = self.embed(x).flatten(2).transpose(1, 2)
            B, N, C = x.shape
            q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
            x = x + self.proj(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))
            return self.head(self.norm(x).mean(1))

    return Local()
'''


def nets(folder: Path) -> Path:
    path = folder / "nets_of_a_user.py"
    path.write_text(NETS, encoding="utf-8")
    return path


def source_of(model: nn.Module, x: Any, build: dict[str, Any] | None = None, **named: Any) -> ExportSource:
    model = copied(model).eval()
    example = as_example(model, x)
    return ExportSource(model, example, interface_of(model, example, **named), facts={"build": build} if build else {})


def pruned(name: str, x: Any, zoo: str = "cifar", macs: float = 0.5, **arguments: Any) -> ExportSource:
    torch.manual_seed(0)
    build = {"name": name, "zoo": zoo, "arguments": arguments}
    if zoo == "own":
        model = load_factory(name)
    else:
        model = build_model(ModelSettings(name, zoo, arguments=arguments), num_classes=None)  # type: ignore[arg-type]
    return source_of(pk.prune(model, x, macs=macs).model, x, build)


def check(source: ExportSource, path: Path) -> tuple[nn.Module, list[str]]:
    """Writes a model, and compares what the folder's file rebuilds."""
    notes = Standalone().write(source, path)
    run = Standalone().open(path)
    for ours, theirs in zip(run(source.example), gather(call(source.model, source.example)), strict=True):
        assert torch.equal(ours, theirs)
    assert Standalone().interface(path) == source.interface
    model = imported(path / "model.py").load()
    assert list(model.state_dict()) == list(source.model.state_dict())
    assert "prunekit" not in "".join(line for line in (path / "model.py").read_text().splitlines() if "import" in line)
    return model, notes


@pytest.mark.slow
def test_models_are_the_same_where_prunekit_is_not_installed(tmp_path: Path) -> None:
    image = torch.rand(2, 3, 32, 32)
    reference = str(nets(tmp_path))
    sources = {
        "cifar": pruned("resnet8", image),
        "own": pruned(f"{reference}:Net", image, "own"),
        "swin": pruned(f"{reference}:swin", image, "own"),
        "encoder": pruned(f"{reference}:encoder", torch.rand(2, 3, 8, 8), "own"),
    }
    folders = []
    for name, source in sources.items():
        Standalone().write(source, tmp_path / name)
        with torch.no_grad():
            output = gather(call(source.model, source.example))[0]
        known = {"state": source.model.state_dict(), "args": source.example, "output": output}
        torch.save(known, tmp_path / f"{name}.pt")
        folders.append(str(tmp_path / name))
    command = [sys.executable, "-I", "-c", WITHOUT_PRUNEKIT, str(tmp_path), *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["same"] * len(folders), done.stderr


def test_rewritten_methods_are_readable_source(tmp_path: Path) -> None:
    source = pruned(f"{nets(tmp_path)}:Net", torch.rand(2, 3, 32, 32), "own")
    _, notes = check(source, tmp_path / "out")
    text = (tmp_path / "out" / "model.py").read_text(encoding="utf-8")
    assert "class Net_2(nets_of_a_user.Net):" in text
    assert '# a comment with "quotes" and ünïcode' in text
    assert "self._Net__hidden" in text
    assert "super(nets_of_a_user.Net, self).extra_repr()" in text
    assert "    model.heads = " in text or "    model._size_forward" in text
    assert any("nets_of_a_user" in note for note in notes)


def test_methods_of_a_class_within_a_function_cannot_be_written(tmp_path: Path) -> None:
    source = pruned(f"{nets(tmp_path)}:within", torch.rand(2, 3, 32, 32), "own")
    with pytest.raises(RunError, match=r"Local: .*cannot be imported by its name; prune with plain_classes=True"):
        Standalone().write(source, tmp_path / "out")


def test_the_constructor_of_a_library_model_is_found(tmp_path: Path) -> None:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1(num_classes=10)
    small = pk.prune(model, torch.rand(2, 3, 64, 64), macs=0.5).model
    check(source_of(small, torch.rand(2, 3, 64, 64)), tmp_path / "out")
    assert (
        "return torchvision.models.squeezenet1_1(weights=None, num_classes=10)"
        in (tmp_path / "out" / "model.py").read_text()
    )


def test_a_model_without_a_known_builder_takes_the_dense_one(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    torch.manual_seed(0)
    small = pk.prune(build(), torch.rand(4, 3, 2, 2), macs=0.5).model
    source = source_of(small, torch.rand(4, 3, 2, 2))
    format = Standalone()
    (note,) = format.write(source, tmp_path / "out")
    assert "load(dense)" in note
    assert torch.equal(format.open(tmp_path / "out")(source.example)[0], source.model(*source.example))
    dense = build()
    for given in (build, dense):
        rebuilt = imported(tmp_path / "out" / "model.py").load(given)
        assert torch.equal(rebuilt(*source.example), source.model(*source.example))
    assert dense[1].out_features == 32
    with pytest.raises(UsageError, match=r"--model file\.py:factory"):
        Standalone().open(tmp_path / "out")


class Shared(nn.Module):
    """Tied and frozen tensors, buffers of all kinds, and a norm to fold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.second, self.third = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.third.weight = self.second.weight
        self.register_buffer("shown", torch.rand(1, 16, 1, 1), persistent=False)
        self.register_buffer("mixing", torch.eye(16).to_sparse())
        self.second.bias.requires_grad_(False)
        self.noise = torch.rand(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.third(self.second(self.norm(self.first(x)).relu()).relu()) * self.shown + self.noise
        return torch.sparse.mm(self.mixing, x.mean((2, 3)).T).T


def test_ties_frozen_sparse_and_folded_tensors_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    model.norm.running_mean.uniform_()
    model = fold_batchnorm(model, torch.rand(2, 3, 8, 8)).model
    source = source_of(model.to(memory_format=torch.channels_last), torch.rand(2, 3, 8, 8))
    rebuilt, _ = check(source, tmp_path / "out")
    assert rebuilt.third.weight is rebuilt.second.weight
    assert not rebuilt.second.bias.requires_grad
    assert rebuilt.first.weight.is_contiguous(memory_format=torch.channels_last)
    assert rebuilt.first.bias is not None
    assert type(rebuilt.norm) is nn.Sequential
    assert rebuilt.mixing.is_sparse
    assert torch.equal(rebuilt.noise, model.noise)


@pytest.mark.parametrize("size", [(32, 32), (48, 40), (40, 100), (20, 24), (16, 90)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shorter_side": 40, "interpolation": "bicubic"},
        {"shorter_side": 24, "channel_order": "bgr"},
        {"interpolation": "nearest", "mean": (0.5,), "std": (0.25,), "white": 127.5},
        {"interpolation": "lanczos", "shorter_side": 36},
    ],
)
def test_images_become_the_same_input(tmp_path: Path, size: tuple[int, int], settings: dict[str, Any]) -> None:
    preprocessing = pk.Preprocessing(height=32, width=32, **settings)
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    table = {name: tuple(item) if isinstance(item, list) else item for name, item in preprocessing.as_dict().items()}
    ours = image_input(tmp_path / "image.png", **table)
    assert torch.equal(ours, preprocessing(tmp_path / "image.png")[0])


def test_the_file_prints_the_best_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    classes = [f"kind {index}" for index in range(10)]
    model = build_model(ModelSettings("resnet8", "cifar"), num_classes=None)
    preprocessing = pk.Preprocessing(height=32, width=32)
    source = source_of(model, torch.rand(2, 3, 32, 32), classes=classes, preprocessing=preprocessing)
    check(source, tmp_path / "out")
    Image.new("RGB", (50, 40), "red").save(tmp_path / "red.png")
    imported(tmp_path / "out" / "model.py").main([str(tmp_path / "red.png")])
    first, best, *_ = capsys.readouterr().out.splitlines()
    with torch.no_grad():
        expected = source.model(preprocessing(tmp_path / "red.png"))[0].argmax()
    assert first == str(tmp_path / "red.png")
    assert best.endswith(f"%  kind {expected}")


def hooked(model: nn.Module) -> None:
    model.relu.register_forward_hook(lambda *_: None)


def replaced(model: nn.Module) -> None:
    model.linear = nn.Sequential(nn.Dropout(), nn.Linear(64, 10))


def overridden(model: nn.Module) -> None:
    model.relu.forward = lambda x: x


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (hooked, "relu has a hook"),
        (replaced, "linear is a Sequential, and its constructor makes a Linear"),
        (overridden, "relu.forward is a function that was set on the model itself"),
    ],
)
def test_what_no_source_says_is_refused(tmp_path: Path, change: Callable[[nn.Module], None], named: str) -> None:
    source = pruned("resnet8", torch.rand(2, 3, 32, 32), macs=0.7)
    change(source.model)
    with pytest.raises(RunError, match=f"(?s){named}.*--model file.py:factory"):
        Standalone().write(source, tmp_path / "out")


def test_files_that_were_changed_are_refused(tmp_path: Path) -> None:
    source = pruned("resnet8", torch.rand(2, 3, 32, 32), macs=0.7)
    path = tmp_path / "out"
    Standalone().write(source, path)
    names = ("model.safetensors", "model.py", "manifest.json")
    weights, code, manifest = ((path / name).read_bytes() for name in names)
    (path / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="checksum"):
        Standalone().open(path)
    (path / "model.safetensors").write_bytes(weights)
    (path / "model.py").write_bytes(code + b"\n")
    with pytest.raises(ArtifactError, match="checksum"):
        Standalone().open(path)
    (path / "model.py").write_bytes(code)
    (path / "manifest.json").write_text(json.dumps({**json.loads(manifest), "format": 2}))
    with pytest.raises(ArtifactError, match="format 2, expected 1"):
        Standalone().interface(path)
    (path / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"expected a standalone folder with manifest\.json"):
        Standalone().interface(path)


@pytest.mark.slow
def test_a_file_that_python_cannot_import_is_refused(tmp_path: Path) -> None:
    nets(tmp_path).rename(tmp_path / "my-nets.py")
    source = pruned(f"{tmp_path / 'my-nets.py'}:swin", torch.rand(2, 3, 32, 32), "own")
    with pytest.raises(ModelError, match="'my-nets' is no name of a module"):
        Standalone().write(source, tmp_path / "out")


def test_the_module_that_differs_is_named(tmp_path: Path) -> None:
    source = pruned("resnet8", torch.rand(2, 3, 32, 32), macs=0.7)
    Standalone().write(source, tmp_path / "out")
    outputs: dict[str, torch.Tensor] = {}
    for name, module in source.model.named_modules():
        module.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out.clone()}))
    with torch.no_grad():
        source.model(*source.example)
    assert Standalone().parts(tmp_path / "out", source.example, outputs) == ""
    outputs["layer2.0.conv2"] = outputs["layer2.0.conv2"] * 1.01
    assert Standalone().parts(tmp_path / "out", source.example, outputs) == "layer2.0.conv2"


def small_net() -> nn.Module:
    """A model that a function of a module builds without arguments."""
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def exported(model: Any, path: Path, **given: Any) -> tuple[str, tuple[str, ...]]:
    found = pk.export(model, torch.rand(8, 3, 2, 2), to="standalone", path=path, timed=(), log=lambda _: None, **given)
    assert found.max_relative_difference == 0
    return (path / "model.py").read_text(encoding="utf-8"), found.notes


def test_the_dense_model_and_its_builder_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = pk.prune(small_net(), torch.rand(4, 3, 2, 2), macs=0.5)
    text, (note,) = exported(result, tmp_path / "function", dense=small_net)
    assert f"from {small_net.__module__} import small_net" in text
    assert "must be importable" in note
    text, (note,) = exported(result, tmp_path / "module", dense=small_net())
    assert "def load(dense: nn.Module | Callable[[], nn.Module]" in text
    assert "load(dense)" in note
    changed = text[text.index("def change") : text.index("def load")]
    assert [line.split(" = ")[0].strip() for line in changed.splitlines() if " = " in line] == [
        "model[1].out_features", "model[2].num_features", "model[4].in_features",
    ]  # fmt: skip
    assert "def load(dense" in exported(result, tmp_path / "closure", dense=lambda: small_net())[0]
    with pytest.raises(RunError, match="not made from the dense model that was given"):
        exported(result, tmp_path / "other", dense=nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    assert not (tmp_path / "other").exists()


def test_a_factory_of_the_command_line_is_imported(tmp_path: Path) -> None:
    (tmp_path / "factory_file.py").write_text(
        "from torch import nn, rand\n\n\ndef net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3)), rand(2, 3, 2, 2)\n"
    )
    command = ["--to", "standalone", "--output", str(tmp_path / "out"), "--no-timing"]
    done = CliRunner().invoke(export_command, [*command, "--model", f"{tmp_path / 'factory_file.py'}:net"])
    assert done.exit_code == 0, done.output
    assert "from factory_file import net" in (tmp_path / "out" / "model.py").read_text()


@pytest.mark.slow
def test_hooks_that_a_library_sets_when_a_model_runs_are_left_to_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = build_model(ModelSettings("vit", "hf", arguments={**sizes, "image_size": 32}), num_classes=3).eval()
    x = torch.rand(2, 3, 32, 32)
    model(x, output_hidden_states=True)
    source = source_of(model, x)
    rebuilt, _ = check(source, tmp_path / "out")
    with torch.no_grad():
        ours, theirs = (net(x, output_hidden_states=True).hidden_states for net in (rebuilt, model))
    assert len(ours) == len(theirs) == 3
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
