"""Whole jobs of language tasks from folders and files: pruned, repaired, trained, measured by perplexity, reported."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from tiny_language import bert, llama, text, write_model
from torch.nn import functional as F

import prunekit
from prunekit.cli import cli
from prunekit.data.sources import load_splits
from prunekit.errors import DataError, ModelError, RecipeError, UsageError
from prunekit.jobs.analyses.evaluate import evaluate
from prunekit.jobs.finetune import finetune, prune_job
from prunekit.jobs.run.command_subject import Own
from prunekit.jobs.run.job_subject import build_of, prepare
from prunekit.jobs.run.subject_sources import resolve
from prunekit.measure.accuracy import evaluate as measured
from prunekit.recipe.loading import load
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.train import DistillSettings, TrainSettings

QUICK = [
    *("data.window=16", "calibration.images=32", "latency.repeats=5", "latency.explain=false"),
    *("device=cpu", "watch=null", "threads=1"),
]


def silent(message: str) -> None:
    """A log that nobody reads."""


def asked(tmp_path: Path, folder: Path, words: int = 2000) -> list[str]:
    (tmp_path / "text.txt").write_text(text(words))
    return [f"model.name={folder}", f"data.root={tmp_path / 'text.txt'}", f"output={tmp_path / 'runs'}", *QUICK]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def perplexity(model: torch.nn.Module, settings: DataSettings) -> float:
    test = load_splits(settings, "causal_lm").test
    ids = test.fetch(torch.arange(len(test)))[0]["input_ids"]
    with torch.no_grad():
        scores = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return float(F.cross_entropy(scores.double(), ids[:, 1:].flatten()).exp())


@pytest.mark.slow
def test_a_recipe_prunes_a_model_with_fewer_tokens_from_its_folder(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    dense, given = llama(), asked(tmp_path, tmp_path / "fewer")
    (tmp_path / "text.txt").write_text(text(2000).replace("w3", "w4"))
    write_model(tmp_path / "tiny", dense)
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_file=str(tmp_path / "tiny" / "tokenizer.json"))
    ids = tokenizer((tmp_path / "text.txt").read_text(), return_tensors="pt").input_ids
    vocabulary = prunekit.Vocabulary.used(dense, tokenizer, ids)
    small = vocabulary.cut(dense)
    small.save_pretrained(str(tmp_path / "fewer"))  # type: ignore[operator]
    vocabulary.tokenizer(tokenizer).save_pretrained(str(tmp_path / "fewer"))
    invoke("prune", "smollm2", *given)
    (path,) = (tmp_path / "runs").rglob("metrics.json")
    metrics = json.loads(path.read_text())
    assert metrics["dense"]["params"] == sum(one.numel() for one in small.parameters())
    whole = replace(load("smollm2", given).known_data, tokenizer=tmp_path / "tiny")
    ids = load_splits(whole, "causal_lm").test.fetch(torch.arange(4))[0]["input_ids"]
    fewer = load_splits(load("smollm2", given).known_data, "causal_lm").test.fetch(torch.arange(4))[0]["input_ids"]
    assert torch.equal(vocabulary.ids(ids), fewer)
    assert len(prunekit.load(path.parent / "model").get_input_embeddings().weight) == len(vocabulary.kept)  # type: ignore[operator]


def test_a_recipe_that_asks_for_fewer_tokens_says_how_to_have_them(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nmodel: {name: resnet18}\nprune:\n  vocabulary: used\n")
    with pytest.raises(
        RecipeError, match=r"mine.yaml:4:3: prune.vocabulary: unknown key; recipes prune no tokens: .*V"
    ):
        load(str(tmp_path / "mine.yaml"))


@pytest.mark.slow
def test_the_recipe_finetunes_a_tiny_decoder_and_reports_perplexity(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", llama())
    given = [*asked(tmp_path, folder), "finetune.lr=0.01", "finetune.epochs=3"]
    invoke("finetune", "smollm2", *given)
    (run,) = (path.parent for path in (tmp_path / "runs").rglob("metrics.json"))
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["compacted_early"]["epoch"] == 0  # adapters are beside the layers of the compact model
    settings = load("smollm2").finetune
    assert (settings.adapter, settings.distill) == ("lora", DistillSettings(temperature=2.0))
    dense, pruned = metrics["dense"], metrics["pruned"]
    assert pruned["macs"] <= 0.8 * dense["macs"]
    assert pruned["perplexity"] < dense["perplexity"]  # it was trained, and the dense model was not
    assert metrics["task"]["scores"][0] == {
        "name": "perplexity", "label": "perplexity", "unit": "", "lower_is_better": True,
    }  # fmt: skip
    small = prunekit.load(run / "model")
    data = load("smollm2", given).known_data
    assert perplexity(small, data) == pytest.approx(pruned["perplexity"], rel=1e-4)
    assert perplexity(llama(), data) == pytest.approx(dense["perplexity"], rel=1e-4)
    history = (run / "history.csv").read_text().splitlines()
    assert "validation_perplexity" in history[0]
    page = (run / "report.html").read_text()
    assert "Perplexity on the test texts (lower is better)" in page
    assert "top-1" not in page.lower()
    said = invoke("evaluate", str(run / "model"))
    assert f"perplexity {pruned['perplexity']:.2f}, token accuracy {pruned['token_accuracy']:.2f} %" in said
    manifest = (run / "model" / "prunekit.json").read_text()
    assert str(folder) not in manifest


@pytest.mark.slow
def test_the_recipe_prunes_without_training(tmp_path: Path) -> None:
    run = prune_job(load("smollm2", asked(tmp_path, write_model(tmp_path / "tiny", llama()))), log=silent)
    assert run.metrics["pruned"]["macs"] <= 0.8 * run.metrics["dense"]["macs"]
    assert run.metrics["repair"]["kept"]
    assert run.metrics["pruned"]["perplexity"] == pytest.approx(run.metrics["dense"]["perplexity"], rel=0.1)


@pytest.mark.slow
def test_adapters_change_the_compact_model_by_their_rank(tmp_path: Path) -> None:
    given = [*asked(tmp_path, write_model(tmp_path / "tiny", llama())), "finetune.lr=0.01", "finetune.epochs=2"]
    repaired = prune_job(load("smollm2", given), log=silent)
    log: list[str] = []
    adapter = "finetune.adapter={rank: 2, modules: ['*_proj']}"
    tuned = finetune(load("smollm2", [*given, adapter, "control=true"]), log=log.append)
    assert tuned.metrics["pruned"]["perplexity"] < 0.95 * repaired.metrics["pruned"]["perplexity"]
    assert tuned.metrics["control"]["perplexity"] < 0.95 * tuned.metrics["dense"]["perplexity"]
    assert any(line.startswith("verify: masked == compact to") for line in log)
    assert tuned.metrics["compacted_early"]["epoch"] == 0
    before, after = repaired.model().state_dict(), tuned.model().state_dict()
    ranks = {name: int(torch.linalg.matrix_rank(after[name] - before[name], atol=1e-4)) for name in before
             if before[name].ndim == 2}  # fmt: skip
    assert {name for name, rank in ranks.items() if rank} == {name for name in before if "_proj" in name}
    assert {*ranks.values()} == {0, 2}
    assert all(torch.equal(after[name], before[name]) for name in before if "_proj" not in name)
    saved = safetensors.torch.load_file(tuned.folder / "checkpoints" / "pruned.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in after.items() if name in saved)


@pytest.mark.slow
def test_embeddings_are_pruned_and_measured_without_labels(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", bert("BertModel", initializer_range=0.3), special=True)
    (tmp_path / "text.txt").write_text(text(600, line=7))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: embed\ntask: embedding\nmodel: {{zoo: hf, name: {folder}}}\n"
        f"data: {{source: text, root: {tmp_path / 'text.txt'}, window: 16, batch: 16}}\n"
        "calibration: {images: 32}\nprune: {budget: {macs: 0.8}, criterion: elimination}\nrepair: {fit: patch}\n"
        f"latency: {{batches: [1], repeats: 5, explain: false}}\noutput: {tmp_path / 'runs'}\ndevice: cpu\n"
    )
    invoke("prune", str(recipe))
    (run,) = (path.parent for path in (tmp_path / "runs").rglob("metrics.json"))
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["dense"]["cosine"] == pytest.approx(100)
    assert metrics["dense"]["spearman"] == pytest.approx(100)
    assert 80 < metrics["pruned"]["cosine"] < 100
    assert 0 < metrics["pruned"]["spearman"] < 100
    said = invoke("evaluate", str(run / "model"))
    assert f"cosine to the dense model {metrics['pruned']['cosine']:.2f} %" in said
    data = load(recipe).known_data
    with pytest.raises(UsageError, match=r"are the dense model's outputs: give the recipe that has it, --recipe PATH"):
        evaluate(resolve(run / "model"), data, torch.device("cpu"), task="embedding")


def job(tmp_path: Path, task: str, folder: Path, **changes: Any) -> JobSettings:
    (tmp_path / "text.txt").write_text(text(600))
    data = DataSettings("text", root=tmp_path / "text.txt", window=16)
    return JobSettings("tiny", ModelSettings(str(folder), "hf"), task=task, data=data, device="cpu", **changes)


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm", "embedding"])
def test_models_and_texts_fit_their_task(tmp_path: Path, task: str) -> None:
    folder = write_model(tmp_path / "tiny", llama() if task == "causal_lm" else bert(), special=task != "causal_lm")
    prepared = prepare(job(tmp_path, task, folder))
    assert prepared.splits.task.name == task
    assert prepared.splits.vocabulary == 45
    build = build_of(prepared.job, prepared.splits)
    assert build is not None
    assert build.head == task
    assert ("attention_mask" in prepared.example_inputs[-1]) == (task == "embedding")


WRITING = """
import torch


