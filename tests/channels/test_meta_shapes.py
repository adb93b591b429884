"""Shortcuts on meta tensors return the shapes, types and strides of the operators; whole numbers are known there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import prunekit as pk
from prunekit.channels.rules.indexing import numbers_in
from prunekit.channels.tracing.operator_mode import SHORTCUTS, OnMeta, run_on_meta
from prunekit.channels.tracing.tracer import trace_model
from prunekit.utils.inputs import as_example
from prunekit.utils.tensors import gather, map_tensors

aten: Any = torch.ops.aten


def tensor(*shape: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Ones; with an order, the memory is that of the axes in this order."""
    if order is None:
        return torch.ones(shape)
    return torch.ones([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])


def seen(out: Any) -> list[Any]:
    """Shape, type and the strides that matter: an axis of one index may have any."""
    return [
        (t.shape, t.dtype, [step for step, n in zip(t.stride(), t.shape, strict=True) if n > 1]) for t in gather(out)
    ]


def agrees(func: Any, *args: Any) -> bool:
    """Whether the operator was the shortcut's to answer; it must then answer as on the CPU."""
    name = str(func._schema.name).replace("::", ".")
    on_meta = map_tensors(args, lambda one: one.to("meta"))
    short = SHORTCUTS[name](on_meta, {})
    assert seen(run_on_meta(func, name, on_meta, {})) == seen(func(*args))
    return short is not NotImplemented


sizes = st.integers(1, 4)
orders = st.sampled_from([None, (0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)])


@given(st.tuples(sizes, sizes, sizes, sizes), orders)
def test_elementwise(shape: tuple[int, ...], order: tuple[int, ...] | None) -> None:
    assert agrees(aten.gelu.default, tensor(*shape, order=order))


def test_batch_norm_in_eval_mode() -> None:
    vector = torch.ones(4)
    rest = [vector] * 4
    assert agrees(aten._native_batch_norm_legit_no_training.default, tensor(2, 4, 3, 3), *rest, 0.1, 1e-5)
    assert not agrees(aten.native_batch_norm.default, tensor(2, 4, 3, 3), *rest, True, 0.1, 1e-5)


def test_integers_are_known_as_far_as_they_depend_on_no_float() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    with OnMeta():
        there = mask.to("meta")
        causal = torch.arange(3, device="meta")[:, None] >= torch.arange(3, device="meta")
        allowed = causal & there.bool()[:, None]
        assert not there.all()
        assert int(there.sum()) == 5
        assert len(there.nonzero()) == 5
        row = allowed[1]
        row &= row.logical_not()  # seen in the tensor that it is a view of
        assert not allowed[1].any()
    assert allowed.is_meta
    assert torch.equal(numbers_in(allowed)[0], torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 0]]).bool())


def test_numbers_that_depend_on_floats_are_unknown() -> None:
    with OnMeta():
        flags = torch.zeros(4, dtype=torch.bool, device="meta")
        first = flags[:1]
        assert not flags.any()
        flags |= torch.empty(4, device="meta") > 0
        for unknown in (flags, first, torch.randint(3, (2,), device="meta")):
            assert numbers_in(unknown) is None
            with pytest.raises(RuntimeError, match="meta"):
                bool(unknown.any())


def test_a_model_that_looks_at_its_mask_is_traced_without_values() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            mask = mask.to(x.device)
            hidden = self.first(x).relu()
            return self.last(hidden if mask.all() else hidden * mask[..., None])

    example = (torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]]))
    trace = trace_model(Masked(), [example])
    assert trace.example[0].is_meta
    assert "aten.mul" in [operator.name for operator in trace.runs[0].operators]


def test_state_of_a_model_that_looks_at_its_mask_is_given_back() -> None:
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.key, self.last = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 9)

        def forward(
            self, tokens: torch.Tensor, mask: torch.Tensor | None = None, cache: torch.Tensor | None = None
        ) -> dict[str, torch.Tensor]:
            keys = self.key(self.embed(tokens))
            keys = keys if cache is None else torch.cat([cache, keys], 1)
            seen = keys if mask is None or mask.to(keys.device).all() else keys * mask.to(keys)[..., None]
            return {"scores": self.last(seen.mean(1)), "cache": keys}

    tokens = torch.randint(0, 9, (2, 5))
    trace = trace_model(Cached(), [as_example(Cached(), {"tokens": tokens, "mask": torch.ones_like(tokens)})])
    assert trace.labels["embed.weight"][1] is not None
    assert all(tensor.is_meta for tensor in trace.model().parameters())
    assert trace.read.state == ("cache",)
    group = pk.trace(Cached(), {"tokens": tokens, "mask": torch.ones_like(tokens)}).groups
    assert {axis for found in group for axis in found.slots} >= {("key.weight", 0)}
