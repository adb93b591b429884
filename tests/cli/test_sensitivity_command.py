"""`prunekit sensitivity` on the embedded digits and on a net of the user's own, with good and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prunekit.cli import cli

RECIPE = """
name: mine
model: {name: squeezenet1_1}
baseline: {epochs: 1, lr: 0.1}
data: {image_size: 8, batch: 64}
calibration: {images: 48}
device: cpu
threads: 1
"""
CODE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.inner = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 12, 3)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        print("chatter")
        x = self.inner(self.norm(self.stem(x)).relu()).relu()
        return self.head(x.mean((2, 3)))


class Wrong(Net):
    def forward(self, x):
        return {"scores": super().forward(x)}


class Broken(Net):
    def forward(self, x):
        x = self.inner(self.norm(self.stem(x)).relu()).relu()
        return self.head((x if self.training else x / 0).mean((2, 3)))
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["sensitivity", *arguments])


OWN = ("mine.yaml", "--model", "own.py:Net")


@pytest.mark.slow
def test_fast_curves_as_a_table_and_as_files(here: Path) -> None:
    done = run(*OWN)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[2].split("  ")[1:2] == ["group"]
    assert {line.split()[0] for line in lines[3:5]} == {"stem", "inner"}
    assert "Rank correlation" not in done.stdout
    assert "measured" not in done.stdout.replace("measured on", "")
    folder = Path(lines[-1].removeprefix("Report: ")).parent
    assert sorted(path.name for path in folder.iterdir()) == [
        "environment.json",
        "log.txt",
        "recipe.yaml",
        "report.html",
        "sensitivity.csv",
        "sensitivity.json",
        "status.json",
    ]
    header = (folder / "sensitivity.csv").read_text().splitlines()[0]
    assert header == "group,module,kept,channels,macs_saved,error_fast,error_total,error_measured,kl,loss"
    assert "2 channel groups, 48 samples; Gram matrices of" in (folder / "log.txt").read_text()


@pytest.mark.slow
def test_measured_curves_as_one_json_object(here: Path) -> None:
    done = run(*OWN, "--measured", "--json", "--seed", "1", "--output", "elsewhere", "calibration.images=32")
    assert done.exit_code == 0, done.output
    payload = json.loads(done.stdout)
    assert "chatter" in done.stderr
    assert "measuring takes 15 forward passes" in done.stderr
    assert Path(payload["folder"]).is_relative_to("elsewhere")
    assert payload["measured_images"] == 32
    assert [group["channels"] for group in payload["groups"]] in ([8, 12], [12, 8])
    assert [point["kept"] for point in payload["measured"]["stem"]] == list(range(8, 0, -1))
    assert payload["measured"]["stem"][0] == {"kept": 8, "error": 0.0, "kl": 0.0, **payload["dense"]}
    assert payload["agreement"] == pytest.approx(1) or payload["agreement"] == pytest.approx(-1)
    assert len(payload["fast"]["inner"]["errors"]) == 12
    page = (Path(payload["folder"]) / "report.html").read_text()
    assert '<span class="state finished">finished</span>' in page
    again = run(*OWN, "--measured", "--groups", "stem", "--groups", "s*")
    assert again.exit_code == 0, again.output
    assert "Dense model on 48 validation images: top-1" in again.stdout
    assert "inner" not in again.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((*OWN, "--groups", "stam"), 2, "groups: 'stam' matches no channel group; did you mean 'stem'?"),
        ((*OWN, "--groups", "head"), 2, "groups: 'head' matches no channel group; expected one of 'inner', 'stem'"),
        ((*OWN, "calibration.images=0"), 2, "calibration.images"),
        ((*OWN, "calibration.images=1"), 2, "calibration: expected at least 8 images"),
        (("none.yaml",), 2, "none.yaml"),
        (("mine.yaml", "--model", "own.py:Wrong"), 2, "expected a model that returns class logits"),
        (("mine.yaml", "baseline.epochs=0", "--model", "own.py:Broken", "--measured"), 1, "reads NaN or Inf"),
    ],
)
def test_bad_input_is_one_message_and_an_exit_code(
    here: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert code == 1 or not (here / "runs").exists()
