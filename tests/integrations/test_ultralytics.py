"""Pruning of ultralytics' models: what comes out predicts, is saved, loads without prunekit, and trains on."""

from __future__ import annotations

import copy
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_shapes import draw_shapes
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves

pytest.importorskip("ultralytics")
from small_yolos import small_yolo
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.nn.tasks import load_checkpoint
from ultralytics.utils import dist as multiple_devices
from ultralytics.utils.patches import torch_load

import prunekit as pk
from prunekit.errors import ArtifactError, DataError, ModelError, PlanError, UsageError
from prunekit.integrations import ultralytics as integration
from prunekit.integrations.ultralytics import PruneWhileTraining, load_yolo, prune_yolo
from prunekit.integrations.yolo.calibration_images import calibration_images
from prunekit.integrations.yolo.pruned_trainer import pruned_trainer
from prunekit.integrations.yolo.pruned_yolo import predictions

WITHOUT_PRUNEKIT = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "prunekit":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
"""


def settings(folder: Path, data: Path, **more: Any) -> dict[str, Any]:
    """What a training of ultralytics takes: on the CPU, quiet, and with its files in a folder."""
    quiet = {"plots": False, "verbose": False, "workers": 0, "device": "cpu", "exist_ok": True}
    return {"data": str(data), "imgsz": 64, "batch": 4, "nbs": 4, "project": str(folder), **quiet, **more}


def tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_shapes(tmp_path_factory.mktemp("shapes"), images=12)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return small_yolo(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def small(dense: Any, data: Path) -> Any:
    return prune_yolo(dense, data, macs=0.5, imgsz=64)


@pytest.mark.slow
def test_a_pruned_detector_is_repaired_and_works_at_any_size(
    dense: Any, small: Any, data: Path, tmp_path: Path
) -> None:
    pruned, before = small, small_yolo(tmp_path).model.state_dict()
    assert isinstance(pruned, YOLO)
    assert all(torch.equal(value, before[name]) for name, value in dense.model.state_dict().items())
    assert pruned.plan.channel_map.macs(pruned.plan.keep) <= 0.5 * pruned.plan.channel_map.macs()
    assert pruned.pruned.repair.after < pruned.pruned.repair.before
    assert re.search(r"MACs (49\.\d|50\.0) %", repr(pruned))
    assert "repair: error of the output" in str(pruned)
    for height, width in ((64, 64), (96, 160)):  # anchors follow the image
        images = torch.rand(2, 3, height, width)
        with torch.no_grad():
            whole = copy.deepcopy(pruned.pruned.masked).eval()(images)[0]
            torch.testing.assert_close(pruned.model(images)[0], whole, rtol=1e-3, atol=1e-2)
    assert pruned.val(**settings(tmp_path, data)).fitness >= 0
    assert len(pruned.predict(str(data.parent / "images" / "val"), imgsz=64, verbose=False)) == 6


@pytest.mark.slow
def test_its_file_loads_predicts_and_exports_without_prunekit_and_is_not_rebuilt(
    small: Any, data: Path, tmp_path: Path
) -> None:
    small.save(tmp_path / "small.pt")
    image = torch.rand(1, 3, 96, 64)
    torch.save(image, tmp_path / "image.pt")
    code = f"""
import torch, ultralytics
yolo = ultralytics.YOLO("small.pt")
torch.save(yolo.model(torch.load("image.pt"))[0], "predicted.pt")
yolo.info(), yolo.val(**{settings(tmp_path, data)})
yolo.save("again.pt")
try:
    ultralytics.YOLO("again.pt").train(epochs=1, **{settings(tmp_path, data)})
except KeyError as error:
    print(error)
