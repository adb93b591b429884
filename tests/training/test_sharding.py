"""Training in shards: what one process does, up to the order of float32 sums, with a part of each tensor in each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import together
from torch import Tensor, nn
from training_models import CPU, Ends, EndsAfter, splits

from prunekit.distributed.process_group import is_shard, is_sharded, local_part, rank, size
from prunekit.errors import PrunekitError
from prunekit.masks.masked_model import masked
from prunekit.planning.plan import Plan
from prunekit.pruning.plan_search import PlanSearch
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import (
    AverageSettings,
    CheckpointSettings,
    ClampSettings,
    DistillSettings,
    FeatureSettings,
    TrainSettings,
)
from prunekit.training import parallel
from prunekit.training.callbacks.callback import Callback, ContextCallback, TrainingRun
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit
from prunekit.utils.context import seeded


def blocks(seed: int = 3) -> nn.Sequential:
    """Two blocks, norms over several channels, a buffer, and a last layer with fewer rows than there are processes."""
    with seeded(seed):
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 6, 1)),
            nn.Flatten(),
            nn.Linear(96, 3),
            nn.Linear(3, 4),
        )


class Looking(Callback):
    """Looks at the shards after every step: zeros, sizes, types."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.steps, self.wrong = 0, list[str]()
        self.sizes: dict[str, dict[str, tuple[int, int]]] = {"weight": {}, "gradient": {}, "momentum": {}}

    def active(self, training: TrainingRun) -> Any:
        self._training = training
        return super().active(training)

    def before_step(self, step: int) -> None:
        self._look("gradient", {name: p.grad for name, p in self._training.model.named_parameters()})

    def after_step(self, step: int, made: bool) -> None:
        self.steps += 1
        named = dict(self._training.model.named_parameters())
        state = self._training.optimizer.state
        self._look("weight", named)
        moments = {name: state[p].get("momentum_buffer", state[p].get("exp_avg")) for name, p in named.items()}
        self._look("momentum", moments)

    def _look(self, kind: str, tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            self.sizes[kind][name] = local_part(tensor).numel(), tensor.numel()
            keep = self._plan.mask(name)
            if keep is not None and kind != "momentum":
                parts = keep.expand(tensor.shape).chunk(size() if is_shard(tensor) else 1)  # of rows
                mine = rank() if is_shard(tensor) else 0
                if mine < len(parts) and bool(local_part(tensor)[~parts[mine]].count_nonzero()):
                    self.wrong.append(f"{kind} {name} after {self.steps} steps")


def trained(settings: TrainSettings) -> dict[str, Any]:
    """The end of a run of 22 images a step, of which shares are 11, and 6 and 5."""
    parallel.UNIT = 200  # or blocks of this size would not be units
    torch.manual_seed(5)
    model = blocks()
    before = {id(parameter) for parameter in model.parameters()}
    budget = PruneSettings(budget=BudgetSettings(channels=0.5), criterion="l2")
    plan = PlanSearch.trace(model, (torch.zeros(1, 3, 8, 8),), budget).find().plan
    single = {name: torch.rand(model.get_parameter(name).shape) > 0.5 for name in ("1.0.weight", "3.weight")}
    plan = replace(plan, element_masks=single)
    sharded = []

    @contextmanager
    def masks(training: TrainingRun) -> Iterator[None]:
        sharded.append([path for path, module in training.model.named_modules() if "FSDP" in type(module).__name__])
        with masked(training.model, plan, training.optimizer, restore=False):
            yield

    sources = CallbackInputs(splits(), 22, blocks(seed=4), plan.channel_map, masks=lambda: plan)
    looking = Looking(plan)
    parts = [ContextCallback(masks), *build_callbacks(settings, sources), looking]
    history = fit(model, splits(), settings, device=CPU, seed=1, batch=22, callbacks=parts)
    assert not is_sharded(model)
    assert {id(parameter) for parameter in model.parameters()} == before
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "history": history,
        "sizes": looking.sizes,
        "wrong": looking.wrong,
        "steps": looking.steps,
        "units": sharded[0],
    }


SGD = TrainSettings(epochs=2, lr=0.1, sharding="full")
CASES = {
    "sgd, accumulated": replace(SGD, accumulate=2),
    "taught, clamped by norm": replace(
        SGD,
        distill=DistillSettings(features=FeatureSettings(modules=("1",), weight=3.0)),
        clamp_weight_grad=ClampSettings(limit=0.05, by="norm"),
        clamp_activation_grad=ClampSettings(limit=0.002),
    ),
    "adamw, clamped": replace(SGD, lr=0.01, optimizer="adamw", clamp_weight_grad=ClampSettings(limit=0.01)),
}


