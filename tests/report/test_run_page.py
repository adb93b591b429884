"""The report: complete from a whole run, honest about a part of one, self-contained, and safe with odd names."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mutants import changed_json, unclean
from synthetic_run import metrics, write_run
from torch import nn

from prunekit.errors import ArtifactError
from prunekit.measure.latency.comparison import LatencyReport
from prunekit.pruning.latency.device_clock import Timing
from prunekit.pruning.latency.latency_target import LatencyResult, LatencyTarget
from prunekit.report import rendering
from prunekit.report.figures.charts import curves, rates
from prunekit.report.headline import blocks, clamped, compared, masked, searched, sentence, tiles
from prunekit.report.pages.run_page import again, lines, missing, write_report
from prunekit.report.rendering import how
from prunekit.report.run_data import read_run
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import BudgetSettings, PruneSettings

VOID = {"meta", "br", "img", "link", "hr", "input"}
SECTIONS = (
    "result",
    "latency",
    "curves",
    "activations",
    "clamps",
    "widths",
    "scores",
    "coupling",
    "locks",
    "environment",
    "recipe",
)


class Page(HTMLParser):
    """Text by section, ids, addresses that a browser would ask for, and tags left open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: dict[str, str] = dict.fromkeys(SECTIONS, "")
        self.text[""] = ""
        self.section = ""
        self.ids: list[str] = []
        self.requests: list[str] = []
        self.figures = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.figures += values.get("role") == "img"
        if tag == "section":
            self.section = values.get("id") or ""
        if values.get("id"):
            self.ids.append(values["id"] or "")
        addresses = [values.get(name) for name in ("src", "href", "xlink:href", "action", "data")]
        self.requests += [address for address in addresses if address and not address.startswith(("#", "data:"))]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.section = "" if tag == "section" else self.section

    def handle_data(self, data: str) -> None:
        self.text[self.section] = self.text.get(self.section, "") + f"{data} "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "resnet34" / "2026-11-20")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_the_page_is_whole_and_asks_for_nothing(page: Page, run: Path) -> None:
    html = (run / "report.html").read_text(encoding="utf-8")
    assert page.open == []
    assert page.requests == []
    assert not re.search(r"@import|url\((?!['\"]?#)", html)
    policy = re.search(r'content="(.*?)"', html[html.index("Content-Security-Policy") :])
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy is not None
    assert re.findall(r"script-src ([^;]*)", policy[1]) == [f"'sha256-{digests[0]}'"]
    assert len(scripts) == html.count("<script") == 1
    assert page.figures == 7  # two of them once more, for phones


def test_ids_of_figures_do_not_collide(page: Page) -> None:
    clip_paths = [name for name in page.ids if re.fullmatch(r"p[0-9a-f]{10}", name)]
    assert len(clip_paths) == len(set(clip_paths)) > 20


def test_headline_gives_values_with_units_and_intervals(page: Page) -> None:
    text = " ".join(page.text["result"].split())
    assert "98.52 % [97.10, 99.25]" in text
    assert "75.0 M 75.0 M 33.7 M −55.1 %" in text
    assert "85.2 MB 85.2 MB 37.7 MB −55.8 %" in text
    assert "−0.37 points" in text
    assert "Channels removed 33.1 %" in text
    assert "pruned against control" in text
    tiles = " ".join(page.text[""].split())
    assert "Top-1 −0.37 points against the dense control" in tiles
    assert "Speedup 1.74× cpu, batch 1, 95 %: [1.69, 1.80]" in tiles
    assert "Masked against compact 3.1e-15" in tiles


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("latency", "2.21×"),
        ("latency", "no CUDA device"),
        ("latency", "cpu, eager, batch 16, 1 thread, float32"),
        ("curves", "Validation top-1"),
        ("widths", "layer4.29.conv1"),
        ("scores", "24 of 30 groups are shown"),
        ("coupling", "layer1.0.conv1 (40 of 64)"),
        ("locks", "output of the model"),
        ("environment", "torch.version"),
        ("recipe", "macs: 0.45"),
    ],
)
def test_each_section_holds_what_the_run_wrote(page: Page, section: str, expected: str) -> None:
    assert expected in page.text[section]


def test_names_and_reasons_are_text_and_never_markup(page: Page, run: Path) -> None:
    assert "input <of> the model & its 'channels'" in page.text["locks"]
    assert "<of>" not in (run / "report.html").read_text(encoding="utf-8")


