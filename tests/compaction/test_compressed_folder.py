"""Model folders whose zeros are bits: the same model bit for bit, for every reader, and damage that is named."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import assert_unchanged, randomized, settled_plan, snapshot
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import VisionTransformer

import prunekit as pk
from prunekit.backends.files.export_source import ExportSource
from prunekit.backends.hub import Hub
from prunekit.backends.standalone import Standalone
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, read_manifest, save
from prunekit.errors import ArtifactError
from prunekit.jobs.run.subject_sources import folder_model
from prunekit.models.interface import interface_of
from prunekit.models.state_dicts import load_weights
from prunekit.models.zoo import build_model
from prunekit.planning.plan import Plan, load_plan
from prunekit.settings.inputs import ModelSettings
from prunekit.utils.files import sha256, with_checksum

PAGE = (Path(pk.__file__).parent / "guide" / "reference" / "model_folder.md").read_text(encoding="utf-8")
EXAMPLE = (torch.zeros(1, 3, 32, 32),)


def vit() -> nn.Module:
    return VisionTransformer(32, 8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=5)


def with_zeros(model: nn.Module, share: float = 0.5) -> nn.Module:
    """The model with zeros in its matrices and kernels, in place."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter[torch.rand(parameter.shape) < share] = 0
    return model


@cache
def small(name: str) -> tuple[nn.Module, Plan, ModelSettings | None]:
    """A compact model whose plan prunes channels, and single weights in what is left."""
    settings = None if name == "vit" else ModelSettings(name, "cifar", arguments={"num_classes": 5})
    model = randomized(vit() if settings is None else build_model(settings, num_classes=None)).eval()
    settled = settled_plan(model, EXAMPLE)
    torch.manual_seed(0)
    matrices = {key: tensor for key, tensor in model.named_parameters() if tensor.ndim > 1}
    masks = {key: torch.rand(tensor.shape) < 0.5 for key, tensor in matrices.items()}
    plan = Plan(settled.channel_map, settled.keep, {"criterion": "none"}, masks)
    plan.zero(model)
    return compact(model, plan), plan, settings


def sizes(*folders: Path) -> list[int]:
    return [(folder / "model.safetensors").stat().st_size for folder in folders]


@pytest.mark.parametrize("name", ["resnet8", "resnet20", "vit"])
def test_a_model_returns_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, plan, settings = small(name)
    dense = None if settings else vit
    for folder, compress in (("plain", False), ("bits", True)):
        assert save(model, tmp_path / folder, plan, build=settings, compress=compress) == tmp_path / folder
        loaded = load(tmp_path / folder, dense)
        assert_unchanged(loaded, snapshot(model))
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.equal(loaded(images), model(images))
    entries = sum(tensor.numel() for tensor in model.parameters() if tensor.ndim > 1)
    kept = sum(int(tensor.count_nonzero()) for tensor in model.parameters() if tensor.ndim > 1)
    plain, bits = sizes(tmp_path / "plain", tmp_path / "bits")
    saved = 4 * (entries - kept) - entries / 8
    assert 0.45 < kept / entries < 0.55
    assert saved * 0.9 - 8_000 < plain - bits < saved  # two entries in the header, and what is too small for that
    assert read_manifest(tmp_path / "bits")["compression"] == "bitmask"
    assert read_manifest(tmp_path / "bits")["format"] == 2
    assert load_plan(tmp_path / "bits").digest == plan.digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    model, plan, settings = small("resnet8")
    model = pk.channels_last(model.to(dtype), torch.zeros(1, 3, 32, 32, dtype=dtype))
    save(model, tmp_path / "bits", plan, build=settings, compress=True)
    loaded = load(tmp_path / "bits")
    small.cache_clear()
    assert_unchanged(loaded, snapshot(model))
    assert loaded.conv1.weight.stride() == model.conv1.weight.stride()  # type: ignore[union-attr, operator]
    assert not loaded.conv1.weight.is_contiguous()  # type: ignore[union-attr, operator]


def test_a_model_without_zeros_is_the_plain_folder(tmp_path: Path) -> None:
    dense = randomized(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 30)))
    plan = settled_plan(dense, (torch.randn(2, 6),))
    for folder, compress in (("plain", False), ("bits", True)):
        save(compact(dense, plan), tmp_path / folder, plan, compress=compress)
    names = ("model.safetensors", "prunekit.json")
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "bits" / name).read_bytes()


