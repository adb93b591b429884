"""State that a model returns for its own next call shrinks with its layers, and both calls are proven."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import randomized
from torch import Tensor, nn

import prunekit as pk
from prunekit.errors import PrunekitError, UsageError
from prunekit.statistics.output_error import OutputComparison

TOKENS = torch.randint(1, 11, (2, 5), generator=torch.Generator().manual_seed(1))


class Cache:
    """Keys and values so far, in an object of its own that is changed in place, as transformers does."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def update(self, *new: Tensor) -> list[Tensor]:
        before = self.parts or [one[:, :, :0] for one in new]
        self.parts = [torch.cat(pair, 2) for pair in zip(before, new, strict=True)]
        return self.parts


@dataclass
class Predicted:
    logits: Tensor
    past: Any = None


class Decoder(nn.Module):
    """A decoder of one layer with `heads` heads, and as many for keys and values, or one."""

    def __init__(self, keys: int = 4, *, optional: str = "past") -> None:
        super().__init__()
        self.depth, self.optional = 6, optional
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.q, self.k, self.v = nn.Linear(16, 24), nn.Linear(16, 6 * keys), nn.Linear(16, 6 * keys)
        self.o = nn.Linear(24, 16)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None, past: Cache | None = None) -> Any:
        x = self.embed(tokens)
        shape = (*x.shape[:-1], -1, self.depth)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        past = Cache() if past is None else past
        k, v = past.update(k, v)
        scores = q @ k.transpose(2, 3) * 0.4
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, None] == 0, -1e9)
        causal = torch.ones(scores.shape[2:]).tril(k.shape[2] - q.shape[2])
        read = scores.masked_fill(causal == 0, -1e9).softmax(-1) @ v
        logits = self.head(x + self.o(read.transpose(1, 2).flatten(2)))
        return Predicted(logits, past) if self.optional == "past" else {"logits": logits, self.optional: past}


def generated(model: nn.Module, tokens: Tensor, steps: int = 4) -> Tensor:
    """The tokens and logits of a greedy decoder with its cache."""
    output = model(tokens)
    found = [output.logits]
    for _ in range(steps):
        output = model(output.logits[:, -1:].argmax(-1), past=output.past)
        found.append(output.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("keys", [4, 1])
def test_a_decoder_loses_heads_and_positions_with_its_cache(keys: int, tmp_path: Path) -> None:
    net: Any = randomized(Decoder(keys)).eval()
    example = {"tokens": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
    small: Any = pk.prune(net, example, channels=0.5)
    assert small.max_relative_difference <= 1e-12
    assert (small.model.embed.embedding_dim, small.model.q.out_features) == (8, 2 * 3), "two heads of three positions"
    assert small.model.k.out_features == small.model.v.out_features == (6 if keys == 4 else 3)
    assert small.plan.channel_map.read.state == ("past",)
    assert small.model(TOKENS).past.parts[0].shape == (2, 2 if keys == 4 else 1, 5, 3)
    with pk.masked(net.double(), small.plan), torch.no_grad():
        expected = generated(net, TOKENS)
    got = generated(small.model.double(), TOKENS)
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
    pk.save(small, tmp_path / "small")
    loaded = pk.load_plan(tmp_path / "small")
    pk.verify(net.float(), small.model.float(), loaded, {"tokens": TOKENS})


def test_query_heads_go_where_all_share_one_key() -> None:
    """The keys stay as they are: `ignore` on their projection locks no heads."""
    net = randomized(Decoder(1)).eval()
    found: Any = pk.prune(net, {"tokens": TOKENS}, channels=0.5, ignore=["k", "v"])
    assert (found.model.q.out_features, found.model.o.in_features) == (12, 12)
    assert (found.model.k.out_features, found.model.v.out_features) == (6, 6)
    rows = found.plan.kept("q.weight", 0)
    assert sorted({int(row) // 6 for row in rows}) == [int(rows[0]) // 6, int(rows[-1]) // 6], "whole heads"


def test_what_is_given_or_named_otherwise_is_an_output() -> None:
    net = randomized(Decoder(optional="state")).eval()
    chart = pk.trace(net, {"tokens": TOKENS})
    assert chart.read.state == ()
    assert any("'state'" in lock.reason and "outputs=" in lock.reason for lock in chart.locks)
    freed = pk.trace(net, {"tokens": TOKENS}, outputs="logits")
    assert len(freed.groups) > len(chart.groups)


class Accumulating(nn.Module):
    """A cell whose second call fails, as its state has another form than it takes."""

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.i, self.h, self.o, self.broken = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3), broken

    def forward(self, x: Tensor, state: Any = None) -> dict[str, Any]:
        before = 0 if state is None else self.h(state[1] if self.broken else state)
        after = (self.i(x) + before).tanh()
        return {"y": self.o(after), "state": after}


def test_state_that_no_second_call_takes_stays_and_says_so() -> None:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(2))
    found: Any = pk.prune(randomized(Accumulating(broken=False)).eval(), x, channels=0.5)
    assert (found.model.i.out_features, found.model.h.in_features) == (8, 8), "read by the second call alone"
    chart = pk.trace(Accumulating(broken=True), (torch.randn(1, 6),))
    assert not chart.groups
    assert any("cached state: no second call with it runs" in lock.reason for lock in chart.locks)


def test_a_repair_is_judged_by_what_is_read() -> None:
    net: Any = randomized(Decoder()).eval()
    everything = OutputComparison.of(net, (TOKENS.repeat(2, 1),))
    read = OutputComparison.of(net, (TOKENS.repeat(2, 1),), pk.trace(net, {"tokens": TOKENS}).read)
    assert len(everything.outputs) == 3
    assert len(read.outputs) == 1


class Detector(nn.Module):
    """Returns its features beside what it detects."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 16), nn.Linear(16, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        first = self.a(x).relu()
        second = self.b(first).relu()
        found = self.head(second)
        return found, {"boxes": found[..., :4], "features": [first, second]}


IMAGES = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("outputs", [0, "0", "1.boxes", [0, "1.boxes"], lambda output: output[0]])
def test_outputs_that_are_not_read_shrink(outputs: Any, tmp_path: Path) -> None:
    net = randomized(Detector()).eval()
    assert not pk.trace(net, IMAGES).groups
    found: Any = pk.prune(net, IMAGES, channels=0.5, outputs=outputs)
    assert (found.model.a.out_features, found.model.b.out_features) == (8, 6)
    assert pk.verify(net, found.model, found.plan, IMAGES).max_relative_difference <= 1e-12
    found.plan.save(tmp_path)
    loaded = pk.load_plan(tmp_path)
    if callable(outputs):
        with pytest.raises(PrunekitError, match="a file does not keep a function"):
            pk.verify(net, found.model, loaded, IMAGES)
    pk.verify(net, found.model, loaded, IMAGES, outputs=outputs)


def test_locks_name_the_outputs_that_need_them() -> None:
    reasons = {lock.reason.partition(";")[0] for lock in pk.trace(Detector(), IMAGES).locks}
    named = {"0": "head", "1.features": "a, b"}
    assert {f"output of the model, {name!r}, made by {layers}" for name, layers in named.items()} <= reasons


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        ("2", "the model returns no '2'; it returns 0, 1.boxes, 1.features"),
        ("1.masks", "the model returns no '1.masks'; it returns 0, 1.boxes, 1.features"),
        ([], "expected names or positions of outputs"),
        (0.5, "expected names or positions of outputs"),
    ],
)
def test_outputs_that_are_not_there_are_refused(outputs: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        pk.plan(Detector(), IMAGES, channels=0.5, outputs=outputs)
