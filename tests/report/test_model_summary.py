"""The table of modules: MACs and parameters are torch's own counts, each counted once, in order of execution."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import VisionTransformer, mobilenet_v3_small, resnet18

import prunekit
from prunekit.channels.tracing.execution import plain_attention
from prunekit.cli import cli
from prunekit.errors import ModelError
from prunekit.hooks.hook import count_hooks
from prunekit.utils.display import count


def vit() -> nn.Module:
    return VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "size", "batch"),
    [(resnet18, 32, 1), (mobilenet_v3_small, 32, 2), (vit, 32, 2)],
    ids=["resnet18", "mobilenet_v3_small", "vit"],
)
def test_totals_are_torch_s_own_counts(build: Callable[[], nn.Module], size: int, batch: int) -> None:
    model, images = build().eval(), torch.randn(batch, 3, size, size)
    found = prunekit.summary(model, images)
    with torch.no_grad(), plain_attention(), FlopCounterMode(display=False) as counter:
        model(images)
    assert found.macs * batch * 2 == counter.get_total_flops() > 0
    assert sum(row.macs for row in found.modules) == found.macs
    total = sum(parameter.numel() for parameter in model.parameters())
    assert found.params == found.trainable == sum(row.params for row in found.modules) == total
    assert found.peak_bytes is not None
    assert found.weight_bytes < found.peak_bytes <= found.weight_bytes + images.nbytes + 2 * found.activation_bytes
    assert count_hooks(model) == 0


class Odd(nn.Module):
    """A stem that is called twice, a weight that is tied, one that is used without its module, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 8)
        self.stem = nn.Conv2d(8, 8, 3, padding=1)
        self.first = nn.Conv2d(3, 8, 1)
        self.relu = nn.ReLU(inplace=True)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        found = self.relu(self.first(images))
        found = self.stem(self.stem(found)).flatten(2).transpose(1, 2) * self.scale
        found = self.attention(found, found, found)[0].mean(1)
        return torch.as_tensor(self.tied(self.head(found)) @ self.head.weight)


def test_rows_are_in_order_of_execution_and_count_everything_once() -> None:
    model, images = Odd().train(), torch.randn(1, 3, 4, 4)
    found = prunekit.summary(model, images)
    rows = {row.path: row for row in found.modules}
    assert list(rows) == [
        "", "first", "relu", "stem", "attention", "attention.out_proj", "head", "tied", "unused"
    ]  # fmt: skip
    assert (rows["stem"].calls, rows["stem"].params, rows["stem"].macs) == (2, 584, 2 * 16 * 8 * 72)
    assert (rows["stem"].inputs, rows["stem"].outputs) == (((1, 8, 4, 4),), ((1, 8, 4, 4),))
    assert rows["stem"].activation_bytes == 2 * 4 * 8 * 16
    assert rows["relu"].activation_bytes == 0  # in place
    assert (rows["tied"].params, rows["tied"].shared_params) == (0, 64)
    assert rows["attention"].macs == 4 * 16 * 64 + 2 * 16 * 16 * 8  # four projections, scores and values
    assert (rows["attention.out_proj"].calls, rows["attention.out_proj"].params) == (0, 72)
    assert (rows[""].params, rows[""].trainable, rows[""].macs) == (8, 0, 64)  # the product in its own forward
    assert (rows["unused"].calls, rows["unused"].outputs) == (0, ())
    assert found.params == sum(row.params for row in found.modules) == sum(p.numel() for p in model.parameters())
    assert found.params - found.trainable == 8
    assert model.training
    text = str(found)
    assert "0 (+64 shared)" in text
    assert f"Odd: {count(found.params)} parameters (8 frozen)" in text


def test_masked_and_compact_models(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval()
    images = torch.randn(1, 3, 8, 8)
    dense = prunekit.summary(model, images)
    pruned = prunekit.prune(model, (images,), channels=0.5)
    with prunekit.masked(model, pruned.plan):
        masked = prunekit.summary(model, images)
    compact = prunekit.summary(pruned.model, images, name="compact")
    assert [(row.path, row.macs, row.params) for row in masked.modules] == [
        (row.path, row.macs, row.params) for row in dense.modules
    ]
    assert (compact.macs, dense.macs) == (4 * 36 * 27 + 4 * 36 * 10, 8 * 36 * 27 + 8 * 36 * 10)
    assert compact.modules[0].outputs == ((1, 4, 6, 6),)
    with compact.to_csv(tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert next((row["path"], row["outputs"], int(row["macs"])) for row in rows) == ("0", "1x4x6x6", 4 * 36 * 27)
    html = compact.to_html()
    assert html.count("<tr>") == 1 + len(compact.modules)
    assert "<code>4</code>" in html
    assert "default-src 'none'" in html


def test_a_model_that_does_not_run_is_named_with_the_module() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(4, 8, 3))
    with pytest.raises(ModelError, match=r"does not run on float32 \(1, 3, 8, 8\) \(in 1\): RuntimeError"):
        prunekit.summary(model, torch.zeros(1, 3, 8, 8))
    assert count_hooks(model) == 0


def test_float64_has_no_peak_and_a_mapping_of_inputs_will_do() -> None:
    found = prunekit.summary(nn.Linear(4, 2).double(), {"input": torch.zeros(3, 4, dtype=torch.float64)})
    assert (found.peak_bytes, found.macs, found.batch, found.activation_bytes) == (None, 8, 3, 3 * 2 * 8)


def test_the_command_prints_and_writes_it(tmp_path: Path) -> None:
    arguments = ["inspect", "resnet20", "--zoo", "cifar", "--layers", "--output", str(tmp_path), "--json"]
    done = CliRunner().invoke(cli, [*arguments, "--input-shape", "1x3x16x16"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["rows"][0]["path"] == "conv1"
    assert result["macs"] == sum(row["macs"] for row in result["rows"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers.csv", "layers.html", "layers.json"]
    assert (tmp_path / "layers.html").read_text().count("<tr>") == 1 + len(result["rows"])
