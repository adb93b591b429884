"""Positions that an attention mask leaves out count for nothing, however many there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit
from prunekit.pruning.sample_statistics import joined_samples
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.gram_matrices import collect_patches
from prunekit.statistics.layer_errors import with_gains
from prunekit.statistics.patches import sample_rows
from prunekit.utils.inputs import Keywords, counted_positions

LENGTHS = [3, 5, 8, 6, 2, 7, 4, 8, 5, 6, 8, 3, 7, 7, 4, 8]


class Block(nn.Module):
    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.norm, self.q, self.v = nn.LayerNorm(12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.up, self.down, self.flat = nn.Linear(12, 24), nn.Linear(24, 12), flat

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        scores = self.q(self.norm(x)) @ x.mT
        weights = scores.masked_fill(~(counted if counted.dim() == 3 else counted[:, None]), -torch.inf).softmax(-1)
        x = x + self.v(weights @ x)
        rows = x.flatten(0, 1) if self.flat else x  # as experts take tokens
        hidden: Tensor = self.down(F.gelu(self.up(rows)))
        return x + hidden.view_as(x)


class Reader(nn.Module):
    """Scores of each token (B, T, 5), or of each text (B, 5)."""

    def __init__(self, *, tokens: bool, flat: bool = False) -> None:
        super().__init__()
        self.table, self.tokens, self.head = nn.Embedding(20, 12), tokens, nn.Linear(12, 5)
        self.blocks = nn.ModuleList(Block(flat=flat) for _ in range(2))
        self.along = nn.Conv1d(12, 12, 1)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        counted, x = attention_mask.bool(), self.table(ids)
        for block in self.blocks:
            x = block(x, counted)
        x = x + F.relu(self.along(x.mT)).mT
        mean = (x * counted[..., None]).sum(1) / counted.sum(1, keepdim=True)
        scores: Tensor = self.head(x if self.tokens else mean)
        return scores


class Translator(nn.Module):
    """Scores (B, T, 5) of what a causal decoder reads beside an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=PAD)
        self.table, self.head, self.idle = nn.Embedding(20, 12), nn.Linear(12, 5), nn.Dropout()
        self.encoder, self.decoder, self.keys, self.cross = Block(flat=False), Block(flat=True), *linear(2)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        decoder_input_ids: Tensor,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        there = attention_mask.bool()
        read, x = self.encoder(self.table(input_ids), there), self.idle(self.table(decoder_input_ids))
        x = self.decoder(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None])
        weights = (x @ self.keys(read).mT).masked_fill(~there[:, None], -torch.inf).softmax(-1)
        scores: Tensor = self.head(x + self.cross(weights @ read))
        return scores


def linear(count: int) -> list[nn.Linear]:
    return [nn.Linear(12, 12) for _ in range(count)]


PAD = 18


def net(**options: Any) -> Reader:
    torch.manual_seed(3)
    return Reader(**options).double().eval()


