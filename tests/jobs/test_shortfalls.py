"""What a run falls short of: budgets, speed, chance, and targets of activation masks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prunekit.jobs.stages.measurement_stage import Measurements, shortfalls
from prunekit.jobs.stages.training_stage import missed_targets
from prunekit.masks.masked_model import Sparsity
from prunekit.measure.accuracy import Scores
from prunekit.measure.latency.comparison import LatencyReport
from prunekit.settings.inputs import ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.tasks.classification import wilson_interval

BY_MACS = PruneSettings(BudgetSettings(macs=0.45))


def job(output: Path, prune: PruneSettings = BY_MACS) -> JobSettings:
    return JobSettings("small", ModelSettings("resnet8", zoo="cifar"), prune=prune, output=output)


def test_an_overall_budget_that_the_test_images_miss_is_named() -> None:
    measured = {"target": None, "overall": 0.6, "sparsity": 0.62, "layers": [{"module": "conv1", "sparsity": 0.9}]}
    assert missed_targets(measured) == ["activations overall 60.0 %: 62.0 % zeros on the test images"]
    assert missed_targets({**measured, "sparsity": 0.605}) == []


def test_a_model_at_chance_is_a_shortfall(tmp_path: Path) -> None:
    def reached(right: int) -> Scores:
        counts = (right, 100, 40, 30, 30)
        return Scores({"top1": float(right)}, 100, counts, wilson_interval(right, 100), 40.0)

    models = {"dense": {"macs": 100, "top1": 33.0}, "pruned": {"macs": 40, "top1": 64.0}}
    accuracies = {"dense": reached(33), "control": reached(45), "pruned": reached(64)}
    measured = Measurements(models, accuracies, LatencyReport((), (), (), ()))
    said = shortfalls(measured, Sparsity(weights=0.5, channels=0.5), job(tmp_path))
    assert said == [
        f"the {name} model's top-1, {value:.2f} %, is not shown to be better than 40.00 %, which always answering the "
        "most frequent class gives: what pruning costs cannot be told by it"
        for name, value in (("dense", 33), ("control", 45))
    ]
    worse = replace(measured, accuracies={"dense": reached(64), "pruned": reached(41)})
    (said_of_pruned,) = shortfalls(worse, Sparsity(weights=0.5, channels=0.5), job(tmp_path))
    assert said_of_pruned.startswith("the pruned model's top-1, 41.00 %, is not shown to be better than 40.00 %")


def test_missed_budgets_and_slower_models_are_said(tmp_path: Path) -> None:
    where = {"runtime": "eager", "device": "cpu", "batch": 1, "threads": 1, "dtype": "float32"}
    row = {"model": "pruned", **where, "median": 0.9, "low": 0.85, "high": 0.95, "stable": True}
    models = {"dense": {"macs": 100}, "pruned": {"macs": 46}}
    measured = Measurements(models, {}, LatencyReport((), (row,), (), ()))
    by_macs = shortfalls(measured, Sparsity(weights=0.5, channels=0.5), job(tmp_path))
    assert [text.split(":")[0] for text in by_macs] == [
        "budget MACs 45.0 %",
        "slower than the dense model",
    ]
    noisy = LatencyReport((), ({**row, "stable": False},), (), (), failures=({**where, "reason": "outputs differ"},))
    assert shortfalls(replace(measured, latency=noisy), Sparsity(weights=0.5, channels=0.5), job(tmp_path))[1:] == [
        "latency not measured: eager, cpu, batch 1, 1 thread, float32: outputs differ"
    ]
    halves = job(tmp_path, prune=PruneSettings(budget=BudgetSettings(channels=0.5)))
    quick = replace(measured, latency=LatencyReport((), ({**row, "high": 1.2},), (), ()))
    assert shortfalls(quick, Sparsity(weights=0.5, channels=0.5), halves) == []
    layers = [{"module": path, "sparsity": share} for path, share in (("a", 0.692), ("b", 0.712), ("c", 0.5))]
    masks = {"target": 0.7, "sparsity": 0.7, "layers": layers}
    assert shortfalls(replace(quick, activations=masks), Sparsity(weights=0.5, channels=0.5), halves) == [
        "activations target 70.0 %: b has 71.2 % zeros on the test images",
        "activations target 70.0 %: c has 50.0 % zeros on the test images",
    ]
    several = job(tmp_path, prune=PruneSettings(budget=BudgetSettings(params=0.5, size_mb=2.0)))
    sizes = {"dense": {"macs": 100, "params": 10}, "pruned": {"macs": 46, "params": 6, "tensor_bytes": 2_100_000}}
    assert shortfalls(replace(quick, models=sizes), Sparsity(weights=0.5, channels=0.5), several) == [
        "budget parameters 50.0 %: 60.00 % of the dense model's parameters are left",
        "budget size 2.00 MB: parameters and buffers take 2.10 MB",
    ]
    memory = job(tmp_path, prune=PruneSettings(budget=BudgetSettings(memory_mb=2.0)))
    taken = {"dense": {"macs": 100, "params": 10}, "pruned": {"macs": 46, "params": 6, "memory_bytes": 2_100_000}}
    assert shortfalls(replace(quick, models=taken), Sparsity(weights=0.5, channels=0.5), memory) == [
        "budget memory 2.00 MB: a forward pass takes 2.10 MB",
    ]
    assert "60.00 % of the free channels are left" in shortfalls(quick, Sparsity(weights=0.5, channels=0.4), halves)[0]
