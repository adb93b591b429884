"""Exports: checked on real samples, scored, timed, and only then named; what fails leaves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import prunekit as pk
from prunekit.backends.backend import FileBackend, register_backend
from prunekit.backends.files.export_source import ExportSource, Run
from prunekit.backends.files.exported_model import ExportedModel
from prunekit.errors import ModelError, RunError, UsageError
from prunekit.models.interface import ModelInterface
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather


@pytest.fixture
def twin() -> type[Any]:
    """A format whose files say nothing, and that runs the model itself, wrong by a factor."""

    @register_backend(format="twin", about="the model itself", suffix=".twin")
    class Twin(FileBackend):
        factor: ClassVar[float] = 1.0
        sources: ClassVar[list[ExportSource]] = []

        def write(self, source: ExportSource, path: Path) -> list[str]:
            path.write_text("twin")
            path.with_name(f"{path.name}.data").write_text("beside")
            self.sources.append(source)
            return ["a note"]

        def open(self, path: Path, *, threads: int = 1) -> Run:
            assert path.read_text() == "twin"
            return lambda example: [self.factor * one for one in gather(call(self.sources[-1].model, example))]

        def interface(self, path: Path) -> ModelInterface:
            return self.sources[-1].interface

    return Twin


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        maps = self.body(image)
        return {"maps": maps, "logits": self.head(maps.mean((2, 3)))}


def quiet(text: str) -> None:
    pass


IMAGES = torch.randn(8, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def test_what_is_exported_is_a_copy_with_names_and_two_batches_agree(twin: Any, tmp_path: Path) -> None:
    model = Two()
    found = pk.export(model, IMAGES, to="twin", path=tmp_path / "two.twin", timed=(1,), log=quiet)
    assert {path.name for path in tmp_path.iterdir()} == {"two.twin", "two.twin.data"}
    source = twin.sources[-1]
    assert source.model is not model
    assert model.training
    assert not source.model.training
    assert [str(one) for one in source.interface.inputs] == ["image: float32 (batch, 3, 9, 9)"]
    assert [one.name for one in source.interface.outputs] == ["maps", "logits"]
    assert [one.batch for one in found.parities] == [2, 5]
    assert found.max_relative_difference == 0
    assert found.real_inputs
    assert found.notes == ("a note",)
    assert [row["batch"] for row in found.latency_rows()] == [1]
    assert found.size_bytes == len("twinbeside")
    assert "image: float32 (batch, 3, 9, 9)" in str(found)


def test_what_computes_something_else_is_named_and_leaves_what_was_there(twin: Any, tmp_path: Path) -> None:
    path = tmp_path / "two.twin"
    pk.export(Two(), IMAGES, to="twin", path=path, timed=(), log=quiet)
    path.write_text("mine")
    twin.factor = 1.01
    with pytest.raises(
        RunError, match=r"computes something else than Two on .*maps: in .*values differ by 0\.01.*logits"
    ):
        pk.export(Two(), IMAGES, to="twin", path=path, timed=(), force=True, log=quiet)
    assert path.read_text() == "mine"
    with pytest.raises(RunError):
        pk.export(Two(), IMAGES, to="twin", path=tmp_path / "other.twin", timed=(), log=quiet)
    assert {one.name for one in tmp_path.iterdir()} == {"two.twin", "two.twin.data"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"to": "twinn"}, "did you mean 'twin'"),
        ({"path": "two.onnx"}, r"expected a name with \.twin"),
        ({"path": "there.twin"}, "exists already; name another path"),
        ({"path": "folder.twin", "force": True}, "a folder of this name is there"),
        ({"dynamic": "sequence"}, "the model takes none, but image"),
        ({"dynamic": "image:0"}, "expected image, sequence, or INPUT:AXIS"),
        ({"dynamic": "imag:2"}, "did you mean 'image'"),
    ],
)
def test_a_wrong_request_writes_nothing(
    given: dict[str, Any], message: str, twin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.twin").write_text("old")
    (tmp_path / "folder.twin").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=message):
        pk.export(Two(), IMAGES, **{"to": "twin", "timed": (), "log": quiet, **given})
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.twin").read_text() == "old"


def test_axes_of_any_size_are_checked_at_another_size(twin: Any, tmp_path: Path) -> None:
    found = pk.export(Two(), IMAGES, to="twin", path=tmp_path / "a.twin", dynamic="image", timed=(), log=quiet)
    assert found.interface.inputs[0].shape == ("batch", 3, "height", "width")
    assert [one.inputs for one in found.parities][-1] == "(float32 (2, 3, 4, 4))"


def test_a_fixed_batch_is_the_only_one(twin: Any, tmp_path: Path) -> None:
    found = pk.export(Two(), IMAGES, to="twin", path=tmp_path / "a.twin", batch=3, timed=(1, 16), log=quiet)
    assert found.interface.inputs[0].shape == (3, 3, 9, 9)
    assert found.interface.outputs[1].shape == (3, 5)
    assert [one.batch for one in found.parities] == [3]
    assert [row["batch"] for row in found.latency_rows()] == [3]


def test_larger_batches_than_a_format_takes_are_run_in_parts_and_not_timed(twin: Any, tmp_path: Path) -> None:
    twin.most_samples = 5
    model = Two().eval()
    found = pk.export(model, IMAGES, to="twin", path=tmp_path / "a.twin", timed=(1, 16), log=quiet)
    assert [row["batch"] for row in found.latency_rows()] == [1]
    sizes = list[int]()

    def run(example: tuple[Any, ...]) -> list[Tensor]:
        sizes.append(len(example[0]))
        return gather(call(model, example))

    whole = ExportedModel(found.path, "twin", found.interface, run)(IMAGES)
    assert sizes == [5, 3]
    torch.testing.assert_close(whole["logits"], model(IMAGES)["logits"])


def test_half_weights_are_compared_with_the_model_that_has_them(twin: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="computes something else"):
        pk.export(Two(), IMAGES, to="twin", path=tmp_path / "a.twin", half=True, timed=(), log=quiet)
    assert not list(tmp_path.iterdir())


class Threes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(3, 2, 2)


def test_a_batch_that_the_code_fixes_is_named_with_the_way_out(twin: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.twin"
    with pytest.raises(ModelError, match=r"runs on 3 samples and not on 2, so its code fixes the batch .*--batch 3"):
        pk.export(Threes(), torch.randn(3, 4), to="twin", path=path, log=quiet)
    found = pk.export(Threes(), torch.randn(3, 4), to="twin", path=path, batch=3, timed=(), log=quiet)
    assert [one.batch for one in found.parities] == [3]


class Images(nn.Module):
    """Takes a list, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        return [self.body(image[None])[0] for image in images]


