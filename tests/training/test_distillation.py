"""Distillation: losses by hand, a teacher that is left alone, features in the kept channels."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training_models import CPU, net, splits

import prunekit
from prunekit.deploy.deployment_transform import for_inference
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.masks.masked_model import masked
from prunekit.planning.plan import Plan
from prunekit.settings.train import AverageSettings, DistillSettings, FeatureSettings, TrainSettings
from prunekit.tasks.task import get_task
from prunekit.tasks.texts import counted_rows
from prunekit.training.callbacks import distillation
from prunekit.training.callbacks.callback import ContextCallback, TrainingRun
from prunekit.training.callbacks.distillation import Distillation, feature_error, soft_targets
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks, on_labels, task_loss, with_teacher
from prunekit.training.loop import fit
from prunekit.utils.context import training_mode

BOTH = DistillSettings(weight=0.7, temperature=3.0, features=FeatureSettings(("0", "1", "5"), weight=0.4))


def pruned(model: nn.Module) -> Plan:
    chart = prunekit.trace(model, (torch.zeros(2, 3, 8, 8),))
    keep = np.ones(chart.n_labels, bool)
    keep[chart.groups[0].labels[:3]] = False
    return Plan(chart, keep)


def training(model: nn.Module) -> TrainingRun:
    return TrainingRun(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU, 4, 2)


def test_logits_follow_the_formula() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    t = 2.5
    by_hand = 0.0
    for s, q in zip(student.tolist(), teacher.tolist(), strict=True):
        p = [np.exp(v / t) / sum(np.exp(w / t) for w in q) for v in q]
        r = [np.exp(v / t) / sum(np.exp(w / t) for w in s) for v in s]
        by_hand += sum(a * np.log(a / b) for a, b in zip(p, r, strict=True)) / 5
    assert soft_targets(student, teacher, t).item() == pytest.approx(t**2 * by_hand, rel=1e-12)
    assert soft_targets(teacher, teacher, t).item() == pytest.approx(0, abs=1e-12)


def test_the_factor_keeps_the_gradient_of_logits_as_large_at_any_temperature() -> None:
    """At a high temperature the gradient is (s - q) / classes for centered logits (Hinton et al. 2015, section 2.1)."""
    torch.manual_seed(0)
    student = (values := torch.randn(1, 6, dtype=torch.float64)).sub(values.mean()).requires_grad_()
    teacher = (values := torch.randn(1, 6, dtype=torch.float64)).sub(values.mean())
    soft_targets(student, teacher, 1e4).backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    torch.testing.assert_close(student.grad, (student - teacher).detach() / 6, rtol=1e-3, atol=0)


def test_features_follow_the_formula() -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    wanted = [torch.randn(2, 3, 4, dtype=torch.float64), 100 * torch.randn(5, dtype=torch.float64)]
    by_hand = sum(((a - b) ** 2).sum() / (b**2).sum() for a, b in zip(given, wanted, strict=True)) / 2
    torch.testing.assert_close(feature_error(given, wanted), by_hand, rtol=1e-12, atol=0)


@pytest.mark.parametrize("halved", [False, True])
def test_a_step_adds_both_losses_in_the_kept_channels(halved: bool) -> None:
    student, teacher = net(1).double(), net(2).double()
    plan = pruned(net()) if halved else None
    images, labels = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.arange(6) % 4
    student[3].eval()
    part = Distillation(teacher, BOTH, lambda: plan)
    with part.active(training(student)):
        output = student(images)
        loss = part.added_loss(images, output, labels)
    with torch.no_grad(), training_mode(teacher, False):
        conv = teacher[0](images)
        norm = teacher[1](conv)
        wanted = teacher[5](teacher[4](torch.relu(norm)))
    keep = plan.keep[plan.channel_map.activations["0", "output", 0]] if plan is not None else np.ones(8, bool)
    assert keep.sum() == (5 if halved else 8)
    at = torch.from_numpy(keep)
    given = student[0](images)
    pairs = [(given[:, at], conv[:, at]), (student[1](given)[:, at], norm[:, at]), (output, wanted)]
    features = sum(((a - b) ** 2).sum() / (b**2).sum() for a, b in pairs) / 3
    p, q = torch.softmax(wanted / 3, 1), torch.softmax(output / 3, 1)
    expected = 0.7 * 9 * (p * (p / q).log()).sum(1).mean() + 0.4 * features
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    assert loss.requires_grad


def test_the_teacher_is_unchanged_and_nothing_is_left_behind() -> None:
    student, teacher = net(1), net(2)
    teacher[1].eval()
    before = copy.deepcopy(teacher.state_dict())
    part = Distillation(teacher, BOTH)
    settings = TrainSettings(epochs=2, lr=0.05, distill=BOTH, accumulate=2)
    fit(student, splits(), settings, device=CPU, seed=1, batch=16, callbacks=[part])
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert (teacher.training, teacher[1].training) == (True, False)
    assert count_hooks(student) == count_hooks(teacher) == 0


def test_a_student_comes_closer_to_its_teacher() -> None:
    """Trained against labels that say nothing, a student learns what the teacher knows from its logits alone."""
    teacher = net(2)
    fit(teacher, splits(), TrainSettings(epochs=5, lr=0.1), device=CPU, seed=1, batch=16)
    reached = []
    for weight in (0.0, 2.0):
        settings = TrainSettings(epochs=3, lr=0.02, label_smoothing=0.999, distill=DistillSettings(weight, labels=1.0))
        student = net(1)
        part = Distillation(teacher, DistillSettings(weight, labels=1.0))
        rows = fit(student, splits(), settings, device=CPU, seed=1, batch=16, callbacks=[part]).rows
        reached.append(rows[-1].validation_loss)
    assert reached[1] < 0.8 * reached[0]


def test_masks_and_checkpointing_go_with_features() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.body, self.reentrant = net(1), reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    settings = DistillSettings(features=FeatureSettings(("body.1",)))
    teacher = Checkpointed(False)
    for reentrant in (False, True):
        student = Checkpointed(reentrant)
        part = Distillation(teacher, settings)
        images = torch.randn(4, 3, 8, 8, requires_grad=True)
        with part.active(training(student)):
            output = student(images)
            if reentrant:  # its first pass records nothing
                with pytest.raises(
                    ModelError, match=r"distill\.features: body.1 did not run as often.*use_reentrant=True"
                ):
                    part.added_loss(images, output, torch.arange(4))
                continue
            part.added_loss(images, output, torch.arange(4)).backward()  # type: ignore[no-untyped-call]
        assert student.body[0].weight.grad.abs().sum() > 0
    model, plan = net(1), pruned(net(1))
    steps = ContextCallback(lambda run: masked(model, plan, run.optimizer, restore=False))
    part = Distillation(net(2), BOTH, lambda: plan)
    run = TrainSettings(epochs=1, lr=0.05, distill=BOTH)
    fit(model, splits(), run, device=CPU, seed=1, batch=16, callbacks=[steps, part])
    assert not model[0].weight[~torch.from_numpy(plan.keep[plan.channel_map.labels["0.weight"][0]])].any()


def test_globs_and_modules_that_do_not_fit_are_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
            self.pair = Pair()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.pair(self.inner(x))[0])  # type: ignore[no-any-return]

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    def added(model: nn.Module, *globs: str, teacher: nn.Module | None = None) -> Any:
        part = Distillation(teacher or Two(), DistillSettings(features=FeatureSettings(globs)))
        with part.active(training(model)):
            return part.added_loss(x := torch.randn(3, 2), model(x), torch.zeros(3).long())

    with pytest.raises(UsageError, match=r"distill\.features\.modules: 'iner' matches no module path.*'inner'"):
        added(Two(), "iner")
    with pytest.raises(ModelError, match="pair gives a tuple; expected one tensor"):
        added(Two(), "pair")
    frozen = Two()
    frozen.inner.requires_grad_(False)
    with pytest.raises(ModelError, match="the output of inner carries no gradient"):
        added(frozen, "inner")
    assert count_hooks(frozen) == 0
    with pytest.raises(UsageError, match="distill is set, and no Distillation is among the callbacks"):
        fit(net(), splits(), TrainSettings(distill=DistillSettings()), device=CPU, seed=0, batch=16)


class Tagger(nn.Module):
    """Scores of each token, which look at that token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.table(input_ids))
        return scores


