"""Language models at tasks of lm-eval, from folders by the command and from Python; no network."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tiny_language import SPECIAL, WORDS, llama, text, write_tokenizer

import prunekit
from prunekit.cli import cli
from prunekit.errors import ModelError, UsageError
from prunekit.integrations.transformers import save_pretrained
from prunekit.jobs.analyses.language_tasks import in_calibration

needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval: pip install prunekit[language]")
QUESTIONS = 6
TASK = """task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def tokenizer_in(folder: Path, more: int = 0) -> Any:
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(folder, more=more)
    kind: Any = PreTrainedTokenizerFast
    made = kind(tokenizer_file=str(folder / "tokenizer.json"), eos_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]")
    made.save_pretrained(str(folder))
    return made


def documents() -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(WORDS), (QUESTIONS, 7), generator=random).tolist()
    return [
        {"question": " ".join(WORDS[at] for at in row[:4]), "choices": [WORDS[at] for at in row[4:]], "answer": at % 3}
        for at, row in enumerate(drawn)
    ]


def tasks_in(folder: Path, given: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir()
    (folder / "docs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in given or documents()))
    (folder / "tiny_choice.yaml").write_text(TASK.format(folder=folder))
    return folder


def share_right(model: torch.nn.Module) -> float:
    """Return the share of questions whose likeliest choice is the right one, by hand."""
    right = 0
    for one in documents():
        ids = torch.tensor([[len(SPECIAL) + WORDS.index(word) for word in one["question"].split()]])
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, -1]
        choices = [float(scores[len(SPECIAL) + WORDS.index(word)]) for word in one["choices"]]
        right += choices.index(max(choices)) == one["answer"]
    return right / QUESTIONS


@needs_lm_eval
@pytest.mark.usefixtures("offline")
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_folders_are_scored_at_tasks_as_by_hand(tmp_path: Path) -> None:
    from prunekit.integrations.lm_eval import harness_model

    tasks, dense = tasks_in(tmp_path / "tasks"), llama(initializer_range=0.5)
    tokenizer = tokenizer_in(tmp_path / "tiny")
    dense.save_pretrained(str(tmp_path / "tiny"))  # type: ignore[operator]
    ids = torch.randint(5, 45, (8, 16), generator=torch.Generator().manual_seed(1))
    made = prunekit.prune(dense, calibration={"input_ids": ids}, params=0.7, outputs="logits", repair=False)
    save_pretrained(made, tmp_path / "small", processor=tokenizer)
    prunekit.save(made, tmp_path / "saved")
    asked = ["--tasks", "tiny_choice", "--task-folder", str(tasks), "--device", "cpu", "--json"]
    for folder, model, key, more in (
        ("tiny", llama(initializer_range=0.5), "model", []),
        ("small", made.model, "pruned", []),
        ("saved", made.model, "pruned", ["--tokenizer", str(tmp_path / "tiny"), "--limit", str(QUESTIONS)]),
    ):
        result = CliRunner().invoke(cli, ["evaluate", str(tmp_path / folder), *asked, *more], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        (row,) = found["tasks"]
        value = share_right(model)
        assert row["scores"] == {key: pytest.approx(value)}
        assert row["errors"] == {key: pytest.approx(math.sqrt(value * (1 - value) / (QUESTIONS - 1)))}
        assert (row["task"], row["metric"], row["samples"], row["few_shot"]) == ("tiny_choice", "acc", QUESTIONS, 0)
        assert found["lm_eval"]
    refused = CliRunner().invoke(cli, ["evaluate", str(tmp_path / "saved"), *asked, "--zoo", "cifar"])
    nothing = CliRunner().invoke(cli, ["evaluate", str(tasks), *asked])
    assert "expected the folder of a model, or of a run that has one" in nothing.output
    assert "saved: a folder says what its models are; leave out --weights, --input-shape and --zoo" in refused.output
    harness = harness_model(made.model, tokenizer, batch=2)
    assert harness.max_length == 64
    with pytest.raises(
        ModelError, match=r"tokenizer: its vocabulary has 48 tokens, ids up to 47, .* embeds 45, ids up"
    ):
        harness_model(made.model, tokenizer_in(tmp_path / "other", more=3))
    with pytest.raises(ModelError, match="expected a language model of transformers, got Linear"):
        harness_model(torch.nn.Linear(2, 2), tokenizer)


@needs_lm_eval
@pytest.mark.usefixtures("offline")
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_run_is_scored_beside_its_dense_model_and_says_what_it_calibrated_on(tmp_path: Path) -> None:
    dense, found, made = llama(initializer_range=0.5), text(2000), documents()
    tokenizer_in(tmp_path / "tiny")
    dense.save_pretrained(str(tmp_path / "tiny"))  # type: ignore[operator]
    (tmp_path / "text.txt").write_text(found)
    copied, other = " ".join(found.split()[20:40]), " ".join(reversed(found.split()[20:40]))
    for number, one in enumerate(made):
        one["source"] = (copied, copied[:30], other)[number % 3]
    tasks = tasks_in(tmp_path / "tasks", made)
    how = ["data.window=16", "calibration.images=16", "latency.repeats=5", "latency.explain=false", "watch=null"]
    places = [f"model.name={tmp_path / 'tiny'}", f"data.root={tmp_path / 'text.txt'}", f"output={tmp_path / 'runs'}"]
    result = CliRunner().invoke(cli, ["prune", "smollm2", *places, *how, "device=cpu", "threads=1"])
    assert result.exit_code == 0, result.output
    (run,) = (path.parent for path in (tmp_path / "runs").rglob("metrics.json"))
    asked = ["--tasks", "tiny_choice", "--task-folder", str(tasks), "--device", "cpu"]
    result = CliRunner().invoke(cli, ["evaluate", str(run), *asked, "--json"], catch_exceptions=False)
    (row,) = json.loads(result.stdout)["tasks"]
    small = prunekit.load(run / "model")
    assert row["scores"] == {"dense": pytest.approx(share_right(dense)), "pruned": pytest.approx(share_right(small))}
    assert row["in_calibration"] == QUESTIONS // 3
    shown = CliRunner().invoke(cli, ["evaluate", str(run / "model"), *asked], catch_exceptions=False).output
    assert "in calibration" in shown
    assert "13 words in a row" in shown
    (tmp_path / "text.txt").unlink()
    gone = CliRunner().invoke(cli, ["evaluate", str(run), *asked], catch_exceptions=False).output
    assert "in calibration: nobody has looked" in gone
    assert "text.txt" in gone


def test_samples_are_counted_that_share_13_words_with_a_text() -> None:
    words = [f"word{number}" for number in range(30)]

    def sample(number: int, **document: Any) -> dict[str, Any]:
        return {"doc_id": number, "doc": document}

    copied = " ".join(words[5:18])
    samples = {
        "all": [
            sample(0, text=f"Before, ({copied.upper().replace(' ', ', ')}) -- after!"),
            sample(0, text=copied),  # of another filter
            sample(1, question="which?", choices=["none", copied]),
            sample(2, text=" ".join(words[5:17])),
            sample(3, one=" ".join(words[5:12]), other=" ".join(words[12:18]), label=1),
        ],
        "none": [sample(0, text=" ".join(reversed(words)))],
    }
    found = in_calibration(samples, [" ".join(words[:10]), "\n" + " ".join(words[10:])])
    assert found == {"all": 2}


@needs_lm_eval
@pytest.mark.usefixtures("offline")
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_folder_whose_code_builds_its_model_is_scored_once_that_is_allowed(tmp_path: Path) -> None:
    tasks, ids = tasks_in(tmp_path / "tasks"), torch.randint(5, 45, (8, 16), generator=torch.Generator().manual_seed(1))
    made = prunekit.prune(llama(initializer_range=0.5), {"input_ids": ids}, params=0.7, outputs="logits")
    prunekit.export(made, {"input_ids": ids[:2]}, to="standalone", path=tmp_path / "alone")
    tokenizer_in(tmp_path / "alone")
    asked = ["evaluate", str(tmp_path / "alone"), "--tasks", "tiny_choice", "--task-folder", str(tasks), "--json"]
    refused = CliRunner().invoke(cli, asked)
    assert refused.exit_code != 0
    assert "is code that would run; if you trust it, add --allow-code" in refused.output
    result = CliRunner().invoke(cli, [*asked, "--allow-code"], catch_exceptions=False)
    assert json.loads(result.stdout)["tasks"][0]["scores"] == {"model": pytest.approx(share_right(made.model))}


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_unknown_tasks_name_those_that_are_like_them(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    from prunekit.jobs.analyses.language_tasks import known_tasks

    manager = TaskManager(include_path=str(tasks_in(tmp_path / "tasks")), include_defaults=False)
    assert known_tasks(["tiny_*", "tiny_choice"], manager) == ["tiny_choice"]
    with pytest.raises(UsageError, match="has no task 'tiny_chioce'; did you mean 'tiny_choice'"):
        known_tasks(["tiny_chioce"], manager)


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_it_says_what_to_install(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["evaluate", str(tmp_path), "--tasks", "arc_easy"])
    assert result.exit_code != 0
    assert 'needs lm_eval, not installed here: pip install "prunekit[language]"' in result.output


def test_options_of_tasks_go_with_tasks(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["evaluate", str(tmp_path), "--few-shot", "2"])
    assert "--few-shot goes with --tasks" in result.output
