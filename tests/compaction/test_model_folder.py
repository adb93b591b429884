"""The model folder: the same model bit for bit, and no damage that passes."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from equivalence import assert_unchanged, random_keep, randomized, settled_plan, snapshot
from safetensors.torch import load_file, save_file
from torch import nn

import prunekit
import prunekit.compaction.model_folder as folder_module
from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, read_manifest, save
from prunekit.errors import ArtifactError, ModelError, PrunekitError, UsageError
from prunekit.models.zoo import build_model
from prunekit.planning.plan import Plan
from prunekit.settings.inputs import ModelSettings
from prunekit.utils import files
from prunekit.utils.files import sha256, with_checksum

FAMILIES = {
    "resnet18": {},
    "mobilenet_v3_small": {},
    "shufflenet_v2_x0_5": {},
    "regnet_y_400mf": {},
    "googlenet": {"aux_logits": True, "init_weights": False},
    "squeezenet1_1": {},
}


@cache
def pruned(name: str) -> tuple[nn.Module, Plan, ModelSettings]:
    settings = ModelSettings(name, arguments={"num_classes": 5, **FAMILIES[name]})
    model = randomized(build_model(settings, num_classes=None)).eval()
    chart = trace(model, (torch.zeros(1, 3, 64, 64),))
    plan = Plan(chart, random_keep(chart, share=0.8), {"criterion": "none"})  # small files: tests copy and hash them
    return compact(model, plan), plan, settings


def saved(path: Path, name: str = "resnet18") -> nn.Module:
    model, plan, settings = pruned(name)
    save(model, path, plan, build=settings, extra={"classes": list("abcde")})
    return model


class Tied(nn.Module):
    """Two layers with one weight, a buffer that no state dict has, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.b.weight = self.a.weight
        self.register_buffer("gain", torch.rand(8) + 1, persistent=False)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.b(self.a(self.first(x).relu()).relu() * self.gain))


def own_model(path: Path) -> tuple[nn.Module, Any, tuple[torch.Tensor]]:
    """A model of the user's own, saved compact; returns the dense and the compact one and an input."""
    dense, example = randomized(Tied()).eval(), (torch.randn(2, 6),)
    plan = settled_plan(dense, example)
    small = compact(dense, plan)
    save(small, path, plan)
    return dense, small, example