def test_odd_module_names_reach_the_figures_as_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "odd", groups=2, only=("scores",))
    scores = pd.read_csv(run / "scores.csv")
    scores["group"] = scores["group"].map({"layer1.0.conv1": "$x_<b>", "layer3.1.conv1": "NA"})
    scores.loc[0, "score"] = float("inf")
    scores.to_csv(run / "scores.csv", index=False)
    text = Page(write_report(run).read_text(encoding="utf-8")).text["scores"]
    assert "$x_<b> (" in text
    assert "NA (" in text


@pytest.mark.parametrize("kept", [(), ("status.json",), ("status.json", "history.csv", "recipe.yaml")])
def test_a_part_of_a_run_says_what_is_missing(kept: tuple[str, ...], tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "part", groups=4)
    for path in run.iterdir():
        if path.name not in kept:
            path.unlink()
    if "status.json" in kept:
        (run / "status.json").write_text(json.dumps({"state": "interrupted", "error": "Ctrl-C"}))
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert ("interrupted" if kept else "unknown") in page.text[""]
    assert "This run has not finished" in page.text[""]
    assert "This run has no measurements." in page.text["result"]
    assert ("This run has no training history." in page.text["curves"]) == ("history.csv" not in kept)
    for section in ("latency", "widths", "scores", "coupling", "locks", "environment"):
        assert "This run has no" in page.text[section]


def test_skipped_steps_are_shown_where_a_run_had_them(page: Page, tmp_path: Path) -> None:
    assert "skipped" not in page.text["curves"]
    run = write_run(tmp_path / "runs" / "skipping", only=("history",))
    history = pd.read_csv(run / "history.csv")
    history["skipped"] = (history["run"] != "control") * (history["epoch"] < 2)
    history.to_csv(run / "history.csv", index=False)
    text = Page(write_report(run).read_text(encoding="utf-8")).text["curves"]
    assert "Steps that were skipped: dense 2, pruned 2." in " ".join(text.split())


def test_images_that_were_skipped_are_named_with_their_reason(page: Page, tmp_path: Path) -> None:
    assert "could not be read" not in page.text["result"]
    run = write_run(tmp_path / "runs" / "corrupt", only=())
    for count, shown in ((2, 2), (30, 20)):
        corrupt = {f"<cats>/{number}.png": "it is empty" for number in range(count)}
        (run / "metrics.json").write_text(json.dumps({**metrics(), "corrupt_images": corrupt}))
        text = " ".join(Page(write_report(run).read_text(encoding="utf-8")).text["result"].split())
        assert f"Images that could not be read, and were skipped: {count} " in text
        assert [f"<cats>/{number}.png : it is empty" in text for number in range(count)].count(True) == shown
        assert ("The others are in metrics.json" in text) == (count > shown)


def test_masks_and_clamps_are_shown_where_a_run_had_them(page: Page, tmp_path: Path) -> None:
    assert page.text["activations"] == page.text["clamps"] == ""
    run = write_run(tmp_path / "runs" / "hooks", only=())
    layers = [
        {"module": "layer1.0.relu", "threshold": 0.01234, "calibrated": 0.6, "sparsity": 0.6049},
        {"module": "relu", "threshold": 0.0, "calibrated": None, "sparsity": 0.71},
    ]
    found = {"side": "output", "target": 0.6, "sparsity": 0.6512, "top1": 97.1, "low": 95.0, "high": 98.2}
    (run / "metrics.json").write_text(json.dumps({**metrics(), "activations": {**found, "layers": layers}}))
    rows = [
        {"run": run_name, "clamp": "clamp_weight_grad", "module": module, "by": "norm", "limit": 0.5, "share": share}
        for run_name, module, share in (("pruned", "conv1", 0.25), ("pruned", "NA", 0.0), ("control", "conv1", 0.125))
    ]
    pd.DataFrame(rows).to_csv(run / "clamps.csv", index=False)
    text = {
        name: " ".join(words.split())
        for name, words in Page(write_report(run).read_text(encoding="utf-8")).text.items()
    }
    assert "65.1 % of the activations are zero (target 60.0 %), top-1 97.10 % [95.00, 98.20]" in text["activations"]
    assert "Top-1 under the activation masks 97.10 % [95.00, 98.20] −1.79 points" in text["result"]
    assert "layer1.0.relu 0.0123 60.0 % 60.5 %" in text["activations"]
    assert "relu 0 – 71.0 %" in text["activations"]
    assert "module clamp by limit pruned control" in text["clamps"]
    assert "conv1 clamp_weight_grad norm 0.500 25.00 % 12.50 %" in text["clamps"]
    errors = {"spread": 0.0123, "uniform": 0.3}
    found |= {"target": None, "overall": 0.65, "by": "macs", "way": "spread", "errors": errors}
    weighted = [{**layer, "weight": 0.5} for layer in layers]
    (run / "metrics.json").write_text(json.dumps({**metrics(), "activations": {**found, "layers": weighted}}))
    shown = " ".join(Page(write_report(run).read_text(encoding="utf-8")).text["activations"].split())
    assert "65.1 % of the activations are zero, weighted by MACs (overall budget 65.0 %), top-1 97.10 %" in shown
    assert "The budget: spread over the layers by errors; output error on held-out images, of its variance: " in shown
    assert "1.23 % spread, 30.00 % with one share" in shown
    assert "layer1.0.relu 0.0123 60.0 % 60.5 % 50.0 %" in shown
    assert "NA clamp_weight_grad norm 0.500 0.00 % –" in text["clamps"]


