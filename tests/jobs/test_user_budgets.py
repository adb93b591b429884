"""Budgets that users register: in plans, recipes, jobs and pages, like those that come with the package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import prunekit as pk
from prunekit.cli import cli
from prunekit.errors import PlanError, RecipeError, UsageError
from prunekit.jobs.run.job_subject import code_of_job, renew_code
from prunekit.jobs.run.resume import resolved
from prunekit.measure.model_size import count_macs, count_parameters
from prunekit.planning.budgets.budget import BUDGETS, Countable
from prunekit.planning.solver import make_plan
from prunekit.recipe.loading import load, with_overrides
from prunekit.report.pages.run_page import write_report
from prunekit.settings.job import dump
from prunekit.settings.pruning import facts_of

X = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
RECIPE = """
name: own
model: {name: resnet8, zoo: cifar}
data: {image_size: 8}
baseline: {epochs: 0}
finetune: {epochs: 0}
calibration: {images: 32}
prune:
  budget: {macs: 0.9, energy: 0.6}
latency: {batches: [1], threads: [1], repeats: 5, explain: false}
threads: 1
device: cpu
"""


def register(name: str = "energy", scale: float = 1.0, **facts: Any) -> None:
    @pk.register_budget(name, **({"share": True, "about": "energy of one sample"} | facts))
    def energy(countable: Countable) -> list[pk.Term]:
        arithmetic = [term.times(4.6 * scale) for term in countable.terms("macs")]
        return arithmetic + [term.times(640 * scale) for term in countable.terms("params")]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4)).eval()


def picojoules(model: nn.Module) -> float:
    return 4.6 * count_macs(model, (X,)) + 640 * count_parameters(model)


@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_what_is_left_is_what_the_compact_model_takes(scale: float) -> None:
    register(scale=scale)
    dense = net()
    result = pk.prune(dense, X, macs=0.9, energy=0.5)
    found = result.plan.provenance["budgets"]["energy"]
    assert found["left"] == pytest.approx(picojoules(result.model) / picojoules(dense), rel=1e-9)
    assert 0.4 < found["left"] <= found["asked"] == 0.5
    assert result.plan.provenance["binding"] == "energy"
    assert "energy" in str(result.plan)
    assert pk.plan(dense, X, macs=0.9, energy=0.5).provenance["budgets"]["energy"] == found


def test_one_of_an_amount_is_said_with_its_unit(tmp_path: Path) -> None:
    register("energy_uj", unit="uJ", share=False, per_unit=1e6)
    dense = net()
    asked = 0.4 * picojoules(dense) / 1e6
    plan = pk.plan(dense, X, energy_uj=asked)
    found = plan.provenance["budgets"]["energy_uj"]
    assert found["dense"] == pytest.approx(picojoules(dense) / 1e6)
    assert found["left"] <= asked
    assert facts_of("energy_uj").shown(found["left"]) in str(plan)
    assert facts_of("energy_uj").shown(0.30412) == "0.304 uJ"
    plan.save(tmp_path)
    unit = BUDGETS._items.pop("energy_uj")  # as where nobody has registered it
    assert str(pk.load_plan(tmp_path)) == str(plan)
    BUDGETS._items["energy_uj"] = unit
    with pytest.raises(
        PlanError, match=r"budget energy_uj: at most 0.001 uJ was asked for, but .* no less than .* uJ;"
    ):
        pk.plan(dense, X, energy_uj=0.001)


def test_a_function_in_a_file_is_named_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def weights(countable):\n    return countable.terms('params')\n")
    own: dict[str, Any] = {f"{file}:weights": 0.5}
    plan = pk.plan(net(), X, **own)
    assert np.array_equal(plan.keep, pk.plan(net(), X, params=0.5).keep)
    assert f"{file}:weights" in plan.provenance["budgets"]
    with pytest.raises(UsageError, match="expected a share above 0 and at most 1, got 2"):
        pk.plan(net(), X, **{f"{file}:weights": 2})  # type: ignore[arg-type]


def test_a_recipe_names_one_in_a_file_that_runs_once_it_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "RAN = open(__file__ + '.ran', 'w').close()\nweights = lambda one: one.terms('params')\n"
    )
    recipe = written(tmp_path / "own.yaml", RECIPE.replace("energy:", "'mine.py:weights':"))
    with pytest.raises(RecipeError, match=r"own.yaml:9:23: prune.budget.mine.py:weights: .* code, .* --allow-code"):
        load(recipe)
    with pytest.raises(
        RecipeError, match=r"9:23: prune.budget.mine.py:weigths: .*no function .*did you mean 'weights'"
    ):
        load(written(tmp_path / "typo.yaml", recipe.read_text().replace(":weights", ":weigths")), allow_code=True)
    with pytest.raises(RecipeError, match=r"9:42: prune.budget.mine.py:weights: expected a number above 0, got -1"):
        load(written(tmp_path / "less.yaml", recipe.read_text().replace("0.6", "-1")), allow_code=True)
    (name,) = load(recipe, runs_code=False).prune.budget.others
    with pytest.raises(UsageError, match=r"own.yaml:9:23: prune.budget.mine.py:weights: .* add --allow-code"):
        BUDGETS.get(name)
    assert not (tmp_path / "mine.py.ran").exists()
    job = load(recipe, allow_code=True)
    assert job.prune.budget.given == {"macs": 0.9, f"{tmp_path / 'mine.py'}:weights": 0.6}  # from beside the recipe
    assert not (tmp_path / "mine.py.ran").exists()
    assert load(written(tmp_path / "again.yaml", dump(job)), allow_code=True) == job
    with pytest.raises(UsageError, match=r"mine.py:weights: expected a share above 0 and at most 1, got 60"):
        renew_code(load(written(tmp_path / "more.yaml", recipe.read_text().replace("0.6", "60")), allow_code=True))
    assert code_of_job(job) == [(f"{tmp_path / 'mine.py'}:weights", BUDGETS)]
    plan = pk.plan(net(), X, settings=job.prune)
    assert np.array_equal(plan.keep, pk.plan(net(), X, macs=0.9, params=0.6).keep)


def test_the_list_of_budgets_has_those_that_are_registered() -> None:
    register("energy_uj", unit="uJ", share=False)
    shown = CliRunner().invoke(cli, ["list", "budgets", "energy*"]).output
    assert re.search(r"^ *energy_uj +uJ +energy of one sample$", shown, re.MULTILINE)


def test_an_override_may_name_one_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def weights(countable):\n    return countable.terms('params')\n")
    recipe = written(tmp_path / "own.yaml", RECIPE.replace(", energy: 0.6", ""))
    monkeypatch.chdir(tmp_path)
    job = load(recipe, ["prune.budget.mine.py:weights=0.5"])
    assert job.prune.budget.given == {"macs": 0.9, "mine.py:weights": 0.5}
    absolute = f"{tmp_path / 'mine.py'}:weights"
    assert resolved(job).prune.budget.given == {"macs": 0.9, absolute: 0.5}
    assert with_overrides(job, [f"prune.budget.{absolute}=0.25"]).prune.budget.given[absolute] == 0.25


def test_one_of_the_least_is_one_over_what_is_counted() -> None:
    register("lighter", unit="x", least=True)
    plan = pk.plan(net(), X, lighter=2)
    assert plan.provenance["budgets"]["lighter"]["left"] >= 2
    with pytest.raises(PlanError, match=r"budget lighter: at least 1000x was asked for, but .* leave no more than"):
        pk.plan(net(), X, lighter=1000)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"energy": 1.5}, "energy: expected a share above 0 and at most 1, got 1.5"),
        ({"energy": "half"}, "energy: expected a share above 0 and at most 1, got 'half'"),
        ({"energy": 0, "macs": 7}, "macs: expected a share .* got 7; .*; energy: expected a share .* got 0"),
        ({"watts": -1}, "watts: expected a number of W above 0, got -1"),
        ({"lighter": 1}, "lighter: expected a number of x above 1, got 1"),
        ({"enrgy": 0.5}, "expected the name of a budget, or file.py:object, got 'enrgy'; did you mean 'energy'?"),
    ],
)
def test_figures_that_mean_nothing_are_refused(figures: dict[str, Any], message: str) -> None:
    register()
    register("watts", unit="W", share=False)
    register("lighter", unit="x", least=True)
    with pytest.raises(UsageError, match=message):
        pk.BudgetSettings(**figures)


def test_settings_hold_it_beside_the_others() -> None:
    register()
    budget = pk.BudgetSettings(macs=0.5, energy=0.4)
    assert budget.given == {"macs": 0.5, "energy": 0.4}
    assert budget.changed(macs=None, energy=0.3) == pk.BudgetSettings(energy=0.3)
    assert budget != pk.BudgetSettings(macs=0.5)


def test_a_name_is_taken_once() -> None:
    register()
    with pytest.raises(ValueError, match="budget 'energy' is registered already; choose another name"):
        pk.register_budget("energy", about="another")(lambda countable: [])
    with pytest.raises(ValueError, match="budget 'macs' is registered already"):
        register("macs")


def test_terms_are_what_a_budget_is_made_of() -> None:
    pk.register_budget("odd", share=True, about="odd")(lambda countable: [3.0])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"budget odd: expected a list of prunekit.Term .* holds float 3.0"):
        pk.plan(net(), X, odd=0.5)
    pk.register_budget("endless", share=True, about="endless")(lambda countable: [pk.Term(float("inf"), ())])
    with pytest.raises(UsageError, match="budget endless: expected finite constants"):
        pk.plan(net(), X, endless=0.5)


def test_what_is_known_without_importing_is_what_is_registered() -> None:
    for name in BUDGETS.declared:
        assert facts_of(name) == BUDGETS.get(name).facts


def test_a_recipe_holds_it_and_an_unknown_one_is_named_with_its_place(tmp_path: Path) -> None:
    register()
    file = tmp_path / "own.yaml"
    file.write_text(RECIPE)
    job = load(file, ["prune.budget.energy=0.5"])
    assert job.prune.budget == pk.BudgetSettings(macs=0.9, energy=0.5)
    again = tmp_path / "again.yaml"
    again.write_text(dump(job))
    assert load(again) == job
    assert load(file, ["prune.budget.energy=null"]).prune.budget == pk.BudgetSettings(macs=0.9)
    with pytest.raises(RecipeError, match=r"9:31: prune.budget.energy: expected a share above 0 and at most 1, got 60"):
        load(written(file, RECIPE.replace("0.6", "60")))
    with pytest.raises(RecipeError, match=r"9:31: prune.budget.energy: expected a share .* got '0.6 J'"):
        load(written(file, RECIPE.replace("0.6", "0.6 J")))
    with pytest.raises(RecipeError, match=r"9:23: prune.budget.enrgy: unknown key; did you mean 'energy'?"):
        load(written(file, RECIPE.replace("energy", "enrgy")))


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


@pytest.mark.slow
def test_a_job_of_the_command_line_keeps_to_it_and_its_page_shows_it(tmp_path: Path) -> None:
    register()
    (tmp_path / "own.yaml").write_text(RECIPE)
    done = CliRunner().invoke(cli, ["prune", str(tmp_path / "own.yaml"), f"output={tmp_path / 'runs'}"])
    (folder,) = (tmp_path / "runs" / "own").glob("2*")
    assert "error" not in done.output, done.output
    found = json.loads((folder / "metrics.json").read_text())["plan"]["budgets"]["energy"]
    said = f"energy {100 * found['left']:.1f} % left, at most 60.0 % asked for, the one that binds"
    assert said in done.output
    assert said in (folder / "report.html").read_text()
    del BUDGETS._items["energy"]  # as where nobody has registered it
    (folder / "report.html").unlink()
    write_report(folder)
    assert said in (folder / "report.html").read_text()
    assert "energy" in str(pk.load_plan(folder))


def test_a_schedule_goes_by_it() -> None:
    from prunekit.planning.schedules import ScheduleStep, settings_at_step

    register("lighter", unit="x", least=True)
    schedule = pk.ScheduleSettings(kind="linear")
    wanted = pk.PruneSettings(pk.BudgetSettings(lighter=2.0), schedule=schedule)
    chart = pk.trace(net(), (X,))
    halfway = settings_at_step(wanted, ScheduleStep(1, 0.5), {"lighter": 1.0})
    assert halfway.budget.given == {"lighter": pytest.approx(1 / 0.75)}
    plan = make_plan(chart, torch.zeros(chart.n_labels).numpy(), halfway)
    assert plan.provenance["budgets"]["lighter"]["left"] >= 1 / 0.75
