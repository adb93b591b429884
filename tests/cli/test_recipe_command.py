"""The recipes that come with the package: listed, shown, copied, and taken by name wherever a recipe is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import prunekit
from prunekit.cli import cli
from prunekit.errors import RecipeError
from prunekit.recipe.loading import INSTALLED, folder, load, recipe_names, recipe_summary

ROOT = Path(__file__).parents[2]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_the_package_holds_the_recipes_of_the_repository() -> None:
    """One folder, which the package has under a name of its own; the build puts all of the package into a wheel."""
    assert INSTALLED.resolve() == ROOT / "recipes"
    assert INSTALLED.parent == Path(prunekit.__file__).parent


def test_a_clone_without_links_has_them_beside_the_package(tmp_path: Path) -> None:
    package = tmp_path / "prunekit" / "recipes"
    package.parent.mkdir()
    assert folder(package) == tmp_path / "recipes"
    package.write_text("../recipes")  # what git makes of a link where there are none
    assert folder(package) == tmp_path / "recipes"
    package.unlink()
    package.mkdir()
    assert folder(package) == package


def test_recipes_are_listed_with_a_line_each() -> None:
    listed = json.loads(run("list", "recipes", "--json"))["recipes"]
    assert [row["name"] for row in listed] == list(recipe_names())
    assert "resnet34" in recipe_names()
    for row in listed:
        assert 30 < len(row["about"]) < 120
        assert row["about"].endswith(".")
    assert len(run("list", "recipes").splitlines()) == len(listed) + 1


@pytest.mark.parametrize("name", ["resnet34", "resnet34.yaml"])
def test_a_recipe_is_shown_as_it_is(name: str) -> None:
    text = (ROOT / "recipes" / "resnet34.yaml").read_text()
    assert run("recipe", "show", name) == text
    assert recipe_summary(name) in text


def test_a_name_that_no_recipe_has_gets_the_nearest() -> None:
    assert "did you mean 'resnet34'" in run("recipe", "show", "resnet3", code=2)


def test_a_name_stands_for_its_file_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = load(INSTALLED / "resnet34.yaml")
    assert load("resnet34") == load("resnet34.yaml") == packaged
    assert load("resnet34", ["seed=3"]).seed == 3
    (tmp_path / "resnet34").mkdir()
    assert load("resnet34") == packaged
    (tmp_path / "resnet34.yaml").write_text("name: mine\nmodel: {name: resnet18, weights: IMAGENET1K_V1}\n")
    assert load("resnet34.yaml").name == "mine"


def test_a_path_outside_a_clone_leads_to_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"comes with a recipe of this name: give resnet34 for the path"):
        load("recipes/resnet34.yaml")
    with pytest.raises(RecipeError, match="did you mean 'resnet34'"):
        load("resnet33")
    assert "give resnet34 for the path" in run("finetune", "recipes/resnet34.yaml", code=2)
    assert "resnet34" in run("--help")
    assert "recipes/" not in run("--help")
