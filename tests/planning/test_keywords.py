"""Keyword arguments of pruning turned into settings."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from prunekit.errors import UsageError
from prunekit.planning.keywords import prune_settings
from prunekit.settings.pattern import PatternSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings

MODEL = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"pattern": "2:4"}, PatternSettings("2:4")),
        ({"sparsity": 0.8}, PatternSettings("unstructured", 0.8)),
        ({"pattern": "kernel", "sparsity": 0.5}, PatternSettings("kernel", 0.5)),
        (
            {"pattern": PatternSettings("block", 0.5, block=(4, 1))},
            PatternSettings("block", 0.5, block=(4, 1)),
        ),
    ],
    ids=["name", "sparsity", "both", "settings"],
)
def test_a_pattern_needs_no_budget_and_leaves_all_channels(given: dict[str, Any], settings: PatternSettings) -> None:
    found = prune_settings(MODEL, **given)
    assert found.pattern == settings
    assert found.channels_stay
    assert found.budget == BudgetSettings()


def test_a_pattern_goes_together_with_a_budget() -> None:
    found = prune_settings(MODEL, pattern="2:4", macs=0.5)
    assert (found.pattern, found.budget) == (PatternSettings("2:4"), BudgetSettings(macs=0.5))
    assert found.round_to == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "budget: expected at least one of .* or a pattern of zeros, such as pattern='2:4' or sparsity=0.8; got"),
        ({"pattern": "unstructured"}, "PatternSettings: sparsity: expected a share of zeros, such as 0.8"),
        ({"pattern": "2:4", "sparsity": 0.8}, "PatternSettings: sparsity: expected nothing, because 2:4 says"),
        ({"pattern": PatternSettings("2:4"), "sparsity": 0.5}, re.escape("replace(pattern, sparsity=0.5)")),
        ({"pattern": (2, 4)}, "pattern: expected a name such as '2:4', .* got tuple"),
        ({"pattern": "2:4", "settings": PruneSettings()}, "settings: expected no pattern beside them"),
    ],
    ids=["none", "no share", "two shares", "beside settings", "tuple", "beside prune settings"],
)
def test_what_does_not_fit_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prune_settings(MODEL, **given)