@pytest.mark.parametrize("labeled", [False, True])
def test_padding_counts_neither_in_logits_nor_in_features(labeled: bool) -> None:
    torch.manual_seed(0)
    student, teacher = Tagger(), Tagger()
    settings = DistillSettings(weight=0.7, features=FeatureSettings(("table",), weight=0.4))
    distillation = Distillation(teacher, settings, task="token_classification")
    ids, labels = torch.randint(1, 9, (3, 4)), torch.randint(0, 5, (3, 4))
    blank, ignored = torch.zeros(3, 7, dtype=torch.long), torch.full((3, 7), -100)
    short = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    long = {"input_ids": torch.cat([ids, blank], 1), "attention_mask": torch.cat([torch.ones_like(ids), blank], 1)}
    losses = []
    with distillation.active(training(student)):
        for inputs, targets in ((short, labels), (long, torch.cat([labels, ignored], 1))):
            output = student(**inputs)
            losses.append(distillation.added_loss(inputs, output, targets if labeled else None))
    torch.testing.assert_close(losses[0], losses[1])


def test_a_label_that_does_not_count_is_not_distilled() -> None:
    scores, others = torch.randn(4, 5), torch.randn(4, 5)
    counted = counted_rows({}, torch.tensor([[1, -100], [2, -100]]), 4)
    assert counted is not None
    assert counted.tolist() == [True, False, True, False]
    assert torch.equal(soft_targets(scores[counted], others[counted], 1.0), soft_targets(scores[::2], others[::2], 1.0))
    assert soft_targets(scores[:0], others[:0], 1.0) == 0
    assert counted_rows(torch.zeros(4, 3), torch.zeros(4, 5), 4) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("some", [False, True])
