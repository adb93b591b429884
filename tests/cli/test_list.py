from __future__ import annotations

import json

from click.testing import CliRunner

from prunekit.cli import cli
from prunekit.criteria import get_criterion
from prunekit.registries import CRITERIA


def test_criteria_are_listed_with_what_they_need() -> None:
    listed = json.loads(CliRunner().invoke(cli, ["list", "criteria", "--json"]).stdout)["criteria"]
    assert {row["name"] for row in listed} == set(CRITERIA.declared)
    for row in listed:
        assert tuple(row["needs"]) == get_criterion(row["name"]).needs
        assert row["label_free"] == ("gradients" not in row["needs"])
        assert row["paper"] or row["name"] == "random"
    shown = CliRunner().invoke(cli, ["list", "criteria"]).stdout.splitlines()
    assert len(shown) == len(listed) + 1
    assert any(line.split()[:3] == ["obs", "no", "weights,"] for line in shown)


def test_only_criteria_can_be_listed() -> None:
    result = CliRunner().invoke(cli, ["list", "models"])
    assert result.exit_code == 2
    assert "'models' is not 'criteria'" in result.output
