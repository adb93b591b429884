"""Pruning in transformers' Trainer: its checkpoints, its best model, its logs, and folders of pruned models."""

from __future__ import annotations

import doctest
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prunekit as pk
from prunekit.errors import ArtifactError, ModelError, UsageError
from prunekit.hooks.hook import count_hooks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from prunekit.integrations import transformers as integration
from prunekit.integrations.transformers import STATE, PruneCallback, from_pretrained, save_pretrained
from prunekit.utils.files import with_checksum

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
}
DATA = [{"input_ids": [i % 40, (3 * i) % 40, (7 * i) % 40, 5, 1], "labels": i % 2} for i in range(64)]
EXAMPLE = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}


@pytest.fixture(autouse=True, scope="module")
def _process_as_before() -> Any:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def bert(seed: int = 0) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=2))


def trainer(folder: Path, model: nn.Module, *callbacks: TrainerCallback, **given: Any) -> Trainer:
    """Of eight steps, unless told otherwise."""
    usual: dict[str, Any] = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "save_strategy": "steps",
        "save_steps": 3,
        "logging_steps": 1,
    }
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    args = TrainingArguments(str(folder), **{**usual, **quiet, **given})
    return Trainer(model, args, train_dataset=DATA, eval_dataset=DATA[:16], callbacks=list(callbacks))