def test_the_command_line_says_the_same_in_a_line() -> None:
    assert list(masked(metrics())) == list(clamped(metrics())) == []
    fixed = {"target": None, "sparsity": 0.5, "top1": 97.1}
    assert list(masked({"activations": fixed})) == ["50.0 % of the activations are zero, top-1 97.10 %"]
    row = {"run": "pruned", "clamp": "clamp_weight_grad", "by": "norm", "module": "fc", "limit": 1.0, "share": 0.0123}
    assert list(clamped({"clamps": [row]})) == ["pruned, clamp_weight_grad: 1.23 % of the gradients at fc"]


def test_norms_are_left_out_of_the_layers(page: Page) -> None:
    assert "layer1.0.conv1" in page.text["widths"]
    assert "bn1" not in page.text["widths"]


def test_blocks_that_are_gone_are_seen_and_named(page: Page, tmp_path: Path) -> None:
    assert "gone" not in page.text["widths"] + page.text["result"]
    run = write_run(tmp_path / "run", only={"layers"})
    layers = pd.read_csv(run / "layers.csv")
    layers.loc[:1, ["in_after", "out_after", "macs_after", "params_after"]] = 0
    layers.to_csv(run / "layers.csv", index=False)
    known = metrics()
    known |= {"blocks": ["layer1.0", "layer1.1"], "plan": {**known["plan"], "blocks": 9}}
    (run / "metrics.json").write_text(json.dumps(known))
    html = write_report(run).read_text(encoding="utf-8")
    shown = Page(html)
    assert "Blocks: 2 of 9 gone as a whole: layer1.0, layer1.1." in shown.text["result"]
    assert "Blocks: 2 of 9 gone as a whole: layer1.0, layer1.1." in shown.text["widths"]
    assert html.count('<tr class="gone">') == shown.text["widths"].count("0 % (gone)") == 2
    assert "gone with its block" in shown.text["widths"]
    assert "2 layers gone with their blocks" in html
    patterns = re.findall(r'<pattern[^>]* id="([^"]*)"', html)
    assert len(set(patterns)) == len(patterns) == 2  # on wide screens, and on phones


def test_long_lists_of_blocks_are_cut_short() -> None:
    (said,) = blocks({"blocks": [f"layers.{index}" for index in range(20)], "plan": {"blocks": 24}})
    assert said.startswith("20 of 24 gone as a whole: layers.0, ")
    assert said.endswith("layers.9 and 10 more")
    assert list(blocks({})) == list(blocks({"blocks": []})) == []


def test_the_headline_is_one_sentence(page: Page) -> None:
    said = (
        "1.74× faster on this CPU (eager, batch 1), top-1 98.52 % against 98.89 %, 55.8 % fewer parameters, verified."
    )
    assert said in page.text[""].replace("\N{NO-BREAK SPACE}", " ")
    assert sentence({}) == ""
    slower = {"device": "cuda", "runtime": "eager", "batch": 8, "median": 0.5, "stable": False}
    found = {**metrics(), "speedup": [slower], "parity": {"max_relative_difference": 1e-3}}
    assert sentence(found).startswith("Speedup unstable on cuda (eager, batch 8), top-1")
    found["speedup"] = [{**slower, "stable": True}]
    assert sentence(found).startswith("2.00× slower on cuda (eager, batch 8), top-1")
    assert "verified" not in sentence(found)


