"""Runtimes that users register themselves are timed, are targets of plans, and stand in reports as the others do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import prunekit as pk
from prunekit.backends.backend import RUNTIMES
from prunekit.backends.session import Setting, inputs_of
from prunekit.cli import cli
from prunekit.errors import RecipeError, UsageError
from prunekit.jobs.finetune import prune_job
from prunekit.measure.latency_profile.network_timing import conditions
from prunekit.recipe.loading import load
from prunekit.report.pages.run_page import write_report
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import LatencySettings, Target
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings
from prunekit.utils import user_code

OWN = """
import os
import prunekit as pk
from prunekit.backends.eager import placed

@pk.register_runtime("{name}", about="the module, called by a function of one's own", times_layers=False)
def opened(source, sample, setting):
    module, sample = placed(source, sample, setting)
    with open({log!r}, "a") as log:
        print(os.getpid(), file=log)
    return pk.Session(lambda: module(*sample))

number = 3
"""


def net() -> nn.Module:
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), *head).eval()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a runtime, in the working directory; what it registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = dict(RUNTIMES._items)
    file = tmp_path / "mine.py"
    file.write_text(OWN.format(name="mine", log=str(tmp_path / "processes")))
    (tmp_path / "net.py").write_text("from torch import nn\n\ndef build():\n    return nn.Conv2d(3, 4, 3)\n")
    yield file
    for name in set(RUNTIMES._items) - set(before) - set(RUNTIMES.declared):
        del RUNTIMES._items[name]


@pytest.mark.slow
def test_bench_times_it_in_a_process_that_finds_its_file_again(own: Path) -> None:
    arguments = ["--input-shape", "1x3x8x8", "--batch", "1", "--repeats", "5", "--json"]
    found = CliRunner().invoke(cli, ["bench", "--model", "net.py:build", "--runtime", "mine.py:opened", *arguments])
    assert found.exit_code == 0, found.output
    payload = json.loads(found.stdout)
    assert [row["runtime"] for row in payload["latency"]] == ["mine.py:opened"]
    assert payload["failures"] == []
    assert not any("not in one of its own" in note for note in payload["notes"])
    processes = (own.parent / "processes").read_text().split()
    assert processes
    assert str(os.getpid()) not in processes


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_a_registered_one_is_the_target_of_a_plan(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(own.parent / "cache"))
    user_code.load_object("mine.py:opened", UsageError)
    found = pk.prune(net(), torch.zeros(1, 3, 12, 12), speedup=1.1, target=Target("mine", block=1))
    assert found.delivered is not None
    assert found.delivered.final.ms > 0
    assert (own.parent / "processes").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_a_job_times_it_and_its_report_shows_it(own: Path) -> None:
    user_code.load_object("mine.py:opened", UsageError)
    job = JobSettings(
        "own",
        ModelSettings("resnet8", "cifar"),
        data=DataSettings(image_size=8),
        baseline=TrainSettings(epochs=0),
        calibration=CalibrationSettings(images=64),
        prune=PruneSettings(BudgetSettings(macs=0.6)),
        latency=LatencySettings((1,), (1,), 5, ("mine",), explain=False),
        device="cpu",
        threads=1,
        output=own.parent / "runs",
    )
    result = prune_job(job, log=lambda text: None, finish=lambda folder: write_report(folder, state="finished"))
    assert {row["runtime"] for row in result.metrics["latency"]} == {"mine"}
    assert '<td class="text">mine</td>' in (result.folder / "report.html").read_text(encoding="utf-8")


def test_a_recipe_may_name_it_and_is_told_the_nearest(own: Path) -> None:
    recipe = own.parent / "recipe.yaml"
    model = "name: own\nmodel: {name: resnet8, zoo: cifar, weights: none.pt}\n"
    recipe.write_text(f"{model}latency: {{runtimes: [eagre]}}\nprune: {{target: {{runtime: mine.py:open}}}}\n")
    with pytest.raises(RecipeError) as caught:
        load(recipe)
    first, second = str(caught.value).splitlines()[1:]
    assert "recipe.yaml:3:22: latency.runtimes.0: expected the name of a runtime, or file.py:object" in first
    assert first.endswith("got 'eagre'; did you mean 'eager'?")
    assert "recipe.yaml:4:27: prune.target.runtime: mine.py: there is no function or class 'open' here" in second
    recipe.write_text(model)
    assert load(recipe, ["latency.runtimes=[mine.py:opened]"]).latency.runtimes == ("mine.py:opened",)


def test_what_is_no_runtime_is_refused(own: Path) -> None:
    assert RUNTIMES.get("mine.py:opened") is RUNTIMES.get("mine")
    with pytest.raises(UsageError, match=r"mine\.py:number: expected a function .*register_runtime.*got int"):
        RUNTIMES.get("mine.py:number")
    with pytest.raises(ValueError, match="runtime 'eager' is registered already"):
        pk.register_runtime("eager", about="another")(lambda source, sample, setting: pk.Session(lambda: None))


def test_profiles_depend_on_its_code(own: Path) -> None:
    user_code.load_object("mine.py:opened", UsageError)
    setting, inputs = Setting("mine", "cpu", 1, 1), inputs_of((3, 8, 8))
    before = conditions(setting, inputs, 5)
    assert before == conditions(setting, inputs, 5)
    own.write_text(own.read_text() + "# changed\n")
    user_code.load_object("mine.py:opened", UsageError)
    after = conditions(setting, inputs, 5)
    assert before.keys() == after.keys()
    assert [key for key in after if before[key] != after[key]] == ["runtime_code"]
    assert "runtime_code" not in conditions(Setting("eager", "cpu", 1, 1), inputs, 5)
