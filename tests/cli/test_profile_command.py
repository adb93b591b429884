"""`prunekit profile` on a small recipe, with good and bad input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prunekit.cli import cli
from prunekit.measure.latency_profile.network_timing import LayerTimes, read_times, write_times

RECIPE = """
name: small
model: {name: resnet8, zoo: cifar}
baseline: {epochs: 1, lr: 0.1}
prune: {budget: {speedup: 1.5}, target: {runtime: eager, batch: 2}}
device: cpu
threads: 1
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, little_effort: None) -> Path:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


def times_in(file: Path) -> LayerTimes:
    times = read_times(file)
    assert times is not None
    return times


def invoke(recipe: Path, *arguments: str) -> Result:
    output = str(recipe.parent / "runs")
    return CliRunner().invoke(cli, ["profile", str(recipe), *arguments, "--networks", "10", "--output", output])


@pytest.mark.slow
def test_layers_and_the_error_of_their_sum(recipe: Path) -> None:
    found = invoke(recipe)
    assert found.exit_code == 0, found.output
    assert "(eager, cpu, batch 2, threads 1, float32, contiguous)" in found.output
    assert "layer3.0.conv2" in found.output
    assert "held out with a median error" in found.output
    again = invoke(recipe, "--json")  # all networks are in the cache
    assert again.exit_code == 0, again.output
    metrics = json.loads(again.stdout)
    assert metrics["networks"] == 10
    assert metrics["setting"]["batch"] == 2
    assert (Path(metrics["folder"]) / "profile.csv").exists()
    assert "latency profile" in (Path(metrics["folder"]) / "report.html").read_text()


@pytest.mark.slow
def test_noisy_networks_are_told_and_measured_again(recipe: Path) -> None:
    assert invoke(recipe).exit_code == 0
    cached = list((recipe.parent / "cache" / "latency").iterdir())
    for index, file in enumerate(cached):  # the machine that tests run on may itself be noisy
        write_times(file, replace(times_in(file), doubts=("another process used the cores",) if index < 2 else ()))
    noted = invoke(recipe)
    told = re.search(r"of 10 networks (\d+) were timed on a machine too noisy", noted.output)
    assert told is not None
    assert 2 <= int(told[1]) < 10  # two networks, which may have been drawn more than once
    assert "`prunekit profile RECIPE --again`" in noted.output
    assert noted.output.count("measured before") == 10
    again = invoke(recipe, "--again")
    assert again.exit_code == 0, again.output
    assert again.output.count("measured before") == 10 - int(told[1])
    assert not any("another process used the cores" in times_in(file).doubts for file in cached)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prune.target.runtime=tflite", "prune.target.runtime: expected the name of a runtime, or file.py:object"),
        ("prune.target.device=cuda:9", "cuda"),
        ("prune.target.dtype=fp8", "prune.target.dtype"),
        ("prune.budget.speedup=0.5", "prune.budget.speedup"),
        ("prune.ignore=['*']", "no channel is free"),
    ],
)
def test_bad_input_is_refused_with_what_was_expected(recipe: Path, override: str, message: str) -> None:
    found = invoke(recipe, override)
    assert found.exit_code == 2, found.output
    assert message in found.output
    assert "Traceback" not in found.output


def test_a_runtime_that_is_not_installed_names_its_extra(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = ("onnx", "onnxruntime", "onnxscript")
    monkeypatch.setattr(
        "prunekit.utils.availability.find_spec", lambda name: None if name in hidden else find_spec(name)
    )
    found = invoke(recipe, "prune.target.runtime=onnxruntime")
    assert found.exit_code == 2
    assert "pip install 'prunekit[export]'" in found.output
