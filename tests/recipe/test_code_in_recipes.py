"""Code that a recipe names in the place of a registered name: where it is looked for, and when it may run."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from prunekit.criteria.criterion import CRITERIA
from prunekit.errors import RecipeError, UsageError
from prunekit.jobs.run.command_subject import own_source
from prunekit.jobs.run.job_subject import code_of_job, renew_code
from prunekit.jobs.run.resume import resolved
from prunekit.recipe.loading import load
from prunekit.utils.user_code import ForbiddenReference, load_object

CODE = """
import numpy as np
from pathlib import Path

Path(__file__).with_name("ran").touch()


def score(evidence):
    return np.ones(evidence.channel_map.n_labels)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    path = tmp_path / "recipe.yaml"
    path.write_text("name: a\nmodel: {name: resnet18, weights: IMAGENET1K_V1}\nprune: {criterion: mine.py:score}\n")
    return path


def test_a_recipe_runs_no_code_unless_it_is_allowed(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.yaml:3:20: prune\.criterion: 'mine\.py:score' is .* --allow-code"):
        load(recipe)
    read = load(recipe, runs_code=False).prune.criterion
    assert isinstance(read, ForbiddenReference)
    for name in (read, copy.deepcopy(read), pickle.loads(pickle.dumps(read))):
        with pytest.raises(UsageError, match=r"recipe\.yaml:3:20: prune\.criterion: .* add --allow-code"):
            load_object(name, UsageError)
    assert not (recipe.parent / "ran").exists()
    job = load(recipe, allow_code=True)
    assert job.prune.criterion == f"{recipe.parent / 'mine.py'}:score"  # from beside the recipe
    assert CRITERIA.get(job.prune.criterion).needs == ("weights",)
    assert (recipe.parent / "ran").exists()


def test_an_override_is_the_users_own_word(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    job = load(recipe, ["prune.criterion=mine.py:score"])
    assert job.prune.criterion == "mine.py:score"
    assert resolved(job).prune.criterion == f"{recipe.parent / 'mine.py'}:score"


def test_what_is_wrong_is_reported_with_all_other_problems(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace(":score", ":scoer") + "seed: -1\ntask: segmentatoin\n")
    with pytest.raises(RecipeError) as caught:
        load(recipe, allow_code=True)
    message = str(caught.value)
    assert "3 problems" in message
    assert "no function or class 'scoer' here; did you mean 'score'?" in message
    assert "task: expected the name of a task, or file.py:object, got 'segmentatoin'; did you mean 'seg" in message
    assert not (recipe.parent / "ran").exists()


def test_a_job_reads_a_file_once_and_knows_when_it_has_changed(recipe: Path) -> None:
    job = load(recipe, allow_code=True)
    renew_code(job)
    ((name, _),) = code_of_job(job)
    first, source = CRITERIA.get(name), own_source(name)
    (recipe.parent / "mine.py").write_text(CODE.replace("np.ones", "np.zeros"))
    assert CRITERIA.get(name) is first
    assert own_source(name) != source
    renew_code(job)
    assert CRITERIA.get(name) is not first