class Odd(nn.Module):
    """Tied weights, a sparse buffer, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 3)
        self.b.weight = self.a.weight
        places = torch.zeros(2, 300, dtype=torch.int64)
        graph = torch.sparse_coo_tensor(places, torch.ones(300), (400, 400), check_invariants=True)
        self.register_buffer("graph", graph)
        self.register_buffer("seen", torch.zeros(2000, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.b(self.a(x).relu()).relu())


def test_tied_sparse_and_integer_tensors(tmp_path: Path) -> None:
    dense = with_zeros(Odd())
    plan = settled_plan(dense, (torch.randn(2, 40),))
    model: Any = compact(dense, plan)
    save(model, tmp_path / "bits", plan, compress=True)
    with safe_open(tmp_path / "bits" / "model.safetensors", "pt") as file:
        shapes = json.loads(file.metadata()["compression"])["dense_shapes"]
    assert {"a.weight", "graph:0", "seen"} <= shapes.keys()
    loaded: Any = load(tmp_path / "bits", Odd)
    assert loaded.a.weight is loaded.b.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].to_dense(), tensor.to_dense()), name
    assert loaded.graph.layout == torch.sparse_coo
    assert pk.stored_sizes(tmp_path / "bits").rows() == pk.stored_sizes(model).rows()


def test_the_reader_of_the_guide_reads_the_same(tmp_path: Path) -> None:
    model, plan, settings = small("resnet8")
    folders = [save(model, tmp_path / str(how), plan, build=settings, compress=how) for how in (False, True)]
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "def read(path)" in code)
    names: dict[str, Any] = {}
    exec(block.partition("\nprint(")[0], names)
    for folder in folders:
        found = names["read"](folder / "model.safetensors")
        assert found.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert found[name].tobytes() == tensor.numpy().tobytes(), name
            assert found[name].shape == tensor.shape


def test_exports_and_other_readers_get_plain_weights(tmp_path: Path) -> None:
    model, plan, settings = small("resnet8")
    folder = save(model, tmp_path / "bits", plan, build=settings, compress=True)
    target = folder_model(folder)
    source = ExportSource(target.model, EXAMPLE, interface_of(target.model, EXAMPLE), folder=folder)
    for write, name in ((Hub(), "hub"), (Standalone(), "standalone")):
        write.write(source, tmp_path / name)
        assert load_file(tmp_path / name / "model.safetensors").keys() == model.state_dict().keys()
        with torch.no_grad():
            assert torch.equal(write.open(tmp_path / name)(EXAMPLE)[0], model(*EXAMPLE))
    assert_unchanged(load(tmp_path / "hub"), snapshot(model))
    assert read_manifest(tmp_path / "hub")["format"] == 1
    other = load(folder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(3)
    load_weights(other, folder / "model.safetensors")
    assert_unchanged(other, snapshot(model))


def rewrite(folder: Path, **values: Any) -> None:
    path = folder / "prunekit.json"
    path.write_text(json.dumps(with_checksum({**json.loads(path.read_text()), **values})))


def test_damage_names_the_file_and_leaves_no_half_of_a_model(tmp_path: Path) -> None:
    model, plan, settings = small("resnet8")
    folder = save(model, tmp_path / "bits", plan, build=settings, compress=True)
    file = folder / "model.safetensors"
    stored, whole = load_file(file), file.read_bytes()
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["compression"])

    def refused(message: str, **manifest: Any) -> None:
        rewrite(folder, sha256={file.name: sha256(file)}, **manifest)
        with pytest.raises(ArtifactError, match=message):
            load(folder)
        with pytest.raises(ArtifactError, match=message):
            pk.stored_sizes(folder)

    name = next(name for name in stored if name.endswith(":values")).removesuffix(":values")
    cut = {**stored, f"{name}:values": stored[f"{name}:values"][1:].clone()}
    save_file(cut, file, {"compression": json.dumps(about)})
    refused(rf"model\.safetensors: {re.escape(name)}: expected \d+ values, as many as bits of 1")
    save_file(stored, file, {"compression": json.dumps({**about, "version": 9})})
    refused(
        r"model\.safetensors: expected a file that is plain, or compressed as 'bitmask' of version 1, got .* version 9"
    )
    file.write_bytes(whole)
    refused(r"its compression is bitmask, and in prunekit.json None", compression=None)
    refused(r"its compression is bitmask, and in prunekit.json zip", compression="zip")
    save(model, folder, plan, build=settings)
    refused(r"its compression is None, and in prunekit.json bitmask", compression="bitmask")
    rewrite(folder, format=3)
    with pytest.raises(ArtifactError, match="format 3, expected 1 or 2"):
        load(folder)


def test_a_folder_from_before_still_loads(tmp_path: Path) -> None:
    model, plan, settings = small("resnet8")
    folder = save(model, tmp_path / "old", Plan(plan.channel_map, plan.keep), build=settings)
    manifest, text = (json.loads((folder / name).read_text()) for name in ("prunekit.json", "plan.json"))
    assert (manifest["format"], text["format"]) == (1, 1)
    del manifest["compression"], text["element_masks"]
    for name, values in (("prunekit.json", manifest), ("plan.json", text)):
        (folder / name).write_text(json.dumps(with_checksum(values)))
    assert_unchanged(load(folder), snapshot(model))
    assert load_plan(folder).element_masks == {}
