"""Training in several processes: what one process does, up to the order of float32 sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import together
from torch import Tensor, nn
from torchvision.models.googlenet import GoogLeNetOutputs
from training_models import CPU, images, net, splits

from prunekit.data.augmentation import Mixing
from prunekit.data.datasets import CorruptImages
from prunekit.data.loader import batches
from prunekit.distributed.process_group import rank
from prunekit.errors import DataError, UsageError
from prunekit.known_names import DtypeName
from prunekit.masks.masked_model import masked
from prunekit.pruning.plan_search import PlanSearch
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import (
    AverageSettings,
    ClampSettings,
    DistillSettings,
    FeatureSettings,
    RegularizerSettings,
    TrainSettings,
)
from prunekit.training.callbacks.callback import Callback, ContextCallback, History, TrainingRun
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.loop import fit


def plain_net(seed: int = 3) -> nn.Sequential:
    """Without BatchNorm and dropout, which look at a process's share alone; with a weight that nothing uses."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 4),
    )
    net[0].unused = nn.Parameter(torch.ones(3, 3))
    return net


def trained(settings: TrainSettings, under_masks: bool) -> dict[str, Any]:
    """The end of a run of 22 images a step: 66 = 3 x 22 over 4 processes makes shares of 6 and 5."""
    model = plain_net()
    parts: list[Callback] = []
    sources = CallbackInputs(splits(), 22)
    if under_masks:
        budget = PruneSettings(budget=BudgetSettings(channels=0.5), criterion="l2")
        plan = PlanSearch.trace(model, (torch.zeros(1, 3, 8, 8),), budget).find().plan
        sources = CallbackInputs(splits(), 22, plain_net(seed=4), plan.channel_map, masks=lambda: plan)

        @contextmanager
        def masks(training: TrainingRun) -> Iterator[None]:
            with masked(model, plan, training.optimizer, restore=False):
                yield

        parts = [ContextCallback(masks), *build_callbacks(settings, sources)]
    history = fit(model, splits(), settings, device=CPU, seed=1, batch=22, callbacks=parts)
    return {"weights": {name: tensor.clone() for name, tensor in model.state_dict().items()}, "history": history}


