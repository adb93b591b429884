"""MACs, parameters and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

import prunekit
from prunekit.measure.model_size import count_macs, count_parameters, size_bytes


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("model", "shape", "macs"),
    [
        (nn.Linear(5, 7), (5,), 35),
        (nn.Conv2d(4, 6, 3, padding=1), (4, 8, 8), 4 * 6 * 9 * 64),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 8, 8), 4 * 9 * 64),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)), (3, 2, 2), 48 + 32),
        (nn.LSTM(6, 16, batch_first=True), (5, 6), 4 * 16 * (6 + 16) * 5),
        (nn.GRU(6, 16, batch_first=True), (5, 6), 3 * 16 * (6 + 16) * 5),
    ],
)
def test_macs_of_one_sample(model: nn.Module, shape: tuple[int, ...], macs: int, batch: int) -> None:
    assert count_macs(model, (torch.zeros(batch, *shape),)) == macs


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].eval()
    before = model[1].running_mean.clone()
    count_macs(model, (torch.ones(2, 4),))
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert torch.equal(model[1].running_mean, before)


@pytest.mark.skipif(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry,
    reason="this torch's FlopCounterMode does not know the CPU's attention kernel",
)
def test_attention_is_counted_whole() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    n, width, hidden = 5, 8, 16
    projections, attention, feed_forward = 4 * n * width * width, 2 * n * n * width, 2 * n * width * hidden
    assert torch.backends.mha.get_fastpath_enabled()
    assert count_macs(layer, (torch.zeros(2, n, width),)) == projections + attention + feed_forward
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_shared_parameter_counts_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert count_parameters(model) == 9 + 3 + 3


def test_bytes_of_a_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "deep" / "b").write_bytes(b"123")
    assert size_bytes(tmp_path / "a") == 5
    assert size_bytes(tmp_path) == 8


class ConstantInput(nn.Module):
    """As StyleGAN's: the first layer is given a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.ones(8, 4, 4))
        self.first = nn.Sequential(nn.Identity(), nn.Conv2d(8, 6, 3, padding=1))
        self.last = nn.Linear(6, 2)

    def forward(self, style: Tensor) -> Tensor:
        maps = self.first(self.constant[None].expand(len(style), -1, -1, -1))
        return self.last(maps.mean((2, 3)) * style)


def test_a_view_of_a_parameter_is_an_input_like_any_other() -> None:
    model, style = ConstantInput(), torch.ones(3, 6)
    macs = 8 * 6 * 9 * 16 + 12
    assert count_macs(model, (style,)) == macs
    table = prunekit.summary(model, style)
    assert {row.path: row.macs for row in table.modules if row.macs} == {"first.1": macs - 12, "last": 12}
    assert table.macs == macs
