"""What processes tell each other, and that a single process needs nobody."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import together

from prunekit.distributed.process_group import (
    everyone,
    from_main,
    gather_on_main,
    gather_values,
    in_turn,
    is_main,
    join_group,
    rank,
    require_equal,
    share_tensors,
    size,
    total,
    wait_for_all,
)
from prunekit.errors import RunError


def exchanged() -> dict[str, Any]:
    mine = rank()
    if mine == 1:
        time.sleep(0.2)  # the others wait

    tensors = {
        "float": torch.full((2, 3), float(mine)),
        "strided": torch.arange(6.0).reshape(2, 3).t() + mine,
        "count": torch.tensor(mine),
    }
    share_tensors(tensors.items(), "a model")
    with in_turn():
        entered = time.monotonic()
        time.sleep(0.05)
        left = time.monotonic()
    wait_for_all()
    return {
        "rank": (mine, size(), is_main()),
        "total": total(0.1 * mine, 2**52, mine),
        "everyone": (everyone(True), everyone(mine > 0), everyone(False)),
        "gathered": gather_values({"rank": mine}),
        "on_main": list(gather_on_main(torch.full((3,), mine))),
        "from_main": [from_main(lambda: ("made by", rank())) for _ in range(3)],
        "tensors": tensors,
        "turn": (entered, left),
    }


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_all_processes_hear_the_same(processes: int, tmp_path: Path) -> None:
    found = together(processes, tmp_path, exchanged)
    ranks = range(processes)
    for number, told in enumerate(found):
        assert told["rank"] == (number, processes, number == 0)
        assert told["total"][0] == pytest.approx(0.1 * sum(ranks), rel=1e-15)
        assert told["total"][1:] == (processes * 2**52, sum(ranks))
        assert told["everyone"] == (True, False, False)
        assert told["gathered"] == [{"rank": each} for each in ranks]
        assert [each[0].item() for each in told["on_main"]] == (list(ranks) if number == 0 else [])
        assert told["from_main"] == [("made by", 0)] * 3
        assert torch.equal(told["tensors"]["float"], torch.zeros(2, 3))
        assert torch.equal(told["tensors"]["strided"], torch.arange(6.0).reshape(2, 3).t())
        assert told["tensors"]["count"] == 0
    main_left = found[0]["turn"][1]
    assert all(told["turn"][0] >= main_left for told in found[1:])  # one clock for all processes of a machine


def disagreed() -> list[str]:
    told = []
    for check in (
        lambda: require_equal("abc" if rank() < 2 else f"other {rank()}", "the plan"),
        lambda: share_tensors([("weight", torch.zeros(2 + rank()))], "the model"),
    ):
        with pytest.raises(RunError) as error:
            check()
        told.append(str(error.value))
    return told


def test_who_differs_is_named_everywhere(tmp_path: Path) -> None:
    for told in together(3, tmp_path, disagreed):
        assert told[0].startswith("the plan: expected the same in all 3 processes, but process 2 has something else")
        assert "(other 2 and abc)" in told[0]
        assert told[1].startswith("names, shapes and types of the model: ")
        assert "but process 1, 2 has" in told[1]


def test_a_single_process_needs_nobody() -> None:
    weight = torch.ones(2)
    with join_group(), in_turn():
        wait_for_all()
        share_tensors([("weight", weight)], "the model")
        require_equal("a", "the plan")
    assert (rank(), size(), is_main()) == (0, 1, True)
    assert total(0.1, 3) == (0.1, 3)
    assert (everyone(True), everyone(False)) == (True, False)
    assert gather_values("a") == ["a"] == list(gather_on_main("a"))
    assert from_main(lambda: weight) is weight
