"""Settings refuse what they cannot hold when they are made, and say so in the words of their annotations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunekit.errors import RecipeError, UsageError
from prunekit.recipe.loading import load
from prunekit.settings.calibration import CalibrationSettings, RepairSettings
from prunekit.settings.deployment import LatencySettings, Target
from prunekit.settings.inputs import AugmentSettings, DataSettings, ModelSettings
from prunekit.settings.job import JobSettings, dump
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import ClampSettings, TrainSettings
from prunekit.settings.validation import Checked

ROOM = Path(import_module("prunekit.settings").__file__ or "").parent
ALL = {
    item
    for path in ROOM.glob("*.py")
    for item in vars(import_module(f"prunekit.settings.{path.stem}")).values()
    if isinstance(item, type)
    and is_dataclass(item)
    and item.__module__.startswith("prunekit.settings")
    and item.__name__.endswith("Settings")
    and item is not BudgetSettings  # whose figures their budgets check
}


@pytest.mark.parametrize("settings", sorted(ALL, key=lambda item: item.__name__))
def test_all_settings_check_themselves_and_their_defaults_pass(settings: type) -> None:
    assert issubclass(settings, Checked)
    required = {"name": "a", "modules": ("a",), "limit": 1.0, "method": "bn_l1", "model": ModelSettings("resnet18")}
    required |= {"kind": "2:4"}
    needed = [field.name for field in fields(settings) if field.default is field.default_factory is MISSING]
    made = settings(**{name: required[name] for name in needed})
    name = fields(settings)[0].name
    if fields(settings)[0].type not in ("Any", "dict[str, Any]"):
        with pytest.raises(UsageError, match=rf"{settings.__name__}: {name}: expected .*, got <object"):
            settings(**{**vars(made), name: object()})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PruneSettings(BudgetSettings(macs=-3), criterion="l2"), "macs: expected a share above 0 .* got -3"),
        (lambda: PruneSettings(round_to=0, min_channels=True), "round_to: .* got 0; min_channels: .* got True"),
        (lambda: ClampSettings(limit=float("inf")), "ClampSettings: limit: expected a number above 0, got inf"),
        (lambda: PruneSettings(criterion="zzz"), "expected the name of a criterion, .* got 'zzz'; expected one"),
        (lambda: PruneSettings(criterion="l3"), "got 'l3'; did you mean 'l2' or 'l1'"),
        (lambda: PruneSettings(scope="globl"), "scope: expected one of .* got 'globl'; did you mean 'global'"),
        (lambda: PruneSettings(ratios={"a": 2}), r"ratios\['a'\]: expected a number above 0 and of at most 1, got 2"),
        (lambda: PruneSettings(ignore="conv1"), r"ignore: expected a tuple \(a string each\), got 'conv1'"),
        (lambda: PruneSettings(budget=0.5), "budget: expected a BudgetSettings, got 0.5"),
        (lambda: PruneSettings(schedule="cubic"), "schedule: expected a ScheduleSettings, or None, got 'cubic'"),
        (lambda: ScheduleSettings(rounds=2.5), "rounds: expected a whole number of at least 1, or None, got 2.5"),
        (lambda: Target("onnxrt"), "runtime: expected the name of a runtime, .* did you mean 'onnxruntime'"),
        (lambda: LatencySettings(batches=(1, 0)), r"batches\[1\]: expected a whole number of at least 1, got 0"),
        (lambda: LatencySettings(batches=()), r"batches: expected a tuple \(.*\) of at least 1 item, got \(\)"),
        (lambda: DataSettings(mean=(0.5,)), r"mean: expected a tuple \(.*\) of 3 items, or None, got \(0.5,\)"),
        (lambda: AugmentSettings(flip=1.5), "flip: expected a number of at least 0 and of at most 1, got 1.5"),
        (lambda: RepairSettings(fit="all"), "fit: expected one of 'bias'"),
        (lambda: TrainSettings(lr=0), "lr: expected a number above 0, or 'auto', got 0"),
        (lambda: CalibrationSettings(images="many"), "images: expected a whole number of at least 1, got 'many'"),
    ],
)  # fmt: skip
def test_what_settings_refuse(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def test_numbers_of_numpy_lists_and_references_are_taken() -> None:
    assert TrainSettings(lr=np.float32(0.5)).lr == 0.5
    settings = PruneSettings(round_to=np.int64(8), ignore=["a"], criterion="mine.py:score")  # type: ignore[arg-type]
    assert settings.criterion == "mine.py:score"


def test_a_recipe_says_all_of_it_with_its_places_all_the_same(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    job = JobSettings("a", ModelSettings("resnet18", weights="DEFAULT"))
    text = dump(job).replace("macs: 0.5", "macs: 7").replace("criterion: l2", "criterion: l3")
    recipe.write_text(
        text.replace("weight_decay: 0.0005", "weight_decay: .inf").replace("round_to: null", "round_to: 0")
    )
    with pytest.raises(RecipeError) as error:
        load(recipe)
    for said in ("prune.budget.macs: expected a number above 0 and of at most 1, or null, got 7",
                 "prune.criterion: expected the name of a criterion", "prune.round_to: expected",
                 "finetune.weight_decay: expected a finite number"):  # fmt: skip
        assert said in str(error.value)
    assert all(line.startswith(f"{recipe}:") for line in str(error.value).splitlines()[1:])


def test_checking_settings_needs_no_torch() -> None:
    code = (
        "import sys; from prunekit.settings.pruning import PruneSettings\n"
        "from prunekit.errors import UsageError\n"
        "try: PruneSettings(criterion='zzz')\n"
        "except UsageError: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