def test_many_rows_are_computed_some_at_a_time(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, some: bool) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(11, 6).to(dtype).requires_grad_(), torch.randn(11, 6).to(dtype)
    counted = torch.arange(11) % 3 > 0 if some else None
    whole = soft_targets(student, teacher, 2.0, counted)
    wanted = torch.autograd.grad(0.7 * whole, student)[0]
    seen, one = [], F.kl_div
    monkeypatch.setattr(F, "kl_div", lambda *given, **named: seen.append(len(given[0])) or one(*given, **named))
    monkeypatch.setattr(distillation, "AT_ONCE", 4 * 6)
    parts = soft_targets(student, teacher, 2.0, counted)
    assert seen == ([2, 3, 2] if some else [4, 4, 3])
    torch.testing.assert_close(parts, whole)
    found = torch.autograd.grad(0.7 * parts, student)[0]
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted)
    if counted is not None:
        assert not found[~counted].any()


PADDED = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 5, 0, 0]]), "attention_mask": torch.ones(2, 4, dtype=torch.long)}
PADDED["attention_mask"][1, 2:] = 0
MARKED = torch.tensor([[-100, 3, -100, 1], [2, -100, -100, -100]])
TASKS: dict[str, tuple[Any, tuple[int, ...], list[list[bool]]]] = {
    # task: a batch, the shape of an output, and which of its rows count
    "causal_lm": (PADDED, (2, 4, 9), [[True, True, True, False], [True, False, False, False]]),
    "masked_lm": (PADDED | {"labels": MARKED}, (2, 4, 9), [[False, True, False, True], [True, False, False, False]]),
    "token_classification": (PADDED | {"labels": MARKED}, (2, 4, 5), (MARKED >= 0).tolist()),
    "text_classification": (PADDED | {"labels": torch.tensor([1, 0])}, (2, 3), [[True], [True]]),
    "seq2seq": (PADDED | {"labels": MARKED, "decoder_input_ids": MARKED.clamp(0)}, (2, 4, 9), (MARKED >= 0).tolist()),
    "segmentation": (
        [torch.randn(2, 3, 1, 2), torch.tensor([[[0, 255]], [[2, 1]]])], (2, 4, 1, 2), [[True, False], [True, True]]
    ),
}  # fmt: skip


class Says(nn.Module):
    """Gives the same scores, whatever it is asked."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, decoder_input_ids: Any = None) -> torch.Tensor:
        return self.scores


@pytest.mark.parametrize("name", TASKS)
def test_every_task_learns_the_rows_that_its_loss_counts(name: str) -> None:
    task, (batch, shape, counted) = get_task(name), TASKS[name]
    inputs, targets = task.unpack(batch)
    torch.manual_seed(0)
    student, teacher = Says(torch.randn(shape)), Says(torch.randn(shape))
    teaching = Distillation(teacher, DistillSettings(temperature=2.0), task=name)
    with teaching.active(training(student)):
        loss = teaching.added_loss(inputs, student(), targets)
    loss.backward()
    axis = 1 if name == "segmentation" else len(shape) - 1
    rows = [each.detach().movedim(axis, -1).reshape(-1, shape[axis]) for each in (student.scores, teacher.scores)]
    kept = torch.tensor(counted).flatten()
    given, wanted = ((values / 2).log_softmax(1)[kept] for values in rows)
    torch.testing.assert_close(loss, 4 * (wanted.exp() * (wanted - given)).sum(1).mean())
    gradient = student.scores.grad
    assert gradient is not None
    assert gradient.movedim(axis, -1).reshape(-1, shape[axis]).any(1).tolist() == kept.tolist()


def test_an_embedding_has_a_teacher_already() -> None:
    with pytest.raises(UsageError, match="task 'embedding' learns the dense model's outputs already; leave it out"):
        task_loss(get_task("embedding"), TrainSettings(distill=DistillSettings()))


SEEN: dict[str, list[Tensor]] = {"student": [], "teacher": []}
"""Images that each was given: not in the modules, of which the teacher is copied."""


class Recording(nn.Module):
    """Keeps what it is given while it learns, or while it teaches."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name

    def forward(self, images: Tensor) -> Tensor:
        if torch.is_grad_enabled() == self.training == (self.name == "student"):
            SEEN[self.name].append(images.clone())
        return self.inner(images)  # type: ignore[no-any-return]


