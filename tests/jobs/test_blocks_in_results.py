"""Blocks that go as a whole, as results, notes and messages show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import randomized
from made_up_timings import time_by_macs
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchvision.models import VisionTransformer

import prunekit as pk
from prunekit.channels.labels.branch import Branch
from prunekit.channels.tracing.channel_map import Keep
from prunekit.errors import PlanError, SettingsError, UsageError
from prunekit.planning.keywords import prune_settings
from prunekit.settings.pruning import facts_of

INPUT = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Sequential):
    """Layers whose result is added to what they read."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return]


class ReadTwice(Block):
    """A block that stays: what its layers compute is read elsewhere too."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self[1](self[0](x))
        return x + self[2](inner) + inner.mean()


def net(blocks: int = 4, last: type[Block] = Block, wide: int = 16) -> nn.Sequential:
    made = [Block(nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, 8)) for _ in range(blocks - 1)]
    made.append(last(nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, 8)))
    return randomized(nn.Sequential(nn.Sequential(*made))).eval()  # type: ignore[return-value]


def without(chart: pk.ChannelMap, branch: Branch) -> Keep:
    keep = np.ones(chart.n_labels, dtype=bool)
    keep[branch.labels] = False
    return chart.completed(keep)


def text(result: object) -> str:
    return " ".join(str(result).split())


def test_a_channel_map_lists_blocks_with_what_they_cost() -> None:
    chart = pk.trace(net(), INPUT)
    rows = chart.block_rows()
    assert [row["block"] for row in rows] == ["0.0", "0.1", "0.2", "0.3"]
    assert [row["layers"] for row in rows] == [[f"0.{index}.0", f"0.{index}.2"] for index in range(4)]
    assert all((row["channels"], row["macs"], row["share"]) == (16, 256, 0.25) for row in rows)
    assert chart.macs() - chart.macs(without(chart, chart.branches.found[1])) == 256
    assert "; 4 blocks may go>" in repr(chart)
    assert "block that may go layers channels MACs share 0.0 2 16 256 25.0 % 0.1 2 16" in text(chart)
    assert "block that stays" not in text(chart)


def test_a_channel_map_says_which_blocks_stay_and_why() -> None:
    chart = pk.trace(net(last=ReadTwice), INPUT)
    (lock,) = chart.branches.locks
    assert len(chart.block_rows()) == 3
    assert f"block that stays reason {lock.name} {lock.reason}" in text(chart)


def test_a_map_without_blocks_shows_none() -> None:
    chart = pk.trace(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), INPUT)
    assert chart.block_rows() == []
    assert "block" not in text(chart)


def test_a_block_of_attention_counts_all_that_its_removal_saves() -> None:
    model = randomized(VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=3)).eval()
    chart = pk.trace(model, torch.randn(1, 3, 16, 16))
    rows = {row["block"]: row["macs"] for row in chart.block_rows()}
    assert len(rows) == 4
    for branch in chart.branches.found:
        assert chart.macs() - chart.macs(without(chart, branch)) == rows[branch.name]


@pytest.mark.parametrize("computed", [(), (2,), (0, 2)], ids=["weights", "last computed", "all computed"])
def test_constants_in_place_of_linear_blocks_are_fitted(computed: tuple[int, ...]) -> None:
    model = net()
    for block in model[0]:  # type: ignore[union-attr]
        for index in computed:
            weight_norm(block[index])
    samples = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    result = pk.prune(model, calibration=samples, macs=0.2, min_channels=8, depth=True, progress=False)
    assert result.plan.gone
    assert result.repair is not None
    fitted = {layer.weight for layer in result.repair.layers if layer.applied == "bias"}
    assert fitted == (set() if computed else {f"{branch.name}.2.weight" for branch in result.plan.gone})
    assert computed or result.repair.after < result.repair.before


def test_points_of_a_frontier_count_the_blocks_that_are_gone() -> None:
    asked: dict[str, Any] = {"calibration": torch.randn(300, 8), "timed": False, "progress": False}
    found = pk.frontier(net(), points=[0.7, 0.2], min_channels=8, depth=True, **asked)
    assert [row["blocks"] for row in found.rows()] == [len(point.result.plan.gone) for point in found.points]  # type: ignore[union-attr]
    assert found.points[-1].blocks == 3
    assert "blocks gone" in text(found)
    assert "blocks" not in text(pk.frontier(net(), points=[0.7], depth=False, **asked))


def test_plans_and_results_name_the_blocks_that_are_gone(tmp_path: Any) -> None:
    result = pk.prune(net(), INPUT, macs=0.2, min_channels=8, depth=True)
    plan, gone = result.plan, [branch.name for branch in result.plan.gone]
    assert len(gone) == 3
    assert plan.totals()["blocks"] == (4, 1)
    assert f"blocks: 3 of 4 gone: {', '.join(gone)}" in text(plan)
    assert "blocks 4 -> 1 (25.0 %)" in repr(plan)
    assert "blocks 4 1 25.0 %" in text(result)
    assert [row for row in result.rows() if row["figure"] == "blocks"] == [
        {"figure": "blocks", "dense": 4, "pruned": 1, "left": 0.25}
    ]
    for row in plan.rows():
        inside = row["layer"].rpartition(".")[0] in gone
        assert (row["out_kept"] == 0) == inside == (row["macs_kept"] == 0)
    plan.save(tmp_path)
    again = pk.load_plan(tmp_path)
    assert str(again) == str(plan)
    assert str(again.channel_map) == str(plan.channel_map)
    (note,) = (note for note in result.notes if "blocks" in note)
    assert note.startswith("modules in place of blocks that are gone: ConstantModule, ShorterModule. Pickled,")


def test_results_without_blocks_gone_do_not_speak_of_them() -> None:
    result = pk.prune(net(), INPUT, macs=0.5)
    assert "blocks" not in result.plan.totals()
    assert "block" not in text(result) + text(result.plan)
    assert result.notes == ()


def test_plain_classes_keep_all_blocks() -> None:
    dense = net()
    free = pk.prune(dense, INPUT, macs=0.2, min_channels=2)
    speedy: dict[str, Any] = {"macs": 0.2, "min_channels": 8}
    assert len(pk.prune(dense, INPUT, **speedy).plan.gone) > 0
    with pytest.raises(PlanError, match=r"leave no less than 0\.5 .*contradicts plain_classes, without which 0 can be"):
        pk.prune(dense, INPUT, **speedy, plain_classes=True)
    plain = pk.prune(dense, INPUT, macs=0.2, min_channels=2, plain_classes=True)
    assert plain.plan.gone == free.plan.gone == ()
    assert [type(module) for module in plain.model.modules()] == [type(module) for module in dense.modules()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"depth": False},
            r"blocks that stay leave no less than 0\.5 .*\(it contradicts depth=False, without which 0 can",
        ),
        (
            {"min_blocks": 3},
            r"blocks that stay leave no less than 0\.375 .*\(it contradicts min_blocks, without which 0 ",
        ),
        (
            {"ignore": "0.*"},
            r"no less than 1 .*\(it contradicts ignore, without which 0 can be had\)|no channel is free",
        ),
    ],
    ids=["depth", "min_blocks", "ignore"],
)
def test_a_refusal_names_what_keeps_blocks(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        pk.plan(net(), INPUT, macs=0.2, min_channels=8, **given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"depth": "some"}, SettingsError, "depth: expected True or False, or 'auto', got 'some'"),
        ({"min_blocks": -1}, SettingsError, "min_blocks: expected a whole number of at least 0, got -1"),
        (
            {"depth": True, "plain_classes": True},
            UsageError,
            "depth: expected false or 'auto', because plain_classes is",
        ),
        ({"depth": False, "min_blocks": 1}, UsageError, "min_blocks: expected 0, because depth is false"),
        ({"depth": True, "settings": pk.PruneSettings()}, UsageError, "settings: expected no depth beside them"),
    ],
    ids=["word", "negative", "plain", "none go", "beside settings"],
)
def test_what_does_not_fit_is_said(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pk.prune(net(), INPUT, **({"macs": 0.5} if "settings" not in given else {}), **given)


def test_a_speedup_that_widths_cannot_give_is_had_by_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path))
    time_by_macs(monkeypatch)
    model = randomized(nn.Sequential(nn.Linear(8, 8), *net())).eval()
    asked: dict[str, Any] = {"speedup": 4.0, "min_channels": 8, "target": pk.Target(block=1)}
    with pytest.raises(PlanError, match=r"1\.89× .*\(it contradicts depth=False, without which 1[67]"):
        pk.prune(model, INPUT, **asked, depth=False)
    result = pk.prune(model, INPUT, **asked)
    assert result.plan.gone
    assert result.delivered is not None
    assert result.delivered.final.speedup >= 4


def test_what_takes_no_time_is_infinitely_fast() -> None:
    assert facts_of("speedup").as_cost(0.0) == float("inf")
    assert facts_of("macs").as_cost(0.0) == 0.0


def test_keywords_become_settings() -> None:
    found = prune_settings(net(), macs=0.5, depth=True, min_blocks=2)
    assert (found.depth, found.min_blocks, found.blocks_may_go) == (True, 2, True)
    assert prune_settings(net(), macs=0.5).depth == "auto"
    assert not prune_settings(net(), macs=0.5, depth=False).blocks_may_go


def test_a_pruner_takes_out_blocks_at_its_end() -> None:
    model = net().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pruner = pk.Pruner(model, optimizer, INPUT, macs=0.2, min_channels=8, depth=True, steps=4)
    for _ in range(6):
        optimizer.zero_grad()
        model(INPUT).square().mean().backward()
        optimizer.step()
        pruner.step()
    gone = len(pruner.plan.gone)
    small, _ = pruner.finish()
    assert gone == 3
    assert sum(parameter.numel() for parameter in small.parameters()) < 0.3 * sum(
        parameter.numel() for parameter in net().parameters()
    )
