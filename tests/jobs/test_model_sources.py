"""What a command line may name, and what it gets for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prunekit.compaction.model_folder import save
from prunekit.errors import ArtifactError, ModelError, PrunekitError, UsageError
from prunekit.jobs.run.command_subject import Subject
from prunekit.jobs.run.subject_sources import resolve
from prunekit.models.zoo import build_model, load_factory
from prunekit.pruning.prune import prune
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.utils.files import with_checksum

JOB = JobSettings("small", ModelSettings("squeezenet1_1"), data=DataSettings(image_size=32))


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(4, 2)\n")
    return f"{tmp_path / 'own.py'}:build"


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_a_job_gives_its_dense_model_with_its_data() -> None:
    target = resolve(JOB)
    assert target.name == "small"
    assert target.sample_shape == (3, 32, 32)
    assert target.splits is not None
    assert target.probe().shape == (1, len(target.splits.classes))
    assert not target.trained


def test_random_weights_follow_the_seed_and_leave_the_global_one_alone() -> None:
    state = torch.get_rng_state()
    first, again = resolve("squeezenet1_1", seed=3), resolve("squeezenet1_1", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert same_weights(first.model, again.model)
    assert not same_weights(first.model, resolve("squeezenet1_1", seed=4).model)


@pytest.mark.parametrize(("name", "shape"), [("squeezenet1_1", (3, 224, 224)), ("efficientnet_b1", (3, 240, 240))])
def test_a_zoo_model_has_the_input_it_was_trained_for(name: str, shape: tuple[int, ...]) -> None:
    assert resolve(name).sample_shape == shape
    assert resolve(name, input_shape=(2, 3, 32, 32)).sample_shape == (3, 32, 32)


def test_the_users_own_model_with_weights(factory: str, tmp_path: Path) -> None:
    weights = {"weight": torch.ones(2, 4), "bias": torch.zeros(2)}
    torch.save(weights, tmp_path / "own.pt")
    target = resolve(None, factory=factory, weights=str(tmp_path / "own.pt"), input_shape=(1, 4))
    assert (target.name, target.sample_shape, target.trained) == ("build", (4,), True)
    assert torch.equal(target.model(torch.ones(1, 4)), torch.full((1, 2), 4.0))


def saved(folder: Path) -> nn.Module:
    dense = build_model(ModelSettings("squeezenet1_1"), num_classes=10)
    pruned = prune(dense, (torch.randn(1, 3, 32, 32),), channels=0.5)
    build = ModelSettings("squeezenet1_1", arguments={"num_classes": 10})
    save(pruned.model, folder, pruned.plan, build=build)
    return pruned.model


def test_a_model_folder_that_knows_its_builder(tmp_path: Path) -> None:
    compact = saved(tmp_path / "model")
    target = resolve(tmp_path / "model")
    assert (target.name, target.sample_shape, target.trained) == (str(tmp_path / "model"), (3, 32, 32), True)
    assert same_weights(target.model, compact)
    assert resolve(str(tmp_path / "model"), input_shape=(1, 3, 64, 64)).sample_shape == (3, 64, 64)


def test_a_model_folder_of_the_users_own_model_needs_the_factory(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))\n"
    )
    factory = f"{tmp_path / 'own.py'}:build"
    pruned = prune(load_factory(factory), (torch.randn(2, 4),), channels=0.5)
    save(pruned.model, tmp_path / "model", pruned.plan)
    target = resolve(tmp_path / "model", factory=factory)
    assert target.model[0].weight.shape == (3, 4)
    assert same_weights(target.model, pruned.model)
    with pytest.raises(ModelError, match=r"give that as --model file\.py:factory, or in Python load it first"):
        resolve(tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({"target": None}, UsageError, "expected a model: a recipe"),
        ({"target": "resnet43"}, ModelError, "did you mean .*'resnet34'"),
        ({"target": "own.py:build"}, ModelError, "give your own model as --model"),
        ({"target": JOB, "weights": "IMAGENET1K_V1"}, UsageError, "--weights goes with"),
        ({"target": "squeezenet1_1", "weights": "IMAGENET"}, ModelError, "did you mean 'IMAGENET1K_V1'"),
        ({"target": "squeezenet1_1", "input_shape": (3,)}, UsageError, "such as 1x3x224x224, got 3"),
        ({"target": None, "factory": "nowhere.py:build", "input_shape": (1, 3)}, ModelError, "no such file"),
    ],
)
def test_what_does_not_go_together_or_is_not_there(
    arguments: dict[str, Any], error: type[PrunekitError], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        resolve(**arguments)


def test_a_factory_without_an_example_needs_a_shape(factory: str) -> None:
    with pytest.raises(UsageError, match=r"expected --input-shape with it.* or a factory that returns \(model"):
        resolve(None, factory=factory)


def test_models_beside_it_tell_the_shape_of_a_factory_without_an_example(factory: str, tmp_path: Path) -> None:
    net = nn.Linear(4, 2)
    several = Subject(net, "several", (), inputs=(torch.zeros(1, 4), torch.zeros(1, 4)))
    beside = [several, Subject(net, "one", (4,)), Subject(net, "other", (5,))]
    assert resolve(None, factory=factory, beside=beside).sample_shape == (4,)
    assert resolve(None, factory=factory, beside=beside, input_shape=(1, 3, 4)).sample_shape == (3, 4)
    (tmp_path / "own.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 2), torch.zeros(1, 7, 4)\n"
    )
    assert resolve(None, factory=factory, beside=beside).sample_shape == (7, 4)
    with pytest.raises(UsageError, match="expected --input-shape with it"):
        resolve(None, factory=f"{Path(__file__)}:Shapeless", beside=[several])


class Shapeless(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)


def test_a_folder_without_a_manifest_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a recipe \(\.yaml\) or a model folder"):
        resolve(tmp_path)


def test_probe_says_what_does_not_run_and_restores_the_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout())
    said = r"mine: the model does not run on an input of 1x5: RuntimeError: .*; --input-shape gives another"
    with pytest.raises(ModelError, match=said):
        Subject(model, "mine", (5,)).probe()
    model[0].eval()
    assert Subject(model, "mine", (4,)).probe().shape == (1, 2)
    assert [module.training for module in model.modules()] == [True, False, True]


def test_whatever_a_models_code_raises_is_a_model_error() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("scale")

    with pytest.raises(ModelError, match=r"broken: the model does not run on an input of 1x3x8x8: KeyError: 'scale'"):
        Subject(Broken(), "broken", (3, 8, 8)).probe()


def test_a_damaged_input_shape_in_a_manifest_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    manifest = json.loads((tmp_path / "prunekit.json").read_text())
    for shapes in (None, [], [[]], [[1]], [["a", "b"]], [[1, -3, 8, 8]], [[1, True, 8, 8]], "1x3x8x8"):
        (tmp_path / "prunekit.json").write_text(json.dumps(with_checksum({**manifest, "example": {"shapes": shapes}})))
        with pytest.raises(ArtifactError, match=r"prunekit\.json: example\.shapes: expected a list of shapes"):
            resolve(tmp_path)
    assert resolve(tmp_path, input_shape=(1, 3, 32, 32)).sample_shape == (3, 32, 32)