def test_what_has_no_batch_is_checked_as_it_is(twin: Any, tmp_path: Path) -> None:
    example = ([torch.randn(3, 8, 8), torch.randn(3, 9, 7)],)
    found = pk.export(Images(), example, to="twin", path=tmp_path / "a.twin", log=quiet)
    assert [str(one) for one in found.interface.inputs] == [
        "images_0: float32 (3, 8, 8)", "images_1: float32 (3, 9, 7)"
    ]  # fmt: skip
    assert len(found.parities) == 1
    assert found.latency == ()


def test_a_model_that_does_not_run_is_named(twin: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not run on its example"):
        pk.export(Two(), torch.randn(4, 7), to="twin", path=tmp_path / "a.twin", log=quiet)
    with pytest.raises(UsageError, match="example: expected what the model is called with"):
        pk.export(Two(), to="twin", path=tmp_path / "a.twin", log=quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_pruned_model_in_memory_becomes_a_repository_that_loads_again(tmp_path: Path) -> None:
    dense, x = build_model(ModelSettings("resnet8", "cifar"), num_classes=5).eval(), torch.randn(5, 3, 16, 16)
    result = pk.prune(dense, x, macs=0.5)
    found = pk.export(result, x, to="hub", path=tmp_path / "hub", timed=(), log=quiet)
    assert found.max_relative_difference == 0
    again = pk.load(tmp_path / "hub", model=dense)
    assert torch.equal(again(x), result.model.eval()(x))