class Reporter(TrainerCallback):
    """Keeps what it is given to log."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        self.rows.append(dict(logs))


@pytest.mark.slow
def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(integration, optionflags=doctest.ELLIPSIS)
    assert done.attempted
    assert not done.failed


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"bf16": True, "gradient_accumulation_steps": 2, "num_train_epochs": 2}])
def test_the_trainer_ends_with_the_compact_model(given: dict[str, Any], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    prune = PruneCallback(EXAMPLE, macs=0.5, steps=0.5, criterion="taylor", on_change=rows.append)
    running = trainer(tmp_path / "run", model := bert(), prune, reporter := Reporter(), save_strategy="no", **given)
    running.train()
    assert reporter.rows[3]["macs_left"] == rows[3]["macs_left"]
    assert running.state.global_step == prune.pruner.step_count == 8
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["macs_left"] <= 0.5
    logged = [row for row in running.state.log_history if "loss" in row]
    assert [row.get("macs_left") for row in logged[:4]] == [row["macs_left"] for row in rows]
    assert rows[-1]["sparsity"] > 0.2
    assert logged[-1]["sparsity"] == pytest.approx(rows[-1]["sparsity"])
    masked = running.predict(DATA[:16]).predictions  # type: ignore[arg-type]
    small = prune.finish(running)
    assert running.model is small
    torch.testing.assert_close(
        torch.tensor(running.predict(DATA[:16]).predictions),  # type: ignore[arg-type]
        torch.tensor(masked),
        rtol=1e-4,
        atol=1e-2 if given else 1e-5,
    )
    assert count_hooks(model) == 0
    before = {name: value.clone() for name, value in small.state_dict().items()}
    running.train()  # which prunes no more
    assert {name: value.shape for name, value in small.state_dict().items()} == {
        name: value.shape for name, value in before.items()
    }
    assert any(not torch.equal(value, before[name]) for name, value in small.state_dict().items())
    with pytest.raises(UsageError, match="has finished with another BertForSeq"):
        trainer(tmp_path / "other", bert(), prune).train()


@pytest.mark.slow
def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    given: dict[str, Any] = {"macs": 0.5, "steps": 0.6, "criterion": "taylor"}
    whole = PruneCallback(EXAMPLE, **given)
    first = trainer(tmp_path / "run", bert(), whole, save_steps=2)
    first.train()
    assert (tmp_path / "run" / "checkpoint-2" / STATE).is_file()
    wanted = {name: value.clone() for name, value in first.model.state_dict().items()}  # type: ignore[union-attr]
    for at in (2, 6):
        again = PruneCallback(EXAMPLE, **given)
        second = trainer(tmp_path / "run", bert(5), again, save_strategy="no")
        second.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{at}"))
        found = second.model.state_dict()  # type: ignore[union-attr]
        assert all(torch.equal(value, found[name]) for name, value in wanted.items()), at
        assert again.pruner.changes == whole.pruner.changes
        again.pruner.close()
    first.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))  # in the process of the first too
    found = first.model.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    with pytest.raises(UsageError, match="this checkpoint has channels that the model has lost since"):
        first.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    longer = trainer(tmp_path / "run", bert(6), again := PruneCallback(EXAMPLE, **given), num_train_epochs=2)
    longer.train(resume_from_checkpoint=True)  # whose share of the training is that of the first
    assert [change.step for change in again.pruner.changes] == [change.step for change in whole.pruner.changes]
    small, other = whole.finish(), again.finish()
    assert [p.shape for p in small.parameters()] == [p.shape for p in other.parameters()]


@pytest.mark.slow
def test_checkpoints_of_others_are_refused(tmp_path: Path) -> None:
    def trained(folder: str, *callbacks: TrainerCallback, **given: Any) -> Trainer:
        return trainer(tmp_path / folder, bert(), *callbacks, max_steps=2, save_steps=1, logging_steps=9, **given)

    trained("run", PruneCallback(EXAMPLE, macs=0.5)).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-1")

    def resumed(where: str, folder: str = "run", **given: Any) -> None:
        prune = PruneCallback(EXAMPLE, **({"macs": 0.5} | given))
        trained(folder, prune).train(resume_from_checkpoint=where)

    with pytest.raises(ArtifactError, match=r"of other settings \(criterion 'l2', not 'taylor'\)"):
        resumed(checkpoint, criterion="taylor")
    with pytest.raises(ArtifactError, match=r"state of that run is not in .*elsewhere/checkpoint-1/pruner.pt; if the"):
        resumed(checkpoint, folder="elsewhere")
    trained("elsewhere", PruneCallback(EXAMPLE, macs=0.5)).train()
    with pytest.raises(ArtifactError, match="state of that run is not in"):  # another run's is there
        resumed(checkpoint, folder="elsewhere")
    there = trainer(tmp_path / "elsewhere", bert(), PruneCallback(EXAMPLE, macs=0.5), resume_from_checkpoint=checkpoint)
    there.train(resume_from_checkpoint=checkpoint)
    (tmp_path / "run" / "checkpoint-1" / STATE).write_bytes(b"no state")
    with pytest.raises(ArtifactError, match=r"pruner.pt: expected the state of a pruner"):
        resumed(checkpoint)
    shutil.rmtree(tmp_path / "elsewhere")
    trained("elsewhere").train()
    with pytest.raises(ArtifactError, match="of step 1, that was written without PruneCallback"):
        resumed(str(tmp_path / "elsewhere" / "checkpoint-1"), folder="elsewhere")


class Scores(TrainerCallback):
    """Makes evaluations worse with each, and remembers which checkpoints were the best."""

    def __init__(self) -> None:
        self.score, self.best = 1.0, list[tuple[int, str | None]]()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **given: Any) -> None:
        self.score -= 0.1
        metrics["eval_loss"] = -self.score  # the lower the better

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.best.append((state.global_step, state.best_model_checkpoint))


@pytest.mark.slow
def test_only_models_under_the_final_plan_are_the_best(tmp_path: Path) -> None:
    prune, scores = PruneCallback(EXAMPLE, macs=0.5, steps=4, schedule="linear"), Scores()
    given = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    running = trainer(tmp_path, bert(), prune, scores, num_train_epochs=1, **given)
    running.train()
    best = {step: Path(best).name for step, best in scores.best if best is not None}
    assert best == {step: f"checkpoint-{min(step, 4)}" for step in range(1, 9)}  # the first is the best, at each plan
    kept = torch.load(tmp_path / "checkpoint-4" / STATE, weights_only=True)["pruner"]["masks"]["keep"]
    assert kept.tolist() == prune.plan.keep.tolist()
    small = prune.finish(running)
    theirs = BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-4")
    for one, other in zip(pk.compact(theirs, prune.plan).parameters(), small.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="steps: expected a whole number of optimizer steps, or a share"):
        PruneCallback(EXAMPLE, macs=0.5, steps=2.5)
    with pytest.raises(UsageError, match="optimizer: expected none, because the callback takes it"):
        PruneCallback(EXAMPLE, macs=0.5, optimizer=None)
    prune = PruneCallback(EXAMPLE, macs=0.5)
    with pytest.raises(UsageError, match="expected a training that has begun with this callback"):
        prune.finish()
    with pytest.raises(UsageError, match="budget: expected at least one of channels, macs"):
        trainer(tmp_path, bert(), PruneCallback(EXAMPLE)).train()
    running = trainer(tmp_path, bert(), prune, max_steps=1)
    running.train()
    with pytest.raises(UsageError, match="prunes another BertForSequenceClassification than"):
        trainer(tmp_path, bert(), prune).train()
    with pytest.raises(UsageError, match="expected the trainer whose BertForSequenceClassification was pruned"):
        prune.finish(trainer(tmp_path, bert()))
    prune.finish(running, early=True)


MODELS: dict[str, Any] = {
    "bert": lambda: BertModel(BertConfig(**SIZES)),
    "tied": lambda: BertForMaskedLM(BertConfig(**SIZES, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=12)),
    "eager, bf16": lambda: BertModel(BertConfig(**SIZES, attn_implementation="eager")).to(torch.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_pruned_model_comes_back_with_class_configuration_and_weights(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    result = pk.prune(model, EXAMPLE, macs=0.5)
    for _ in range(2):  # the second replaces the first
        folder = save_pretrained(result, tmp_path / "small")
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(model).__name__]
    again = from_pretrained(folder)
    assert type(again).__name__ == type(model).__name__
    assert again.config._attn_implementation == model.config._attn_implementation
    assert again.config.to_dict() | {"architectures": None} == model.config.to_dict() | {"architectures": None}
    small = result.model.eval()
    assert {name: value.dtype for name, value in again.state_dict().items()} == {
        name: value.dtype for name, value in small.state_dict().items()
    }
    with torch.no_grad():
        one, other = small(**EXAMPLE)[0], again(**EXAMPLE)[0]
    assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="mismatch"):  # not silently another model
        type(model).from_pretrained(folder)


@pytest.mark.slow
def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    result = pk.prune(bert(), EXAMPLE, macs=0.5)
    with pytest.raises(UsageError, match="expected a pruned model of transformers, got Linear"):
        save_pretrained(nn.Linear(2, 2), tmp_path / "no")
    with pytest.raises(ArtifactError, match="expected an entry 'transformers'"):
        from_pretrained(pk.save(result, tmp_path / "plain"))
    folder = save_pretrained(result, tmp_path / "small")
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"this one also has 'mine.txt', which would be lost"):
        save_pretrained(result, folder)
    with pytest.raises(ModelError, match=r"cls: expected BertForSequenceClassification, .* got BertModel"):
        from_pretrained(folder, BertModel)
    manifest = json.loads((folder / "prunekit.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "somebody/kernel"}))
    manifest["transformers"]["attention"] = "somebody/kernel"
    (folder / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))
    assert from_pretrained(folder).config._attn_implementation == "sdpa"  # no code from elsewhere
    manifest["transformers"]["class"] = "Trainer"
    (folder / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))
    with pytest.raises(ModelError, match="is of Trainer, which is no model of transformers"):
        from_pretrained(folder)
    with pytest.raises(ArtifactError, match=r"expected a model folder with prunekit.json"):
        from_pretrained(tmp_path / "absent")
