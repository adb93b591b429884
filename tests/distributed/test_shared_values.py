"""Values in the store of a process group are data: what is more is refused, and does not run."""

from __future__ import annotations

import os
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prunekit as pk
from prunekit.distributed.process_group import packed, unpacked
from prunekit.errors import RunError
from prunekit.settings.pruning import PruneSettings


class Running:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def test_data_arrive_as_they_were_sent() -> None:
    value = {
        "plain": (None, True, 1, 2.5, "text", b"bytes", [1, {2}, frozenset({3}), slice(1, 2), 1j]),
        "classes": [Path("a/b"), Counter("aab"), OrderedDict(a=1), torch.float16, torch.device("cpu"), np.dtype("f4")],
        "settings": PruneSettings(),
        "array": np.arange(6.0).reshape(2, 3),
        "numbers": (np.float32(1.5), np.int64(7)),
    }
    found = unpacked(packed(value))
    assert {key: found[key] for key in ("plain", "classes", "settings", "numbers")} == {
        key: value[key] for key in ("plain", "classes", "settings", "numbers")
    }
    assert np.array_equal(found["array"], np.arange(6.0).reshape(2, 3))
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        for shape in ((), (0, 3), (2, 3)):
            tensor = torch.ones(shape, dtype=dtype)
            again = unpacked(packed(tensor))
            assert torch.equal(again, tensor)
            assert again.dtype == dtype


def test_a_plan_arrives_as_it_was_made() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    plan = pk.prune(model, torch.randn(2, 4), macs=0.5).plan
    from dataclasses import replace

    sent = replace(plan, channel_map=replace(plan.channel_map, source=None))
    assert unpacked(packed(sent)).digest == plan.digest


@pytest.mark.parametrize("function", [os.mkdir, eval, exec, getattr, __import__, print])
def test_code_is_refused_and_does_not_run(function: Any, tmp_path: Path) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps({"a": [Running(function, str(tmp_path / "made"))]}, protocol)
        with pytest.raises(RunError, match=r"process group: expected data from the main process, got \w+\.\w+"):
            unpacked(data)
    assert not (tmp_path / "made").exists()


def test_neither_functions_of_this_package_nor_nested_pickles_are_called(tmp_path: Path) -> None:
    from prunekit.utils.user_code import load_object

    for data in (
        pickle.dumps(Running(load_object, "python:os:getcwd", RunError)),
        pickle.dumps(torch.ones(2)),  # by torch's own functions, one of which unpickles
        b"\x80\x04\x8c\x08builtins\x8c\x0ddict.fromkeys\x93)R.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x051 + 1\x85R.",
    ):
        with pytest.raises(RunError, match="expected data from the main process"):
            unpacked(data)