def test_the_teacher_sees_the_blends_that_the_student_sees() -> None:
    given, taught = SEEN["student"], SEEN["teacher"]
    given.clear()
    taught.clear()
    distill = DistillSettings()
    settings, part = (
        TrainSettings(epochs=1, lr=0.01, distill=distill),
        Distillation(Recording(net(2), "teacher"), distill),
    )
    fit(Recording(net(1), "student"), splits(), settings, device=CPU, seed=1, batch=16, callbacks=[part])
    first = next(at for at, seen in enumerate(taught) if torch.equal(seen, given[0]))
    assert len(given) == 4 < len(taught)  # which sees what is held out before and after
    assert all(map(torch.equal, given, taught[first:]))
    plain = {image.numpy().tobytes() for image, _ in splits().train}
    assert not any(image.contiguous().numpy().tobytes() in plain for image in given[0])  # all are blended


@pytest.mark.parametrize(("labels", "equal"), [(None, True), (0.5, False)])
def test_images_are_learned_without_their_labels(labels: float | None, equal: bool) -> None:
    """Other labels of the training images change nothing, unless they are given a weight."""
    made = []
    for wrong in (False, True):
        data, student = splits(), net(1)
        if wrong:
            data = replace(data, train=replace(data.train, labels=data.train.labels.roll(1)))
        distill = DistillSettings(labels=labels)
        settings = TrainSettings(epochs=1, lr=0.05, distill=distill)
        fit(student, data, settings, device=CPU, seed=1, batch=16, callbacks=[Distillation(net(2), distill)])
        made.append(student.state_dict())
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items()) == equal


def test_what_is_not_said_suits_the_task() -> None:
    auto = TrainSettings()
    images = with_teacher(auto, get_task("image_classification")).distill
    assert images == DistillSettings(temperature=1.0, labels=0.0, blend=True)
    own = with_teacher(replace(auto, mixup=0.2), get_task("image_classification")).distill
    assert isinstance(own, DistillSettings)
    assert own.blend is False  # the training blends them itself
    assert with_teacher(auto, get_task("causal_lm")).distill == DistillSettings(
        temperature=2.0, labels=1.0, blend=False
    )
    assert with_teacher(auto, get_task("embedding")).distill is None
    assert with_teacher(replace(auto, distill=None), get_task("causal_lm")).distill is None
    assert on_labels(auto).distill is None


@pytest.mark.parametrize("view", [False, True])
def test_the_fast_teacher_answers_as_the_teacher(view: bool) -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), nn.Linear(144, 2)

        def forward(self, images: Tensor) -> Tensor:
            found = self.body(images)
            found = found.view(len(images), -1) if view else found.flatten(1)
            return self.head(found)  # type: ignore[no-any-return]

    teacher = Viewing().eval()
    teacher.body[1].running_mean.normal_()
    images = torch.randn(5, 3, 8, 8)
    fast = for_inference(teacher, (images,))
    assert (fast is teacher) == view  # channels that lie last cannot be viewed like that
    torch.testing.assert_close(fast(images), teacher(images))
    assert isinstance(teacher.body[1], nn.BatchNorm2d)
    assert teacher.body[0].weight.is_contiguous()