SGD = TrainSettings(epochs=3, lr=0.1)
CASES = {
    "sgd": (SGD, False),
    "under masks, accumulated": (replace(SGD, accumulate=2), True),
    "taught, averaged, sparsified": (
        replace(
            SGD,
            distill=DistillSettings(features=FeatureSettings(modules=("3",), weight=3.0)),
            average=AverageSettings(),
            regularize=RegularizerSettings("group_lasso", strength=1e-3),
        ),
        True,
    ),
    "adamw, clamped": (
        TrainSettings(
            epochs=2,
            lr=0.01,
            optimizer="adamw",
            clamp_weight_grad=ClampSettings(limit=0.01),
            clamp_activation_grad=ClampSettings(limit=0.002),
        ),
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "processes"),
    [("sgd", 2), ("under masks, accumulated", 4), ("taught, averaged, sparsified", 4), ("adamw, clamped", 2)],
)
def test_several_processes_do_what_one_does(case: str, processes: int, tmp_path: Path) -> None:
    alone = trained(*CASES[case])
    found = together(processes, tmp_path, trained, *CASES[case])
    assert any((weight != plain_net().state_dict()[name]).any() for name, weight in alone["weights"].items())
    for other in found:
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(other["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name)
            assert torch.equal(other["weights"][name], found[0]["weights"][name])
            assert torch.equal(other["weights"][name] == 0, weight == 0)
        same_history(other["history"], alone["history"])


def same_history(found: History, expected: History) -> None:
    assert found.best_epoch == expected.best_epoch
    clamps = {(row.clamp, row.module): row.share for row in expected.clamps}
    assert {(row.clamp, row.module): pytest.approx(row.share, abs=0.01) for row in found.clamps} == clamps
    for row, alone in zip(found.rows, expected.rows, strict=True):
        assert (row.lr, row.skipped, row.epoch) == (alone.lr, alone.skipped, alone.epoch)
        assert row.train_score == alone.train_score  # counts of whole images, or of shares of them: exact
        assert row.validation_score == alone.validation_score
        assert row.train_loss == pytest.approx(alone.train_loss, rel=1e-5)
        assert row.validation_loss == pytest.approx(alone.validation_loss, rel=1e-5)


@pytest.mark.parametrize("mixing", [None, Mixing(4, mixup=0.4), Mixing(4, 0.4, cutmix=1.0)])
def test_shares_are_disjoint_and_whole(mixing: Mixing | None) -> None:
    whole = batches(images(66, 0), 22, shuffle_seed=1, mixing=mixing).at_epoch(2)
    for of in (1, 2, 4):
        split, dealt = ([list(share(rank, of)) for rank in range(of)] for share in (whole.split, whole.dealt))
        for number, (pixels, labels) in enumerate(whole):
            parts = [each[number] for each in split]
            assert torch.equal(torch.cat([part[0] for part in parts]), pixels)
            assert torch.equal(torch.cat([part[1] for part in parts]), labels)
            assert max(map(len, (part[1] for part in parts))) - min(map(len, (part[1] for part in parts))) <= 1
            assert torch.equal(dealt[number % of][number // of][0], pixels)
        assert [len(each) for each in dealt] == [len(whole.dealt(rank, of)) for rank in range(of)]
        assert sum(map(len, dealt)) == len(whole) == len(whole.split(0, of))
        assert whole.split(0, of).images == whole.dealt(0, of).images == whole.images == 66


def with_batchnorm(precision: DtypeName) -> tuple[list[Tensor], list[int]]:
    model = net()
    settings = TrainSettings(epochs=2, lr=0.05, precision=precision)
    history = fit(model, splits(), settings, device=CPU, seed=1, batch=16)
    return [tensor.clone() for tensor in model.state_dict().values()], [row.skipped for row in history.rows]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_differs_between_shares_leaves_the_replicas_equal(precision: DtypeName, tmp_path: Path) -> None:
    """BatchNorm normalizes by each share, dropout draws in each, and float16 overflows in one and skips in all."""
    one, other = together(2, tmp_path, with_batchnorm, precision)
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert not torch.equal(one[0][0], net()[0].weight)
    assert one[1] == other[1]


class Unreadable:
    """Images of which some cannot be read, in the process that is to read them."""

    def __init__(self, wrong: set[int], limit: int) -> None:
        self.images, self.wrong = images(66, 0), wrong
        self.labels, self.corrupt = self.images.labels, CorruptImages(limit)

    def __len__(self) -> int:
        return 66

    def fetch(self, indices: Tensor, draw: Any = None) -> tuple[Tensor, Tensor]:
        for index in indices.tolist():
            if index in self.wrong:
                self.corrupt.add(f"{index}.png", "it is broken")
        kept = [index for index in indices.tolist() if index not in self.wrong]
        return self.images.fetch(torch.tensor(kept, dtype=torch.int64), draw)


def broken(wrong: set[int], limit: int) -> tuple[dict[str, str], History] | str:
    data = Unreadable(wrong, limit)
    try:
        history = fit(
            plain_net(), replace(splits(), train=data), TrainSettings(epochs=1, lr=0.05), device=CPU, seed=1, batch=11
        )  # fmt: skip
    except DataError as error:
        return str(error)
    return data.corrupt.found, history


@pytest.mark.slow
def test_images_that_one_process_cannot_read(tmp_path: Path) -> None:
    """A step for which a process has a single image left is skipped by all; the images are known to all."""
    order = batches(images(66, 0), 11, shuffle_seed=1).at_epoch(1).order().tolist()
    one, two = set(order[:2]), set(order[2 * 11 : 2 * 11 + 2])  # of 3 images; both steps are then left with 1
    alone = broken(one | two, 4)
    assert not isinstance(alone, str)
    assert alone[1].rows[0].skipped == 0
    for found in together(4, tmp_path / "few", broken, one | two, 4):
        assert not isinstance(found, str)
        assert found[0].keys() == alone[0].keys()
        assert found[1].rows[0].skipped == 2
    for found in together(2, tmp_path / "many", broken, {one_of(order[:6]), one_of(order[6:11])}, 1):
        assert isinstance(found, str)
        assert found.startswith("2 images cannot be read, and data.max_corrupt allows 1")


def one_of(indices: list[int]) -> int:
    """One that is not read before the first step."""
    return next(index for index in indices if index > 1)


def refused() -> list[str]:
    told = []
    for batch in (7, 66):
        try:
            fit(plain_net(), splits(7), TrainSettings(epochs=1), device=CPU, seed=1, batch=batch)
        except UsageError as error:
            told.append(str(error))
    return told


@pytest.mark.slow
def test_a_batch_too_small_for_the_processes_is_refused(tmp_path: Path) -> None:
    for told in together(4, tmp_path, refused):
        assert len(told) == 2
        assert told[0].startswith("data.batch: expected at least 8, two images for each of 4 processes, got 7")


def drifting() -> str:
    """A part that changes the weights of one replica alone."""
    model = plain_net()

    class Drift(Callback):
        def after_step(self, step: int, made: bool) -> None:
            with torch.no_grad():
                next(model.parameters()).add_(1e-3 * rank())

    try:
        fit(model, splits(), TrainSettings(epochs=1), device=CPU, seed=1, batch=22, callbacks=[Drift()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow
def test_replicas_that_drift_apart_are_found(tmp_path: Path) -> None:
    for told in together(2, tmp_path, drifting):
        assert told.startswith("RunError: the weights after training: expected the same in all 2 processes")


class WithAuxiliary(nn.Module):
    """Returns what GoogLeNet does: in train mode the scores of further heads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Flatten(), nn.Linear(192, 4), nn.Linear(192, 4)

    def forward(self, images: Tensor) -> Any:
        found = self.body(images)
        return GoogLeNetOutputs(self.head(found), self.aux(found), None) if self.training else self.head(found)


def with_auxiliary() -> dict[str, Tensor]:
    torch.manual_seed(3)
    model, teacher = WithAuxiliary(), WithAuxiliary()
    settings = TrainSettings(epochs=2, lr=0.1, distill=DistillSettings())
    parts = build_callbacks(settings, CallbackInputs(splits(), 22, teacher))
    fit(model, splits(), settings, device=CPU, seed=1, batch=22, callbacks=parts)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
def test_heads_that_are_in_no_loss_are_not_waited_for(tmp_path: Path) -> None:
    """A teacher alone is learned from, which says nothing of auxiliary heads."""
    whole = with_auxiliary()
    for found in together(2, tmp_path, with_auxiliary):
        for name, tensor in whole.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