def data():
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 30, (4 + at % 3,), generator=random) for at in range(24)]
    samples = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.flip(0)[:3]} for row in rows]
    return samples[:16], samples[16:]
"""


@pytest.mark.slow
def test_what_a_decoder_reads_is_made_of_labels_in_a_job(tmp_path: Path) -> None:
    (tmp_path / "writing.py").write_text(WRITING)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 30}
    settings = JobSettings(
        "write",
        ModelSettings("t5", "hf", arguments={**sizes, "decoder_start_token_id": 0}),
        task="seq2seq",
        data=DataSettings("own", batch=4),
        baseline=TrainSettings(epochs=1),
        device="cpu",
    )
    prepared = prepare(settings, Own(data=f"{tmp_path / 'writing.py'}:data"))
    inputs, labels = prepared.splits.test.fetch(torch.arange(4))
    assert inputs["decoder_input_ids"].tolist() == [[0, *row[:-1]] for row in labels.tolist()]
    found = measured(prepared.model, [(inputs, labels)], prepared.splits.task, torch.device("cpu"))
    assert found.counts[1] == 12
    batches = [{name: sample[name][None] for name in sample} for sample in prepared.splits.train.dataset]  # type: ignore[attr-defined]
    result = prunekit.prune(prepared.model.eval(), calibration=batches, macs=0.8, task="seq2seq", repair=False)
    with torch.no_grad():
        assert result.model(**inputs).logits.shape == (4, 3, 30)


def test_a_tokenizer_with_more_tokens_than_the_model_embeds(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", llama(), more=7)
    with pytest.raises(
        ModelError, match=r"its vocabulary has 52 tokens, ids up to 51, and LlamaForCausalLM embeds 45, ids"
    ):
        prepare(job(tmp_path, "causal_lm", folder))


def test_a_missing_folder_and_text_are_said_together(tmp_path: Path) -> None:
    given = [f"model.name={tmp_path}/none", f"data.root={tmp_path}/text.txt"]
    with pytest.raises(DataError) as caught:
        prepare(load("smollm2", given))
    message = str(caught.value)
    assert message.startswith("2 things are missing:\n  data.root: ")
    assert "hf download HuggingFaceTB/SmolLM2-135M-Instruct" in message


def test_targets_of_the_dense_model_need_its_weights_and_no_gradients(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", bert("BertModel"))
    with pytest.raises(UsageError, match=r"baseline: expected none, because the targets of task 'embedding' are"):
        prepare(job(tmp_path, "embedding", folder, baseline=TrainSettings(epochs=1)))
    settings = load(
        "smollm2", ["task=embedding", f"model.name={folder}", "prune.criterion=taylor", "finetune.distill=null"]
    )
    (tmp_path / "text.txt").write_text(text(600))
    with pytest.raises(UsageError, match=r"at the dense model whose outputs are the targets .* got 'taylor'"):
        prepare(replace(settings, data=replace(settings.data, root=tmp_path / "text.txt"), device="cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["task=image_classification"], r"task: expected 'causal_lm', 'masked_lm', 'embedding', because data\.source"),
        (["task=seq2seq"], r"task: expected 'causal_lm', 'masked_lm', 'embedding', because data\.source is 'text'"),
        (
            ["data.source=digits", "data.root=null", "data.window=null"],
            r"data\.source: expected 'text', 'huggingface',",
        ),
        (["data.source=digits", "data.root=null"], r"data\.window: expected nothing, because data\.source is 'digits'"),
        (["data.root=null"], r"data\.root: expected the path of a file of text"),
        (["model.zoo=torchvision", "model.head=causal_lm"], r"model\.head: expected nothing, because model\.zoo is"),
        (["model.name=llama"], r"baseline: expected a mapping that says how to train the dense model"),
    ],
)
def test_contradictions_of_texts(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load("smollm2", changes)


def test_windows_beyond_the_positions_name_the_largest_and_bytes_are_told(tmp_path: Path) -> None:
    given = job(tmp_path, "causal_lm", write_model(tmp_path / "tiny", llama()))
    with pytest.raises(ModelError, match=r"data.window: expected at most 64, the positions that .* set data.window=64"):
        evaluate(resolve(replace(given, data=replace(given.data, window=65))), None, torch.device("cpu"))
    found = evaluate(resolve(given), None, torch.device("cpu")).figures()
    test = load_splits(given.known_data, "causal_lm").test
    assert (found["text_tokens"], found["predicted_tokens"]) == (16 * len(test), 15 * len(test))
    bits = math.log2(found["perplexity"]) * found["text_tokens"] / found["text_bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits)
    assert found["byte_perplexity"] == pytest.approx(2**bits)