# The same model again


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_loaded_model_is_the_saved_one(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", name)
    state = torch.get_rng_state()
    loaded = load(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), state)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert_unchanged(loaded, snapshot(model))
    assert [str(module) for module in loaded.modules()] == [str(module) for module in model.modules()]
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
    total = loaded.train()(images)
    (total if isinstance(total, torch.Tensor) else sum(total)).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_the_folder_is_files_of_tensors_and_text(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    of_model, of_plan = ["model.safetensors", "prunekit.json"], ["plan.json", "plan.safetensors"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(of_model + of_plan)
    manifest = read_manifest(tmp_path / "model")
    assert manifest["class"] == "ResNet"
    assert manifest["example"]["shapes"] == [[1, 3, 64, 64]]
    assert manifest["classes"] == list("abcde")
    assert manifest["build"] == {
        "name": "resnet18",
        "zoo": "torchvision",
        "arguments": {"num_classes": 5},
    }
    assert manifest["sha256"] == {"model.safetensors": sha256(tmp_path / "model" / "model.safetensors")}
    kept = pruned("resnet18")[1].kept("conv1.weight", 0)
    assert manifest["kept"]["conv1.weight"] == [kept.tolist(), None, None, None]
    assert manifest["dense_shapes"]["conv1.weight"] == [64, 3, 7, 7]
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert tensors.keys() == model.state_dict().keys()


def test_weights_are_not_downloaded_or_needed(tmp_path: Path) -> None:
    model, plan, settings = pruned("resnet18")
    with_weights = ModelSettings(settings.name, arguments=settings.arguments, weights="/not/there.safetensors")
    save(model, tmp_path / "model", plan, build=with_weights)
    assert_unchanged(load(tmp_path / "model"), snapshot(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_precision_survives(dtype: torch.dtype, tmp_path: Path) -> None:
    small, plan, settings = pruned("resnet18")
    model = copy.deepcopy(small).to(dtype)
    save(model, tmp_path / "model", plan, build=settings)
    assert_unchanged(load(tmp_path / "model"), snapshot(model))


@pytest.mark.parametrize("how", ["model", "factory", "meta", "wrapped model", "wrapped factory"])
def test_the_users_own_model(how: str, tmp_path: Path) -> None:
    dense, small, example = own_model(tmp_path / "model")
    before = snapshot(dense)
    given: Any = dense if how == "model" else Tied
    if how == "meta":
        with torch.device("meta"):
            given = Tied()
    if how.startswith("wrapped"):
        given = nn.DataParallel(dense) if how == "wrapped model" else lambda: nn.DataParallel(Tied())
    loaded: Any = load(str(tmp_path / "model"), given)
    assert loaded.b.weight is loaded.a.weight
    assert_unchanged(loaded, snapshot(small))
    assert int(loaded.steps) == 3
    with torch.no_grad():
        assert torch.equal(loaded(*example), small(*example))
    assert_unchanged(dense, before)
    assert dense.first.out_features == 8


class Growing(nn.Module):
    """Positions kept in a buffer, made anew when the input has another length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("places", torch.zeros(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.places) != x.shape[1]:
            self.places = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10
        return self.last(self.first(x + self.places).relu())


@pytest.mark.parametrize("before", [False, True])
def test_a_buffer_that_forward_makes_anew(before: bool, tmp_path: Path) -> None:
    dense, example = randomized(Growing()).eval(), (torch.randn(2, 5, 6),)
    if before:  # the size of its input is in the dense model already, and not in what `Growing()` makes
        dense(*example)
    plan = settled_plan(dense, example)
    small = compact(dense, plan)
    save(small, tmp_path / "new", plan)
    small(*example)
    save(small, tmp_path / "used", plan)
    for folder in ("new", "used"):
        loaded = load(tmp_path / folder, Growing)
        with torch.no_grad():
            assert torch.equal(loaded(*example), small(*example))
            assert torch.equal(loaded(example[0][:, :3]), small(example[0][:, :3]))


class FirstSeen(nn.Module):
    """Buffers that are None until the first call: a table of positions, and a mean that a checkpoint has too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("places", None, persistent=False)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.places is None:
            self.places = torch.arange(x.shape[1] * x.shape[2], dtype=x.dtype).view(x.shape[1:]) / 10
        if self.mean is None:
            self.mean = x.detach().mean((0, 1))
        return self.last((x - self.mean + self.places).relu())


@pytest.mark.parametrize("before", [False, True])
def test_buffers_that_are_none_until_forward_makes_them(before: bool, tmp_path: Path) -> None:
    dense, example = randomized(FirstSeen()).eval(), (torch.randn(2, 5, 6),)
    if before:
        dense(*example)
    plan = settled_plan(dense, example)
    small = compact(dense, plan)
    small(*example)
    save(small, tmp_path / "used", plan)
    loaded = load(tmp_path / "used", FirstSeen)
    assert loaded.state_dict().keys() == small.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(loaded(example[0] + 1), small(example[0] + 1))


def test_a_factory_that_looks_at_its_weights(tmp_path: Path) -> None:
    class Looking(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.scale = float(self.last.weight.sum()) * 0 + 1

    _, small, example = own_model(tmp_path / "model")
    loaded = load(tmp_path / "model", Looking)
    with torch.no_grad():
        assert torch.equal(loaded(*example), small(*example))


def test_a_model_of_nobodys_zoo_asks_for_its_class(tmp_path: Path) -> None:
    own_model(tmp_path / "model")
    with pytest.raises(ModelError, match=r"this model \(Tied\) was built by its owner's code; load it with"):
        load(tmp_path / "model")


def test_a_factory_that_fails_says_so_itself(tmp_path: Path) -> None:
    own_model(tmp_path / "model")

    def broken() -> nn.Module:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        load(tmp_path / "model", broken)


def test_another_dense_model_is_refused(tmp_path: Path) -> None:
    own_model(tmp_path / "model")
    wider = Tied()
    wider.last = nn.Linear(8, 4)
    with pytest.raises(ArtifactError, match=r"does not belong to this dense model: last\.weight: shape"):
        load(tmp_path / "model", wider)
    with pytest.raises(ArtifactError, match=r"is missing in the folder.*is not in the dense model"):
        load(tmp_path / "model", nn.Sequential(nn.Linear(6, 8)))


# Damage

Damage = Callable[[Path], Any]


def rewrite(*keys: Any, value: Any = "remove") -> Damage:
    """Sets or removes one entry of the manifest."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "prunekit.json").read_text())
        place = manifest
        for key in keys[:-1]:
            place = place[key]
        if value == "remove":
            del place[keys[-1]]
        else:
            place[keys[-1]] = value
        (folder / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))

    return damage


def flip(at: int) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[at] ^= 4
        (folder / "model.safetensors").write_bytes(content)

    return damage


def exchange(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Other weights, with the checksum made to match."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        rewrite("sha256", "model.safetensors", value=sha256(folder / "model.safetensors"))(folder)

    return damage


JUNK: list[Any] = [None, 5, "text", [1], {"a": 1}, [[1e30]], [[[3]], None, None, None]]
DAMAGE: dict[str, Damage] = {
    "no manifest": lambda folder: (folder / "prunekit.json").unlink(),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "empty manifest": lambda folder: (folder / "prunekit.json").write_text(""),
    "manifest cut off": lambda folder: (folder / "prunekit.json").write_text(
        (folder / "prunekit.json").read_text()[:99]
    ),
    "manifest is a list": lambda folder: (folder / "prunekit.json").write_text("[1]"),
    "manifest is binary": lambda folder: (folder / "prunekit.json").write_bytes(b"\xff\x00"),
    "weights cut off": lambda folder: (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}"),
    "a bit of a weight": flip(-100),
    "a bit of the header": flip(20),
    "a missing tensor": exchange(lambda tensors: tensors.pop("fc.bias")),
    "a tensor too many": exchange(lambda tensors: tensors.update(more=torch.ones(2))),
    "weights that are whole numbers": exchange(lambda tensors: tensors.update({"fc.bias": torch.ones(5).long()})),
    "a norm of bools": exchange(lambda tensors: tensors.update({"bn1.bias": tensors["bn1.bias"] > 0})),
    "a variance that is NaN": exchange(lambda tensors: tensors["bn1.running_var"].fill_(float("nan"))),
    "a tensor of another shape": exchange(lambda tensors: tensors.update({"fc.bias": torch.ones(6)})),
    "not safetensors": lambda folder: [
        (folder / "model.safetensors").write_text("hello"),
        rewrite("sha256", "model.safetensors", value=sha256(folder / "model.safetensors"))(folder),
    ],
    "index out of range": rewrite("kept", "bn1.bias", 0, 0, value=-1),
    "index twice": rewrite("kept", "bn1.bias", 0, 1, value=0),
    "index of a wider axis": rewrite("kept", "bn1.bias", 0, -1, value=64),
    "index that is no number": rewrite("kept", "bn1.bias", 0, 0, value="x"),
    "a fact that was changed": lambda folder: (folder / "prunekit.json").write_text(
        (folder / "prunekit.json").read_text().replace('"class": "ResNet"', '"class": "ResNut"')
    ),
    "no index": rewrite("kept", "bn1.bias", 0, value=[]),
    "axis that is not kept": rewrite("kept", "bn1.bias", 0, value=None),
    "one index fewer": rewrite("kept", "bn1.bias", 0, 0),
    "unknown network": rewrite("build", "name", value="resnet19"),
    "other network": rewrite("build", "name", value="resnet34"),
    "other classes": rewrite("build", "arguments", "num_classes", value=6),
    "argument that no constructor has": rewrite("build", "arguments", value={"widths": 3}),
    **{f"no {key}": rewrite(key) for key in ("format", "kept", "dense_shapes", "example", "sha256")},
    **{f"build without {key}": rewrite("build", key) for key in ("name", "zoo", "arguments")},
    **{
        f"{'.'.join(keys)} is {junk!r}": rewrite(*keys, value=junk)
        for keys in (("format",), ("kept",), ("sha256",), ("build", "name"), ("build", "zoo"), ("build", "arguments"))
        for junk in JUNK
        if (keys, junk) != (("build", "arguments"), {"a": 1})
    },
    **{f"kept indices are {junk!r}": rewrite("kept", "bn1.bias", value=junk) for junk in JUNK},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folders") / "model"
    saved(path)
    return path


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folders_are_refused(name: str, whole: Path, tmp_path: Path) -> None:
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    DAMAGE[name](tmp_path)
    with pytest.raises(ArtifactError) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_no_folder_and_a_file_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected a model folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="expected a model folder"):
        load(tmp_path / "file")


def test_a_name_from_the_folder_is_never_imported(whole: Path, tmp_path: Path) -> None:
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = set(sys.modules)
    for name in ("os.system", "antigravity", "antigravity:fly", "../model.py"):
        rewrite("build", "name", value=name)(tmp_path)
        with pytest.raises(ArtifactError):
            load(tmp_path)
    rewrite("build", "zoo", value="antigravity")(tmp_path)
    with pytest.raises(ArtifactError):
        load(tmp_path)
    assert "antigravity" not in set(sys.modules) - before


# Written whole or not at all


def test_saving_again_replaces_the_folder(tmp_path: Path) -> None:
    saved(tmp_path / "model", "squeezenet1_1")
    model = saved(tmp_path / "model", "resnet18")
    assert_unchanged(load(tmp_path / "model"), snapshot(model))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("module", "function"), [(folder_module, "write_tensors"), (files, "sha256"), (files, "write_json")]
)
def test_a_failed_save_leaves_the_old_folder(
    module: ModuleType, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(tmp_path / "model")

    def full(*args: Any, **options: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, function, full)
        with pytest.raises(OSError, match="No space left"):
            saved(tmp_path / "model", "squeezenet1_1")
        with pytest.raises(OSError, match="No space left"):
            saved(tmp_path / "new", "squeezenet1_1")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_unchanged(load(tmp_path / "model"), snapshot(model))


def test_facts_that_are_not_json_are_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    model, plan, settings = pruned("resnet18")
    saved(tmp_path / "model")
    with pytest.raises((ValueError, TypeError, PrunekitError)):
        save(model, tmp_path / "model", plan, build=settings, extra={"loss": float("nan")})
    assert read_manifest(tmp_path / "model")["example"]["shapes"] == [[1, 3, 64, 64]]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_sizes_that_modules_remember_are_set_on_loading(tmp_path: Path) -> None:
    layers = (nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 1, groups=8), nn.PReLU(16), nn.ConvTranspose2d(16, 6, 2))
    model = randomized(nn.Sequential(*layers, nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1))).eval()
    plan = settled_plan(model, (torch.randn(1, 3, 8, 8),))
    small: Any = compact(model, plan)
    save(small, tmp_path / "model", plan)
    loaded: Any = load(tmp_path / "model", model)
    assert (loaded[1].groups, loaded[1].in_channels, loaded[1].out_channels) == (5, 5, 10)
    assert (loaded[2].num_parameters, loaded[3].in_channels, loaded[3].out_channels) == (10, 10, 4)
    assert [str(module) for module in loaded] == [str(module) for module in small]


def test_norms_without_tensors_know_their_width_again(tmp_path: Path) -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))).eval()
    example = (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)
    plan = settled_plan(model, example)
    small = compact(model, plan)
    save(small, tmp_path / "model", plan)
    loaded: Any = load(tmp_path / "model", model)
    assert loaded[1].num_features == plan.kept("0.weight", 0).size < 8
    assert torch.equal(loaded(*example), small(*example))  # a width that does not fit would warn, which fails a test
    manifest = json.loads((tmp_path / "model" / "prunekit.json").read_text())
    for wrong in ({"0": 3}, {"nowhere": 3}, {"1": 0}, ["1"]):
        manifest["widths_of_bare_norms"] = wrong
        (tmp_path / "model" / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))
        with pytest.raises(ArtifactError, match="does not fit the model"):
            load(tmp_path / "model", model)


def test_a_result_is_saved_whole_and_what_is_none_says_the_call(tmp_path: Path) -> None:
    class ByName(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).relu() * scale)  # type: ignore[no-any-return]

    model, example = randomized(ByName()), {"scale": torch.ones(1), "x": torch.rand(3, 4)}
    result = prunekit.prune(model, example, macs=0.5)
    folder = save(result, tmp_path / "result")
    plan = prunekit.load_plan(folder)
    assert plan.digest == result.plan.digest
    assert plan.channel_map.inputs == result.plan.channel_map.inputs
    assert read_manifest(folder)["example"] == {
        "shapes": [[3, 4], [1]], "dtypes": ["float32", "float32"], "names": ["x", "scale"]
    }  # fmt: skip
    again = load(folder, model=ByName)
    assert prunekit.verify(model, again, plan, example).max_relative_difference <= 1e-12
    assert torch.equal(again(**example), result.model(**example))
    second = save(result.model, tmp_path / "model", plan)  # as the plan from a file knows it
    assert read_manifest(second)["example"] == read_manifest(folder)["example"]
    plan.save(tmp_path / "plan")
    for call, said in (
        (lambda: save("small", result.model, plan), r"the model first, .*prunekit\.save\(small, 'small', plan\)"),
        (lambda: save(plan, "small"), r"got a Plan: prunekit\.save\(prunekit\.compact\(model, plan\), folder, plan\)"),
        (lambda: save(result, "small", plan), "expected no plan beside a Pruned, which has its own"),
        (lambda: save(result.model, "small"), r"plan: expected a prunekit\.Plan, got None"),
        (lambda: save([1], "small"), r"model: expected a torch\.nn\.Module, got list"),  # type: ignore[arg-type]
        (lambda: load(tmp_path / "plan"), r"this is a plan, which prunekit\.load_plan\('.*plan'\) reads"),
        (lambda: load(folder), r"prunekit\.load\('.*result', model=\.\.\.\)"),
        (lambda: prunekit.load_plan(tmp_path), r"plan\.save\(folder\) and prunekit\.save\(result, folder\) write them"),
    ):
        with pytest.raises(PrunekitError, match=said):
            call()
    assert not Path("small").exists()


def test_saving_loses_nothing_that_is_no_model_folder(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("a year's work")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"this one also has 'thesis.tex', which would be lost: name a folder inside"):
        saved(tmp_path / "home")
    for place in ("file", "file/below"):
        with pytest.raises(UsageError, match=r"expected a folder, but .*file is a file; choose another name"):
            saved(tmp_path / place)
    saved(tmp_path / "empty")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "a year's work"
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "home"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("Net", r"expected the dense model or a function that builds it, got str: prunekit.load\('.*', model=lambda: "),
        (lambda: None, "expected a function that returns the dense model, got None"),
        (lambda width: nn.Linear(width, 2), "expected a function without arguments, and .* needs some .*'width'"),
    ],
)
def test_what_builds_no_model_says_what_to_give(given: Any, message: str, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "model", model=given)


@pytest.mark.parametrize(
    "function", [load, prunekit.load_plan, lambda given: save(*pruned("resnet18")[:1], given, pruned("resnet18")[1])]
)
def test_a_folder_that_is_no_path_is_named(function: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match="expected a path, such as 'small', got type"):
        function(nn.Linear)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet.pth", r"model\.load_state_dict\(torch\.load\(path\)\)"),
        ("resnet.safetensors", r"model\.load_state_dict\(safetensors\.torch\.load_file\(path\)\)"),
        ("resnet.onnx", r"which a runtime runs: prunekit\.predict\(path, images\)"),
        ("resnet.engine", "which a runtime runs"),
        ("mine.yaml", r"prunekit\.finetune\(path\) runs"),
        ("photo.jpg", "this is a file, no model folder"),
        ("small/model.safetensors", r"the folder that it is in: prunekit\.load\('.*small'\)"),
    ],
)
def test_a_file_in_place_of_a_folder_says_what_reads_it(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    for file in ("small/prunekit.json", name):
        (tmp_path / file).write_text("{}")
    with pytest.raises(ArtifactError, match=said):
        load(tmp_path / name)
