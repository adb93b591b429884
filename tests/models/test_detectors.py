"""Detectors by name: torchvision's and ultralytics', their weights, and model folders of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import prunekit as pk
from prunekit.errors import ModelError
from prunekit.models.detectors import load_ultralytics, made_for, ultralytics_files
from prunekit.models.zoo import build_model, model_arguments
from prunekit.settings.inputs import ModelSettings
from prunekit.tasks.detection import DETECTION

SSD = "ssdlite320_mobilenet_v3_large"


def build(name: str, zoo: Any = "torchvision", *, classes: int | None = 3, **arguments: Any) -> Any:
    if zoo == "ultralytics":
        pytest.importorskip("ultralytics")
    return build_model(ModelSettings(name, zoo, arguments=arguments), num_classes=classes, image_size=64)


def test_torchvisions_detectors_take_images_as_they_are() -> None:
    model = build(SSD).eval()
    assert made_for(model) == 64
    assert model.head.classification_head.num_columns == 4
    images, _ = model.transform([torch.rand(3, 64, 64)])
    assert images.tensors.shape == (1, 3, 64, 64)
    plain = build_model(ModelSettings(SSD), num_classes=None)
    assert made_for(plain) == 320
    assert plain.head.classification_head.num_columns == 91
    assert made_for(nn.Identity()) is None
    assert model_arguments(ModelSettings(SSD), 3, 64) == {"num_classes": 4, "image_size": 64}
    given = {"num_classes": 9, "image_size": 32}
    assert model_arguments(ModelSettings(SSD, arguments=given), 3, 64) == given
    with pytest.raises(ModelError, match=r"weights_backbone: weights come from model.weights"):
        build(SSD, weights_backbone="DEFAULT")


def test_ultralytics_models_are_named_by_family_and_scale() -> None:
    pytest.importorskip("ultralytics")
    names = sorted(ultralytics_files())
    assert {"yolov8n", "yolo11x", "yolo26n", "yolov10b", "yolov9t", "rtdetr-l", "yolov8n-p2", "yolov5nu"} - set(
        names
    ) <= {"yolov5nu"}
    assert not {"yolov8n-seg", "yolov8n-cls", "yolo11n-pose"} & set(names)
    assert list(names) == sorted(names)


def test_a_file_of_the_same_name_is_not_taken_for_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("yolov8n.yaml").write_text("name: a recipe\n")
    small, large = build("yolov8n", "ultralytics"), build("yolov8s", "ultralytics", classes=80)
    count = [sum(parameter.numel() for parameter in model.parameters()) for model in (small, large)]
    assert count == [3_011_433, 11_166_560]
    assert small.model[-1].nc == 3
    assert capsys.readouterr().out == ""
    assert hasattr(small.args, "box")


def test_unknown_names_and_arguments_are_named() -> None:
    pytest.importorskip("ultralytics")
    with pytest.raises(ModelError, match="there is no model 'yolo11q' in ultralytics; did you mean"):
        build("yolo11q", "ultralytics")
    with pytest.raises(ModelError, match="there is no argument 'width'; expected ch or num_classes"):
        build("yolov8n", "ultralytics", width=2)


@pytest.mark.slow
def test_weights_are_read_from_every_form(tmp_path: Path) -> None:
    source = build("yolov8n", "ultralytics")
    for buffer in source.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1)
    state = source.state_dict()
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pt")
    torch.save({"epoch": 3, "model": None, "ema": source.half(), "train_args": {"lr": 0.1}}, tmp_path / "c.pt")
    source.float()
    for name in ("a.safetensors", "b.pt", "c.pt"):
        settings = ModelSettings("yolov8n", "ultralytics", weights=str(tmp_path / name))
        found = build_model(settings, num_classes=3).state_dict()
        assert all(
            torch.allclose(found[key].float(), value.float(), rtol=1e-3, atol=1e-3) for key, value in state.items()
        )
    with pytest.raises(ModelError, match="these are not the weights of this DetectionModel"):
        build_model(ModelSettings("yolov8n", "ultralytics", weights=str(tmp_path / "c.pt")), num_classes=5)


class Tool(nn.Module):
    """A class of neither torch nor ultralytics."""


def test_checkpoints_with_other_classes_are_not_loaded(tmp_path: Path) -> None:
    model = build("yolov8n", "ultralytics")
    model.extra = Tool()
    torch.save({"model": model}, tmp_path / "a.pt")
    with pytest.raises(ModelError, match=r"it names .*Tool, and of ultralytics' checkpoints only layers of torch and"):
        load_ultralytics(build("yolov8n", "ultralytics"), tmp_path / "a.pt")
    del model.extra
    model.names = print
    torch.save({"model": model}, tmp_path / "b.pt")
    with pytest.raises(ModelError, match=r"b.pt: it names builtins.print"):
        load_ultralytics(build("yolov8n", "ultralytics"), tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(b"no archive")
    with pytest.raises(ModelError, match=r"c.pt: expected a state dict of tensors, but"):
        load_ultralytics(build("yolov8n", "ultralytics"), tmp_path / "c.pt")


def test_a_checkpoint_has_no_class_of_the_library_called(tmp_path: Path) -> None:
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    layers = {"nc": 1, "activation": f"open({str(tmp_path / 'ran')!r}, 'w')", "backbone": [], "head": []}

    class Called:
        def __reduce__(self) -> tuple[Any, ...]:
            return tasks.DetectionModel, (layers,)

    torch.save({"model": Called()}, tmp_path / "a.pt")
    with pytest.raises(ModelError, match=r"a\.pt: expected a checkpoint of ultralytics, but .*argument"):
        load_ultralytics(build("yolov8n", "ultralytics"), tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "zoo"), [(SSD, "torchvision"), ("yolov8n", "ultralytics")])
def test_folders_rebuild_pruned_detectors(tmp_path: Path, name: str, zoo: Any) -> None:
    torch.manual_seed(0)
    model, images = build(name, zoo).eval(), torch.rand(2, 3, 64, 64)
    small = pk.prune(model, images, channels=0.5)
    settings = ModelSettings(name, zoo, arguments=model_arguments(ModelSettings(name, zoo), 3, 64))
    folder = pk.save(small, tmp_path / "small", build=settings, task="detection", classes=["a", "b", "c"])
    loaded = pk.load(folder)
    assert made_for(loaded) == made_for(model)
    with torch.no_grad():
        a, b = (DETECTION.scored(each, (images,), each(images)) for each in (small.model, loaded))
    for one, other in zip(a, b, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("boxes", "scores", "labels"))
