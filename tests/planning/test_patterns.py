"""Patterns of zeros: masks by scores, and which layers get them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pattern_masks import holds
from torch import nn

from prunekit.channels.trace import trace
from prunekit.errors import PlanError, SettingsError
from prunekit.planning.patterns.pattern import Pattern, PatternLayers, pattern_layers
from prunekit.planning.plan import Plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.weight_pattern import PatternSettings
from prunekit.statistics.layer_graph import find_layer_graph


def of(kind: str, sparsity: float | None = None, block: tuple[int, int] | None = None) -> Pattern:
    return Pattern.of(PatternSettings(kind, sparsity, block))


ALL = [
    of("unstructured", 0.7),
    of("2:4"),
    of("3:8"),
    of("block", 0.5, (4, 1)),
    of("block", 0.5, (1, 4)),
    of("kernel", 0.5),
]


@pytest.mark.parametrize("pattern", ALL, ids=lambda pattern: pattern.name)
def test_a_mask_has_its_pattern_and_keeps_the_highest_units(pattern: Pattern) -> None:
    scores = torch.rand(8, 16, 9, generator=torch.Generator().manual_seed(0))
    mask = pattern.mask(scores, 0.5)
    assert holds(pattern, mask)
    assert not holds(pattern, torch.rand(8, 16, 9) < 0.5) or pattern.name == "unstructured"
    if pattern.kept_of is None:
        assert 1 - float(mask.double().mean()) == pytest.approx(0.5)
        kept, gone = pattern.units(scores)[pattern.units(mask.float()) > 0], pattern.units(scores * ~mask)
        assert float(kept.min()) >= float(gone.max())
    else:
        kept_count, width = pattern.kept_of
        groups = scores.view(8, 16 // width, width, 9).movedim(2, -1)
        best = groups.topk(kept_count, -1).values.sum()
        assert float((scores * mask).sum()) == pytest.approx(float(best))


def test_masks_are_the_same_under_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """There `kthvalue` raises on a GPU, as it does here."""
    scores = torch.randint(5, (8, 8, 9), generator=torch.Generator().manual_seed(0)).double()
    masks = [Pattern("unstructured").mask(scores, share) for share in (0.0, 0.1, 0.5, 1.0)]

    def kthvalue(*_: Any) -> None:
        raise RuntimeError("kthvalue does not have a deterministic implementation")

    monkeypatch.setattr(torch.Tensor, "kthvalue", kthvalue)
    torch.use_deterministic_algorithms(True)
    try:
        again = [Pattern("unstructured").mask(scores, share) for share in (0.0, 0.1, 0.5, 1.0)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, masks, again))


def test_neighbors_along_the_inputs_are_counted_at_each_position_of_a_kernel() -> None:
    mask = of("2:4").mask(torch.rand(3, 8, 9), 0.5)
    assert torch.equal(mask.view(3, 2, 4, 9).sum(2), torch.full((3, 2, 9), 2))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "5:4"}, "kind: expected N:M with 0 < N < M, such as 2:4, got '5:4'"),
        ({"kind": "dense"}, "kind: expected one of unstructured, 2:4, N:M, block, kernel, got 'dense'"),
        ({"kind": "kernel"}, "sparsity: expected a share of zeros, such as 0.8, because 'kernel' has any, got none"),
        ({"kind": "2:4", "sparsity": 0.3}, "sparsity: expected nothing, because 2:4 says how many zeros there are"),
        ({"kind": "block", "sparsity": 0.5}, "block: expected outputs and inputs, such as [4, 1]"),
        ({"kind": "2:4", "block": (1, 4)}, "block: expected nothing, because kind is '2:4'"),
    ],
)
def test_settings_that_contradict_themselves(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        PatternSettings(**given)
    assert said in str(caught.value)


def test_widths_are_multiples_of_what_the_pattern_needs() -> None:
    settings = PruneSettings(BudgetSettings(macs=0.5), pattern=PatternSettings("2:8"), round_to=3)
    assert settings.round_to == 24
    assert PruneSettings(pattern=PatternSettings("2:8")).round_to is None
    of_both = [PruneSettings(BudgetSettings(macs=0.5), pattern=PatternSettings(*kind)).round_to
               for kind in (("2:8",), ("unstructured", 0.8))]  # fmt: skip
    assert of_both == [8, None]
    assert PruneSettings(pattern=PatternSettings("2:4")).channels_stay
    assert not PruneSettings().channels_stay


class Net(nn.Module):
    """A first and a last layer, a depthwise one, one that is called twice, and a width of 18."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=16)
        self.wide, self.narrow = nn.Conv2d(16, 18, 1), nn.Conv2d(18, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(self.wide(self.depthwise(self.stem(x).relu()).relu()).relu()).relu()
        return self.head(x.mean((2, 3)))


def found(**given: Any) -> PatternLayers:
    model, x = Net().eval(), torch.randn(2, 3, 8, 8)
    chart = trace(model, x)
    plan = Plan(chart, np.ones(chart.n_labels, dtype=bool))
    return pattern_layers(find_layer_graph(model, (x,)), plan, PatternSettings(**given))


def test_first_last_and_depthwise_layers_stay_dense_and_say_why() -> None:
    layers = found(kind="2:4", ignore=("narrow",))
    assert [layer.path for layer in layers.layers] == ["wide"]
    said = " ".join(layers.notes())
    for words in ("stem dense: a first layer", "head dense: a last layer", "depthwise dense: 2:4 is along inputs"):
        assert words in said
    every = found(kind="kernel", sparsity=0.5, first_and_last=True)
    assert [layer.path for layer in every.layers] == ["stem", "depthwise", "wide", "narrow", "head"]


def test_a_pattern_that_does_not_fit_names_layers_and_what_would_do() -> None:
    with pytest.raises(
        PlanError, match=r"2:4 doesn't fit 1 of the layers: narrow has 18 inputs, no multiple of 4.*"
    ) as e:
        found(kind="2:4")
    assert "pattern.ignore=['narrow']" in str(e.value)


def test_a_budget_below_what_dense_layers_hold_names_them() -> None:
    with pytest.raises(PlanError, match=r"at most .* is possible; layers that stay dense hold the rest: stem"):
        found(kind="unstructured", sparsity=0.9)
    with pytest.raises(PlanError, match=r"pattern.layers makes .* zero already"):
        found(kind="unstructured", sparsity=0.1, layers={"*": 0.9})
    with pytest.raises(PlanError, match=r"pattern.ignore: 'wid' matches no layer.*wide"):
        found(kind="2:4", ignore=("wid",))
