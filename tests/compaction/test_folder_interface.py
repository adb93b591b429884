"""The model folder says how to feed its model, and a loaded model has it without being another model for that."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prunekit as pk
from prunekit.compaction.model_folder import folder_interface, load, save
from prunekit.errors import ArtifactError, UsageError
from prunekit.models.cifar import CifarResNet
from prunekit.models.interface import ModelInterface, TensorSpec, attached
from prunekit.utils.files import with_checksum
from prunekit.utils.inputs import Keywords

FEED = pk.Preprocessing(16, 16, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))
CLASSES = ("cat", "dog", "ox")


class Photos(nn.Sequential):
    def __init__(self) -> None:
        conv = nn.Conv2d(3, 8, 3, stride=2)
        super().__init__(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


class Words(nn.Module):
    """Takes tokens and a mask by name, and returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide, self.head = nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.wide(self.table(input_ids)).relu() * attention_mask[..., None]
        return {"logits": self.head(found.mean(1)), "states": found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    small = pk.prune(Photos(), torch.randn(2, 3, 16, 16), channels=0.5)
    where = tmp_path_factory.mktemp("saved") / "model"
    return save(small, where, preprocessing=FEED, classes=CLASSES, task="image_classification")


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a model folder with another manifest."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((folder / "prunekit.json").read_text())
    change(manifest)
    (to / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))
    return to


def test_the_folder_says_how_to_feed_its_model(folder: Path) -> None:
    found = folder_interface(folder)
    assert found.inputs == (TensorSpec("input", "float32", ("batch", 3, 16, 16)),)
    assert found.outputs == (TensorSpec("output", "float32", ("batch", 3)),)
    assert (found.task, found.classes, found.preprocessing) == ("image_classification", CLASSES, FEED)
    assert pk.interface(folder) == found
    assert ModelInterface.from_dict(json.loads(json.dumps(found.as_dict())), "text") == found


def test_a_loaded_model_has_it_as_a_callable(folder: Path, tmp_path: Path) -> None:
    model = load(folder, Photos)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    assert model.preprocessing == FEED
    assert torch.equal(model.preprocessing(pixels), FEED(pixels))
    assert model(model.preprocessing([pixels, pixels])).shape == (2, 3)
    assert pk.interface(model) == folder_interface(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_the_model_stays_what_it_was(folder: Path) -> None:
    """State dict, deepcopy, pickle, torch.save, traces and exports are as without it."""
    model, x = load(folder, Photos), torch.randn(2, 3, 16, 16)
    assert model.state_dict().keys() == Photos().state_dict().keys()
    assert str(model).count("reprocessing") == 0
    output = model(x)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    again = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False))
    for other in again:
        assert torch.equal(other(x), output)
        assert attached(other) == attached(model)
    assert again[0].preprocessing == FEED
    assert again[1].preprocessing == FEED.as_dict()  # plain data, which needs no prunekit
    for made in (torch.jit.trace(model, x), torch.jit.script(model), torch.export.export(model, (x,)).module()):
        assert torch.equal(made(x), output)  # type: ignore[operator]


class WithoutPrunekit(pickle.Unpickler):
    """Reads pickles as on a machine where prunekit is not installed."""

    def find_class(self, module: str, name: str) -> Any:
        assert module.partition(".")[0] != "prunekit", name
        return super().find_class(module, name)


def test_a_pickle_needs_no_prunekit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
    save(pk.prune(net, torch.randn(1, 3, 8, 8), channels=0.5), tmp_path / "model", preprocessing=FEED)
    found = WithoutPrunekit(io.BytesIO(pickle.dumps(load(tmp_path / "model", net)))).load()
    assert found(torch.zeros(1, 3, 8, 8)).shape == (1, 2)
    assert found.preprocessing["height"] == 16


def test_an_attribute_of_the_models_own_stays(tmp_path: Path) -> None:
    class Own(Photos):
        preprocessing = "mine"

    small = pk.prune(Own(), torch.randn(1, 3, 16, 16), channels=0.5)
    save(small, tmp_path / "own", preprocessing=FEED)
    loaded = load(tmp_path / "own", Own)
    assert loaded.preprocessing == "mine"
    assert pk.interface(loaded).preprocessing == FEED


def test_a_model_that_is_saved_again_keeps_it(folder: Path, tmp_path: Path) -> None:
    first = load(folder, Photos)
    again = pk.prune(first, torch.randn(1, 3, 16, 16), channels=0.5)
    found = folder_interface(save(again, tmp_path / "again"))
    assert (found.task, found.classes, found.preprocessing) == ("image_classification", CLASSES, FEED)
    other = folder_interface(save(again, tmp_path / "other", classes=["x", "y", "z"]))
    assert (other.classes, other.preprocessing) == (("x", "y", "z"), FEED)
    assert load(tmp_path / "other", first).preprocessing == FEED


def test_inputs_by_name_and_outputs_in_a_mapping(tmp_path: Path) -> None:
    tokens, mask = torch.randint(0, 50, (2, 7)), torch.ones(2, 7)
    small = pk.prune(Words(), {"input_ids": tokens, "attention_mask": mask}, channels=0.5)
    width = small.model.wide.out_features
    for example in (None, (tokens, Keywords(attention_mask=mask))):
        found = folder_interface(save(small, tmp_path / "model", task="text_classification", example=example))
        assert [str(one) for one in found.inputs] == [
            "input_ids: int64 (batch, 7)",
            "attention_mask: float32 (batch, 7)",
        ]
        assert [str(one) for one in found.outputs] == [
            "logits: float32 (batch, 2)",
            f"states: float32 (batch, 7, {width})",
        ]
    assert not hasattr(load(tmp_path / "model", Words), "preprocessing")