def test_the_command_that_makes_a_run_again(page: Page, run: Path, tmp_path: Path) -> None:
    assert f"prunekit finetune {run / 'recipe.yaml'}" in page.text["recipe"]
    own = write_run(tmp_path / "own's run", only=())
    (own / "metrics.json").write_text(json.dumps({**metrics(), "fine_tuned": False}))
    recipe = "data: {source: own}\ntask: a.py:b\nbaseline: {optimizer: own}\n"
    (own / "recipe.yaml").write_text(f"#   --data '/my files/own.py:data'\n#   --optimizer python:mine:sgd\n{recipe}")
    found = again(read_run(own))
    assert found is not None
    assert shlex.split(found)[:3] == ["prunekit", "prune", str(own / "recipe.yaml")]
    words = ["--data", "/my files/own.py:data", "--optimizer", "python:mine:sgd", "--allow-code"]
    assert shlex.split(found)[3:] == words


@pytest.mark.slow
def test_a_page_is_written_without_waiting_for_torch() -> None:
    """Whatever sections it has: that alone would take most of the three seconds that a report may take."""
    sections = "detections, explanation, model_tables, sensitivity_curves, training_curves"
    modules = (
        f"from prunekit.report.pages import run_page, compare_page; from prunekit.report.sections import {sections}"
    )
    code = f"import sys; {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_figures_say_how_they_were_measured(page: Page, run: Path) -> None:
    html = (run / "report.html").read_text(encoding="utf-8")
    labels = set(re.findall(r'<abbr tabindex="0" title="[^"]{20,}">([^<]*)</abbr>', html))
    assert {"MACs", "Speedup", "median, ms", "p90", "Masked against compact"} <= labels
    shown = {tile.label for tile in tiles(metrics())} | {row.label for row in compared(metrics())} - {"Test images"}
    assert {label for label in shown if "<abbr" not in how(label)} == set()
    assert how("<of my own>") == "&lt;of my own&gt;"


def test_every_column_of_figures_says_how_they_were_measured() -> None:
    """But those of names and settings, and of counts that need no method."""
    plain = {"module", "model", "layer", "run", "batch", "threads", "group", "weight", "key", "cause", "against", "#"}
    plain |= {"channel", "channels", "like channel"}
    for template in Path(rendering.__file__).parent.rglob("*.html"):
        html = template.read_text(encoding="utf-8")
        bare = set(re.findall(r"<th(?: class=\"soft\")?>([^<{]+)</th>", html))
        assert bare <= plain, template.name
        for label, other in re.findall(r'\{\{ "([^"]+)" \| how(?:\("([^"]+)"\))? \}\}', html):
            assert (other or label) in rendering.notes(), template.name


def test_every_tile_and_every_section_with_a_figure_says_how_it_was_made(page: Page, run: Path) -> None:
    folder = Path(rendering.__file__).parent
    for file in folder.glob("*.py"):
        labels = set(re.findall(r'Tile\(\s*"([^"]+)"', file.read_text(encoding="utf-8")))
        assert labels <= rendering.notes().keys(), file.name
    html = (run / "report.html").read_text(encoding="utf-8")
    sections = [part for part in re.findall(r"<section.*?</section>", html, re.S) if "<figure>" in part]
    assert len(sections) > 4
    assert [part[:80] for part in sections if not re.search(r"<h[23]><abbr tabindex", part)] == []


def test_a_page_written_by_the_run_itself_shows_the_state_to_come(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "last", only=())
    (run / "status.json").write_text(json.dumps({"state": "running", "started": "2026-11-20T11:00:00+00:00"}))
    text = Page(write_report(run, state="finished").read_text(encoding="utf-8")).text[""]
    assert "finished started 2026-11-20 11:00:00 UTC" in " ".join(text.split())
    assert "has not finished" not in text


def test_budgets_are_shown_with_what_is_left(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "runs" / "budgets", only=())).read_text(encoding="utf-8"))
    assert "Budget MACs 45.0 % left, at most 45.0 % asked for." in page.text["result"]


