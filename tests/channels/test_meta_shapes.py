"""Shortcuts on meta tensors return the shapes, types and strides of the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunekit.channels.tracing.meta_shapes import SHORTCUTS, run_on_meta
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


@given(st.tuples(sizes, sizes, sizes, sizes), orders, st.integers(1, 4))
def test_layer_norm(shape: tuple[int, ...], order: tuple[int, ...] | None, over: int) -> None:
    source, own = tensor(*shape, order=order), shape[-over:]
    weight = torch.ones(own)
    assert agrees(aten.native_layer_norm.default, source, own, weight, weight, 1e-5) == source.is_contiguous()


@given(sizes, sizes, sizes, st.sampled_from(["of the columns", "one", "full"]))
def test_linear_layers(rows: int, inner: int, columns: int, bias: str) -> None:
    shape = {"of the columns": (columns,), "one": (1,), "full": (rows, columns)}[bias]
    taken = agrees(aten.addmm.default, tensor(*shape), tensor(rows, inner), tensor(columns, inner).t())
    assert taken == (shape == (columns,))


@given(st.tuples(sizes, sizes, sizes, sizes), orders)
def test_softmax_of_attention(shape: tuple[int, ...], order: tuple[int, ...] | None) -> None:
    source = tensor(*shape, order=order)
    assert agrees(aten._safe_softmax.default, source, -1) == source.is_contiguous()
    assert not agrees(aten._safe_softmax.default, source, -1, torch.float64)


@given(st.tuples(sizes, sizes, sizes, sizes), orders, orders, st.lists(st.booleans(), min_size=4, max_size=4))
def test_elementwise(shape: tuple[int, ...], order: Any, other: Any, ones: list[bool]) -> None:
    left = tensor(*shape, order=order)
    right = tensor(*[1 if one else size for one, size in zip(ones, shape, strict=True)], order=other)
    assert agrees(aten.gelu.default, left)
    if left.is_contiguous() and right.is_contiguous():
        for func in (aten.add.Tensor, aten.mul.Tensor):
            assert agrees(func, left, right)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions(stride: int, groups: int) -> None:
    source, weight = tensor(2, 4, 9, 7), tensor(8, 4 // groups, 3, 3)
    rest = [stride, stride], [1, 1], [1, 1], False, [0, 0], groups
    assert agrees(aten.convolution.default, source, weight, None, *rest)


def test_batch_norm_in_eval_mode() -> None:
    vector = torch.ones(4)
    rest = [vector] * 4
    assert agrees(aten._native_batch_norm_legit_no_training.default, tensor(2, 4, 3, 3), *rest, 0.1, 1e-5)
    assert not agrees(aten.native_batch_norm.default, tensor(2, 4, 3, 3), *rest, True, 0.1, 1e-5)
