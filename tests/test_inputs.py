"""What a model is called with, and how samples are taken from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prunekit.errors import ModelError
from prunekit.inputs import arguments, count_of, described, inputs_in, joined, taken


class Net(nn.Module):
    def forward(self, ids: Tensor, kinds: Tensor | None = None, mask: Tensor | None = None, **more: Any) -> Tensor:
        return ids


class ByName(nn.Module):
    def forward(self, ids: Tensor, *, mask: Tensor) -> Tensor:
        return ids


A, B = torch.arange(6).view(3, 2), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (A, (A,)),
        ((A, B), (A, B)),
        ([A, B], (A, B)),
        ({"mask": B, "ids": A}, (A, None, B)),
        ({"ids": A}, (A,)),
        ({"kinds": B, "ids": A}, (A, B)),
    ],
)
def test_arguments_in_the_order_of_forward(inputs: Any, expected: tuple[Any, ...]) -> None:
    given = arguments(Net(), inputs)
    assert len(given) == len(expected)
    assert all(one is other for one, other in zip(given, expected, strict=True))


@pytest.mark.parametrize(
    ("model", "inputs", "why"),
    [
        (Net(), {"mask": B}, "missing a required argument: 'ids'"),
        (Net(), {"ids": A, "pixels": B}, "'pixels' is not in list"),
        (ByName(), {"ids": A, "mask": B}, "taken by name alone"),
        (ByName(), {"ids": A, "other": B}, "required"),
    ],
)
def test_what_forward_does_not_take_by_position_is_refused(model: nn.Module, inputs: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why) as raised:
        arguments(model, inputs)
    assert f"expected a forward that takes {', '.join(inputs)}" in str(raised.value)


def test_samples_of_nested_inputs() -> None:
    inputs = {"ids": A, "more": (B, None)}
    assert count_of(inputs) == 3
    halves = [taken(inputs, slice(2)), taken(inputs, slice(2, None))]
    assert [count_of(half) for half in halves] == [2, 1]
    again = joined(halves)
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

    found = taken(Outputs(logits=torch.arange(4)), slice(2))
    assert isinstance(found, Outputs)
    assert found["logits"].tolist() == [0, 1]
