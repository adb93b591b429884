"""Stages that are kept come back as they were."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutants import changed_values, unclean
from torch import nn

from prunekit.errors import ResumeError
from prunekit.jobs.run.resume import StageClock, cache_plan, cache_repair, cached_plan, cached_repair
from prunekit.jobs.run.run_folder import RunFolder
from prunekit.pruning.latency.device_clock import Timing
from prunekit.pruning.latency.latency_target import Attempt
from prunekit.pruning.plan_search import PlanSearch
from prunekit.repair.repair_report import LayerRepair, RepairMemory, RepairReport
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.utils.files import write_json
from prunekit.utils.state_folders import read_state, write_state

EXAMPLE = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, "", lambda message: None)


def test_a_plan_comes_back_with_how_it_was_found(run: RunFolder) -> None:
    dense = net().eval()
    planned = PlanSearch.trace(dense, EXAMPLE, PruneSettings(BudgetSettings(macs=0.6))).find()
    timing = Timing(1.5, 1.4, 1.6, 2.0, 1.9, 2.1, False, ("noisy", "few"))
    attempts = (Attempt(0, 1.0, 1.4, 0.5, 1.01, timing), Attempt(1, 0.97, 1.3, 0.4, 0.99, timing))
    planned = replace(planned, attempts=attempts)
    assert cached_plan(run, dense) is None
    cache_plan(run, planned)
    again = cached_plan(run, dense)
    assert again is not None
    assert np.array_equal(again.plan.keep, planned.plan.keep)
    assert again.plan.kept_indices.keys() == planned.plan.kept_indices.keys()
    assert np.array_equal(again.scores, planned.scores, equal_nan=True)
    assert again.scores.dtype == planned.scores.dtype
    assert (again.max_relative_difference, again.locked_by_trial) == (
        planned.max_relative_difference,
        planned.locked_by_trial,
    )
    assert torch.equal(again.compact.eval()(*EXAMPLE), planned.compact.eval()(*EXAMPLE))
    assert again.attempts == attempts
    assert again.plan.provenance["binding"] == planned.plan.provenance["binding"]
    cache_plan(run, replace(planned, attempts=()))
    assert cached_plan(run, dense).attempts == ()  # type: ignore[union-attr]


def test_another_plan_in_the_folder_is_refused(run: RunFolder) -> None:
    dense = net().eval()
    planned = PlanSearch.trace(dense, EXAMPLE, PruneSettings(BudgetSettings(macs=0.6))).find()
    cache_plan(run, planned)
    PlanSearch.trace(dense, EXAMPLE, PruneSettings(BudgetSettings(macs=0.4))).find().plan.save(run.resume / "planned")
    with pytest.raises(ResumeError, match="planned: not the plan that this run was made with"):
        cached_plan(run, dense)


@pytest.mark.parametrize("report", [True, False])
def test_a_repair_comes_back_with_its_report(report: bool, run: RunFolder) -> None:
    dense, repaired = net(), net()
    with torch.no_grad():
        repaired[0].weight.mul_(2)  # type: ignore[union-attr, operator]
        repaired[1].running_mean.add_(1)  # type: ignore[union-attr, operator]
    layers = (LayerRepair("0.weight", "patch", 0.5, 0.1, 27, 20, 1e-6, "noted"), LayerRepair("3.weight"))
    done = RepairReport(layers, 0.5, 0.1, True, RepairMemory(8, 1, 2, 3, (4, 5))) if report else None
    assert cached_repair(run, dense) is None
    cache_repair(run, repaired, done)
    found = cached_repair(run, dense)
    assert found is not None
    assert found[1] == done
    for name, value in repaired.state_dict().items():
        assert torch.equal(found[0].state_dict()[name], value)
    assert torch.equal(dense.state_dict()["0.weight"], net().state_dict()["0.weight"])


def test_what_is_damaged_is_made_again(tmp_path: Path) -> None:
    said: list[str] = []
    run = RunFolder(tmp_path, "", said.append)
    cache_repair(run, net(), None)
    (run.resume / "repair" / "tensors.safetensors").write_bytes(b"")
    assert cached_repair(run, net()) is None
    assert said[0].startswith("repair: ")
    assert said[0].endswith("made again")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state["weights"].update({"0.weight": torch.ones(1)}), "expected (8, 3, 3, 3) of torch.float32"),
        (lambda state: state["weights"].pop("1.running_var"), "'1.running_var' is not there"),
        (lambda state: state["weights"]["3.bias"].fill_(torch.inf), "'3.bias': it has NaN or Inf in it"),
        (lambda state: state.pop("weights"), "expected values by name, got NoneType"),
        (lambda state: state.update(report={"layers": 1}), "report.layers"),
    ],
)
def test_a_repair_that_does_not_fit_is_made_again(
    change: Callable[[dict[str, Any]], object], says: str, tmp_path: Path
) -> None:
    """Its checksums are right, as if prunekit had written it."""
    run = RunFolder(tmp_path, "", (said := list[str]()).append)
    cache_repair(run, net(), None)
    state = read_state(run.resume / "repair")
    change(state)
    write_state(run.resume / "repair", state)
    assert cached_repair(run, net()) is None
    assert says in said[0]


@pytest.mark.slow
def test_mutants_of_a_plan_are_made_again_or_refused(tmp_path: Path) -> None:
    dense = net().eval()
    run = RunFolder(tmp_path, "", lambda message: None)
    planned = PlanSearch.trace(dense, EXAMPLE, PruneSettings(BudgetSettings(macs=0.6))).find()
    timing = Timing(1.5, 1.4, 1.6, 2.0, 1.9, 2.1, False, ("noisy", "few"))
    cache_plan(run, replace(planned, attempts=(Attempt(0, 1.0, 1.4, 0.5, 1.01, timing),)))
    state = read_state(run.resume / "plan")
    scores = state.pop("scores")

    def read(mutant: Any) -> None:
        write_state(run.resume / "plan", mutant if isinstance(mutant, dict) else {"x": mutant})
        assert cached_plan(run, dense) is None

    assert unclean(read, changed_values(state, 100, seed=50)) == []  # without scores none is whole
    for wrong in (scores[1:], scores.long(), 3):
        read(state | {"scores": wrong})
    write_state(run.resume / "plan", state | {"scores": scores})
    assert cached_plan(run, dense) is not None
    (run.resume / "planned" / "plan.json").write_text("{}")
    assert cached_plan(run, dense) is None


def test_seconds_of_a_stage_add_up_over_processes(tmp_path: Path) -> None:
    clock = StageClock(tmp_path / "seconds.json")
    with clock.stage("plan"):
        time.sleep(0.02)
    with suppress(KeyboardInterrupt), clock.stage("repair"):
        time.sleep(0.02)
        raise KeyboardInterrupt
    again = StageClock(tmp_path / "seconds.json")
    assert again.stages == clock.stages
    with again.stage("repair"):
        time.sleep(0.02)
    assert again.stages["repair"] >= 0.04
    assert again.stages["plan"] == clock.stages["plan"]
    for wrong in ([1], {"plan": "long"}, {"plan": None}):
        write_json(tmp_path / "seconds.json", wrong)
        assert StageClock(tmp_path / "seconds.json").stages == {}
