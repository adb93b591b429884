"""Embeddings of a pruned model against those of the dense one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.errors import DataError, ModelError, UsageError
from prunekit.measure.accuracy import evaluate
from prunekit.tasks import embedding
from prunekit.tasks.embedding import EMBEDDING, embeddings, rank_correlation
from prunekit.tasks.texts import PaddedTexts

CPU = torch.device("cpu")


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=11, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).eval()


def changed(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return other


def texts(count: int = 9) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [{"input_ids": torch.randint(1, 11, (2 + at % 5,), generator=generator)} for at in range(count)]


def test_scores_are_those_of_single_texts_however_batches_fall() -> None:
    dense = bert()
    pruned, samples = changed(dense), texts()
    task = EMBEDDING.bound(dense)
    with torch.no_grad():
        pairs = [
            [model(one["input_ids"][None]).last_hidden_state.mean(1)[0] for one in samples] for model in (pruned, dense)
        ]
    found, wanted = (torch.stack(each) for each in pairs)
    cosine = float(F.cosine_similarity(found, wanted, dim=1).mean())
    ranks = rank_correlation(found, wanted)
    assert 0.5 < cosine < 0.999
    for sizes in ((9,), (2, 7), (4, 4, 1)):
        batches, at = [], 0
        for size in sizes:
            batches.append(task.unpacking(PaddedTexts()(samples[at : at + size])))
            at += size
        read = evaluate(pruned, batches, task, CPU)
        assert read.values["cosine"] == pytest.approx(100 * cosine, rel=1e-5)
        assert read.values["spearman"] == pytest.approx(100 * ranks, abs=0.5)
        assert read.n_test == 9
        inputs, targets = batches[0]
        expected = 1 - F.cosine_similarity(found[: sizes[0]], wanted[: sizes[0]], dim=1).mean()
        assert torch.allclose(task.loss(pruned(**inputs), targets), expected, atol=1e-5)
    same = evaluate(dense, batches, task, CPU)
    assert same.values == {"cosine": pytest.approx(100.0), "spearman": pytest.approx(100.0)}


def test_pairs_are_those_of_the_first_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "PAIRED", 5)
    dense = bert()
    metric: Any = EMBEDDING.bound(dense).metric
    assert metric is not None
    kept = metric()
    for start in (0, 4, 8):
        inputs, targets = EMBEDDING.unpack(PaddedTexts()(texts(12)[start : start + 4]))
        with torch.no_grad():
            kept.update(dense(**inputs), targets)
    assert len(kept._first[0]) == 5
    assert kept._count == 12


@pytest.mark.parametrize("output", ["tensor", "tokens", "named", "tuple"])
def test_forms_of_embeddings(output: str) -> None:
    states, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [0, 1, 1]])
    mean = torch.stack([states[0, :2].mean(0), states[1, 1:].mean(0)])
    forms: dict[str, Any] = {
        "tensor": mean,
        "tokens": states,
        "named": {"last_hidden_state": states, "sentence_embedding": mean},
        "tuple": (states, None),
    }
    assert torch.allclose(embeddings(forms[output], mask), mean)


def test_images_have_embeddings_too() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    task = EMBEDDING.bound(net)
    pair = task.unpacking(torch.randn(5, 3, 2, 2))
    assert evaluate(net, [pair], task, CPU).values["cosine"] == pytest.approx(100.0)


def test_without_a_dense_model_or_embeddings_it_says_so() -> None:
    with pytest.raises(UsageError, match=r'get_task\("embedding"\)\.bound\(dense\)'):
        EMBEDDING.loss(torch.ones(2, 3), [])
    with pytest.raises(ModelError, match=r"expected embeddings \(B, D\)"):
        embeddings({"logits": torch.ones(2, 3)})
    with pytest.raises(DataError, match="expected a tensor, or tensors by name"):
        EMBEDDING.unpacking(3)
    assert EMBEDDING.from_dense
    assert rank_correlation(torch.ones(1, 2), torch.ones(1, 2)) == 0