def test_memory_is_a_row_where_it_was_counted() -> None:
    label = "Memory of a forward pass, counted"
    assert label not in {row.label for row in compared(metrics())}
    found = metrics()
    found["dense"]["memory_bytes"] = found["control"]["memory_bytes"] = 51_384_128
    found["pruned"]["memory_bytes"] = 25_689_172
    row = next(row for row in compared(found) if row.label == label)
    assert [value for value, _ in row.cells] == ["51.4 MB", "51.4 MB", "25.7 MB"]
    assert row.change == "−50.0 %"


def test_scores_against_a_model_at_chance_say_nothing(tmp_path: Path) -> None:
    found = metrics()
    found["accuracy"]["control"] |= {"chance": 98.7, "at_chance": True}
    assert sentence(found).count("(at chance, so that it says nothing)") == 1
    top1 = next(tile for tile in tiles(found) if tile.label == "Top-1")
    assert (top1.value, top1.doubtful) == ("at chance", True)
    assert top1.detail.startswith("98.52 % against 98.89 %")
    assert next(iter(compared(found))).change == "says nothing: at chance"
    folder = write_run(tmp_path / "run", only=())
    (folder / "metrics.json").write_text(json.dumps(found), encoding="utf-8")
    page = write_report(folder).read_text(encoding="utf-8")
    assert '<div class="tile doubtful">' in page
    assert "\u22120.37" not in page


def test_shortfalls_stand_at_the_top(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "short", only=())
    (run / "metrics.json").write_text(json.dumps({**metrics(), "shortfalls": ["kept 52.0 % of the MACs, asked 45 %"]}))
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "kept 52.0 % of the MACs, asked 45 %" in page.text[""]
    assert "No shortfalls" not in page.text["result"]


def test_a_run_without_fine_tuning_shows_its_repair(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "short", only=())
    found = {"before": 0.125, "after": 0.0123, "kept": True, "layers": 2, "refitted": 1}
    measured = {**metrics(), "accuracy": {}, "fine_tuned": False, "repair": found}
    del measured["control"]
    (run / "metrics.json").write_text(json.dumps(measured))
    rows = [
        {"weight": "conv1.weight", "applied": "patch", "before": 0.2, "after": 0.02, "columns": 27, "rank": 26}
        | {"ridge": 1e-3, "note": None},
        dict.fromkeys(("before", "after", "ridge"), 0.0)
        | {"weight": "<b>.weight", "applied": None, "columns": 0, "rank": 0, "note": "its weight is used 2 times"},
    ]
    pd.DataFrame(rows).to_csv(run / "repair.csv", index=False)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    text = {name: " ".join(content.split()) for name, content in page.text.items()}
    assert text["result"].startswith("Dense and pruned Nothing was fine-tuned after pruning.")
    assert "held-out images 12.50 % → 1.23 % of its variance; 1 of 2 layers refitted" in text["repair"]
    assert "conv1.weight patch 20.00 % 2.00 % 26 of 27 1.0e-03" in text["repair"]
    assert "<b>.weight – – – – – its weight is used 2 times" in text["repair"]


def test_without_a_control_the_dense_model_is_the_reference(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "short", only=())
    without = {**metrics(), "accuracy": {}}
    del without["control"]
    (run / "metrics.json").write_text(json.dumps(without))
    page = Page(write_report(run).read_text(encoding="utf-8"))
    text = " ".join(page.text["result"].split())
    assert "pruned against dense" in text
    assert "98.70 % 98.52 % −0.18 points" in text
    assert "points against the dense model" in page.text[""]


