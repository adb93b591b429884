"""Jobs that export their model: files, figures, the section of the report, and what fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import prunekit as pk
from prunekit.backends.onnx_runtime import OnnxRuntime
from prunekit.backends.openvino import OpenVino
from prunekit.cli import cli
from prunekit.errors import RecipeError, RunError, UsageError
from prunekit.jobs import finetune
from prunekit.jobs.finetune import prune_job
from prunekit.recipe_jobs import job_of
from prunekit.report.pages.run_page import write_report
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import LatencySettings, QuantizeSettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings

pytest.importorskip("onnxruntime")


def job(output: Path, **changes: Any) -> JobSettings:
    settings: dict[str, Any] = {
        "model": ModelSettings("resnet8", "cifar"),
        "data": DataSettings(image_size=16, batch=64),
        "baseline": TrainSettings(epochs=2, lr=0.1),
        "calibration": CalibrationSettings(images=64),
        "prune": PruneSettings(BudgetSettings(macs=0.7)),
        "latency": LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        "export": ("onnx", "pt2"),
        "device": "cpu",
        "threads": 1,
        "output": output,
    }
    return JobSettings("shipped", **settings | changes)


def run(settings: JobSettings) -> Any:
    return prune_job(settings, log=lambda text: None, finish=lambda folder: write_report(folder, state="finished"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    return run(job(tmp_path_factory.mktemp("runs"), quantize=QuantizeSettings(images=32, max_drop=None)))


@pytest.mark.slow
def test_files_are_in_the_run_with_their_figures(finished: Any) -> None:
    rows = {row["path"]: row for row in finished.metrics["exports"]}
    assert list(rows) == ["exports/model.onnx", "exports/model-int8.onnx", "exports/model.pt2"]
    assert all((finished.folder / path).is_file() for path in rows)
    assert json.loads((finished.folder / "metrics.json").read_text())["exports"] == finished.metrics["exports"]
    for path in ("exports/model.onnx", "exports/model.pt2"):
        assert [one["batch"] for one in rows[path]["parities"]] == [2, 5]
        assert rows[path]["max_relative_difference"] < 1e-4
        assert rows[path]["real_inputs"]
        assert rows[path]["scores"]["top1"] == pytest.approx(finished.metrics["pruned"]["top1"], abs=0.2)
        assert [one["batch"] for one in rows[path]["latency"]] == [1]
    int8 = rows["exports/model-int8.onnx"]
    assert int8["quantized"]["layers"]
    assert {one["over"] for one in int8["quantized"]["speedup"]} == {"float", "dense"}
    assert int8["scores"]["n_test"] == finished.metrics["pruned"]["n_test"]
    assert int8["size_bytes"] < rows["exports/model.onnx"]["size_bytes"]


@pytest.mark.slow
def test_the_report_has_a_section_with_the_command_that_runs_each(finished: Any) -> None:
    page = (finished.folder / "report.html").read_text(encoding="utf-8")
    section = page.split('<section id="exports">')[1].split("</section>")[0]
    (commands,) = re.findall(r"<pre>(.*?)</pre>", section, re.S)
    assert [line.split()[:2] for line in commands.strip().splitlines()] == [["prunekit", "predict"]] * 3
    assert section.count("the dense file") == section.count("the float file") == 1
    assert "Exported: exports/model-int8.onnx" in str(finished)


@pytest.mark.slow
def test_a_folder_of_the_run_is_exported_on_its_test_images(finished: Any, tmp_path: Path) -> None:
    found = pk.export(
        finished.folder / "model", to="onnx", path=tmp_path / "small.onnx", timed=(), log=lambda text: None
    )
    assert found.real_inputs
    assert found.scores is not None
    assert found.scores.n_test == finished.metrics["pruned"]["n_test"]
    assert found.interface.classes == tuple(map(str, range(10)))
    assert found.interface.preprocessing is not None
    called = CliRunner().invoke(
        cli,
        ["export", str(finished.folder / "model"), "--output", str(tmp_path / "b.onnx"), "--no-timing", "--json"],
    )
    assert called.exit_code == 0, called.output
    (row,) = json.loads(called.stdout)["exports"]
    assert row["scores"] == found.scores.figures()
    again = CliRunner().invoke(cli, ["export", str(finished.folder / "model"), "--output", str(tmp_path / "b.onnx")])
    assert again.exit_code == 2
    assert "exists already" in again.output


@pytest.mark.slow
def test_int8_beside_a_folder_of_the_run_is_timed_against_its_dense_model(finished: Any, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"path": tmp_path / "a.onnx", "quantize": QuantizeSettings(images=32, max_drop=None)}
    found = pk.export(finished.folder / "model", to="onnx", timed=(1,), log=lambda text: None, **asked)
    assert found.int8 is not None
    assert found.int8.path == tmp_path / "a-int8.onnx"
    assert {row["over"] for row in found.int8.quantized["speedup"]} == {"float", "dense"}
    assert "int8" in str(found)
    found.path.unlink()
    with pytest.raises(UsageError, match=r"a-int8\.onnx: exists already"):
        pk.export(finished.folder / "model", to="onnx", log=lambda text: None, **asked)
    assert {path.name for path in tmp_path.iterdir()} == {"a-int8.onnx"}


def test_int8_without_data_or_in_another_format_writes_nothing(tmp_path: Path) -> None:
    model, quantize = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)), QuantizeSettings()
    given: dict[str, Any] = {"quantize": quantize, "log": lambda text: None}
    with pytest.raises(UsageError, match="expected data to take the ranges"):
        pk.export(model, torch.zeros(1, 4), path=tmp_path / "a.onnx", **given)
    with pytest.raises(UsageError, match="expected the format onnx or openvino, got pt2"):
        pk.export(model, torch.randn(4, 4), to="pt2", path=tmp_path / "a.pt2", **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_folder_of_images_scores_a_file_and_calibrates_none(finished: Any, tmp_path: Path) -> None:
    for name in ("0", "1"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("L", (16, 16), 100 * int(name)).save(tmp_path / "photos" / name / "a.png")
    given = ["export", str(finished.folder / "model"), "--data", str(tmp_path / "photos"), "--no-timing"]
    called = CliRunner().invoke(cli, [*given, "--output", str(tmp_path / "a.onnx"), "--json"])
    assert called.exit_code == 0, called.output
    assert json.loads(called.stdout)["exports"][0]["scores"]["n_test"] == 2
    refused = CliRunner().invoke(cli, [*given, "--output", str(tmp_path / "b.onnx"), "--int8"])
    assert refused.exit_code == 2
    assert "these are test images alone" in refused.output
    assert not list(tmp_path.glob("b*"))


@pytest.mark.slow
def test_one_that_fails_is_a_shortfall_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> None:
        raise RunError("onnx has no operator for this")

    monkeypatch.setattr(OnnxRuntime, "write", write)
    result = run(job(tmp_path))
    assert [row["format"] for row in result.metrics["exports"]] == ["pt2"]
    assert any("export to onnx not made: RunError: onnx has no operator" in one for one in result.shortfalls)
    assert {path.name for path in (result.folder / "exports").iterdir()} == {"model.pt2"}


def test_what_cannot_be_written_here_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxRuntime, "packages", ("not_here",))
    monkeypatch.setattr(finetune, "export_models", None)
    with pytest.raises(UsageError, match="export 'onnx' needs not_here, not installed here"):
        run(job(tmp_path))
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(OpenVino, "quantizer", "not_here")
    pytest.importorskip("openvino")
    with pytest.raises(UsageError, match="int8 for openvino needs not_here, not installed here"):
        run(job(tmp_path, export=("onnx", "openvino"), quantize="int8"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"export": ["onnxx"]}, "did you mean 'onnx'"),
        ({"export": ["pt2"], "quantize": "int8"}, "onnx or openvino among the formats of export"),
        ({"export": ["onnx"], "quantize": {"max_drop": -1}}, r"quantize\.max_drop"),
    ],
)
def test_a_recipe_says_what_fits(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        job_of("resnet34", changes)
    assert job_of("resnet34", {"export": ["onnx"], "quantize": "int8"}).quantize == "int8"
    assert job_of("resnet34", {"export": ["onnx"], "quantize": {"max_drop": 0.5}}).quantize == QuantizeSettings(
        max_drop=0.5
    )