def runs(names: list[str]) -> list[dict[str, Any]]:
    return [trained(CASES[name]) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "names"), [(2, list(CASES)), (4, ["taught, clamped by norm"])])
def test_shards_do_what_one_process_does(processes: int, names: list[str], tmp_path: Path) -> None:
    found = together(processes, tmp_path, runs, names)
    for number, alone in enumerate(runs(names)):
        others = [each[number] for each in found]
        assert alone["units"] == []
        assert any((weight != blocks().state_dict()[name]).any() for name, weight in alone["weights"].items())
        for other in others:
            assert other["units"] == ["", "0", "1"]
            assert other["wrong"] == []
            assert other["steps"] == alone["steps"] > 1
            for name, weight in alone["weights"].items():
                torch.testing.assert_close(other["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name)
                assert torch.equal(other["weights"][name], others[0]["weights"][name])
                assert torch.equal(other["weights"][name] == 0, weight == 0)
            same(other["history"], alone["history"])
        for kind, sizes in alone["sizes"].items():
            for name, (_, total) in sizes.items():
                rows = len(alone["weights"][name])
                most = total // rows * -(-rows // processes)  # of whole rows, a process's share
                held = [other["sizes"][kind][name] for other in others]
                assert sum(own for own, _ in held) == total
                assert max(own for own, _ in held) == most < total or rows == 1


STOPS = replace(SGD, epochs=3)


def kept(folder: Path, ending: int) -> tuple[list[Tensor], Any]:
    model = blocks()
    model.register_buffer("seen", torch.zeros(2), persistent=False)
    checkpoints = Checkpoints(folder / str(rank()), CheckpointSettings(every_steps=1, keep=1), log=lambda _: None)
    history = fit(
        model, splits(), STOPS, device=CPU, seed=1, batch=22, callbacks=[EndsAfter(ending)], checkpoints=checkpoints
    )  # fmt: skip
    return list(model.state_dict().values()), [(row.train_loss, row.validation_loss) for row in history.rows]


def others(folder: Path) -> dict[str, Any]:
    """A run that ends and goes on, one whose weights are not finite, and what is refused."""
    parallel.UNIT = 200
    whole = kept(folder / "whole", -1)
    for step in (2, 5):
        with pytest.raises(Ends):
            kept(folder / "ended", step)
    return {"whole": whole, "again": kept(folder / "ended", -1), "told": [said(case) for case in REFUSED]}


def said(case: str) -> str:
    settings, model, more = SGD, blocks(), dict[str, Any]()
    if case == "nan":
        with torch.no_grad():
            model[4].bias[0] = math.nan
    elif case == "scalar":
        model.scale = nn.Parameter(torch.tensor(1.0))
    elif case == "average":
        settings = replace(settings, average=AverageSettings())
        more["callbacks"] = build_callbacks(settings, CallbackInputs(splits(), 22))
    elif case == "fp16":
        settings = replace(settings, precision="fp16")
    else:
        more["until"] = lambda: True
    try:
        fit(model, splits(), settings, device=CPU, seed=1, batch=22, **more)
    except PrunekitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


REFUSED = {
    "nan": "NonFiniteError: .*first not finite: unknown",
    "scalar": "ModelError: sharding: full: Sequential: .*scalar",
    "average": "UsageError: sharding: full does not go with Average, which need",
    "fp16": "UsageError: sharding: full does not go with precision fp16",
    "left": "UsageError: sharding: full does not go with a run that is paused",
}


@pytest.mark.slow
def test_runs_in_shards_that_end_go_on_bit_by_bit(tmp_path: Path) -> None:
    found = together(2, tmp_path, others, tmp_path / "runs")
    for each in found:
        for key in ("whole", "again"):
            weights, losses = each[key]
            assert all(torch.equal(a, b) for a, b in zip(weights, found[0]["whole"][0], strict=True))
            assert losses == found[0]["whole"][1]
        for told, expected in zip(each["told"], REFUSED.values(), strict=True):
            assert re.match(expected, told), told
    assert {path.name for path in (tmp_path / "runs").glob("*/*")} == {"0"}  # the main process alone writes


def same(found: Any, expected: Any) -> None:
    assert found.best_epoch == expected.best_epoch
    clamps = {(row.clamp, row.module): pytest.approx(row.share, abs=0.01) for row in expected.clamps}
    assert {(row.clamp, row.module): row.share for row in found.clamps} == clamps
    for row, alone in zip(found.rows, expected.rows, strict=True):
        assert (row.train_score, row.validation_score) == (alone.train_score, alone.validation_score)
        assert row.train_loss == pytest.approx(alone.train_loss, rel=1e-5)
        assert row.validation_loss == pytest.approx(alone.validation_loss, rel=1e-5)
