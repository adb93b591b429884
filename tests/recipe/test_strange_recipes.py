"""Recipes and overrides that are broken in any way: each problem has a place, in bounded time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from mutants import ODD_TEXTS, changed_values, damaged_bytes, unclean

from prunekit.cli import cli
from prunekit.errors import RecipeError, UsageError
from prunekit.recipe.loading import load
from prunekit.recipe.yaml_positions import Origin, parse
from prunekit.settings.job import dump

HEAD = "name: t\nmodel: {name: resnet8, zoo: cifar}\ndata: {source: digits}\nprune: {budget: {macs: 0.5}}\n"


def sound(tmp_path: Path) -> tuple[Path, Any]:
    """Return a recipe with all settings, and its values."""
    path = tmp_path / "r.yaml"
    path.write_text(HEAD + "baseline: {epochs: 1}\nfinetune: {epochs: 1}\n")
    text = dump(load(path))
    return path, parse(text, Origin("x")).values


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ("seed: !!bool maybe", r"r\.yaml:5:7: expected YAML, but it is no bool"),
        ("calibration:\n  images: !!int x", r"r\.yaml:6:11: expected YAML, but it is no int"),
        ("seed: 2001-99-99", r"r\.yaml:5:7: expected YAML, but it is no timestamp"),
        ("seed: " + "9" * 5000, r"r\.yaml:5:7: .* it is no int"),
        ("seed: " + "9" * 100, r"r\.yaml:5:7: .* a whole number has 333 bits, more than 128"),
        ("seed: " + "{a: " * 150 + "1" + "}" * 150, r"r\.yaml:5:\d+: .* more than 100 deep"),
        ('output: "\\ud800"', r"r\.yaml:5:9: .* not Unicode"),
        ("? [a]\n: 1", r"r\.yaml:5:3: .* a key is a list or a mapping"),
        ("a: &a [1, 1]\n" * 3, r"r\.yaml:6:1: a: duplicate key"),
        (
            "task: [a]\ndevice: [cpu]",
            r"(?s)r\.yaml:5:7: task: exp.*r\.yaml:6:9: device: expected text, got a list",
        ),
        ("repair: {rounds: {}}\nlatency: 1", r"(?s)r\.yaml:5:.*r\.yaml:6:10: latency: expected"),
    ],
)
def test_broken_yaml_is_a_problem_at_its_place(rest: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(HEAD + rest + "\n")
    with pytest.raises(RecipeError, match=problem):
        load(path)


@pytest.mark.parametrize(
    "section", ["data: {source: [digits]}", "model: {name: [x], zoo: {a: 1}}", "prune: {budget: [1]}"]
)
def test_a_value_of_another_type_is_a_problem_at_its_place(section: str, tmp_path: Path) -> None:
    """Checks of several keys together cannot be made then, and are left out."""
    path, key = tmp_path / "r.yaml", section.partition(":")[0]
    lines = [section if line.startswith(key) else line for line in HEAD.splitlines()]
    path.write_text("\n".join(lines))
    with pytest.raises(RecipeError, match=rf"r\.yaml:{lines.index(section) + 1}:\d+: {key}\.\w+: expected"):
        load(path)


@pytest.mark.parametrize(
    "override",
    [
        "seed=!!bool maybe",
        "seed=2001-99-99",
        "seed=" + "[" * 400,
        "seed=" + "9" * 5000,
        "output=\udcff",
        "a." * 500 + "b=1",
    ],
)
def test_a_broken_override_is_named(override: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(HEAD)
    with pytest.raises(RecipeError, match="override") as caught:
        load(path, [override])
    str(caught.value).encode()


def test_overrides_by_key_are_plain_values(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(HEAD)
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(UsageError, match="very deep"):
        load(path, {"model.arguments": {"x": deep}})


def test_commands_end_with_2_and_a_line(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(HEAD + "seed: !!float abc\n")
    for recipe in (tmp_path / "r.yaml", "a\0b.yaml", tmp_path / "\udcff.yaml"):
        result = CliRunner().invoke(cli, ["finetune", str(recipe), "--dry-run"], prog_name="prunekit")
        assert result.exit_code == 2
        assert "not expected" not in result.stderr


@pytest.mark.slow
def test_damaged_recipes_are_read_or_refused(tmp_path: Path) -> None:
    path, values = sound(tmp_path)
    text = dump(load(path))

    def read(mutant: bytes) -> None:
        path.write_bytes(mutant)
        load(path)

    assert unclean(read, damaged_bytes(text.encode(), 50, seed=0)) == []

    def read_values(mutant: Any) -> None:
        path.write_text(json.dumps(mutant))  # JSON is YAML
        load(path)

    assert unclean(read_values, changed_values(values, 75, seed=0)) == []


@pytest.mark.slow
def test_strange_overrides_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(HEAD)
    keys = ("seed", "model.name", "task", "prune.budget", "prune.budget.macs", "x.y")  # each kind of value, and none
    overrides = [f"{key}={text}" for key in keys for text in ODD_TEXTS]
    assert unclean(lambda override: load(path, [override]), overrides) == []
