"""What a model is called with, and how samples are taken from it."""

from __future__ import annotations

import copy
import pickle
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prunekit.errors import ModelError, UsageError
from prunekit.utils.inputs import (
    Keywords,
    arguments_by_name,
    as_example,
    call,
    concatenate,
    counted_positions,
    described,
    inputs_as_example,
    inputs_in,
    sample_count,
    select_samples,
    sequence_shape,
)


class Net(nn.Module):
    def forward(self, ids: Tensor, kinds: Tensor | None = None, mask: Tensor | None = None, **more: Any) -> Tensor:
        return ids


class ByName(nn.Module):
    def forward(self, ids: Tensor, *, mask: Tensor) -> Tensor:
        return ids


A, B = torch.arange(6).view(3, 2), torch.ones(3, 2)


def test_inputs_of_a_batch_as_an_example() -> None:
    assert inputs_as_example(Net(), A)[0] is A
    assert inputs_as_example(Net(), [A, B]) == (A, B)  # as a data loader collates tuples
    assert inputs_as_example(Net(), {"mask": B, "ids": A}) == ({"ids": A, "mask": B},)
    holder = SimpleNamespace(ids=A)
    assert inputs_as_example(Net(), holder) == (holder,)


def test_arguments_by_name() -> None:
    assert arguments_by_name(Net(), (A, B)) == {"ids": A, "kinds": B}
    assert arguments_by_name(Net(), (A, Keywords(mask=B))) == {"ids": A, "mask": B}
    assert arguments_by_name(nn.DataParallel(Net()), (A, B)) == {0: A, 1: B}


@pytest.mark.parametrize(
    "given", [(A, A != 0), {"attention_mask": A != 0, "ids": A}, (A, Keywords(attention_mask=A != 0))]
)
def test_padding_is_found_by_position_and_by_name(given: Any) -> None:
    class Masked(nn.Module):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return ids

    counted = counted_positions(Masked(), as_example(Masked(), given))
    assert counted is not None
    assert [mask.tolist() for mask in counted.masks] == [(A != 0).tolist()]
    assert sequence_shape(Masked(), as_example(Masked(), given)) == (3, 2)


class OfOneMapping(nn.Module):
    def forward(self, batch: dict[str, Tensor], scale: float = 1.0) -> Tensor:
        return batch["ids"] * scale


def test_an_example_is_positional_arguments_and_keywords_at_the_end() -> None:
    assert as_example(Net(), A)[0] is A
    assert as_example(Net(), (A, B)) == (A, B)
    (named,) = as_example(ByName(), {"mask": B, "ids": A})
    assert type(named) is Keywords
    assert list(named) == ["ids", "mask"]  # in the order of forward, whatever the mapping's
    assert as_example(ByName(), (named,)) == (named,)
    assert as_example(ByName(), (A, Keywords(mask=B))) == (A, {"mask": B})
    assert call(ByName(), (named,)) is A
    assert call(ByName(), (A, Keywords(mask=B))) is A
    assert call(OfOneMapping(), as_example(OfOneMapping(), ({"ids": A},))).tolist() == A.tolist()
    assert list(as_example(Net(), {"more": B, "mask": None, "ids": A})[0]) == ["ids", "mask", "more"]


def test_keywords_stay_keywords() -> None:
    named = Keywords(ids=A)
    ways = (copy.copy(named), copy.deepcopy(named), pickle.loads(pickle.dumps(named)), select_samples(named, slice(2)))
    assert [type(way) for way in ways] == [Keywords] * 4
    assert sample_count(ways[-1]) == 2


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (np.ones(3), "got ndarray; give torch.from_numpy(array)"),
        ((np.ones(3),), "got NumPy arrays (ndarray); give torch.from_numpy(array)"),
        ([A], "got [int64 (3, 2)]; give tuple(list) for several positional arguments, or (list,)"),
        ([(A,)], "got [(int64 (3, 2))]; give tuple(list)"),
        (3, "got int; give (value,)"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_example_is_refused(given: Any, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)) as raised:
        as_example(Net(), given)
    assert "a tensor, a tuple of positional arguments or a mapping of keyword arguments" in str(raised.value)


@pytest.mark.parametrize(
    ("model", "given", "why"),
    [
        (ByName(), {"ids": A, "other": B}, "got ids, other, and forward takes ids, mask: missing a required"),
        (ByName(), (A, Keywords(other=B)), "got other, and forward takes ids, mask"),
        (
            OfOneMapping(),
            {"ids": A},
            "forward takes batch, scale: missing a required argument: 'batch'; where batch is",
        ),
        (OfOneMapping(), {"batch": A, "size": B}, "got an unexpected keyword argument 'size'"),
    ],
)
def test_names_that_forward_does_not_take_are_refused(model: nn.Module, given: Any, why: str) -> None:
    with pytest.raises(ModelError, match=re.escape(why)):
        as_example(model, given)


def test_samples_of_nested_inputs() -> None:
    inputs = {"ids": A, "more": (B, None)}
    assert sample_count(inputs) == 3
    halves = [select_samples(inputs, slice(2)), select_samples(inputs, slice(2, None))]
    assert [sample_count(half) for half in halves] == [2, 1]
    again = concatenate(halves)
    assert torch.equal(again["ids"], A)
    assert torch.equal(again["more"][0], B)
    assert again["more"][1] is None
    assert inputs_in((inputs, A)) is inputs
    assert inputs_in(A) is A
    assert described((inputs, [A] * 5)) == (
        "({ids: int64 (3, 2), more: (float32 (3, 2), NoneType)}, "
        "[int64 (3, 2), int64 (3, 2), int64 (3, 2), int64 (3, 2), ...])"
    )


def test_mappings_that_refuse_update_are_taken_too() -> None:
    class Outputs(dict[str, Tensor]):
        """As transformers' model outputs."""

        def update(self, *_: object, **__: object) -> None:
            raise TypeError("no update")

    found = select_samples(Outputs(logits=torch.arange(4)), slice(2))
    assert isinstance(found, Outputs)
    assert found["logits"].tolist() == [0, 1]
