"""The task `detection`: losses and detections of torchvision's and ultralytics' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prunekit as pk
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.data.user_data import sample_splits
from prunekit.errors import DataError, ModelError
from prunekit.measure.accuracy import evaluate
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.tasks.detection import DETECTION, class_count, collate, detector_kind
from prunekit.training.compatibility import check_fits

pytest.importorskip("pycocotools")
CPU = torch.device("cpu")
SSD = ("ssdlite320_mobilenet_v3_large", "torchvision")
NETS = [
    SSD,
    ("fasterrcnn_mobilenet_v3_large_320_fpn", "torchvision"),
    ("retinanet_resnet50_fpn", "torchvision"),
    ("fcos_resnet50_fpn", "torchvision"),
    ("yolov8n", "ultralytics"),
    ("yolo26n", "ultralytics"),
    ("rtdetr-l", "ultralytics"),
]


def shapes(*targets: Any, images: int = 20) -> Splits:
    return load_splits(DataSettings("shapes", image_size=64, images=images, targets=targets))


def net(name: str, zoo: Any, classes: int = 3, **arguments: Any) -> nn.Module:
    if zoo == "ultralytics":
        pytest.importorskip("ultralytics")
    torch.manual_seed(0)
    return build_model(ModelSettings(name, zoo, arguments=arguments), num_classes=classes, image_size=64)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "zoo"), NETS, ids=[name for name, _ in NETS])
def test_a_detector_computes_its_loss_and_finds_boxes(name: str, zoo: str) -> None:
    splits, model = shapes(), net(name, zoo)
    assert detector_kind(model) == zoo
    assert class_count(model) == 3
    check_fits(model, splits, CPU)
    images, targets = splits.train.fetch(torch.arange(4))
    with DETECTION.mode_for_loss(model):
        value = DETECTION.loss(model(*DETECTION.loss_inputs(model, (images,), targets)), targets)  # type: ignore[misc]
        twice = DETECTION.loss_inputs(model, (images.repeat(2, 1, 1, 1),), targets * 2)  # type: ignore[misc]
        if zoo == "torchvision" and "fasterrcnn" not in name:  # which draws some of its boxes at random
            of_both = DETECTION.loss(model(*twice), targets * 2).detach()
            assert float(of_both) == pytest.approx(float(value.detach()), rel=1e-3)
    value.backward()
    assert value.ndim == 0
    assert float(value.detach()) > 0
    assert sum(bool(p.grad is not None and p.grad.abs().sum() > 0) for p in model.parameters()) > 50
    model.eval()
    with torch.no_grad():
        found = DETECTION.scored(model, (images,), model(images))
    assert len(found) == 4
    for each in found:
        assert each["boxes"].shape == (len(each["scores"]), 4)
        assert each["labels"].dtype == torch.int64
        if len(each["labels"]):
            assert each["labels"].min() >= 0
            assert each["labels"].max() <= 2
            assert each["boxes"].min() > -640
            assert 4 < each["boxes"].max() < 640


@pytest.mark.slow
def test_ultralytics_detections_are_decoded_in_pixels() -> None:
    model: Any = net("yolov8n", "ultralytics").eval()
    raw = torch.zeros(1, 7, 3)  # x, y, width, height and the scores of three classes, of three places
    raw[0, :, 0] = torch.tensor([20.0, 30.0, 10.0, 20.0, 0.1, 0.9, 0.0])
    raw[0, :, 1] = torch.tensor([21.0, 30.0, 10.0, 20.0, 0.0, 0.8, 0.0])  # overlaps the first
    raw[0, :, 2] = torch.tensor([50.0, 50.0, 8.0, 8.0, 0.0, 0.0, 0.6])
    (found,) = DETECTION.scored(model, (torch.zeros(1, 3, 64, 64),), (raw, {}))
    order = found["scores"].argsort(descending=True)[:2]
    assert torch.allclose(found["boxes"][order], torch.tensor([[15.0, 20, 25, 40], [46.0, 46, 54, 54]]))
    assert found["labels"][order].tolist() == [1, 2]
    assert len(found["labels"]) == 3


def test_the_loss_of_ultralytics_is_that_of_its_own_batch() -> None:
    model: Any = net("yolov8n", "ultralytics").train()
    images, targets = shapes().train.fetch(torch.arange(3))
    ((batch,), wanted) = DETECTION.loss_inputs(model, (images,), targets), []  # type: ignore[misc]
    for index, target in enumerate(targets):
        for box, label in zip(target["boxes"].tolist(), target["labels"].tolist(), strict=True):
            x, y, right, bottom = (side / 64 for side in box)
            wanted.append([index, label, (x + right) / 2, (y + bottom) / 2, right - x, bottom - y])
    rows = torch.cat([batch["batch_idx"][:, None], batch["cls"], batch["bboxes"]], 1)
    assert torch.allclose(rows, torch.tensor(wanted), atol=1e-6)
    total, _ = model.loss(batch)
    assert float(DETECTION.loss(model(batch), targets).detach()) == pytest.approx(
        float(total.sum().detach()) / 3, rel=1e-4
    )


def test_crowds_are_not_learned() -> None:
    model = net(*SSD)
    target = {
        "boxes": torch.tensor([[1.0, 1, 20, 20], [5, 5, 60, 60]]),
        "labels": torch.tensor([2, 0]),
        "iscrowd": torch.tensor([0, 1]),
    }
    _, (given,) = DETECTION.loss_inputs(model, (torch.zeros(1, 3, 64, 64),), [target])  # type: ignore[misc]
    assert given["labels"].tolist() == [3]
    assert len(given["boxes"]) == 1


@pytest.mark.slow
def test_mask_and_keypoint_rcnn_learn_what_the_data_has() -> None:
    everything = shapes("masks", "keypoints")
    for name, part in (("maskrcnn_resnet50_fpn", "masks"), ("keypointrcnn_resnet50_fpn", "keypoints")):
        more = {"num_keypoints": 3} if part == "keypoints" else {}
        model = net(name, "torchvision", **more, rpn_post_nms_top_n_train=20)
        images, targets = everything.train.fetch(torch.arange(2))
        output = model(*DETECTION.loss_inputs(model, (images,), targets))  # type: ignore[misc]
        assert {"loss_mask", "loss_keypoint"} & output.keys()
        assert torch.isfinite(DETECTION.loss(output, targets))
        with pytest.raises(DataError, match=rf"RCNN learns {part}, and the targets have .*data.targets: \[{part}\]"):
            check_fits(model, shapes(), CPU)
    with pytest.raises(
        ModelError, match=r"it knows 17 keypoints of an object, and the data has 3; set model.arguments"
    ):
        check_fits(net("keypointrcnn_resnet50_fpn", "torchvision"), everything, CPU)


def test_models_that_do_not_fit_are_named_before_training() -> None:
    splits = shapes()
    for zoo, name in (("torchvision", SSD[0]), ("ultralytics", "yolov8n")):
        with pytest.raises(
            ModelError, match=r"expected 3 classes, as the data has, and its head has 2; set model.argu"
        ):
            check_fits(net(name, zoo, classes=2), splits, CPU)
    with pytest.raises(ModelError, match="Linear: expected a detector of torchvision or of ultralytics"):
        check_fits(nn.Linear(2, 2), splits, CPU)
    odd = load_splits(DataSettings("shapes", image_size=72, images=20))
    with pytest.raises(ModelError, match=r"height and width are multiples of 32, got 72 x 72; set data.image_size"):
        check_fits(net("yolov8n", "ultralytics"), odd, CPU)


def test_data_of_ones_own_is_collated_and_checked() -> None:
    def sample(size: int, label: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.rand(3, size, size), {"boxes": torch.tensor([[1.0, 2, 9, 9]]), "labels": label}

    good = [sample(16, torch.tensor([index % 2])) for index in range(6)]
    splits = sample_splits({"train": good, "test": good}, "detection", classes=["a", "b"])
    images, targets = splits.test.fetch(torch.arange(4))
    assert images.shape == (4, 3, 16, 16)
    assert [int(t["labels"]) for t in targets] == [0, 1, 0, 1]
    assert splits.sample_shape == (3, 16, 16)
    with pytest.raises(DataError, match="bring all to one size, with their boxes"):
        sample_splits({"train": [*good, sample(20, torch.tensor([0]))], "test": good}, "detection")
    with pytest.raises(DataError, match=r"a list with a mapping for each: `boxes` \(n, 4\)"):
        sample_splits({"train": [sample(16, torch.tensor([0.5]))] * 4, "test": good}, "detection")
    assert collate(good[:2])[0].shape == (2, 3, 16, 16)


@pytest.mark.slow
def test_a_small_detector_learns_shapes() -> None:
    """Trained on a few images it finds them again: boxes and classes go in and come out in the same form."""
    model = net(*SSD)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.2
    images, targets = shapes().train.fetch(torch.arange(6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, weight_decay=0)
    before = evaluate(model, [(images, targets)], "detection", CPU)
    for _ in range(35):
        value = DETECTION.loss(model(*DETECTION.loss_inputs(model, (images,), targets)), targets)  # type: ignore[misc]
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    found = evaluate(model, [(images, targets)], "detection", CPU)
    assert before.values["map50"] < 10
    assert found.values["map50"] > 60
    assert found.values["map"] > 30
    assert found.interval is not None
    assert found.interval[0] <= found.values["map"] <= found.interval[1]
    assert found.figures().keys() == {"map", "map50", "n_test", "low", "high"}


@pytest.mark.slow
def test_torchvisions_detectors_take_lists_of_images_of_several_sizes() -> None:
    model = net("ssdlite320_mobilenet_v3_large", "torchvision").eval()
    images = [torch.rand(3, 64, 48), torch.rand(3, 40, 64)]
    targets = [{"boxes": torch.tensor([[4.0, 4, 30, 30]]), "labels": torch.tensor([label])} for label in (0, 2)]
    batches = [(images, targets), (tuple(images[::-1]), tuple(targets[::-1]))]
    found = evaluate(model, batches, DETECTION, CPU)
    assert found.n_test == 4
    terms = pk.collect_gradients(model, batches, task="detection").terms["backbone.features.0.0.0.weight", 0]
    assert terms.shape == (2, 16)
    assert terms.any()
    assert not any(module.training for module in model.modules())