@pytest.mark.parametrize(("distill", "norms", "kept"), [
    (DistillSettings(), "running", True), (DistillSettings(), "batch", False), (None, "running", True),
])  # fmt: skip
def test_running_statistics_stay_where_they_are_asked_to(
    distill: DistillSettings | None, norms: Any, kept: bool
) -> None:
    student, modes, same = net(1), set[bool](), list[bool]()
    before = copy.deepcopy(dict(student[1].named_buffers()))

    def note(*_: Any) -> None:
        if student.training and torch.is_grad_enabled():
            modes.add(student[1].training)

    def compare(_: Any) -> None:
        same.append(all(torch.equal(before[name], value) for name, value in student[1].named_buffers()))

    student[1].register_forward_hook(note)
    settings = TrainSettings(epochs=2, lr=0.05, distill=distill, norms=norms)
    parts = build_callbacks(settings, CallbackInputs(splits(), 16, net(2)))
    fit(student, splits(), settings, device=CPU, seed=1, batch=16, callbacks=parts, on_epoch=compare)
    assert (modes, same) == ({not kept}, [kept, kept])
    assert student[1].training  # as it was


def test_an_average_keeps_running_statistics_that_stay() -> None:
    """Those of a batch are not what the weights were trained with: computed again, they would spoil them."""
    made = []
    for statistics in (None, "averaged"):
        average = AverageSettings("swa", start=0.0, statistics=statistics)  # type: ignore[arg-type]
        settings = TrainSettings(epochs=2, average=average, distill=DistillSettings(), norms="running")
        student = net(1)
        parts = build_callbacks(settings, CallbackInputs(splits(), 16, net(2)))
        made.append(fit(student, splits(), settings, device=CPU, seed=1, batch=16, callbacks=parts).rows)
    assert [row.held_out_loss for row in made[0]] == [row.held_out_loss for row in made[1]]


def test_detectors_that_were_trained_keep_running_statistics() -> None:
    """Their batches are small; a training from nothing, also of a new head alone, needs those of batches."""
    classes, boxes, plain = get_task("image_classification"), get_task("detection"), TrainSettings(distill=None)
    model, new = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)), nn.BatchNorm2d(3)
    for norm in (model[0], model[1]):
        norm(torch.randn(2, 3, 4, 4))
    asked = [(classes, model), (boxes, model), (boxes, nn.Sequential(*model, new)), (boxes, nn.Linear(2, 2))]
    assert [with_teacher(plain, *each).norms for each in asked] == [None, "running", None, None]
    assert with_teacher(replace(plain, norms="batch"), boxes, model).norms == "batch"
    assert on_labels(plain).norms is None


class Viewed(nn.Module):
    """A network that views its maps, which channels that lie last don't allow."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(144, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).view(len(images), -1))  # type: ignore[no-any-return]


def test_a_teacher_gets_images_in_a_layout_that_it_takes() -> None:
    """Its student takes channels that lie last, so that the images of the batch do."""
    part = Distillation(teacher := Viewed(), DistillSettings())
    images = torch.randn(6, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    with part.active(training(net(1))):
        loss = part.added_loss(images, output := net(1)(images), torch.arange(6) % 4)
    assert loss is not None
    with torch.no_grad():
        torch.testing.assert_close(loss, soft_targets(output, teacher(images.contiguous()), 1.0))


def test_images_are_blended_only_for_tasks_that_count_shares() -> None:
    def right(output: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([(output.argmax(1) == labels).sum(), torch.tensor(len(labels))])

    strict = replace(get_task("image_classification"), name="strict", counts=right)
    found = with_teacher(TrainSettings(), strict).distill
    assert found == DistillSettings(temperature=1.0, labels=0.0, blend=False)
    with pytest.raises(UsageError, match=r"distill\.blend .* shares of classes then, which task 'strict' does not"):
        task_loss(strict, TrainSettings(distill=DistillSettings(blend=True)))
    assert isinstance(found, DistillSettings)
    settings, data = TrainSettings(epochs=1, distill=found), replace(splits(), task=strict)
    fit(net(1), data, settings, device=CPU, seed=1, batch=16, callbacks=[Distillation(net(2), found, task=strict)])


def test_a_teacher_is_called_with_what_its_student_is_called_with() -> None:
    class Fed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, images: Tensor, before: Tensor) -> Tensor:
            return self.weight * (images.mean((2, 3)) + before[:, None])

    def with_targets(_: nn.Module, example: tuple[Any, ...], targets: Tensor) -> tuple[Any, ...]:
        return (*example, targets.float())

    forced = replace(get_task("image_classification"), name="forced", loss_inputs=with_targets)
    part, images, labels = Distillation(Fed(), DistillSettings(), task=forced), torch.randn(4, 3, 8, 8), torch.arange(4)
    student = nn.Linear(3, 3)
    with part.active(training(student)):
        loss = part.added_loss(images, output := student(images.mean((2, 3))), labels)
    assert loss is not None
    torch.testing.assert_close(loss, soft_targets(output, Fed()(images, labels.float()), 1.0))
