"""Recipes: what loads, what comes back out, and the exact text of what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prunekit.errors import RecipeError
from prunekit.recipe.loading import load
from prunekit.settings.inputs import AugmentSettings, DataSettings, ModelSettings, RandAugmentSettings
from prunekit.settings.job import JobSettings, dump
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import ActivationSettings, ClampSettings, TrainSettings

GOLDEN = Path(__file__).parent / "golden"
RECIPES = Path(__file__).parents[2] / "recipes"
OVERRIDES = {
    "overrides.yaml": [
        "sed=3",
        "finetune.lr=1",
        "prune.round_to=[",
        "no equals sign",
        "latency.batches.0=1",
        "baseline={momentum: 1, momentum: 2}",
        "prune.ratios.layer1.0.conv1=-1",
        "prune.budget.channels=0.5",
        "prune.budget.macs=0.5",
        "=3",
        "data.=3",
    ]
}


def minimal(folder: Path, text: str = "") -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"name: small\nmodel: {{name: resnet18, weights: IMAGENET1K_V1}}\n{text}", encoding="utf-8")
    return path


@pytest.mark.parametrize("recipe", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_problem_is_reported_as_in_the_golden_file(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with PRUNEKIT_OVERWRITE_GOLDEN=1 to write the files anew, then read the difference."""
    monkeypatch.chdir(GOLDEN)
    with pytest.raises(RecipeError) as caught:
        load(recipe.name, OVERRIDES.get(recipe.name, []))
    golden = recipe.with_suffix(".txt")
    if os.environ.get("PRUNEKIT_OVERWRITE_GOLDEN"):
        golden.write_text(f"{caught.value}\n", encoding="utf-8")
    assert f"{caught.value}\n" == golden.read_text(encoding="utf-8")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_and_survive_a_round_trip(recipe: Path, tmp_path: Path) -> None:
    job = load(recipe)
    assert job.name == recipe.stem
    (tmp_path / "again.yaml").write_text(dump(job), encoding="utf-8")
    assert load(tmp_path / "again.yaml") == job


def test_what_is_not_given_takes_the_defaults(tmp_path: Path) -> None:
    expected = JobSettings("small", ModelSettings("resnet18", weights="IMAGENET1K_V1"))
    assert load(minimal(tmp_path)) == expected


def test_values_get_the_types_of_the_settings(tmp_path: Path) -> None:
    text = "finetune: {lr: 1e-3, momentum: 0, epochs: 3}\nlatency: {batches: [1, 2]}\noutput: out\nthreads: 2\n"
    job = load(minimal(tmp_path, text))
    assert (job.finetune.lr, job.finetune.epochs) == (0.001, 3)
    assert isinstance(job.finetune.momentum, float)
    assert (job.latency.batches, job.output, job.threads) == ((1, 2), Path("out"), 2)


def test_yaml_merge_keys_are_merged_and_located(tmp_path: Path) -> None:
    text = "baseline: &train {epochs: 3, lr: 0.1}\nfinetune:\n  <<: *train\n  epochs: 1\n"
    assert load(minimal(tmp_path, text)).finetune == TrainSettings(epochs=1, lr=0.1)
    with pytest.raises(RecipeError, match=r"recipe\.yaml:3:34: finetune\.lr: expected a number above 0"):
        load(minimal(tmp_path, text.replace("0.1", "-1")))


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("seed=3", {"seed": 3}),
        ("prune.budget={channels: 0.5}", {"prune": PruneSettings(budget=BudgetSettings(channels=0.5))}),
        (
            "prune.budget={params: 0.4, size_mb: 12, macs: 0.5, memory_mb: 40}",
            {"prune": PruneSettings(budget=BudgetSettings(macs=0.5, params=0.4, size_mb=12.0, memory_mb=40.0))},
        ),
        ("prune.ratios.layer1.*.conv1=0.5", {"prune": PruneSettings(ratios={"layer1.*.conv1": 0.5})}),
        ("prune.depth=false", {"prune": PruneSettings(depth=False)}),
        ("prune.depth=auto", {}),
        ("prune={depth: true, min_blocks: 2}", {"prune": PruneSettings(depth=True, min_blocks=2)}),
        ("baseline.lr=1e-2", {"baseline": TrainSettings(lr=0.01)}),
        ("model.arguments.width=2", {"model": ModelSettings("resnet18", "torchvision", {"width": 2}, "IMAGENET1K_V1")}),
        ("output=a=b", {"output": Path("a=b")}),
        ("threads=", {"threads": None}),
        ("data.max_corrupt=0.01", {"data": DataSettings(max_corrupt=0.01)}),
        ("data.augment=flip", {"data": DataSettings(augment="flip")}),
        (
            "data.augment.rand_augment.magnitude=5",
            {"data": DataSettings(augment=AugmentSettings(rand_augment=RandAugmentSettings(magnitude=5)))},
        ),
    ],
)
def test_an_override_changes_its_key_and_nothing_else(override: str, changed: dict[str, Any], tmp_path: Path) -> None:
    path = minimal(tmp_path)
    assert load(path, [override]) == replace(load(path), **changed)


