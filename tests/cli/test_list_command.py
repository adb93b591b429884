from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from prunekit.cli import cli
from prunekit.cli.commands.list import KINDS
from prunekit.known_names import CRITERIA, FORMATS, RUNTIMES


def test_criteria_are_listed_with_what_they_need() -> None:
    listed = json.loads(CliRunner().invoke(cli, ["list", "criteria", "--json"]).stdout)["criteria"]
    assert {row["name"] for row in listed} == set(CRITERIA.declared)
    for row in listed:
        assert tuple(row["needs"]) == CRITERIA.get(row["name"]).needs
        assert row["label_free"] == ("gradients" not in row["needs"])
        assert row["paper"] or row["name"] == "random"
    shown = CliRunner().invoke(cli, ["list", "criteria"]).stdout.splitlines()
    assert len(shown) == len(listed) + 1
    assert any(line.split()[:3] == ["elimination", "weights,", "patches"] for line in shown)


def test_each_kind_is_listed_by_name_with_a_line_each() -> None:
    expected = {
        "criteria": "l2", "budgets": "macs", "runtimes": "eager", "tasks": "segmentation", "sections": None,
        "recipes": "resnet34", "models": "resnet18", "formats": "onnx",
    }  # fmt: skip
    assert {*expected, "devices"} == set(KINDS)  # kits that other machines have: tests/pruning/test_device_budgets.py
    for kind, name in expected.items():
        found = json.loads(CliRunner().invoke(cli, ["list", kind, "--json"]).stdout)[kind]
        assert found
        assert name is None or name in {row["name"] for row in found}
    some = json.loads(CliRunner().invoke(cli, ["list", "models", "resnet1*", "--json"]).stdout)["models"]
    assert {row["name"] for row in some} >= {"resnet18", "resnet101", "resnet110"}
    assert all(row["name"].startswith("resnet1") for row in some)
    eager = json.loads(CliRunner().invoke(cli, ["list", "runtimes", "eager", "--json"]).stdout)["runtimes"]
    assert [row["usable"] for row in eager] == [True]


def test_a_zoo_whose_extra_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # importing it fails
    listed = CliRunner().invoke(cli, ["list", "models", "resnet20", "--json"])
    assert listed.exit_code == 0
    assert [row["zoo"] for row in json.loads(listed.stdout)["models"]] == ["cifar"]
    assert "models of timm are not listed" in listed.stderr


def test_only_what_is_there_can_be_listed() -> None:
    result = CliRunner().invoke(cli, ["list", "weights"])
    assert result.exit_code == 2
    assert "'weights' is not one of 'criteria', 'budgets'" in result.output


def test_what_is_listed_as_usable_is_what_the_imported_ones_say() -> None:
    for kind, registry in (("formats", FORMATS), ("runtimes", RUNTIMES)):
        listed = json.loads(CliRunner().invoke(cli, ["list", kind, "--json"]).stdout)[kind]
        assert {row["name"]: row["missing"] for row in listed} == {
            name: one.unusable() for name, one in registry.items()
        }
