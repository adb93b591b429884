"""Axes that a model's own Python fixes, and code that no exporter follows, are named with their line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exporting import source_of
from torch import Tensor, nn

from prunekit.backends.files.export_source import ExportOptions
from prunekit.backends.files.program import program_of
from prunekit.errors import RunError


class Inside(nn.Module):
    """A model with a function inside of a module of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.inside = nn.Linear(6, 6), Function(function)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(self.stem(x))
        return out


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def fixed_by_view(x: Tensor) -> Tensor:
    return x.reshape(2, -1) + 1  # the line


def fixed_by_loop(x: Tensor) -> Tensor:
    return torch.stack([x[i] * i for i in range(len(x))])  # the line


def branching(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] <= 4 else x - 1  # the line


@pytest.mark.parametrize("function", [fixed_by_view, fixed_by_loop])
def test_a_batch_that_the_code_fixes_is_named_with_its_line(function: Callable[[Tensor], Tensor]) -> None:
    source = source_of(Inside(function), (torch.randn(2, 6),))
    place = r"at inside \(test_dynamic_axes.py:\d+: .*# the line\); export it with a fixed batch"
    with pytest.raises(RunError, match=rf"Inside: the batch \(axis 0 of x\) cannot be .* fixes it to 2 {place}"):
        program_of(source, flat=True)
    assert "forward" not in vars(source.model)


def test_a_condition_on_the_batch_is_named_with_its_line() -> None:
    message = r"the model's code depends on it: batch <= 4 at test_dynamic_axes.py:\d+: .*# the line; export it with a"
    with pytest.raises(RunError, match=message):
        program_of(source_of(Inside(branching), (torch.randn(2, 6),)), flat=False)


def test_the_shape_of_the_last_batch_that_a_model_keeps_does_not_fix_the_next() -> None:
    class Anchored(nn.Module):
        """Has anchors for the last shape, as detectors have."""

        shape: torch.Size | None = None
        anchors: Tensor

        def forward(self, x: Tensor) -> Tensor:
            if self.shape != x.shape:
                self.shape, self.anchors = x.shape, torch.arange(x.shape[1])
            return x + self.anchors

    model, example = Anchored(), (torch.randn(2, 6),)
    model(*example)
    source = source_of(model, example)
    assert source.model.shape == (2, 6)
    exported = program_of(source, flat=True).exported
    for samples in (1, 2, 5):
        x = torch.randn(samples, 6)
        (found,) = exported.module()(x)
        torch.testing.assert_close(found, x + torch.arange(6))


def test_a_condition_on_another_axis_is_a_note() -> None:
    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1) if x.shape[1] > 4 else x.sum(1)

    options = ExportOptions(dynamic={"x": {1: "time"}})
    program = program_of(source_of(Long(), (torch.randn(2, 6),), options=options), flat=True)
    (note,) = program.notes
    assert note.startswith("holds where time > 4 at test_dynamic_axes.py:")
    assert program.interface.inputs[0].shape == ("batch", "time")


def test_sizes_of_outputs_are_told_by_the_names_of_axes() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"outer": (x[:, None] + x[None]).flatten(0, 1), "rows": y[:, :3], "fixed": x.sum(0)}

    source = source_of(Pairs(), (torch.randn(3, 4), torch.randn(3, 7)))
    outputs = {spec.name: spec.shape for spec in program_of(source, flat=True).interface.outputs}
    assert outputs == {"outer": ("batch**2", 4), "rows": ("batch", 3), "fixed": (4,)}


def test_code_that_depends_on_values_is_named_with_its_line() -> None:
    def on_values(x: Tensor) -> Tensor:
        return x + 1 if float(x.sum()) > 0 else x  # the line

    message = r"Inside cannot be exported: .*data-dependent.* at inside \(test_dynamic_axes.py:\d+: .*# the line\)"
    with pytest.raises(RunError, match=message):
        program_of(source_of(Inside(on_values), (torch.randn(2, 6),)), flat=True)