def test_the_last_override_wins_and_may_repair_the_file(tmp_path: Path) -> None:
    path = minimal(tmp_path, "prune: {budget: {macs: 7}}\n")
    assert load(path, ["prune.budget.macs=8", "prune.budget.macs=0.25"]).prune.budget.macs == 0.25
    switched = load(path, ["prune.budget.macs=null", "prune.budget.channels=0.5"])
    assert switched.prune.budget == BudgetSettings(channels=0.5)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "there is no such file"), (b"name: \xff", "byte 6 is not"), (b"name: \x00", ":1: .* zero byte")],
)
def test_a_file_that_cannot_be_read_says_why(content: bytes | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=expected) as caught:
        load(path)
    assert str(path) in str(caught.value)


positive = st.floats(min_value=1e-12, max_value=1e6)
texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)
clamps = st.builds(
    ClampSettings, limit=positive, by=st.sampled_from(["value", "norm"]), modules=st.none() | st.just(("a.*", "b"))
)
activations = st.builds(
    ActivationSettings, modules=st.lists(texts, min_size=1, max_size=2).map(tuple), target=st.floats(0.01, 0.99)
)
policies = st.none() | st.builds(RandAugmentSettings, magnitude=st.integers(0, 30))
jobs = st.builds(
    JobSettings,
    name=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}", fullmatch=True),
    model=st.builds(
        ModelSettings,
        name=texts,
        arguments=st.dictionaries(texts, st.none() | st.booleans() | st.integers() | positive | texts, max_size=3),
        weights=texts,
    ),
    baseline=st.none()
    | st.builds(TrainSettings, lr=positive, epochs=st.integers(0, 9), clamp_weight_grad=st.none() | clamps),
    activations=st.none() | activations,
    data=st.builds(
        DataSettings,
        augment=st.just("flip")
        | st.builds(AugmentSettings, scale=st.just((0.3, 1.0)), crop=st.just("resized"), rand_augment=policies),
        max_corrupt=st.integers(0, 9) | st.floats(0.01, 0.99),
    ),
    prune=st.builds(
        PruneSettings,
        budget=st.builds(BudgetSettings, channels=st.floats(0.01, 1), size_mb=st.none() | positive),
        ignore=st.lists(texts, max_size=3).map(tuple),
        ratios=st.dictionaries(texts, st.floats(0.01, 1), max_size=2),
    ),
    threads=st.none() | st.integers(1, 64),
    output=st.just(Path("runs")) | st.just(Path("/tmp/a b: c")),
)


@pytest.mark.slow
@settings(max_examples=25)
@given(job=jobs)
def test_dump_then_load_gives_an_equal_job(job: JobSettings, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    for defaults in (True, False):
        path.write_text(dump(job, defaults=defaults), encoding="utf-8")
        assert load(path) == job


def test_a_recipe_that_is_not_there_has_a_near_spelling(tmp_path: Path) -> None:
    minimal(tmp_path)
    with pytest.raises(RecipeError, match=r"there is no such file; did you mean '.*recipe\.yaml'\?"):
        load(tmp_path / "recipes.yaml")


def test_a_list_with_a_wrong_item_is_not_called_too_short(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"1 problem in the recipe\n.*latency\.threads\.0: expected a whole number"):
        load(minimal(tmp_path, "latency: {threads: [0]}\n"))


def test_the_digits_have_no_root(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.root: expected nothing, because data\.source is 'digits'"):
        load(minimal(tmp_path), ["data.root=photos"])
