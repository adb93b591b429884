"""The whole job in several processes: what one process finds, up to the order of float32 sums; and one folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_group import together
from safetensors.torch import load_file
from several_jobs import job, ran, written

import prunekit
from prunekit.distributed.process_group import from_main, rank
from prunekit.errors import PeerError, RunError
from prunekit.jobs.analyses.evaluate import evaluate
from prunekit.jobs.run.command_subject import Own, Subject
from prunekit.jobs.run.job_subject import prepare
from prunekit.jobs.stages.calibration_stage import loss_gradients
from prunekit.jobs.stages.training_stage import Trainings
from prunekit.models.zoo import load_factory
from prunekit.planning.plan import Plan
from prunekit.pruning.schedule_planner import require_same_plan, share_plan
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import ActivationSettings, TrainSettings
from prunekit.statistics.channel_stats import ChannelStats


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("own"))


CHANGES: dict[str, Any] = {
    "activations": ActivationSettings(modules=("2",), target=0.6),
    "repair": RepairSettings(rows=2048),
    "finetune": TrainSettings(epochs=2, lr=0.02, sharding="full"),  # the baseline is trained by replicas
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, factory: str) -> tuple[Path, dict[str, Any], list[str]]:
    return ran(tmp_path_factory.mktemp("alone"), factory, CHANGES)


@pytest.mark.slow
def test_several_processes_find_what_one_finds(
    alone: tuple[Path, dict[str, Any], list[str]], factory: str, tmp_path: Path
) -> None:
    """They train the compact model, which is to come to what one process has under masks."""
    folder, expected, log = alone
    changes = {**CHANGES, "prune": replace(job(tmp_path).prune, compact_early=True)}
    found = together(4, tmp_path / "meet", ran, tmp_path / "runs", factory, changes)
    path, metrics, told = found[0]
    assert [each[:2] for each in found] == [(path, metrics)] * 4  # all end alike
    assert metrics["environment"]["processes"] == 4
    assert {each.name for each in (tmp_path / "runs" / "small").iterdir()} == {path.name, "calibration"}
    assert {each.relative_to(path) for each in path.rglob("*") if "tfevents" not in each.name} == {
        each.relative_to(folder) for each in folder.rglob("*") if "tfevents" not in each.name
    }
    assert json.loads((path / "status.json").read_text())["state"] == "finished"
    said, expected_lines = (
        [line.split(":")[0] for line in lines if not line.startswith(("latency", "compact early"))]
        for lines in (told, log)
    )
    assert said == expected_lines  # of times, doubts differ
    assert metrics["compacted_early"] is not None

    assert prunekit.load_plan(path).digest == prunekit.load_plan(folder).digest
    for name in ("dense", "control", "pruned"):
        for key in ("macs", "params", "n_test"):
            assert metrics[name][key] == expected[name][key]
        assert metrics[name]["top1"] == pytest.approx(expected[name]["top1"], abs=0.4)  # two of 539 images
    same_statistics(ChannelStats.load(path / "statistics"), ChannelStats.load(folder / "statistics"))
    theirs = load_file(folder / "model" / "model.safetensors")
    for name, weight in load_file(path / "model" / "model.safetensors").items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-2, atol=1e-3, msg=name)


def close(found: Any, expected: Any, atol: float) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=atol)


def same_statistics(found: ChannelStats, expected: ChannelStats) -> None:
    """Of dense models that differ by the order of float32 sums: counts are exact."""
    assert list(found) == list(expected)
    for key, layer in found.items():
        assert (layer.count == expected[key].count).all()
        close(layer.mean, expected[key].mean, 1e-4)


def taylor_terms(settings: JobSettings, factory: str) -> dict[tuple[str, str, int], Any] | None:
    torch.manual_seed(3)
    prepared = prepare(settings, Own(model=factory))
    found = loss_gradients(prepared, prepared.model, log=lambda _: None)
    if found is None or found.diagonal is None:
        return None
    kinds = {"first": found.terms, "second": found.diagonal}
    return {(kind, *axis): np.sort(rows, axis=0) for kind, terms in kinds.items() for axis, rows in terms.items()}


@pytest.mark.slow
def test_gradients_of_all_batches_arrive(factory: str, tmp_path: Path) -> None:
    """Five batches of 64, whole: what each process finds in a batch is what a single one finds, random signs too."""
    settings = job(tmp_path, prune=PruneSettings(budget=BudgetSettings(macs=0.5), criterion="obd"))
    (expected,) = together(1, tmp_path / "alone", taylor_terms, settings, factory)
    main, *others = together(4, tmp_path / "meet", taylor_terms, settings, factory)
    assert others == [None] * 3
    assert {rows.shape[0] for rows in main.values()} == {5}
    for axis, rows in expected.items():
        np.testing.assert_array_equal(main[axis], rows)


def counted(recipe: JobSettings, factory: str) -> tuple[int, int, float]:
    """Correct and tested images, and their share: 539 in batches of 64 are 9 batches, the last of 27."""
    torch.manual_seed(rank())  # the main process's weights count
    target = Subject(load_factory(factory), "net", (3, 16, 16))
    found = evaluate(target, recipe.data, torch.device("cpu")).figures()
    return found["correct"], found["n_test"], found["top1"]


@pytest.mark.slow
def test_test_images_count_once(factory: str, tmp_path: Path) -> None:
    settings = job(tmp_path)
    expected = counted(settings, factory)
    assert expected[1] == 539
    assert expected[0] > 0
    assert together(4, tmp_path / "meet", counted, settings, factory) == [expected] * 4


def failed(output: Path, factory: str, failing: int) -> tuple[str, str]:
    train = Trainings.train

    def fails(self: Trainings, *arguments: Any, **named: Any) -> Any:
        if rank() == failing:
            raise RunError("the disk is full")
        return train(self, *arguments, **named)

    Trainings.train = fails  # type: ignore[method-assign]
    try:
        ran(output, factory, {})
    except (RunError, PeerError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_ends_the_run(failing: int, factory: str, tmp_path: Path) -> None:
    found = together(2, tmp_path / "meet", failed, tmp_path / "runs", factory, failing)
    told = f"process {failing} of 2 failed: the disk is full"
    assert found[failing] == ("RunError", "the disk is full")
    assert found[1 - failing] == ("PeerError", told)
    (status,) = (tmp_path / "runs" / "small").glob("*/status.json")
    said = json.loads(status.read_text())
    assert (said["state"], said["error"]) == (
        "failed",
        "RunError: the disk is full" if failing == 0 else f"PeerError: {told}",
    )


def plans() -> tuple[str, int, str]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    made: Plan | None = None
    if rank() == 0:
        settings = PruneSettings(budget=BudgetSettings(channels=0.5), criterion="l2")
        made = prunekit.plan(net, (torch.zeros(1, 3, 9, 9),), settings=settings)
    plan = share_plan(made)
    kept = int(prunekit.compact(net, plan)[0].out_channels)
    other = plan if rank() < 1 else replace(plan, keep=~plan.keep | (plan.keep.cumsum() == 1))
    try:
        require_same_plan(other, "after phase 2")
    except RunError as error:
        return plan.digest, kept, str(error)
    return plan.digest, kept, from_main(lambda: "")


@pytest.mark.slow
def test_every_process_has_the_plan_and_another_is_found(tmp_path: Path) -> None:
    (one, kept, said), *others = together(3, tmp_path, plans)
    assert kept == 4
    assert others == [(one, kept, said)] * 2
    assert said.startswith("the plan after phase 2: expected the same in all 3 processes, but process 1, 2 has")
