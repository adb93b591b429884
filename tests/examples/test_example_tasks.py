"""Every example is a task from a trained model to a smaller one; some as whole jobs of the command line."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentences
import speech
import torch
from click.testing import CliRunner
from drawings import CLASSES, SIZE, draw
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import prunekit as pk
from prunekit.cli import cli
from prunekit.data.loader import batches
from prunekit.data.user_data import sample_splits
from prunekit.measure.accuracy import evaluate
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.train import TrainSettings
from prunekit.training.loop import fit
from prunekit.utils.inputs import inputs_as_example

CPU = torch.device("cpu")
EXAMPLES = ("unet", "pose", "depth", "super_resolution", "speech", "sentences")
FILES = Path(inspect.getfile(sentences)).parent
RECIPE = """
name: NAME
task: python:NAME:task
model: {name: own, zoo: own}
data: {source: own, batch: 32}
calibration: {images: 16}
prune: {budget: {macs: 0.5}}
repair: {joint_steps: 0}
baseline: {epochs: 1, optimizer: adamw, lr: 3e-3}
finetune: {epochs: 1, optimizer: adamw, lr: 1e-3}
control: false
latency: {batches: [1], threads: [1], repeats: 5, explain: false}
device: cpu
threads: 1
"""


def own(name: str) -> list[str]:
    parts = (f"python:{name}:{part}" for part in ("model", "data"))
    return ["--model", next(parts), "--data", next(parts), "--allow-code"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_pruned_repaired_and_trained_on(name: str) -> None:
    example = importlib.import_module(name)
    torch.manual_seed(0)
    model, task, (train, test) = example.model(), example.task(), example.data()
    few = Subset(train, range(24))
    splits = sample_splits({"train": few, "test": Subset(test, range(16))}, task)
    # 3 validation samples may be all right from the beginning, which no epoch beats then
    splits = replace(splits, validation=splits.train)
    dense = fit(model, splits, TrainSettings(epochs=2, optimizer="adamw", lr=3e-3), device=CPU, seed=0, batch=8)
    model.eval()

    found = pk.prune(model, calibration=few, macs=0.5, task=task, repair=RepairSettings(joint_steps=0))
    assert found.plan.channel_map.macs(found.plan.keep) <= 0.5 * found.plan.channel_map.macs()
    assert found.max_relative_difference < 1e-12
    assert found.repair is not None
    assert found.repair.after < 0.7 * found.repair.before  # from 21 samples
    inputs, _ = task.unpacking(next(iter(DataLoader(test, 4))))
    proof = pk.verify(found.masked, found.model, found.plan, inputs_as_example(model, inputs))
    assert proof.max_relative_difference < 1e-12
    assert proof.dtype == "float64"

    settings = TrainSettings(epochs=3, optimizer="adamw", lr=3e-4)
    history = fit(found.model, splits, settings, device=CPU, seed=0, batch=8)
    assert history.rows[-1].train_loss < dense.rows[0].train_loss
    scores = evaluate(found.model, batches(splits.test, 8, shuffle_seed=None), task, CPU)
    assert scores.values.keys() == {score.name for score in task.scores}
    assert np.isfinite(list(scores.values.values())).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_task_takes_twenty_lines_at_most(name: str) -> None:
    """What a user would write: the functions behind the model and the data, and the task."""
    example = importlib.import_module(name)
    source = inspect.getsource(example.task)
    used = [example.task]
    for word in re.findall(r"\w+", source):
        found = getattr(example, word, None)
        if inspect.isfunction(found) and found.__module__ == example.__name__ and found not in used:
            used.append(found)
    lines = [line for each in used for line in inspect.getsource(each).splitlines() if line.strip()]
    assert len(lines) <= 20 + 2 * len(used)  # without docstrings of a line and the functions' first lines


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize("name", ["unet", "super_resolution", "speech"])
def test_an_example_is_a_job_from_the_recipe_to_the_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example = importlib.import_module(name)
    small = tuple(Subset(part, range(count)) for part, count in zip(example.data(), (48, 8), strict=True))
    monkeypatch.setattr(example, "data", lambda: small)
    Path("mine.yaml").write_text(RECIPE.replace("NAME", name))
    done = CliRunner().invoke(cli, ["finetune", "mine.yaml", *own(name), "--json"])
    metrics = json.loads(done.stdout)
    missed = [line for line in metrics["shortfalls"] if "always answering" not in line]  # hardly trained
    assert missed == []
    assert done.exit_code == bool(metrics["shortfalls"]), done.output
    main = example.task().main
    assert metrics["parity"]["max_relative_difference"] < 1e-9
    assert metrics["latency_failures"] == []
    assert metrics["pruned"]["macs"] <= 0.5 * metrics["dense"]["macs"]
    folder = next(Path("runs", name).glob("2*"))
    page = (folder / "report.html").read_text()
    samples = example.task().samples
    assert f"{main.label[:1].upper()}{main.label[1:]} on the test {samples}" in page
    assert "top-1" not in page.lower()
    assert "top1" not in (folder / "metrics.json").read_text()
    assert samples == "images" or not re.search(r"\d (test |training |validation )?images", page)
    shown = f"{metrics['pruned'][main.name]:.2f} {main.unit}"
    assert shown in page
    assert main.unit == "%" or f"{metrics['pruned'][main.name]:.2f} %" not in page
    again = CliRunner().invoke(cli, ["evaluate", str(folder / "model"), "--recipe", "mine.yaml", *own(name)])
    assert again.exit_code == 0, again.output
    assert f"{main.label} {shown}" in again.stdout


def test_scenes_show_what_their_targets_say() -> None:
    scene, again = draw(3), draw(3)
    assert torch.equal(scene.image, again.image)
    assert not torch.equal(scene.image, draw(4).image)
    assert {*scene.mask.unique().tolist()} <= {*range(len(CLASSES))}
    ground = scene.mask == 0
    assert scene.depth[0, 0, 0] > scene.depth[0, -1, 0]
    assert (scene.depth[0][~ground] <= 2).all()
    assert ((scene.centers > 0) & (scene.centers < SIZE)).all()


def test_edits_are_counted_as_levenshtein_does() -> None:
    assert speech.distance([1, 2, 3], [1, 2, 3]) == 0
    assert speech.distance([], [1, 2]) == 2
    assert speech.distance([1, 3], [1, 2, 3]) == 1
    assert speech.distance([4, 2, 3, 5], [1, 2, 3]) == 2


def test_the_correlation_of_batches_is_that_of_all() -> None:
    torch.manual_seed(0)
    pairs, alike = torch.randn(40, 2, 8), torch.rand(40)
    counts = sum(sentences.counts(*part) for part in zip(pairs.split(7), alike.split(7), strict=True))
    want = float(np.corrcoef(sentences.cosine(pairs).numpy(), alike.numpy())[0, 1])
    assert sentences.task().score(counts) == {"pearson": pytest.approx(100 * max(0.0, want))}
    assert sentences.pearson(torch.tensor([4.0, 2, 1, 1, 3, 0.5])) == 0.0  # one side is constant


class Multiple(nn.Module):
    """Scores choices (B, choices, T) of which padding is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(20, 12), nn.Linear(12, 16), nn.Linear(16, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.flatten(0, 1)[..., None]
        states = self.first(self.table(input_ids.flatten(0, 1))).relu()
        scores: Tensor = self.last((states * mask).sum(1) / mask.sum(1)).view(input_ids.shape[:2])
        return scores


def test_padding_of_several_texts_for_each_sample_is_left_out() -> None:
    torch.manual_seed(0)
    model = Multiple().eval()
    mask = (torch.arange(6) < torch.randint(2, 7, (24, 3, 1))).long()
    ids = torch.randint(1, 20, (24, 3, 6)) * mask
    other = ids.masked_fill(mask == 0, 7)  # what stands at padding changes nothing
    data = [{"input_ids": each, "attention_mask": mask} for each in (ids, other)]
    first, second = (pk.calibrate(model, each) for each in data)
    key = next(key for key in first if key.module == "first" and key.side == "output")
    np.testing.assert_allclose(first[key].mean, second[key].mean, rtol=1e-6)
    assert first[key].count[0] == int(mask.sum())
    found = [pk.prune(model, calibration=each, macs=0.5).model(ids, mask) for each in data]
    torch.testing.assert_close(*found)
