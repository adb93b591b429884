"""What commands that look into models know of a pruned one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prunekit
from prunekit.errors import UsageError
from prunekit.inspection.visualize.feature_maps import feature_maps
from prunekit.jobs.run.command_subject import Subject
from prunekit.jobs.run.model_pair import load_model_pair, single_model

CODE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.attention = nn.Conv2d(3, 8, 4, 4), nn.MultiheadAttention(8, 4, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))
"""


def test_channels_of_packed_projections_stand_where_the_dense_ones_do(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    names: dict[str, type[nn.Module]] = {}
    exec(CODE, names)
    model, example = names["Net"]().eval(), torch.rand(1, 3, 16, 16)
    pruned = prunekit.prune(model, (example,), channels=0.5)
    prunekit.save(pruned.model, tmp_path / "model", pruned.plan)
    sides = load_model_pair(tmp_path / "model", factory=f"{tmp_path / 'own.py'}:Net")
    name = "attention.in_proj_weight"
    rows = sides.rows[name]
    assert (len(rows), int(rows.sum())) == (24, len(pruned.plan.kept(name, 0)))
    assert 0 < rows.sum() < 24
    models: dict[str, nn.Module] = {"dense": model, "pruned": sides.models["pruned"]}
    (found,) = feature_maps(models, example, [name], kept=sides.kept)
    shown: Tensor = found.sides["pruned"]
    assert np.array_equal(~shown.isnan().flatten(1).any(1).numpy(), rows)
    assert found.note == ""


def test_an_image_becomes_an_input_of_the_models_channels() -> None:
    gray, four = (single_model(Subject(nn.Identity(), "net", shape)) for shape in ((1, 8, 12), (4, 8, 8)))
    feed = gray.image_conversion
    assert (feed.height, feed.width, feed.shorter_side, len(feed.mean), len(feed.std)) == (8, 12, 14, 1, 1)
    with pytest.raises(UsageError, match="takes images of 1 or 3 channels, but it takes 4 x 8 x 8"):
        _ = four.image_conversion