def test_an_empty_list_of_locks_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "free", only=())
    (run / "locks.csv").write_text("module,operator,channels,reason\n")
    assert "Nothing is locked" in Page(write_report(run).read_text(encoding="utf-8")).text["locks"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("metrics.json", "{", r"metrics\.json:1:2: expected JSON"),
        ("metrics.json", "[]", r"metrics\.json: expected a JSON object, got list"),
        ("layers.csv", "module,kind\n", r"layers\.csv: expected the columns .* in_before, .* not found"),
        ("history.csv", "", r"history\.csv: expected a CSV table"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, expected: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "damaged", groups=2)
    (run / name).write_text(content)
    with pytest.raises(ArtifactError, match=expected):
        write_report(run)
    assert not (run / "report.html").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected the folder of a run"):
        write_report(tmp_path / "nothing")


def test_a_single_epoch_has_an_axis_of_whole_epochs() -> None:
    row = {"run": "pruned", "epoch": 1, "train_loss": 0.2, "validation_loss": 0.3, "validation_top1": 97.0}
    ticks = re.findall(r"<g id=\"xtick_\d+\">.*?<text[^>]*>([^<]*)</text>", curves(pd.DataFrame([row])), re.DOTALL)
    assert ticks == ["1", "1"]


def test_the_start_is_the_point_at_epoch_0_and_is_said_where_no_epoch_beat_it(tmp_path: Path) -> None:
    rows = [{"run": "pruned", "epoch": 1, "train_loss": 0.2, "validation_loss": 0.3, "validation_top1": 97.0}]
    trainings = {"pruned": {"epochs": 1, "best_epoch": 0, "validation": 99.07, "start": 99.07, "start_loss": 0.1}}
    drawn = curves(pd.DataFrame(rows), trainings=trainings)
    ticks = re.findall(r"<g id=\"xtick_\d+\">.*?<text[^>]*>([^<]*)</text>", drawn, re.DOTALL)
    assert ticks == ["0", "1"] * 2
    folder = write_run(tmp_path / "run", only=("history",))
    said = "pruned: no epoch beat the start (top-1 99.07 %), which is delivered"
    for best, times in ((0, 1), (1, 0)):
        found = {**metrics(), "trainings": {"pruned": {**trainings["pruned"], "best_epoch": best}}}
        (folder / "metrics.json").write_text(json.dumps(found))
        assert Page(write_report(folder).read_text(encoding="utf-8")).text["curves"].count(said) == times
        assert lines({**found, "shortfalls": []}, folder).count(f"Training of {said}") == times


def test_rates_that_were_tried_are_shown_with_the_start_and_the_one_taken(tmp_path: Path) -> None:
    tried = [(0.0, 0.47), (3e-4, 0.45), (5.5e-3, 0.41), (0.1, None)]
    trained = {"lr": 5.5e-3, "rates": [{"rate": rate, "steps": 4, "held_out_loss": loss} for rate, loss in tried]}
    drawn = rates({"pruned": trained, "control": {"epochs": 1}})
    for text in ("Learning rates tried: pruned", "taken: 0.0055", ">start<", "held-out loss"):
        assert text in str(drawn)
    assert rates({"control": {"epochs": 1}}) is None
    said = "pruned: lr 0.0055 was taken of 3 tried (held-out loss 0.410; start 0.470)"
    folder, found = write_run(tmp_path / "run", only=("history",)), {**metrics(), "trainings": {"pruned": trained}}
    (folder / "metrics.json").write_text(json.dumps(found))
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert said in page.text["curves"]
    assert "taken: 0.0055" in page.text["curves"]
    unhelped = {"lr": 3e-4, "rates": [{**row, "held_out_loss": 0.5 + row["rate"]} for row in trained["rates"]]}
    unhelped["rates"][0]["held_out_loss"] = 0.4
    assert list(searched({"trainings": {"pruned": unhelped, "control": {"lr": 0.0055, "rates": []}}})) == [
        "pruned: lr 0.0003 was taken of 3 tried, the lowest, because none helped (held-out loss 0.500; start 0.400)",
        "control: lr 0.0055 was taken, the middle of its range: 5 % of the steps are too few to try others",
    ]


@pytest.mark.parametrize("batch", [16, 4])
def test_a_page_shows_one_speedup_for_a_model_and_the_target_of_its_budget(tmp_path: Path, batch: int) -> None:
    """Batch 16 is in the table of latencies as well, where another process measured 2.21 times."""
    channel_map: Any = None
    wanted = PruneSettings(BudgetSettings(speedup=2.0), target=Target(batch=batch))
    timing = Timing(19.0, 18.8, 19.2, 2.05, 2.02, 2.08, True, (), processes=5)
    result = LatencyResult(
        LatencyTarget(nn.Identity(), channel_map, channel_map, wanted, channel_map), (), True, timing
    )
    folder, found = write_run(tmp_path / "run", only=()), metrics()
    rows = [
        {"model": "pruned", "memory_format": form, "stable": True, "doubts": [], **row}
        for row in found["speedup"]
        for form in ("contiguous", "channels_last")
    ]
    report = result.in_place(LatencyReport((), tuple(rows), (), ()), "pruned")
    shown = [(row["median"], row["memory_format"]) for row in report.speedup if row["batch"] == 16]
    assert shown == [(2.05 if batch == 16 else 2.21, "contiguous"), (2.21, "channels_last")]
    found |= {"speedup": [row for row in report.speedup if row["memory_format"] == "contiguous"]}
    found["delivered"] = result.summary()
    (folder / "metrics.json").write_text(json.dumps(found))
    page = write_report(folder).read_text(encoding="utf-8")
    assert f"2.05× faster on this CPU (eager, batch {batch})" in page
    (tile,) = [tile for tile in tiles(found) if tile.label == "Speedup"]
    assert (tile.value, tile.detail) == ("2.05×", f"cpu, batch {batch}, 95 %: [2.02, 2.08]")
    assert "speedup 2.00× asked for, 2.05× [2.02, 2.08]" in page
    assert ("2.21×" in page) == (batch != 16)


def test_an_unstable_figure_is_marked_and_explained(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", only=())
    metrics = json.loads((folder / "metrics.json").read_text())
    doubts = {"stable": False, "doubts": ["threads oversubscribed; to settle it: an idle machine"]}
    setting = {"model": "pruned", "memory_format": "channels_last", "peak_memory_bytes": 61_100_000}
    metrics["speedup"][0] |= doubts | setting
    metrics["latency"][0] |= {"low_ms": 8.1, "high_ms": 9.9, "samples_per_s": 109.9} | doubts | setting
    metrics["machine"] = {
        "cpu": "Some CPU", "cores": 2, "clock_mhz": 2600.0, "clock_mhz_after": 1800.0, "load_average": [3.5, 2.7, 2.7],
        "other_busy_cores": 1.5, "busy_processes": [{"pid": 1, "name": "python", "cores": 1.5}],
    }  # fmt: skip
    (folder / "metrics.json").write_text(json.dumps(metrics))
    page = write_report(folder).read_text(encoding="utf-8")
    assert page.count("[8.10, 9.90] unstable") == 1
    assert page.count("[1.69, 1.80] unstable") == 1
    assert "Speedup unstable on this CPU (eager, batch 1)" in page
    assert not re.search(r"[\d.]+× (faster|slower)", page)
    assert '<div class="tile doubtful"><span><abbr' in page
    assert "float32 channels_last" in page
    assert "61.1 MB" in page
    assert (
        "unstable (eager, cpu, batch 1, 1 thread, float32 channels_last): latency of pruned, speedup of pruned: th"
        in page
    )
    assert "Some CPU, 2 cores, clock 2600 then 1800 MHz" in page
    assert "1.5 cores busy (python 1.5)" in page


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("metrics.json", "latency", [3], "metrics.json"),
        ("metrics.json", "accuracy", {"dense": 3}, "metrics.json"),
        ("metrics.json", "pruned", [1, 2], "metrics.json"),
        ("metrics.json", "speedup", "fast", "metrics.json"),
        ("status.json", "state", ["finished"], None),
        ("environment.json", "torch", 3, None),
    ],
)
def test_values_of_other_types_are_named_and_the_rest_is_shown(
    name: str, key: str, value: object, says: str | None, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", groups=2, only=())
    found = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps({**found, key: value}))
    said: list[str] = []
    page = write_report(run, whole=False, log=said.append)
    assert "<html" in page.read_text()
    assert says is None or any("not as prunekit writes" in each for each in said)


def test_a_table_of_text_in_place_of_numbers_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", groups=2, only=("history",))
    table = (run / "history.csv").read_text().splitlines()
    (run / "history.csv").write_text("\n".join([table[0], ",".join(["x"] * len(table[0].split(",")))]))
    said: list[str] = []
    page = write_report(run, whole=False, log=said.append)
    assert any("not as prunekit writes" in each for each in said)
    assert said[0] in html.unescape(page.read_text())


@pytest.mark.slow
def test_mutants_of_figures_are_shown_or_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", groups=2, only=())

    def read(mutant: bytes) -> None:
        (run / "metrics.json").write_bytes(mutant)
        write_report(run, whole=False)
        missing(run)

    assert unclean(read, changed_json(metrics(), 200, seed=50)) == []
