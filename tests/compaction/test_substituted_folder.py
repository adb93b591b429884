"""Folders of models with substituted attention or attributes set: the same model again, and nothing that misfits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import assert_unchanged, randomized, settled_plan, snapshot
from torch import nn
from torchvision.models import SwinTransformer, VisionTransformer
from torchvision.models.swin_transformer import SwinTransformerBlockV2

from prunekit.channels.tracing.substitutes import SizedAttention
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, read_manifest, save
from prunekit.errors import ArtifactError
from prunekit.utils.files import with_checksum


def small_swin(**options: Any) -> nn.Module:
    return SwinTransformer([4, 4], 12, [2, 2], [3, 6], [4, 4], num_classes=5, **options)


def small_vit() -> nn.Module:
    return VisionTransformer(32, 8, num_layers=2, num_heads=3, hidden_dim=12, mlp_dim=24, num_classes=5)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vit": small_vit,
    "swin": small_swin,
    "swin_v2": partial(small_swin, block=SwinTransformerBlockV2),
}


def saved(folder: Path, name: str) -> tuple[nn.Module, torch.Tensor]:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    dense = randomized(MODELS[name]()).eval()
    plan = settled_plan(dense, (images,), share=0.4)
    small = compact(dense, plan)
    save(small, folder, plan)
    return small, images


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_the_saved_one(name: str, tmp_path: Path) -> None:
    small, images = saved(tmp_path / "model", name)
    sized = {path for path, module in small.named_modules() if isinstance(module, SizedAttention)}
    assert sized
    assert sized <= read_manifest(tmp_path / "model")["attention_heads"].keys()
    loaded = load(tmp_path / "model", MODELS[name])
    assert [str(module) for module in loaded.modules()] == [str(module) for module in small.modules()]
    assert [type(module) for module in loaded.modules()] == [type(module) for module in small.modules()]
    assert_unchanged(loaded, snapshot(small))
    with torch.no_grad():
        assert torch.equal(loaded(images), small(images))


@pytest.mark.parametrize("entry", [
    ["Linear", 2], ["os.system", 2], ["MultiheadAttention", 0], ["MultiheadAttention", 5], ["MultiheadAttention"],
    ["MultiheadAttention", "2"], ["MultiheadAttention", True], [2, 2], None, "MultiheadAttention",
])  # fmt: skip
def test_heads_that_do_not_fit_are_refused(entry: Any, tmp_path: Path) -> None:
    saved(tmp_path / "model", "vit")
    manifest = read_manifest(tmp_path / "model")
    path = next(iter(manifest["attention_heads"]))
    for where in (path, "encoder", "nowhere"):
        manifest["attention_heads"] = {where: entry if where == path else ["MultiheadAttention", 2]}
        (tmp_path / "model" / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))
        with pytest.raises(ArtifactError, match="does not fit the model"):
            load(tmp_path / "model", small_vit)


class Own(nn.Module):
    """Attention of somebody's own, with its sizes in an attribute and in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.heads = 12, (4, 3)
        self.first, self.last = nn.Linear(6, 36), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(len(x), x.shape[1], *self.heads).transpose(1, 2) for part in self.first(x).chunk(3, -1))
        mixed = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2)
        return self.last(mixed.reshape(*x.shape[:2], self.width))


def test_attributes_that_were_set_are_set_again(tmp_path: Path) -> None:
    example = (torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0)),)
    dense = randomized(Own()).eval()
    plan = settled_plan(dense, example, share=0.5)
    small: Any = compact(dense, plan)
    assert (small.width, small.heads) == (2, (2, 1))
    save(small, tmp_path / "model", plan)
    manifest = read_manifest(tmp_path / "model")
    assert manifest["attributes"] == {"": {"width": 2, "heads": [2, 1]}}
    loaded: Any = load(tmp_path / "model", Own)
    assert (loaded.width, loaded.heads) == (2, (2, 1))
    with torch.no_grad():
        assert torch.equal(loaded(*example), small(*example))
    for wrong in (5, [], {"": 5}, {"": {"width": "6"}}, {"": {"forward": 6}}, {"nowhere": {"width": 6}},
                  {"": {"heads": [2]}}, {"": {"__class__": 6}}, {"": {"training": 1}}, {"": {"width": -1}},
                  {"": {"width": 10**30}}, {"": {"heads": [2, 0]}}):  # fmt: skip
        manifest["attributes"] = wrong
        (tmp_path / "model" / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))
        with pytest.raises(ArtifactError, match="does not fit the model"):
            load(tmp_path / "model", Own)
