"""Training in several processes that ends in the middle and goes on: the weights of one that does not, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import together
from torch import Tensor, nn
from training_models import CPU, Ends, EndsAfter, splits

from prunekit.distributed.process_group import rank
from prunekit.errors import ResumeError
from prunekit.settings.train import AverageSettings, CheckpointSettings, ClampSettings, TrainSettings
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit

SETTINGS = TrainSettings(
    epochs=3,
    lr=0.05,
    accumulate=2,
    average=AverageSettings(),
    clamp_activation_grad=ClampSettings(limit=0.002),
)


class Net(nn.Module):
    """BatchNorm sees a process's share, and dropout is drawn in each.

    DDP sums gradients in the order in which layers are made at first, and then in that in which gradients come.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(128, 4)

    def forward(self, images: Tensor) -> Any:
        return self.head(self.dropout(self.second(self.norm(self.first(images)).relu()).relu()).flatten(1))


def trained(folder: Path, ending: int | None, batch: int = 22) -> tuple[list[Tensor], list[Any]]:
    model, images = Net(), splits()
    checkpoints = Checkpoints(folder / str(rank()), CheckpointSettings(every_steps=1, keep=1), log=lambda _: None)
    parts = [*build_callbacks(SETTINGS, CallbackInputs(images, batch)), EndsAfter(ending or -1)]
    history = fit(
        model, images, SETTINGS, device=CPU, seed=1, batch=batch, callbacks=parts, checkpoints=checkpoints
    )  # fmt: skip
    rows = [(row.lr, row.train_loss, row.train_score, row.validation_loss, row.skipped) for row in history.rows]
    return list(model.state_dict().values()), [rows, history.best_epoch, history.clamps]


def resumed(folder: Path) -> dict[str, Any]:
    whole = trained(folder / "whole", None)
    for step in (2, 5):  # in the middle of an epoch, and after one
        try:
            trained(folder / "ended", step)
        except Ends:
            continue
    again = trained(folder / "ended", None)
    over = trained(folder / "ended", None)
    try:
        trained(folder / "ended", None, batch=11)
    except ResumeError as error:
        said = str(error)
    else:
        said = ""
    return {"whole": whole, "again": again, "over": over, "said": said}


@pytest.mark.slow
def test_what_ends_and_goes_on_is_bit_identical(tmp_path: Path) -> None:
    found = together(4, tmp_path, resumed, tmp_path / "runs")
    main = found[0]["whole"]
    assert len(main[1][0]) == 3
    for told in found:
        for name in ("whole", "again", "over"):
            weights, figures = told[name]
            assert all(torch.equal(one, other) for one, other in zip(weights, main[0], strict=True)), name
            assert figures == main[1], name
        assert "batch: 22 there, 11 here" in told["said"]
    assert {path.name for path in (tmp_path / "runs").glob("*/*")} == {"0"}  # the main process alone writes