def texts(longest: int, filler: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    ids, mask = torch.full((len(LENGTHS), longest), filler), torch.zeros(len(LENGTHS), longest).long()
    for row, length in enumerate(LENGTHS):
        ids[row, :length], mask[row, :length] = torch.randint(1, 20, (length,), generator=draw), 1
    return {"ids": ids, "attention_mask": mask}


def alone() -> list[dict[str, Tensor]]:
    """Each text without padding."""
    whole = texts(8, 0)
    return [{name: part[i : i + 1, :length] for name, part in whole.items()} for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("flat", [False, True])
def test_statistics_of_texts_are_those_of_each_alone(flat: bool) -> None:
    model = net(tokens=True, flat=flat)
    wanted = prunekit.calibrate(model, alone())
    found = prunekit.calibrate(model, texts(11, 17))
    assert found.keys() == wanted.keys()
    for key, layer in wanted.items():
        for name in ("count", "mean", "variance", "mean_abs", "rms", "min", "max", "zero_fraction"):
            assert np.allclose(getattr(found[key], name), getattr(layer, name), rtol=1e-9, atol=1e-12), (key, name)


def pairs(longest: int, written: int, filler: int, *, masked: bool) -> dict[str, Tensor]:
    """Texts for encoder and decoder, padded to the lengths that are asked for."""
    first, draw = texts(longest, filler), torch.Generator().manual_seed(6)
    ids, mask = torch.full((len(LENGTHS), written), filler), torch.zeros(len(LENGTHS), written).long()
    for row, length in enumerate(reversed(LENGTHS)):
        ids[row, :length], mask[row, :length] = torch.randint(1, PAD, (length,), generator=draw), 1
    ids[:, 0] = filler  # the start of what is written, as T5 has it
    made = {"input_ids": first["ids"], "attention_mask": first["attention_mask"], "decoder_input_ids": ids}
    return made | ({"decoder_attention_mask": mask} if masked else {})


def pairs_alone() -> list[dict[str, Tensor]]:
    whole, each = pairs(8, 8, PAD, masked=False), zip(LENGTHS, reversed(LENGTHS), strict=True)
    return [
        {name: part[i : i + 1, : written if "decoder" in name else read] for name, part in whole.items()}
        for i, (read, written) in enumerate(each)
    ]


def translator() -> Translator:
    torch.manual_seed(3)
    return Translator().double().eval()


@pytest.mark.parametrize("masked", [False, True])
def test_statistics_of_translations_are_those_of_each_alone(masked: bool) -> None:
    """The decoder's padding is left out, by its own mask or by the id of padding."""
    model = translator()
    wanted = prunekit.calibrate(model, pairs_alone())
    found = prunekit.calibrate(model, pairs(8, 11, PAD, masked=masked))
    assert found.keys() == wanted.keys()
    for key, layer in wanted.items():
        for name in ("count", "mean", "variance", "mean_abs", "rms", "min", "max", "zero_fraction"):
            assert np.allclose(getattr(found[key], name), getattr(layer, name), rtol=1e-9, atol=1e-12), (key, name)


@pytest.mark.parametrize(("longest", "written"), [(13, 9), (8, 8), (10, 10)])
def test_padding_of_encoder_and_decoder_is_told_apart(longest: int, written: int) -> None:
    """Also where both read as many positions."""
    model = translator()
    given = pairs_alone(), pairs(8, 9, PAD, masked=False), pairs(longest, written, PAD, masked=False)
    alone, some, more = (joined_samples(model, each, 16) for each in given)
    wanted, first, second = (with_gains(model, collect_patches(model, [(each,)]), each) for each in (alone, some, more))
    assert len(first.layers) == len(second.layers) > 10
    for least, one, other in zip(wanted.layers, first.layers, second.layers, strict=True):
        assert least.rows == one.rows == other.rows
        for same in zip(least.grams, one.grams, other.grams, strict=True):
            assert all(torch.allclose(same[0], each, rtol=1e-9, atol=1e-12) for each in same[1:])
        assert one.output_gain == pytest.approx(other.output_gain, rel=1e-6)
        assert torch.allclose(one.variance, other.variance)


def test_positions_of_one_shape_count_where_both_sides_do() -> None:
    counted = counted_positions(translator(), (Keywords(pairs(8, 8, PAD, masked=True)),))
    assert counted is not None
    assert [mask.sum(1).tolist() for mask in counted.masks] == [
        [min(both) for both in zip(LENGTHS, reversed(LENGTHS), strict=True)]
    ]


def test_lengths_may_differ_from_batch_to_batch() -> None:
    """Layers without weights, such as an activation, tell tokens from channels by what the model is given."""

    class Told(Reader):
        def __init__(self) -> None:
            super().__init__(tokens=True)
            self.act = nn.GELU()

        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(self.act(self.table(ids)).sum(2).long().remainder(20), torch.ones_like(ids))

    torch.manual_seed(3)
    model, batches = Told().double().eval(), [torch.arange(12).view(3, 4), torch.arange(12).view(2, 6)]
    stats = prunekit.calibrate(model, batches)
    assert stats["act", "output", 0].channels == 12
    assert (stats["act", "output", 0].count == 24).all()


@pytest.mark.parametrize("tokens", [False, True])
def test_patches_and_gains_know_nothing_of_padding(tokens: bool) -> None:
    model = net(tokens=tokens)
    some, more = (joined_samples(model, texts(*how), 16) for how in ((8, 0), (13, 17)))
    first, second = (with_gains(model, collect_patches(model, [(each,)]), each) for each in (some, more))
    assert len(first.layers) == len(second.layers) == 10
    for one, other in zip(first.layers, second.layers, strict=True):
        assert one.rows == other.rows
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one.grams, other.grams, strict=True))
        assert one.output_gain == pytest.approx(other.output_gain, rel=1e-6)
        assert torch.allclose(one.variance, other.variance)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [False, True])
