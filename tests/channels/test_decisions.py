"""Equal scores come in any order: the compact model repeats the order of the masked one, and nothing else passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import Net, image, random_keep, randomized
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.channels.trial.comparison import Decision, decision
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.errors import VerificationError
from prunekit.masks.masked_model import masked
from prunekit.measure.verification import verify
from prunekit.planning.plan import Plan


def sorted_scores(scores: Tensor, *, descending: bool = True) -> tuple[Any, list[Tensor]]:
    return ((scores,), {"descending": descending}), list(scores.sort(descending=descending))


def known(scores: Tensor) -> Decision:
    arguments, outs = sorted_scores(scores)
    found = decision("aten.sort", arguments, outs)
    assert found is not None
    return found


SCORES = torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64)


def test_rounding_does_not_decide() -> None:
    arguments, outs = sorted_scores(SCORES + torch.tensor([0, 1e-13, 0]))
    assert outs[1].tolist() == [2, 1, 0]
    known(SCORES).follow(arguments, outs, 1e-9, 0.0)
    assert outs[1].tolist() == [2, 0, 1]


def test_scores_that_differ_decide() -> None:
    arguments, outs = sorted_scores(SCORES + torch.tensor([0, 1e-3, 0]))
    known(SCORES).follow(arguments, outs, 1e-9, 0.0)
    assert outs[1].tolist() == [2, 1, 0]


def test_another_setting_decides() -> None:
    arguments, outs = sorted_scores(SCORES, descending=False)
    known(SCORES).follow(arguments, outs, 1e-9, 0.0)
    assert outs[1].tolist() == [0, 1, 2]


def test_more_or_fewer_are_taken() -> None:
    found = decision("torchvision.nms", (SCORES,), [torch.tensor([2, 0])])
    assert found is not None
    kept = torch.tensor([2])
    found.follow((SCORES + 1e-13,), [kept], 1e-9, 0.0)
    assert kept.tolist() == [2, 0]


@pytest.mark.parametrize(("name", "dtype"), [("aten.sort", torch.int64), ("aten.copy_", torch.float64)])
def test_whole_numbers_and_what_is_overwritten_are_no_decisions(name: str, dtype: torch.dtype) -> None:
    scores = SCORES.to(dtype)
    assert decision(name, (scores,), list(scores.sort())) is None


def ranking(step: float) -> nn.Module:
    """Its second score is larger than the first by `step` for every channel that is gone."""

    def forward(net: Any, x: Tensor) -> Any:
        y = net.a(x)
        z = net.b(y).flatten(2).mean(2)
        scores = torch.tensor([1.0, 1.0 + step * (8 - y.shape[1])], dtype=torch.float64)
        best = scores.sort(descending=True, stable=True).indices
        return z[best]

    return randomized(Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 5, 1))).eval()


def test_a_trial_goes_on_behind_equal_scores_and_so_does_the_proof() -> None:
    model, example = ranking(1e-13), image()
    chart = trace(model, example)
    settled = run_trial(model, chart, random_keep, [example])
    assert settled.channel_map.locks == chart.locks
    plan = Plan(settled.channel_map, settled.keep)
    assert plan.removed
    with masked(model, plan, restore=True) as dense:
        assert verify(dense, compact(model, plan), plan, [example]).max_relative_difference <= 1e-9
        wrong = compact(model, plan)
        with torch.no_grad():
            wrong.b.weight[0, 0] += 1e-3  # type: ignore[union-attr, index, operator]
        with pytest.raises(VerificationError):
            verify(dense, wrong, plan, [example])


def test_a_trial_stops_at_scores_that_differ() -> None:
    """The operators just before have labels too, but none that is free: locking those would help nothing."""
    model, example = ranking(1e-3), image()
    settled = run_trial(model, trace(model, example), random_keep, [example])
    assert not (~settled.keep).any()
