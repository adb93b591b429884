"""Keyword arguments of pruning turned into settings."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import prunekit
from prunekit.errors import UsageError
from prunekit.planning.keywords import DEFAULTS, PlanKeywords, prune_settings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.weight_pattern import PatternSettings

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


@pytest.mark.parametrize("function", [prunekit.prune, prunekit.plan, prunekit.Pruner])
def test_signatures_show_every_keyword_with_its_default(function: Any) -> None:
    shown = inspect.signature(function).parameters
    assert [name for name in PlanKeywords.__annotations__ if name not in shown] == []
    assert {name: shown[name].default for name in DEFAULTS} == {
        name: getattr(PruneSettings(), name) for name in DEFAULTS
    }
    assert shown["macs"].default is shown["criterion"].default is shown["scope"].default is None


def test_keywords_are_those_of_the_settings() -> None:
    made_of = {one.name for kind in (PruneSettings, BudgetSettings) for one in fields(kind)}
    elsewhere = {"budget", "others", "schedule", "compact_early"}
    assert {*PlanKeywords.__annotations__} == made_of - elsewhere | {"sparsity", "settings"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("macz", "macz: there is no such argument and no such budget; did you mean 'macs'?"),
        ("calibraton", "did you mean 'calibration'"),
        ("pruning_ratio", "give what may be left: channels=0.5"),
    ],
)
def test_a_wrong_keyword_is_refused_with_the_nearest_name(name: str, message: str) -> None:
    for call in (prunekit.prune, prunekit.plan):
        with pytest.raises(UsageError, match=message):
            call(MODEL, torch.ones(1, 8), **{"channels": 0.5, name: 1})