yolo.fuse()
torch.save(yolo.model(torch.load("image.pt"))[0], "fused.pt")
"""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_PRUNEKIT + code]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "train() would rebuild it in its dense size. Add `import prunekit.integrations.ultralytics`" in ran.stdout
    with torch.no_grad():
        own = copy.deepcopy(small.model).half().float()(image)[0]
    torch.testing.assert_close(torch.load(tmp_path / "predicted.pt"), own)
    torch.testing.assert_close(torch.load(tmp_path / "fused.pt"), own, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
def test_its_trainer_keeps_the_structure(small: Any, data: Path, tmp_path: Path) -> None:
    small.save(tmp_path / "small.pt")
    yolo = load_yolo(tmp_path / "small.pt")
    had, first = shapes(yolo.model), yolo.model.model[0].conv.weight.clone()
    seen: list[tuple[int, ...]] = []
    yolo.add_callback(
        "on_train_batch_end", lambda trainer: seen.append(tuple(trainer.model.model[3].conv.weight.shape))
    )
    yolo.train(epochs=3, freeze=[0], multi_scale=0.5, close_mosaic=2, **settings(tmp_path, data, name="tuned"))
    assert set(seen) == {tuple(had["model.3.conv.weight"])}
    assert shapes(yolo.model) == had
    torch.testing.assert_close(yolo.model.model[0].conv.weight, first)
    best = YOLO(tmp_path / "tuned" / "weights" / "best.pt")
    assert shapes(best.model) == had
    assert not torch.equal(best.model.model[1].conv.weight, small.model.model[1].conv.weight)
    again = load_yolo(tmp_path / "tuned" / "weights" / "best.pt")
    assert repr(again) == repr(small)
    again.train(epochs=1, **settings(tmp_path, data, name="again"))
    assert shapes(again.model) == had


@pytest.mark.slow
def test_plain_objects_train_resume_and_tune_the_pruned_model(small: Any, data: Path, tmp_path: Path) -> None:
    small.save(tmp_path / "small.pt")
    had = shapes(small.model)

    def stop(trainer: Any) -> None:
        if trainer.epoch == 0:
            raise KeyboardInterrupt

    yolo = YOLO(tmp_path / "small.pt")
    yolo.add_callback("on_fit_epoch_end", stop)
    with pytest.raises(KeyboardInterrupt):
        yolo.train(epochs=2, **settings(tmp_path, data, name="run"))
    resumed = YOLO(tmp_path / "run" / "weights" / "last.pt")
    resumed.train(resume=True)
    assert resumed.trainer.start_epoch == 1
    assert shapes(resumed.model) == had
    YOLO(tmp_path / "small.pt").tune(iterations=1, epochs=1, **settings(tmp_path, data, name="tune"))
    assert shapes(YOLO(tmp_path / "tune" / "weights" / "best.pt").model) == had
    dense = small_yolo(tmp_path)
    whole = shapes(dense.model)
    dense.train(epochs=1, **settings(tmp_path, data, name="dense"))  # others are trained as they were
    assert shapes(dense.model) == whole


@pytest.mark.slow
def test_a_training_that_stopped_is_resumed_in_the_structure(small: Any, data: Path, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(trainer: Any) -> None:
        if trainer.epoch == 1:
            raise Stopped

    yolo = load_yolo(copy.copy(small))
    yolo.add_callback("on_fit_epoch_end", stop)
    with pytest.raises(Stopped):
        yolo.train(epochs=4, **settings(tmp_path, data, name="run"))
    last = tmp_path / "run" / "weights" / "last.pt"
    written = torch_load(last)
    resumed, begun = load_yolo(last), []
    resumed.add_callback("on_train_start", lambda trainer: begun.append(copy.deepcopy(trainer.optimizer.state_dict())))
    resumed.add_callback("on_train_start", lambda trainer: begun.append(copy.deepcopy(trainer.model.state_dict())))
    resumed.train(resume=True)
    assert resumed.trainer.start_epoch == 2
    for key, moments in begun[0]["state"].items():
        for name, value in written["optimizer"]["state"][key].items():
            torch.testing.assert_close(moments[name].float(), value.float())
    average = written["ema"].float().state_dict()  # what ultralytics goes on from
    assert all(torch.equal(value, average[name]) for name, value in begun[1].items())
    assert shapes(resumed.model) == shapes(small.model)


@pytest.mark.slow
def test_processes_for_several_devices_train_the_structure(
    small: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiple_devices, "USER_CONFIG_DIR", tmp_path)
    monkeypatch.setattr(DetectionTrainer, "train", lambda self: None)  # whatever the launching process would start
    made: list[Any] = []
    start = pruned_trainer(DetectionTrainer)
    monkeypatch.setattr(start, "train", lambda self: made.append(self), raising=False)
    yolo = load_yolo(copy.copy(small))
    with pytest.raises(FileNotFoundError, match="no checkpoint was saved"):  # as nothing trained
        yolo.train(epochs=1, **settings(tmp_path, data))
    monkeypatch.delattr(start, "train")
    script = multiple_devices.generate_ddp_file(made[0])
    state = torch_load(Path(script).with_suffix(".pt"), map_location="cpu")
    worker = state["trainer"](overrides=state["args"], _callbacks=state["callbacks"])
    worker.model = state["model"]
    worker.setup_model()
    assert shapes(worker.model) == shapes(small.model)
    small.save(tmp_path / "small.pt")
    worker.model = str(tmp_path / "small.pt")  # as in a process that resumes
    worker.setup_model()
    assert shapes(worker.model) == shapes(small.model)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["segment", "pose", "obb", "classify", "end2end"])
def test_every_task_is_pruned_saved_and_trained(task: str, tmp_path: Path) -> None:
    data = draw_shapes(tmp_path / "data", task=task.replace("end2end", "detect"), images=4)
    dense = small_yolo(tmp_path, task.replace("end2end", "detect"), end2end=task == "end2end")
    pruned = prune_yolo(dense, macs=0.5, imgsz=64)
    assert pruned.pruned.max_relative_difference < 1e-12
    pruned.save(tmp_path / "pruned.pt")
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        pairs = zip(
            tensors(YOLO(tmp_path / "pruned.pt").model(image)), tensors(pruned.model.half().float()(image)), strict=True
        )
    for one, other in pairs:
        torch.testing.assert_close(one, other)
    pruned.train(epochs=1, **settings(tmp_path, data))
    assert shapes(pruned.model) == shapes(YOLO(tmp_path / "pruned.pt").model)
    plain = YOLO(tmp_path / "pruned.pt")
    plain.train(epochs=1, **settings(tmp_path, data))
    assert shapes(plain.model) == shapes(pruned.model)


def test_locks_name_the_outputs_of_the_head(tmp_path: Path) -> None:
    model = small_yolo(tmp_path).model
    whole, read = (
        pk.trace(model, torch.rand(2, 3, 64, 64)),
        pk.trace(model, torch.rand(2, 3, 64, 64), outputs=predictions),
    )
    reasons = [lock.reason for lock in whole.locks]
    assert any("'1.feats'" in reason and "outputs=" in reason for reason in reasons)
    assert not any("feats" in lock.reason for lock in read.locks)
    assert sum(len(group.labels) for group in read.groups) > sum(len(group.labels) for group in whole.groups)


def test_images_come_in_every_form(data: Path, tmp_path: Path) -> None:
    yolo = small_yolo(tmp_path)
    folder = data.parent / "images" / "train"
    paths = sorted(folder.iterdir())
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(map(str, paths)))
    arrays = [np.asarray(Image.open(path))[..., ::-1] for path in paths]
    config = {"path": str(data.parent), "train": "images/train"}
    pixels = torch.stack([torch.from_numpy(array[..., ::-1].copy()).permute(2, 0, 1) for array in arrays])
    batches = [{"img": pixels[:8], "cls": torch.zeros(3)}, {"img": pixels[8:], "cls": torch.zeros(1)}]
    expected = pixels.float() / 255
    for form in (
        data,
        str(data),
        config,
        folder,
        [*map(str, paths)],
        listed,
        arrays,
        pixels,
        expected,
        batches,
        [pixels],
    ):
        torch.testing.assert_close(calibration_images(yolo, form, (64, 64), 99, 0), expected)
    few = calibration_images(yolo, folder, (96, 32), 5, 0)
    assert few.shape == (5, 3, 96, 32)
    assert torch.equal(few, calibration_images(yolo, folder, (96, 32), 5, 0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing.yaml", "data: 'missing.yaml' is no data set that ultralytics reads"),
        (3, "data: expected a data set's YAML file .*; got int"),
        ([], "data: the loader is empty"),
        (torch.rand(8, 1, 64, 64), r"expected images of shape \(B, 3, H, W\), got \(8, 1, 64, 64\)"),
        ([{"image": 1}], "or of dictionaries with them under 'img'; got dict with 'image'"),
        ([torch.rand(4, 3, 64, 64), torch.rand(4, 3, 32, 64)], "expected all of one size"),
        (["nowhere.png"], "data: there is no nowhere.png"),
    ],
)
def test_bad_data_is_told(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        prune_yolo(small_yolo(tmp_path), given, macs=0.5, imgsz=64)


def test_a_file_that_is_no_image_is_told(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(DataError, match="no images in"):
        prune_yolo(small_yolo(tmp_path), tmp_path / "images", macs=0.5, imgsz=64)
    (tmp_path / "images" / "a.png").write_bytes(b"none")
    with pytest.raises(DataError, match=r"a\.png cannot be read as an image"):
        prune_yolo(small_yolo(tmp_path), tmp_path / "images", macs=0.5, imgsz=64)


def test_bad_calls_say_what_to_do(tmp_path: Path) -> None:
    yolo = small_yolo(tmp_path)
    yolo.save(tmp_path / "dense.pt")
    for call, kind, message in (
        (lambda: prune_yolo(yolo.model, macs=0.5), UsageError, "give the object of ultralytics, not its .model"),
        (lambda: prune_yolo(tmp_path / "none.pt", macs=0.5), UsageError, "there is no file"),
        (lambda: prune_yolo(yolo, imgsz=64), UsageError, "budget: expected at least one of"),
        (lambda: prune_yolo(yolo, macs=0.5, imgsz=65), UsageError, "imgsz: expected multiples of 16 pixels"),
        (lambda: prune_yolo(yolo, macs=0.5, plain_classes=False), UsageError, "plain_classes: prune_yolo decides this"),
        (lambda: prune_yolo(yolo, macs=0.5, suppression=True), UsageError, "suppression: expected a budget of time"),
        (lambda: prune_yolo(yolo, speedup=2, suppression=True), UsageError, "suppression: expected images as data="),
        (lambda: load_yolo(tmp_path / "dense.pt"), ArtifactError, "expected a pruned model, .* got a dense one"),
    ):
        with pytest.raises(kind, match=message):
            call()


def test_trainers_refuse_what_they_would_not_keep(small: Any, data: Path, tmp_path: Path) -> None:
    yolo = small_yolo(tmp_path)
    yolo.save(tmp_path / "dense.pt")
    with pytest.raises(UsageError, match="leave out pretrained=False"):
        load_yolo(copy.copy(small)).train(epochs=1, pretrained=False, **settings(tmp_path, data))
    with pytest.raises(ModelError, match="expected a pruned model, got a dense one"):
        load_yolo(copy.copy(small)).train(epochs=1, pretrained=tmp_path / "dense.pt", **settings(tmp_path, data))
    fewer = tmp_path / "fewer.yaml"
    fewer.write_text(data.read_text().replace("  2: triangle\n", ""))
    with pytest.raises(ModelError, match="has 3 classes, and the data has 2; train the dense model on this data first"):
        load_yolo(copy.copy(small)).train(epochs=1, **settings(tmp_path, fewer))
    fused = load_yolo(copy.copy(small))
    fused.model = copy.deepcopy(fused.model).fuse(verbose=False)
    with pytest.raises(ModelError, match="norms are folded"):
        fused.train(epochs=1, **settings(tmp_path, data))
    with pytest.raises(UsageError, match="tune: this model is pruned, and the processes of Ray"):
        load_yolo(copy.copy(small)).tune(use_ray=True)


@pytest.mark.slow
def test_a_drop_is_judged_by_a_function_of_an_object_of_ultralytics(dense: Any, data: Path) -> None:
    images = [np.random.default_rng(seed).integers(256, size=(64, 64, 3), dtype=np.uint8) for seed in range(2)]
    wanted = [found.boxes.conf for found in dense.predict(images, conf=1e-9, imgsz=64, verbose=False)]
    judged = list[tuple[int, float]]()

    def score(yolo: Any) -> float:
        assert isinstance(yolo, YOLO)
        assert "(detect)" in repr(yolo)
        yolo.val(data=str(data), imgsz=64, plots=False, verbose=False, workers=0)  # which fuses what it is given
        found = [one.boxes.conf for one in yolo.predict(images, conf=1e-9, imgsz=64, verbose=False)]
        off = sum(float((a[:8].sum() - b[:8].sum()).abs()) for a, b in zip(wanted, found, strict=True))
        judged.append((sum(one.numel() for one in yolo.model.parameters()), -off))
        return -off

    small = prune_yolo(dense, data, max_drop=1e-3, evaluate=score, imgsz=64)
    assert small.pruned.score.drop <= 1e-3 < max(-off for _, off in judged)  # of models without weights, or narrower
    assert len({size for size, _ in judged}) > 2
    assert small.pruned.score.score in [score for _, score in judged]
    assert any(isinstance(module, nn.BatchNorm2d) for module in small.model.modules())
    assert any(isinstance(module, nn.BatchNorm2d) for module in dense.model.modules())


@pytest.mark.slow
def test_a_model_that_was_pruned_by_hand_is_kept_too(tmp_path: Path) -> None:
    yolo = small_yolo(tmp_path)
    yolo.model = pk.prune(yolo.model, torch.rand(2, 3, 64, 64), macs=0.5, plain_classes=True, outputs=predictions).model
    kept = load_yolo(yolo)
    assert "parameters 49.2 % left" in repr(kept)
    kept.save(tmp_path / "kept.pt")
    assert shapes(load_yolo(tmp_path / "kept.pt").model) == shapes(kept.model)
    with pytest.raises(KeyError, match="This model is pruned"):
        type(kept.model)(kept.model.yaml, verbose=False)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_time_of_suppression_is_part_of_the_budget(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yolo, target = small_yolo(tmp_path), pk.Target()
    images = calibration_images(yolo, data, (64, 64), 8, 0)
    assert integration.suppression_ms(yolo, images, target) > 0
    monkeypatch.setattr(integration, "suppression_ms", lambda *_: 2.0)
    assert integration.without_suppression(yolo, images, 5.0, None, target)[0] == 3.0
    with pytest.raises(PlanError, match="suppression alone takes 2 ms"):
        integration.without_suppression(yolo, images, 1.5, None, target)
    _, speedup, notes = integration.without_suppression(yolo, images, None, 1.2, target)
    whole = float(notes[0].split("model's time, ")[1].split(" ms")[0])
    assert speedup == pytest.approx(whole / ((whole + 2) / 1.2 - 2), rel=0.05)
    dual = small_yolo(tmp_path, end2end=True)
    dual.model.end2end = True
    with pytest.raises(UsageError, match="returns its boxes without one"):
        prune_yolo(dual, images, speedup=1.2, imgsz=64, suppression=True)


@pytest.mark.slow
@pytest.mark.parametrize("public", [prune_yolo, load_yolo, PruneWhileTraining])
def test_examples_of_docstrings_run(public: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(inspect.unwrap(public)) or ""
    example, said = doctest.DocTestParser().get_doctest(text, {}, public.__name__, None, None), list[str]()
    done = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert done.attempted
    assert not done.failed, "".join(said)


@pytest.mark.slow
def test_a_model_of_the_package(tmp_path: Path) -> None:
    pruned = prune_yolo("yolov8n.yaml", channels=0.5, imgsz=64)
    left = {row["figure"]: row["left"] for row in pruned.pruned.rows()}
    assert left["MACs"] < 0.3, "the head is pruned too"
    pruned.save(tmp_path / "pruned.pt")
    loaded, _ = load_checkpoint(tmp_path / "pruned.pt")
    assert shapes(loaded) == shapes(pruned.model)
