"""A teacher for detectors: the same view for both, an error that is 0 where they agree, and training with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign

from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.settings.inputs import DataSettings
from prunekit.settings.train import DistillSettings, FeatureSettings, TrainSettings
from prunekit.statistics.output_error import OutputComparison
from prunekit.tasks.detection import DETECTION
from prunekit.tasks.detection_heads import Said, head_error
from prunekit.training import rate_search
from prunekit.training.callbacks.callback import EpochRow, TrainingRun
from prunekit.training.callbacks.distillation import Distillation
from prunekit.training.callbacks.selection import task_loss, with_teacher
from prunekit.training.loop import fit

pytest.importorskip("pycocotools")
CPU = torch.device("cpu")


def backbone() -> Any:
    layers = [nn.Conv2d(3, 8, 3, 4, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1), nn.BatchNorm2d(32)]
    found: Any = nn.Sequential(*layers, nn.ReLU(inplace=True))
    found.out_channels = 32
    return found


def fcos() -> nn.Module:
    return FCOS(backbone(), 4, anchor_generator=AnchorGenerator(((8,),), ((1.0,),)), min_size=(48, 64, 80), max_size=96)


def retinanet() -> nn.Module:
    anchors = AnchorGenerator(((8, 16),), ((1.0,),))
    return RetinaNet(backbone(), 4, anchor_generator=anchors, min_size=64, max_size=64)


def ssd() -> nn.Module:
    layers = backbone()
    layers.out_channels = [32]
    return SSD(layers, DefaultBoxGenerator([[2]]), (64, 64), 4)


def faster_rcnn() -> nn.Module:
    return FasterRCNN(
        backbone(), 4, min_size=(48, 64, 80), max_size=96, rpn_anchor_generator=AnchorGenerator(((8, 16),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2), rpn_post_nms_top_n_train=50, box_batch_size_per_image=16,
    )  # fmt: skip


def yolo(end2end: bool = False, bins: int = 16) -> nn.Module:
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    head = [[-1, 1, "Conv", [16, 3, 2]], [-1, 1, "Conv", [24, 3, 2]], [-1, 1, "Conv", [32, 3, 2]]]
    detect = [[[1, 2], 1, "Detect", ["nc"]]]
    config = {"nc": 3, "backbone": head, "head": detect, "end2end": end2end, "reg_max": bins, "ch": 3}
    model: nn.Module = tasks.DetectionModel(config, verbose=False)
    return model


MAKES: dict[str, Callable[[], nn.Module]] = {
    "fcos": fcos,
    "retinanet": retinanet,
    "ssd": ssd,
    "faster_rcnn": faster_rcnn,
    "yolo": yolo,
    "yolo of two branches": lambda: yolo(end2end=True),
    "yolo without bins": lambda: yolo(bins=1),
}
BOTH = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d) and module.bias is not None:
                module.bias.zero_()  # it says that there are hardly any objects
            if "cls" in name and isinstance(module, nn.Conv2d):
                module.weight.mul_(20)
    return model


def shapes() -> Splits:
    return load_splits(DataSettings("shapes", image_size=64, images=20))


def output_of(model: nn.Module, images: Any, targets: Any) -> Any:
    assert DETECTION.loss_inputs is not None
    return model(*DETECTION.loss_inputs(model, (images,), targets))


@pytest.mark.parametrize("background", [False, True])
def test_boxes_count_as_much_as_an_object_is_likely(background: bool) -> None:
    scores = torch.tensor([[9.0, -9.0, -9.0], [-9.0, -9.0, 9.0]])
    said = Said(scores, torch.ones(2, 4), background)
    each, boxes = said.detected().values()
    likely = torch.tensor([0.0, 1.0] if background else [1.0, 1.0])
    torch.testing.assert_close(boxes, likely[:, None].expand(2, 4), atol=1e-3, rtol=0)
    torch.testing.assert_close(each.amax(1), likely, atol=1e-3, rtol=0)
    if background:  # boxes of each class count by its probability
        of_classes = replace(said, boxes=torch.ones(2, scores.shape[1], 4)).detected()["boxes"]
        torch.testing.assert_close(of_classes, each.repeat_interleave(4, 1), atol=1e-3, rtol=0)
        said = replace(said, background=False)
        likely = torch.ones(2)
    distances = nn.functional.one_hot(torch.tensor([3, 1, 0, 2]), 5) * 50.0  # bins of each side
    more = {"keypoints": torch.ones(2, 3), "prototypes": torch.ones(1, 5)}
    said = replace(said, boxes=distances.expand(2, 4, 5), more=lambda: more)
    found = said.detected()
    torch.testing.assert_close(found["boxes"][1], torch.tensor([3.0, 1.0, 0.0, 2.0]), atol=1e-2, rtol=0)
    aside = replace(said, centerness=torch.full((2, 1), -20.0)).detected()
    assert float(aside["scores"].max()) < 1e-3
    assert float(aside["boxes"].max()) < 1e-3
    torch.testing.assert_close(found["keypoints"], likely[:, None].expand(2, 3), atol=1e-3, rtol=0)
    assert found["prototypes"] is more["prototypes"]


@pytest.mark.parametrize("end2end", [False, True])
def test_a_model_of_two_branches_is_judged_by_the_one_that_detects(end2end: bool) -> None:
    model: Any = yolo(end2end=True).eval()
    model.model[-1].end2end = end2end
    images = torch.rand(3, 3, 64, 64)
    judge = OutputComparison.of(model, (images,))
    before = dict(judge.values(model, (images,)))
    with torch.no_grad():
        for layer in model.model[-1].cv3:
            layer[-1].bias.add_(1)
    assert torch.equal(dict(judge.values(model, (images,)))["scores"], before["scores"]) is end2end


def rtdetr() -> nn.Module:
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    layers = [[-1, 1, "Conv", [16, 3, 2]], [-1, 1, "Conv", [24, 3, 2]], [-1, 1, "Conv", [32, 3, 2]]]
    decoder = [[[1, 2], 1, "RTDETRDecoder", ["nc", 32, 12, 2, 4, 2, 64]]]
    model: nn.Module = tasks.RTDETRDetectionModel(
        {"nc": 3, "backbone": layers, "head": decoder, "ch": 3}, verbose=False
    )
    return model


def detr_of_transformers(*, nothing: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if nothing:  # one of the classes says that there is no object
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.YolosConfig(**sizes, image_size=[64, 64], num_detection_tokens=12, num_labels=3)
        return transformers.YolosForObjectDetection(config)  # type: ignore[no-any-return]
    backbone_config = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(
        backbone_config=backbone_config, encoder_hidden_dim=16, d_model=16, encoder_in_channels=[8, 16, 16],
        decoder_in_channels=[16, 16, 16], encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=12, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, num_labels=3, num_denoising=0,
    )  # fmt: skip
    found: nn.Module = transformers.RTDetrForObjectDetection(config)
    for weight in found.parameters():
        if weight.ndim > 1:  # else all places score alike
            nn.init.kaiming_normal_(weight)
    return found


SELECTING: dict[str, Callable[[], nn.Module]] = {
    "faster_rcnn": faster_rcnn,
    "rtdetr": rtdetr,
    "detr of transformers": partial(detr_of_transformers, nothing=False),
    "yolos": partial(detr_of_transformers, nothing=True),
}


@pytest.mark.parametrize("name", SELECTING)
def test_selected_places_are_those_of_the_dense_model(name: str) -> None:
    torch.manual_seed(1)
    model = SELECTING[name]().eval()
    images: Any = 3 * torch.randn(3, 3, 64, 64)
    judge = OutputComparison.of(model, (images,))
    assert judge.head is not None
    other = copy.deepcopy(model)
    with torch.no_grad():
        want = judge.values(model, (images,))
        for weight in other.parameters():
            weight.mul_(1 + 0.03 * torch.randn_like(weight))
        got = judge.values(other, (images,))
        own = OutputComparison.of(other, (images,)).values(other, (images,))  # of its own places
    assert [key for key, _ in want] == [key for key, _ in got]

    def error(found: list[tuple[int | str, Tensor]]) -> float:
        pairs = [(one, two) for (_, one), (_, two) in zip(want, found, strict=True)]
        if any(one.shape != two.shape for one, two in pairs):  # another number of places
            return float("inf")
        return max(float((one - two).norm() / one.norm()) for one, two in pairs)

    assert error(got) < 0.2
    assert name == "yolos" or error(own) > 2 * error(got)  # it has the same queries for all images


def test_a_head_that_says_something_else_is_compared_as_any_model() -> None:
    class Transform(nn.Module):
        def forward(self, images: Any, targets: Any = None) -> Any:
            return inner(images, targets)

    model: Any = ssd().eval()
    inner, model.transform = model.transform, Transform()
    assert OutputComparison.of(model, ([torch.rand(3, 64, 64)] * 3,)).head is not None
    plain = model.head.forward
    model.head.forward = lambda features: {**plain(features), "cls_logits": None}
    with pytest.raises(AttributeError):
        OutputComparison.of(model, ([torch.rand(3, 64, 64)] * 3,))  # torchvision's own postprocessing


def test_a_second_stage_with_one_box_for_all_classes_is_compared_as_any_model() -> None:
    class OneBox(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.box = nn.Linear(1024, 4), nn.Linear(1024, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.scores(x), self.box(x)

    model: Any = faster_rcnn().eval()
    model.roi_heads.box_predictor = OneBox()
    decode = model.roi_heads.postprocess_detections
    model.roi_heads.postprocess_detections = lambda scores, boxes, *rest: decode(scores, boxes.repeat(1, 4), *rest)
    assert OutputComparison.of(model, (torch.rand(3, 3, 64, 64),)).head is None


@contextmanager
def reading(models: dict[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """What the first layers of models read."""
    found: dict[str, list[Tensor]] = {name: [] for name in models}
    handles = []
    for name, model in models.items():
        first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))

        def note(_: Any, given: Any, name: str = name) -> None:
            found[name].append(given[0].clone())

        handles.append(first.register_forward_pre_hook(note))
    yield found
    for handle in handles:
        handle.remove()


@BOTH
def test_a_teacher_sees_the_students_view_and_is_left_as_it_was(make: Callable[[], nn.Module]) -> None:
    student, teacher = made(make, 1), made(make, 2)
    before = copy.deepcopy(teacher.state_dict())
    images, targets = shapes().train.fetch(torch.arange(4))
    part = Distillation(teacher, DistillSettings(weight=0.5), task="detection")
    run = TrainingRun(student, torch.optim.SGD(student.parameters(), lr=0.1), CPU, 4, 1)
    student.train()
    with part.active(run), reading({"student": student, "teacher": teacher}) as read:
        for _ in range(8):
            added = part.added_loss(images, output_of(student, images, targets), targets)
        with torch.no_grad():
            output_of(student, images, targets)  # as a validation, of which nothing is kept
    assert len(read["teacher"]) == 8
    assert all(torch.equal(one, other) for one, other in zip(*read.values(), strict=False))
    if make in (fcos, faster_rcnn):
        assert len({one.shape for one in read["student"]}) > 1, "sizes are drawn at random"
    assert added.item() > 0
    added.backward()  # type: ignore[no-untyped-call]
    moved = [name for name, value in student.named_parameters() if value.grad is not None and value.grad.any()]
    assert len(moved) > 0.7 * len([*student.parameters()])
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert not count_hooks(student)
    assert not count_hooks(teacher)


@BOTH
def test_the_error_is_least_where_both_agree(make: Callable[[], nn.Module]) -> None:
    """With statistics of norms as they are, a copy says what the teacher says, and does not move."""
    student = made(make, 1)
    teacher = copy.deepcopy(student)
    images, targets = shapes().train.fetch(torch.arange(4))
    assert DETECTION.heads is not None
    teaching = DETECTION.mode_for_loss(teacher)
    with DETECTION.mode_for_loss(student), teaching, DETECTION.heads(student, teacher) as heads:
        for changed in (False, True):
            if changed:
                with torch.no_grad():
                    for parameter in student.parameters():
                        parameter.add_(0.3 * torch.randn_like(parameter))
            output_of(student, images, targets)
            with torch.no_grad():
                taught = heads.teach()
            error = heads.error(taught)
            gradients = torch.autograd.grad(
                error, [p for p in student.parameters() if p.requires_grad], allow_unused=True
            )
            largest = max(float(one.abs().max()) for one in gradients if one is not None)
            if changed:
                assert error.item() > 1e-3
                assert largest > 1e-3
            else:
                assert abs(error.item()) < 1e-6
                assert largest < 1e-4


def test_the_error_is_the_formula() -> None:
    torch.manual_seed(0)
    logits, wanted = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    wanted[3:] = -4.0  # where there is no object
    boxes, meant = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    by_hand, total = 0.0, 0.0
    for index in range(5):
        p, q = wanted[index].sigmoid(), logits[index].sigmoid()
        by_hand += float((p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum())
        if (sure := float(p.max())) >= 0.1:
            apart = (boxes[index] - meant[index]).abs()
            by_hand += sure * float(torch.where(apart < 1, apart**2 / 2, apart - 0.5).sum())
            total += sure
    assert head_error(Said(logits, boxes), Said(wanted, meant)).item() == pytest.approx(by_hand / max(total, 1))
    bins, likely = torch.randn(5, 4, 6, dtype=torch.float64), torch.randn(5, 4, 6, dtype=torch.float64)
    p, q = likely.softmax(2), bins.softmax(2)
    sure_of = wanted.sigmoid().amax(1) * (wanted.sigmoid().amax(1) >= 0.1)
    divergence = ((p * (p / q).log()).sum((1, 2)) * sure_of).sum() / sure_of.sum()
    assert head_error(Said(wanted, bins), Said(wanted, likely)).item() == pytest.approx(divergence.item())


@pytest.mark.slow
@pytest.mark.parametrize("make", [ssd, fcos, faster_rcnn, yolo])
def test_a_detector_trains_with_it(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = made(make, 1), made(make, 2)
    layer = "model.1" if make is yolo else "backbone.3"
    features = FeatureSettings((layer,), weight=0.1)
    settings = TrainSettings(epochs=2, optimizer="adamw", lr=1e-3, distill=DistillSettings(features=features))
    part = Distillation(teacher, settings.distill, task="detection")  # type: ignore[arg-type]
    before = copy.deepcopy(student.state_dict())
    moved: list[bool] = []

    def compare(row: EpochRow) -> None:
        moved.append(any(not torch.equal(value, before[name]) for name, value in student.state_dict().items()))

    history = fit(student, shapes(), settings, device=CPU, seed=0, batch=4, callbacks=[part], on_epoch=compare)
    assert len(history.rows) == 2
    assert moved == [True, True]
    monkeypatch.setattr(rate_search, "SHARE", 1.0)
    monkeypatch.setattr(rate_search, "STEPS", 2)
    monkeypatch.setattr(rate_search, "FEWEST", 1)
    found, losses = [], []
    for lr in ("auto", None):
        model = made(make, 1)
        settings = replace(settings, epochs=3, lr=lr or found[0].lr)
        part = Distillation(teacher, settings.distill, task="detection")  # type: ignore[arg-type]
        found.append(fit(model, shapes(), settings, device=CPU, seed=0, batch=4, callbacks=[part]))
        losses.append([row.train_loss for row in found[-1].rows])
    assert losses[0] == losses[1]
    tried = {row.held_out_loss for row in found[0].rates}
    assert len(tried) == len(found[0].rates) >= 4
    assert None not in tried


def test_what_no_teacher_can_show_is_said_or_left_out() -> None:
    class RTDETRDecoder(nn.Module):
        nc = 3

    queries: Any = yolo()
    queries.model[-1] = RTDETRDecoder()
    auto = TrainSettings(epochs=1, distill="auto")
    found = with_teacher(auto, DETECTION, fcos()).distill
    assert isinstance(found, DistillSettings)
    assert (found.temperature, found.labels, found.blend) == (1, 1, False)
    assert with_teacher(auto, DETECTION, queries).distill is None
    with pytest.raises(UsageError, match=r"distill\.temperature: expected none, because .* compares heads"):
        task_loss(DETECTION, TrainSettings(epochs=1, distill=DistillSettings(temperature=2.0)))


def test_teachers_that_do_not_fit_are_named_before_training() -> None:
    class RTDETRDecoder(nn.Module):
        nc = 3

    queries: Any = yolo()
    queries.model[-1] = RTDETRDecoder()
    wide = FCOS(backbone(), 4, anchor_generator=AnchorGenerator(((16,),), ((1.0,),)))
    gray = made(ssd, 1)
    gray.transform.image_mean = [0.5, 0.5, 0.5]
    five = FCOS(backbone(), 6, anchor_generator=AnchorGenerator(((8,),), ((1.0,),)))
    for student, teacher, message in (
        (fcos(), yolo(), "a detector of torchvision with 3 classes, as the student is, got one of ultralytics"),
        (fcos(), five, "with 3 classes, as the student is, got one of torchvision with 5"),
        (fcos(), retinanet(), "expected a teacher that is a FCOS, as the student is, got RetinaNet"),
        (faster_rcnn(), ssd(), "expected a teacher that is a FasterRCNN"),
        (fcos(), wide, r"anchors: .*16.* of the teacher, .*8.* of the student"),
        (ssd(), gray, r"normalization: .* of the teacher"),
        (yolo(), yolo(bins=8), "bins: 8 of the teacher, 16 of the student"),
        (yolo(), yolo(end2end=True), "branches: one2many and one2one of the teacher, one2many of the student"),
        (queries, queries, "the answers of RTDETRDecoder cannot be compared"),
        (nn.Linear(2, 2), fcos(), "Linear: expected a detector"),
    ):
        part = Distillation(teacher, DistillSettings(), task="detection")
        run = TrainingRun(student, torch.optim.SGD(student.parameters(), lr=0.1), CPU, 4, 1)
        with pytest.raises(ModelError, match=message), part.active(run):
            pass
