"""The log of a training, read back from its files as TensorBoard reads them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from torch import nn
from training_models import CPU, net, splits

import prunekit
from prunekit.planning.plan import Plan
from prunekit.settings.train import AverageSettings, CheckpointSettings, ClampSettings, TrainSettings, WatchSettings
from prunekit.training.callbacks.callback import Callback, ContextCallback, History
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.callbacks.tensorboard import TensorBoardLogger
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit

SETTINGS = TrainSettings(
    epochs=3,
    lr=0.05,
    average=AverageSettings(decay=0.9),
    clamp_weight_grad=ClampSettings(limit=0.01),
    precision="bf16",
)
WATCH = WatchSettings()


def read(folder: Path) -> EventAccumulator:
    everything = dict.fromkeys(("scalars", "tensors"), 0)
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def pruned() -> tuple[nn.Sequential, Plan]:
    model = net()
    return model, prunekit.plan(model, (torch.zeros(2, 3, 8, 8),), channels=0.5)


def train(
    folder: Path, watch: WatchSettings | None, *, checkpoints: Checkpoints | None = None, stop: Callback | None = None
) -> tuple[nn.Module, Plan, History]:
    model, plan = pruned()
    images = splits()
    parts: list[Callback] = [ContextCallback(lambda training: prunekit.masked(model, plan, training.optimizer))]
    parts += build_callbacks(SETTINGS, CallbackInputs(images, 16, masks=lambda: plan))
    if watch is not None:
        parts.insert(0, TensorBoardLogger(watch, folder / "events", folder / "scalars.csv", lambda: plan))
    parts += [] if stop is None else [stop]
    history = fit(
        model, images, SETTINGS, device=CPU, seed=1, batch=16, callbacks=parts, checkpoints=checkpoints, label="watched"
    )
    return model, plan, history


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, Plan, History]:
    folder = tmp_path_factory.mktemp("watched")
    return folder, *train(folder, WATCH)


def test_scalars_of_epochs_layers_and_clamps_are_read_back(
    watched: tuple[Path, nn.Module, Plan, History],
) -> None:
    folder, model, plan, history = watched
    events = read(folder / "events")
    for tag, name in (("loss/train", "train_loss"), ("top1/validation", "validation_top1"), ("lr", "lr")):
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert found == [(row.epoch, pytest.approx(row.figures()[name])) for row in history.rows]
    layers = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    zeros = {name: 1 - plan.channel_map.parameters_kept(plan.keep, [name]) / p.numel() for name, p in layers.items()}
    for name, share in zeros.items():
        assert share > 0.3
        values = [event.value for event in events.Scalars(f"sparsity/{name.removesuffix('.weight')}")]
        assert values == [pytest.approx(share)] * 3
    sizes = [parameter.numel() for parameter in layers.values()]
    overall = np.average(list(zeros.values()), weights=sizes)
    assert events.Scalars("sparsity/all")[0].value == pytest.approx(overall)
    for row in history.clamps:  # in each epoch as many values are looked at
        shares = [event.value for event in events.Scalars(f"clamped/{row.clamp}/{row.module}")]
        assert len(shares) == 3
        assert np.mean(shares) == pytest.approx(row.share)
        assert len(set(shares)) > 1
    with (folder / "scalars.csv").open(newline="") as file:
        rows = [(row["tag"], int(row["epoch"]), float(row["value"])) for row in csv.DictReader(file)]
    tags = events.Tags()["scalars"]
    assert {(tag, epoch) for tag, epoch, _ in rows} == {
        (tag, event.step) for tag in tags for event in events.Scalars(tag)
    }
    values = {(tag, epoch): value for tag, epoch, value in rows}
    assert all(values[tag, e.step] == pytest.approx(e.value) for tag in tags for e in events.Scalars(tag))


def test_scalars_that_belong_together_share_a_chart(watched: tuple[Path, nn.Module, Plan, History]) -> None:
    events = read(watched[0] / "events")
    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert charts["loss"] == ["loss/.*"]
    assert charts["sparsity"] == ["sparsity/.*"]


def test_nothing_is_drawn_or_trained_otherwise_without_it(
    watched: tuple[Path, nn.Module, Plan, History], tmp_path: Path
) -> None:
    model, _, _ = train(tmp_path / "none", None)
    for name, value in watched[1].state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert not (tmp_path / "none").exists()
    train(tmp_path / "table", WatchSettings(tensorboard=False))
    assert [path.name for path in (tmp_path / "table").iterdir()] == ["scalars.csv"]
    lines = [(folder / "scalars.csv").read_text().splitlines() for folder in (watched[0], tmp_path / "table")]
    values = [[line for line in found if line.split(",")[1] not in ("seconds", "images_per_s")] for found in lines]
    assert values[0] == values[1]
    assert len(values[0]) > 30


class Stops(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def after_step(self, step: int, made: bool) -> None:
        if step == self.at:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_resumed_training_is_seen_once(watched: tuple[Path, nn.Module, Plan, History], tmp_path: Path) -> None:
    """It stops in epoch 2, behind its first step and a checkpoint; epoch 1 is there already, in another file."""

    def checkpoints() -> Checkpoints:
        return Checkpoints(tmp_path / "checkpoints", CheckpointSettings(every_steps=1))

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, WATCH, checkpoints=checkpoints(), stop=Stops(7))
    left = read(tmp_path / "events")
    assert [event.step for event in left.Scalars("loss/train")] == [1]
    left_writer = TensorBoardLogger(WATCH, tmp_path / "events", tmp_path / "scalars.csv")
    left_writer.load_state_dict({"events": {"epoch": 1}, "clamped": {}})
    left_writer.scalars(watched[3].rows[1])  # as if it had come further than its checkpoint
    left_writer.close()
    train(tmp_path, WATCH, checkpoints=checkpoints(), stop=Stops(0))
    events, whole = read(tmp_path / "events"), read(watched[0] / "events")
    for tag in whole.Tags()["scalars"]:
        here, there = ([(e.step, e.value) for e in found.Scalars(tag)] for found in (events, whole))
        assert here == there or tag in ("seconds", "images_per_s"), tag
    tables = [(folder / "scalars.csv").read_text().splitlines() for folder in (tmp_path, watched[0])]
    first, second = ([line.split(",")[:2] for line in table] for table in tables)
    assert first == second


def test_a_full_disk_ends_the_watching_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    part = TensorBoardLogger(
        WatchSettings(tensorboard=False), tmp_path / "file", tmp_path / "file" / "t.csv", warn=said.append
    )
    history = fit(net(), splits(), TrainSettings(epochs=2), device=CPU, seed=1, batch=16, callbacks=[part])
    assert len(history.rows) == 2
    assert len(said) == 1
    assert "no more is written of this training, which goes on" in said[0]