def test_a_repair_is_the_same_with_more_padding(tokens: bool) -> None:
    model = net(tokens=tokens)
    done = [
        prunekit.prune(model, calibration=texts(*how), channels=0.6, repair=RepairSettings(joint_steps=0))
        for how in ((8, 0), (13, 17))
    ]
    assert (done[0].plan.keep == done[1].plan.keep).all()
    reports = [each.repair for each in done]
    assert reports[0] is not None
    assert reports[1] is not None
    assert reports[0].after < 0.8 * reports[0].before
    assert reports[0].after == pytest.approx(reports[1].after, rel=1e-6)
    assert reports[0].before == pytest.approx(reports[1].before, rel=1e-6)
    for one, other in zip(done[0].model.parameters(), done[1].model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)


def test_samples_with_padding_are_spread_over_all_batches() -> None:
    class Branching(Reader):
        """Leaves out a mask that masks nothing, as transformers do."""

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            if bool(attention_mask.all()):
                return super().forward(ids, torch.ones_like(ids))
            return super().forward(ids + 0, attention_mask * 1)

    torch.manual_seed(3)
    model, some = Branching(tokens=False).double().eval(), texts(8, 0)
    padded = some["attention_mask"].all(1).logical_not()
    order = torch.cat([torch.nonzero(~padded), torch.nonzero(padded)]).flatten()  # whole texts first
    batches = [{name: part[order[i : i + 4]] for name, part in some.items()} for i in range(0, 16, 4)]
    mask = joined_samples(model, batches, 16)["attention_mask"]
    assert [bool(part.all()) for part in mask.split(2)] == [False] * 8
    found = prunekit.prune(model, calibration=batches, channels=0.6, repair=RepairSettings(joint_steps=0)).repair
    assert found is not None
    assert found.after < 0.8 * found.before


@pytest.mark.slow
def test_measured_errors_are_the_same_with_more_padding() -> None:
    model = net(tokens=True)
    curves = [prunekit.sensitivity(model, texts(*how), measured_on=texts(*how)) for how in ((8, 0), (8, 17))]
    for name, points in curves[0].measured.items():
        others = curves[1].measured[name]
        assert [point.error for point in points] == pytest.approx([point.error for point in others], rel=1e-6)


@pytest.mark.slow
def test_what_a_cache_holds_of_padding_judges_nothing() -> None:
    class Caching(Reader):
        """Returns keys (B, heads, T, 6) beside its scores, as decoders do."""

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Any:
            keys = self.blocks[1].v(self.table(ids)).unflatten(2, (2, 6)).transpose(1, 2)
            return super().forward(ids, attention_mask), [keys]

    torch.manual_seed(3)
    model = Caching(tokens=True).double().eval()
    reports = [
        prunekit.prune(model, calibration=texts(*how), channels=0.6, repair=RepairSettings(joint_steps=0)).repair
        for how in ((8, 0), (13, 17))
    ]
    assert reports[0] is not None
    assert reports[1] is not None
    assert reports[0].before == pytest.approx(reports[1].before, rel=1e-6)
    assert reports[0].after == pytest.approx(reports[1].after, rel=1e-6)


def test_rows_are_drawn_among_those_that_count() -> None:
    among = torch.tensor([1, 4, 6, 7, 11])
    drawn = sample_rows(12, 3, 0, among)
    assert len(drawn) == 3
    assert set(drawn.tolist()) <= set(among.tolist())
    assert sample_rows(12, 9, 0, among).tolist() == among.tolist()


@pytest.mark.parametrize(
    ("mask", "understood"),
    [
        (torch.tensor([[1, 1, 0], [1, 0, 0]]), True),
        (torch.tensor([[True, False], [True, True]]), True),
        (torch.tensor([[1.0, 0.0], [1.0, 1.0]]), True),
        (torch.ones(2, 3), False),  # all count
        (torch.tensor([[0.0, -1e4], [0.0, 0.0]]), False),  # is added to scores
        (torch.tensor([[1, 0], [0, 0]]), False),
        (torch.ones(2, 1, 3, 3), False),
        (None, False),
    ],
)
def test_masks_of_zeros_and_ones_are_understood(mask: Tensor | None, understood: bool) -> None:
    ids = torch.zeros(2, 3)
    by_place = counted_positions(net(tokens=True), (ids, mask))
    by_name = counted_positions(net(tokens=True), (ids, Keywords(attention_mask=mask)))
    for found in (by_place, by_name):
        assert (found is not None) == understood
        assert found is None or mask is None or torch.equal(found.masks[0], mask != 0)
