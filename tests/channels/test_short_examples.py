"""Short examples: a trial takes some tens of tokens where they show what the whole sequences show."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prunekit
from prunekit.channels.trial.comparison import TOKENS, shortened
from prunekit.utils.inputs import as_example
from prunekit.utils.tensors import gather


class Reader(nn.Module):
    """Scores of tokens; another layer reads sequences beyond some length, and padding is zero."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.table, self.first, self.other = nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(8, 16)
        self.last = nn.Linear(16, 50)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.table(input_ids)
        if attention_mask is not None and not bool(attention_mask.all()):
            x = x * attention_mask[..., None]
        x = self.other(x) if x.shape[1] > self.longest else self.first(x)
        return self.last(x.relu())


def short(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    given = as_example(model, example)
    return given, shortened(model, prunekit.trace(model, example), given, given)


def test_sequences_are_cut_where_the_model_runs_alike() -> None:
    torch.manual_seed(0)
    ids = torch.randint(50, (2, 100))
    given, found = short(Reader(1000), ids)
    assert torch.equal(found[0], ids[:, :TOKENS])
    assert given[0].shape == (2, 100)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(torch.randint(50, (2, TOKENS)), id="short"),
        pytest.param(torch.randint(50, (2, 100)), id="other layers"),
    ],
)
def test_an_example_that_shows_more_stays(example: Tensor) -> None:
    given, found = short(Reader(50), example)
    assert found is given


def test_images_and_vectors_stay() -> None:
    given, found = short(nn.Linear(100, 4), torch.randn(2, 100))
    assert found is given


def test_what_is_left_has_the_padding_of_the_whole() -> None:
    ids, mask = torch.arange(300).view(3, 100) % 50, torch.ones(3, 100, dtype=torch.int64)
    mask[0, 70:], mask[1, :20] = 0, 0
    _, found = short(Reader(1000), {"input_ids": ids, "attention_mask": mask})
    tokens, left = gather(found)
    assert torch.equal(tokens, torch.stack([ids[0, 53:85], ids[1, 3:35], ids[2, :32]]))
    assert left.sum(1).tolist() == [17, 15, 32]


def test_the_trial_and_the_proof_take_what_is_left_before_the_whole() -> None:
    torch.manual_seed(0)
    lengths: dict[int, None] = {}  # in the order in which they are met
    model = Reader(1000)

    class Watched(Reader):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            result = super().forward(input_ids, attention_mask)
            if result.dtype == torch.float64 or self.table.weight.dtype == torch.float64:
                lengths[input_ids.shape[1]] = None
            return result

    model.__class__ = Watched
    prunekit.prune(model, calibration=torch.randint(50, (16, 100)), params=0.8)
    assert [*lengths] == [TOKENS, 100]


class Far(nn.Module):
    """Behaves otherwise beyond position 64: by a literal width in a view, or by a factor of the width."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.table, self.body, self.back = nn.Embedding(90, 32), nn.Linear(32, 48), nn.Linear(48, 32)
        self.head, self.view = nn.Linear(32, 5), view

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        y = torch.relu(self.body(x))
        if self.view and ids.shape[1] > 64:
            y = y.reshape(len(y), -1, 48)
        far = (torch.arange(ids.shape[1]) >= 64).to(y.dtype)[None, :, None]
        y = y if self.view else y * (1 + far * (y.shape[-1] / 48 - 0.5))
        scores: Tensor = self.head(self.back(y) + x)
        return scores


@pytest.mark.parametrize("view", [True, False])
def test_what_shows_beyond_the_short_text_is_found_on_the_whole_one(view: bool) -> None:
    torch.manual_seed(0)
    model, ids = Far(view=view).eval(), torch.randint(0, 90, (8, 128))
    result = prunekit.prune(model, calibration=ids, params=0.7, repair=False)
    masked = copy.deepcopy(model).double()
    result.plan.zero(masked)
    with torch.no_grad():
        assert result.model.double()(ids).shape == (8, 128, 5)
        assert torch.allclose(masked(ids), result.model(ids), atol=1e-9)


class Positions(nn.Module):
    """A transformer whose table of positions is longer than the example, as in most tutorials."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed, self.positions = nn.Embedding(20, 16), nn.Parameter(torch.randn(1, 24, 16))
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.register_buffer("mask", torch.ones(24, 24) if way == "triangle" else torch.ones(24, 24).tril())
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x, length, mask = self.embed(tokens), tokens.shape[1], None
        if self.way == "slice":
            x = x + self.positions[:, :length]
        elif self.way == "narrow":
            x = x + self.positions.transpose(0, 1).narrow(0, 0, length).squeeze(1)
        elif self.way == "select":
            x = x + torch.stack([self.positions[0, index] for index in range(length)])
        elif self.way == "scaled":
            x = x + nn.functional.dropout(self.positions * 0.5, 0.1, self.training)[:, :length]
        elif self.way == "joined":
            x = x + torch.cat([self.first, self.positions], 1)[:, 1 : length + 1]
        elif self.way == "triangle":
            mask = self.mask.triu(1)[:length, :length].bool()
        else:
            mask = self.mask[:length, :length] == 0
        return self.head(self.layer(x, src_mask=mask))  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["slice", "narrow", "select", "scaled", "joined", "triangle", "mask"])
@pytest.mark.parametrize("budget", [{"params": 0.7}, {"channels": 0.5}])
def test_longer_texts_than_the_example_still_run(way: str, budget: dict[str, float]) -> None:
    torch.manual_seed(0)
    model, tokens = Positions(way).eval(), torch.randint(20, (2, 24))
    pruned = prunekit.prune(model, tokens[:, :6], **budget)
    assert pruned.model.get_parameter("positions").shape[1] == 24
    assert pruned.model.get_buffer("mask").shape == (24, 24)
    with torch.no_grad(), prunekit.masked(model, pruned.plan):
        expected = model(tokens)
        torch.testing.assert_close(pruned.model(tokens), expected)
    assert ("other entries of the same axis" in str(pruned.plan.channel_map.locks)) is (way != "select")
