"""The plan itself: immutable, saved and loaded, and what is read from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from equivalence import random_keep
from safetensors.numpy import load_file, save_file
from torch import nn

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.errors import ArtifactError, PlanError
from prunekit.planning.plan import Plan, load_plan
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.utils.files import sha256, with_checksum

EXAMPLE = (torch.zeros(1, 3, 32, 32),)


@pytest.fixture(scope="module")
def chart() -> ChannelMap:
    with torch.device("meta"):
        model = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    return trace(model, (torch.empty(1, 3, 32, 32, device="meta"),))


@pytest.fixture
def plan(chart: ChannelMap) -> Plan:
    settings = PruneSettings(budget=BudgetSettings(macs=0.5), ignore=("conv5.0",), ratios={"stage2.*": 0.5})
    made = make_plan(chart, np.arange(chart.n_labels, dtype=float), settings, seed=5)
    masks = {"fc.weight": torch.rand(10, 1024) > 0.5}
    return Plan(chart, made.keep, made.provenance, masks)


# Immutable


def test_a_plan_cannot_be_changed(plan: Plan) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.keep = np.ones(3, dtype=bool)  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        plan.keep[1] = False


def test_a_plan_does_not_follow_the_array_it_was_made_from(chart: ChannelMap) -> None:
    keep = random_keep(chart)
    made = Plan(chart, keep)
    before = made.keep.copy()
    keep[:] = True
    assert np.array_equal(made.keep, before)
    assert keep.flags.writeable


@pytest.mark.parametrize("shape", [(3,), (), (2, 2)])
def test_keep_of_another_size_is_refused(chart: ChannelMap, shape: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"keep: expected shape \(\d+,\), got"):
        Plan(chart, np.ones(shape, dtype=bool))


def test_locked_channels_cannot_go(chart: ChannelMap) -> None:
    keep = np.ones(chart.n_labels, dtype=bool)
    keep[0] = False
    with pytest.raises(PlanError, match="every locked channel"):
        Plan(chart, keep)


# What is read from it


def test_masks_and_kept_indices_agree(plan: Plan) -> None:
    pruned = 0
    for name, shape in plan.channel_map.shapes.items():
        mask = plan.mask(name)
        wanted = torch.ones(shape, dtype=torch.bool)
        for axis in range(len(shape)):
            kept = plan.kept(name, axis)
            assert np.array_equal(kept, np.unique(kept))
            gone = np.setdiff1d(np.arange(shape[axis]), kept)
            wanted.index_fill_(axis, torch.from_numpy(gone), False)
            pruned += gone.size
        if name == "fc.weight":
            wanted &= plan.element_masks[name]
        assert (mask is None) == bool(wanted.all()), name
        if mask is not None:
            assert mask.dtype == torch.bool
            assert torch.equal(mask.expand(shape), wanted), name
    assert pruned > 100


def test_widths_and_removed(plan: Plan) -> None:
    widths = plan.widths()
    assert len(widths) == len(plan.channel_map.groups)
    assert sum(dense - kept for kept, dense in widths.values()) == plan.removed == int((~plan.keep).sum())
    assert sum(dense for _, dense in widths.values()) == plan.channel_map.n_labels - 1


def test_a_plan_that_keeps_everything_masks_nothing(chart: ChannelMap) -> None:
    whole = Plan(chart, np.ones(chart.n_labels, dtype=bool))
    assert whole.removed == 0
    assert whole.kept_indices == {}
    assert all(whole.mask(name) is None for name in chart.shapes)
    assert chart.macs(whole.keep) == chart.macs()


# Saved and loaded


def test_a_plan_reads_back_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "here")
    again = load_plan(tmp_path / "here")
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["plan.json", "plan.safetensors"]
    assert np.array_equal(again.keep, plan.keep)
    assert again.provenance == plan.provenance
    assert again.provenance["seed"] == 5
    assert torch.equal(again.element_masks["fc.weight"], plan.element_masks["fc.weight"])
    old, new = plan.channel_map, again.channel_map
    assert (new.n_labels, new.locks, new.shapes) == (old.n_labels, old.locks, old.shapes)
    assert new.labels.keys() == old.labels.keys()
    for name, axes in old.labels.items():
        for a, b in zip(axes, new.labels[name], strict=True):
            assert (a is None and b is None) or np.array_equal(a, b)  # type: ignore[arg-type]
    assert new.activations.keys() == old.activations.keys()
    assert all(np.array_equal(new.activations[key], labels) for key, labels in old.activations.items())
    assert [group.name for group in new.groups] == [group.name for group in old.groups]
    assert [group.slots for group in new.groups] == [group.slots for group in old.groups]
    assert new.macs(plan.keep) == old.macs(plan.keep)
    assert new.layer_macs() == old.layer_macs()
    assert again.widths() == plan.widths()


def test_saving_again_replaces_the_plan(plan: Plan, chart: ChannelMap, tmp_path: Path) -> None:
    plan.save(tmp_path)
    other = Plan(chart, random_keep(chart, seed=9))
    other.save(tmp_path)
    assert np.array_equal(load_plan(tmp_path).keep, other.keep)
    assert load_plan(tmp_path).element_masks == {}


def test_masks_of_single_weights_take_a_bit_each(plan: Plan, chart: ChannelMap, tmp_path: Path) -> None:
    masks = {
        "fc.weight": plan.element_masks["fc.weight"],
        "fc.bias": torch.tensor([True, False, True] * 3 + [False]),
        "conv1.0.weight": torch.rand(24, 1, 3, 3) > 0.5,
        "conv5.0.weight": (torch.rand(192, 1024, 1, 1) > 0.5).transpose(0, 1),
    }
    many = Plan(chart, plan.keep, element_masks=masks)
    many.save(tmp_path / "masks")
    Plan(chart, plan.keep).save(tmp_path / "none")
    again = load_plan(tmp_path / "masks")
    assert again.element_masks.keys() == masks.keys()
    assert all(torch.equal(again.element_masks[name], mask) for name, mask in masks.items())
    assert again.digest == many.digest
    with_masks, without = ((tmp_path / name / "plan.safetensors").stat().st_size for name in ("masks", "none"))
    bits = sum((mask.numel() + 7) // 8 for mask in masks.values())
    assert bits <= with_masks - without < bits + 500
    formats = {name: json.loads((tmp_path / name / "plan.json").read_text())["format"] for name in ("masks", "none")}
    assert formats == {"masks": 2, "none": 1}  # an older prunekit would find no masks, and must not go on


def test_masks_from_before_were_one_byte_for_each_weight(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path)
    path = tmp_path / "plan.safetensors"
    tensors = load_file(path)
    del tensors["bits/fc.weight"]
    save_file({**tensors, "element/fc.weight": plan.element_masks["fc.weight"].numpy()}, path)
    rewrite(lambda text: [text.update(format=1, sha256=sha256(path)), text.pop("element_masks")])(tmp_path)
    assert load_plan(tmp_path).digest == plan.digest


def test_a_plan_for_a_model_with_nothing_to_prune(tmp_path: Path) -> None:
    chart = trace(nn.Linear(4, 3, bias=False), (torch.ones(2, 4),))
    Plan(chart, np.ones(1, dtype=bool)).save(tmp_path)
    assert load_plan(tmp_path).channel_map.n_labels == 1


Damage = Callable[[Path], Any]


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        text = json.loads((folder / "plan.json").read_text())
        change(text)
        (folder / "plan.json").write_text(json.dumps(with_checksum(text)))

    return damage


def flip(folder: Path) -> None:
    path = folder / "plan.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Damage] = {
    "no text": lambda folder: (folder / "plan.json").unlink(),
    "no tensors": lambda folder: (folder / "plan.safetensors").unlink(),
    "text cut off": lambda folder: (folder / "plan.json").write_text((folder / "plan.json").read_text()[:-40]),
    "text is a list": lambda folder: (folder / "plan.json").write_text("[]"),
    "text is not UTF-8": lambda folder: (folder / "plan.json").write_bytes(b"\xff\xfe"),
    "one bit of the tensors": flip,
    "tensors cut off": lambda folder: (folder / "plan.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      "),
    "another format": rewrite(lambda text: text.update(format=99)),
    "another format's kind": rewrite(lambda text: text.update(format="1")),
    "a mask of another shape": rewrite(lambda text: text.update(element_masks={"fc.weight": [10, 1025]})),
    "a mask of no memory's shape": rewrite(lambda text: text.update(element_masks={"fc.weight": [0, 2**70]})),
    "a mask that is not there": rewrite(lambda text: text.update(element_masks={"fc.bias": [10]})),
    "no masks": rewrite(lambda text: text.pop("element_masks")),
    **{
        f"{key} {name}": rewrite(lambda text, key=key, junk=junk: text.update({key: junk}))  # type: ignore[misc]
        for key in ("shapes", "locks", "activations", "macs", "sha256", "element_masks")
        for name, junk in (("null", None), ("number", 5), ("list of numbers", [1]), ("object", {"a": 1}))
    },
    **{
        f"no {key}": rewrite(lambda text, key=key: text.pop(key))  # type: ignore[misc]
        for key in ("shapes", "locks", "activations", "macs", "sha256", "provenance", "format")
    },
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_plans_are_refused(name: str, plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path)
    DAMAGE[name](tmp_path)
    with pytest.raises(ArtifactError, match=r"plan\.(json|safetensors)"):
        load_plan(tmp_path)


def test_the_tensors_of_another_plan_are_refused(plan: Plan, chart: ChannelMap, tmp_path: Path) -> None:
    plan.save(tmp_path / "a")
    Plan(chart, random_keep(chart, seed=9)).save(tmp_path / "b")
    (tmp_path / "b" / "plan.safetensors").replace(tmp_path / "a" / "plan.safetensors")
    with pytest.raises(ArtifactError, match="checksum differs"):
        load_plan(tmp_path / "a")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"expected a folder with plan\.json .* plan\.json is not there"):
        load_plan(tmp_path / "nowhere")


class Indexed(nn.Module):
    """Buffers that no mask can zero: of whole numbers, of truth values, and sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("places", torch.arange(12))
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool))
        self.register_buffer("graph", torch.eye(5).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.places[:5, None] + self.mask.sum()
        return self.b(y)  # type: ignore[no-any-return]


def test_a_plan_of_a_model_with_indices_is_read_back(tmp_path: Path) -> None:
    chart = trace(Indexed(), (torch.randn(2, 5, 6),))
    made = Plan(chart, random_keep(chart))
    made.save(tmp_path)
    found = load_plan(tmp_path)
    assert found.channel_map.labels["places"] == (None,)
    assert found.channel_map.labels["mask"] == (None, None)
    assert found.kept_indices.keys() == made.kept_indices.keys()