def test_a_model_that_does_not_run_on_zeros_is_saved(tmp_path: Path) -> None:
    class Picky(Photos):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            if not bool(image.any()):
                raise ValueError("a black image")
            return super().forward(image)

    small = pk.prune(Picky(), torch.randn(2, 3, 16, 16), channels=0.5)
    found = folder_interface(save(small, tmp_path / "model", classes=CLASSES, preprocessing=FEED))
    assert found.inputs == (TensorSpec("image", "float32", ("batch", 3, 16, 16)),)
    assert (found.outputs, found.classes, found.preprocessing) == ((), CLASSES, FEED)


def test_an_older_folder_loads_as_before(folder: Path, tmp_path: Path) -> None:
    older = changed(folder, tmp_path / "older", lambda manifest: manifest.pop("interface"))
    model = load(older, Photos)
    assert not hasattr(model, "preprocessing")
    found = folder_interface(older)
    assert found.inputs == (TensorSpec("input", "float32", ("batch", 3, 16, 16)),)
    assert (found.outputs, found.classes, found.preprocessing, found.task) == ((), (), None, None)
    named = changed(older, tmp_path / "named", lambda manifest: manifest.update(classes=list(CLASSES)))
    assert folder_interface(named).classes == CLASSES


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (3, "Input should be an object, got 3"),
        ({"inputs": [], "outputs": "output"}, "outputs: Input should be a valid array, got 'output'"),
        ({"inputs": [{"name": "x", "dtype": "float32"}], "outputs": []}, "inputs.0.shape: Field required"),
        (
            {"inputs": [{"name": "x", "dtype": "float32", "shape": [-1, 2.5]}], "outputs": []},
            "inputs.0.shape.0.*, got -1",
        ),
        ({"inputs": [], "outputs": [], "classes": "abc"}, "classes: Input should be a valid array, got 'abc'"),
        ({"inputs": [], "outputs": [], "task": 3}, "task: Input should be a valid string, got 3"),
        ({"inputs": [], "outputs": [], "preprocessing": {"height": "tall"}}, "preprocessing"),
        ({"inputs": [], "outputs": [], "preprocessing": [1]}, "expected a mapping"),
        ({"inputs": [], "outputs": [], "preprocessing": {"height": 4, "width": 4, "run": "rm"}}, "run"),
    ],
)
def test_a_damaged_interface_is_named(wrong: Any, told: str, folder: Path, tmp_path: Path) -> None:
    damaged = changed(folder, tmp_path / "damaged", lambda manifest: manifest.update(interface=wrong))
    for read in (folder_interface, pk.interface, lambda where: load(where, Photos)):
        with pytest.raises(ArtifactError, match=f"prunekit.json: interface.*{told}"):
            read(damaged)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"preprocessing": {"height": 3}}, "preprocessing: expected a prunekit.Preprocessing, got dict"),
        ({"classes": "cat"}, "classes: expected the name of each label"),
        ({"task": 3}, "task: expected its name"),
        ({"example": "x"}, "expected an example"),
    ],
)
def test_what_is_no_interface_is_refused_before_anything_is_written(
    given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    small = pk.prune(Photos(), torch.randn(2, 3, 16, 16), channels=0.5)
    with pytest.raises(UsageError, match=told):
        save(small, tmp_path / "model", **given)
    assert not (tmp_path / "model").exists()


def test_the_interface_of_any_model_is_found_by_an_example() -> None:
    model = CifarResNet(8)
    found = pk.interface(model, torch.randn(2, 3, 32, 32))
    assert [str(one) for one in (*found.inputs, *found.outputs)] == [
        f"{found.inputs[0].name}: float32 (batch, 3, 32, 32)",
        "output: float32 (batch, 10)",
    ]
    with pytest.raises(UsageError, match=r"expected an example .* or a model that prunekit.load returned"):
        pk.interface(model)
    with pytest.raises(UsageError, match=r"expected a model, .* got int"):
        pk.interface(3)  # type: ignore[arg-type]


def test_what_was_changed_by_hand_is_noticed(folder: Path, tmp_path: Path) -> None:
    """Two class names that were swapped, or one digit of a size, give other answers; older folders have no checksum."""
    changed_by = {
        "classes": lambda text: text.replace(f'"{CLASSES[0]}"', '"?"'),
        "height": lambda text: text.replace('"height": 16', '"height": 17'),
        "seed": lambda text: text.replace('"provenance": {', '"provenance": {"other": 1, '),
    }
    for name, change in changed_by.items():
        there = shutil.copytree(folder, tmp_path / name)
        text = (there / "prunekit.json").read_text()
        assert change(text) != text, name
        (there / "prunekit.json").write_text(change(text))
        with pytest.raises(ArtifactError, match=r"prunekit\.json: something in it was changed .* remove the entry"):
            load(there, Photos)
        manifest = json.loads((there / "prunekit.json").read_text())
        del manifest["checksum"]
        (there / "prunekit.json").write_text(json.dumps(manifest))
        load(there, Photos)
    there = shutil.copytree(folder, tmp_path / "laid out anew")
    (there / "prunekit.json").write_text(json.dumps(json.loads((there / "prunekit.json").read_text())))
    load(there, Photos)
