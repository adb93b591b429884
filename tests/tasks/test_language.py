"""Language tasks: what counts, exact sums over batches, left padding, and the decoder's input."""

from __future__ import annotations

import doctest
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from equivalence import assert_only_rounded
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.data.user_data import sample_splits
from prunekit.errors import DataError, ModelError
from prunekit.measure.accuracy import evaluate
from prunekit.settings.train import TrainSettings
from prunekit.tasks.language import CAUSAL_LM, MASKED_LM, SEQ2SEQ, TOKEN_CLASSIFICATION
from prunekit.tasks.task import Task, get_task
from prunekit.tasks.texts import IGNORED, PaddedTexts
from prunekit.training import rate_search
from prunekit.training.loop import fit

CPU = torch.device("cpu")
WORDS = 11


def llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def sentences(count: int = 6, seed: int = 1) -> list[dict[str, Tensor]]:
    """Texts of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(1, WORDS, (3 + at % 4,), generator=generator)} for at in range(count)]


def padded(texts: list[dict[str, Tensor]], left: bool) -> dict[str, Tensor]:
    longest = max(len(text["input_ids"]) for text in texts)

    def pad(values: Tensor) -> Tensor:
        rest = longest - len(values)
        return F.pad(values, (rest, 0) if left else (0, rest))

    ids = torch.stack([pad(text["input_ids"]) for text in texts])
    return {"input_ids": ids, "attention_mask": torch.stack([pad(torch.ones_like(t["input_ids"])) for t in texts])}


def one_by_one(model: nn.Module, texts: list[dict[str, Tensor]]) -> tuple[float, float, int]:
    """Sum of negative log likelihoods, right answers, tokens."""
    lost = right = tokens = 0.0
    with torch.no_grad():
        for text in texts:
            ids = text["input_ids"][None]
            scores = model(input_ids=ids).logits[0, :-1].log_softmax(1)
            lost -= float(scores.double().gather(1, ids[0, 1:, None]).sum())
            right += int((scores.argmax(1) == ids[0, 1:]).sum())
            tokens += ids.shape[1] - 1
    return lost, right, int(tokens)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 3, 1)])
def test_perplexity_is_that_of_all_tokens_however_batches_fall_and_are_padded(
    left: bool, sizes: tuple[int, ...]
) -> None:
    model, texts = llama(), sentences()
    lost, right, tokens = one_by_one(model, texts)
    batches, at = [], 0
    for size in sizes:
        batches.append(CAUSAL_LM.unpack(padded(texts[at : at + size], left)))
        at += size
    found = evaluate(model, batches, CAUSAL_LM, CPU)
    assert found.n_test == len(texts)
    assert found.counts[1:] == (tokens, right)
    assert found.values["perplexity"] == pytest.approx(float(torch.tensor(lost / tokens).exp()), rel=1e-5)
    assert found.values["token_accuracy"] == pytest.approx(100 * right / tokens)
    assert (found.unit, found.lower_is_better, found.interval) == ("", True, None)


def test_the_loss_is_that_of_transformers_and_labels_are_no_input() -> None:
    model, batch = llama(), padded(sentences(), left=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    labels[0, 1] = IGNORED
    inputs, targets = CAUSAL_LM.unpacking(batch | {"labels": labels})
    assert list(inputs) == ["input_ids", "attention_mask"]
    wanted = model(**batch, labels=labels)
    assert torch.allclose(CAUSAL_LM.loss(wanted, targets), wanted.loss)
    assert torch.equal(CAUSAL_LM.loss((wanted.logits, wanted.loss), targets), CAUSAL_LM.loss(wanted.logits, targets))
    assert CAUSAL_LM.weighed(targets) == int((labels[:, 1:] != IGNORED).sum())
    smooth = CAUSAL_LM.smoothed
    assert smooth is not None
    assert torch.allclose(
        smooth(0.1)(wanted, targets),
        F.cross_entropy(wanted.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1),
    )


def test_masked_tokens_and_tags_count_alone() -> None:
    scores = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.tensor([[1, IGNORED, 2], [IGNORED, IGNORED, 0]])
    ids = torch.ones(2, 3, dtype=torch.int64)
    for task in (MASKED_LM, TOKEN_CLASSIFICATION):
        _, targets = task.unpacking({"input_ids": ids, "labels": labels})
        rows = scores[labels != IGNORED]
        assert torch.allclose(task.loss(scores, targets), F.cross_entropy(rows, labels[labels != IGNORED]))
        nothing = torch.full_like(labels, IGNORED)
        loss = task.loss(scores, nothing)
        loss.backward()
        assert float(loss.detach()) == 0
        assert task.counts is not None
        empty = task.score(task.counts(scores, nothing))
        assert empty == ({"perplexity": 1e300} if task is MASKED_LM else {}) | {"token_accuracy": 0.0}
    guesses = F.one_hot(torch.tensor([[1, 0, 2], [1, 1, 1]]), 5).float()
    read = evaluate(nn.Identity(), [(guesses, labels)], replace(TOKEN_CLASSIFICATION, unpack=lambda pair: pair), CPU)
    assert read.values["token_accuracy"] == pytest.approx(200 / 3)
    assert read.chance == pytest.approx(100 / 3)


def test_training_weighs_batches_by_tokens() -> None:
    """Steps of several batches are those of one batch, and the mean loss is that of the tokens."""
    texts = sentences(12)
    splits = sample_splits({"train": texts, "test": texts[:2], "validation": texts[2:8]}, CAUSAL_LM)
    rows, weights = [], []
    for batch, accumulate in ((4, 1), (1, 4)):
        model = llama()
        settings = TrainSettings(epochs=1, lr=0.1, momentum=0.0, weight_decay=0.0, accumulate=accumulate)
        rows.append(fit(model, splits, settings, device=CPU, seed=0, batch=batch).rows[0])
        weights.append(model.lm_head.weight.detach())
    assert torch.allclose(weights[0], weights[1], atol=1e-5)
    whole, parts = rows
    assert whole.validation_loss is not None
    assert whole.validation_loss == pytest.approx(parts.validation_loss, rel=1e-5)
    assert whole.validation_score == pytest.approx(float(torch.tensor(whole.validation_loss).exp()), rel=1e-5)
    assert whole.score == "perplexity"


def test_a_learning_rate_is_found_by_the_loss_of_held_out_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_search, "SHARE", 1.0)
    monkeypatch.setattr(rate_search, "STEPS", 2)
    texts = sentences(20)
    splits = sample_splits({"train": texts, "test": texts[:2], "validation": texts[12:]}, CAUSAL_LM)
    settings = TrainSettings(epochs=2, optimizer="adamw", lr="auto")
    history = fit(llama(), splits, settings, device=CPU, seed=0, batch=5)
    assert history.start is not None
    start, *tried = history.rates
    assert start.held_out_loss == pytest.approx(history.start.validation_loss, rel=1e-5)
    assert history.lr == min(tried, key=lambda row: row.held_out_loss).rate


def test_training_with_gradient_checkpointing_makes_the_same_weights() -> None:
    texts = sentences(12)
    splits = sample_splits({"train": texts, "test": texts[:2], "validation": texts[2:8]}, CAUSAL_LM)
    found = []
    for checkpointing in (False, True):
        model = llama().double()
        settings = TrainSettings(epochs=1, lr=0.1, gradient_checkpointing=checkpointing)
        fit(model, splits, settings, device=CPU, seed=0, batch=4)
        found.append(dict(model.named_parameters()))
    assert_only_rounded(found[1], found[0])


def test_the_decoder_reads_what_the_model_itself_makes_of_labels() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.randint(1, WORDS, (2, 5))
    labels = torch.tensor([[3, 4, 1], [5, 1, IGNORED]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    with pytest.raises(DataError, match=r"bind the task to the model, task\.bound\(model\)"):
        SEQ2SEQ.unpacking(batch)
    task = SEQ2SEQ.bound(model)
    inputs, targets = task.unpacking(batch)
    assert inputs["decoder_input_ids"].tolist() == [[0, 3, 4], [0, 5, 1]]
    wanted = model(**batch)
    with torch.no_grad():
        output = model(**inputs)
    assert torch.allclose(task.loss(output, targets), wanted.loss)
    assert evaluate(model, [(inputs, targets)], task, CPU).counts[1] == 5


@pytest.mark.parametrize(
    ("name", "batch", "message"),
    [
        ("causal_lm", torch.ones(2, 3), "expected a mapping with input_ids"),
        ("causal_lm", {"input_ids": torch.ones(2, 3)}, "of whole numbers"),
        ("causal_lm", {"input_ids": torch.ones(2, 3).long(), "labels": torch.ones(2).long()}, r"labels \(B, T\)"),
        ("masked_lm", {"input_ids": torch.ones(2, 3).long()}, "one for each token"),
        ("token_classification", {"input_ids": torch.ones(2, 3).long(), "labels": torch.ones(2, 2).long()}, "each"),
        ("seq2seq", {"input_ids": torch.ones(2, 3).long()}, "the tokens to write"),
    ],
)
def test_batches_of_another_form(name: str, batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        get_task(name).unpacking(batch)


def test_scores_of_another_form() -> None:
    labels = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ModelError, match=r"expected scores of tokens \(B, T, classes\), got shape \(2, 5\)"):
        CAUSAL_LM.loss(torch.randn(2, 5), labels)
    with pytest.raises(ModelError, match=r"for each of the tokens \(2, 3\), got shape \(2, 4, 5\)"):
        CAUSAL_LM.loss(torch.randn(2, 4, 5), labels)
    with pytest.raises(DataError, match=r"expected labels 0\.\.4, as many as the model has scores, the largest is 9"):
        CAUSAL_LM.loss(torch.randn(2, 3, 5), 9 * labels)


def test_texts_of_several_lengths_are_padded_by_kind() -> None:
    samples: list[Any] = [
        {"input_ids": [1, 2, 3], "labels": [4, 5, 6], "token_type_ids": [1, 1, 1], "number": 3},
        {"input_ids": [1], "labels": [4], "token_type_ids": [1], "number": 4},
    ]
    found = PaddedTexts(9)(samples)
    assert found["input_ids"].tolist() == [[1, 2, 3], [1, 9, 9]]
    assert found["labels"].tolist() == [[4, 5, 6], [4, IGNORED, IGNORED]]
    assert found["token_type_ids"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert found["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert found["number"].tolist() == [3, 4]
    assert PaddedTexts()([(torch.ones(2), 1), (torch.ones(2), 2)])[1].tolist() == [1, 2]


@pytest.mark.parametrize("documented", [PaddedTexts, Task.bound])
def test_examples_run(documented: Any) -> None:
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(documented) or "", {}, "example", None, None)
    assert example.examples
    assert not doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed


def test_every_language_task_is_registered() -> None:
    names: list[str] = ["causal_lm", "masked_lm", "token_classification", "seq2seq", "embedding"]
    assert [get_task(name).name for name in names] == names
    assert all(isinstance(get_task(name), Task) for name in names)
