"""Random nets with random plans: masked == compact, and by the rules alone; and what a repair makes of them.

Set PRUNEKIT_RANDOM_NETS=1000 to look at that many nets, after a change of a rule.
"""

from __future__ import annotations

import os

import pytest
import torch
from equivalence import TOLERANCE, parity, random_keep, randomized, settled_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_nets import SIZE, STEPS, RandomNet

import prunekit
from prunekit.channels.trace import trace
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.errors import PlanError
from prunekit.measure.model_size import count_macs
from prunekit.planning.plan import Plan

NETS = int(os.environ.get("PRUNEKIT_RANDOM_NETS", "80"))
number = st.integers(0, 47)
Program = list[tuple[str, int, int]]
dtypes = st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16])
programs = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), number, number), min_size=2, max_size=9)


def images(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@settings(max_examples=NETS, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(programs, st.integers(0, 9), st.sampled_from([0.2, 0.5, 0.9]), dtypes)
def test_masked_equals_compact(program: Program, seed: int, share: float, dtype: torch.dtype) -> None:
    model, example = randomized(RandomNet([("conv", 0, seed), *program]), seed).eval(), (images(2, seed),)
    if not any(name == "spectrum" for name, _, _ in program):  # of other numbers torch has no transform on a CPU
        model, example = model.to(dtype), (example[0].to(dtype),)
    first = trace(model, example)
    settled = run_trial(model, first, lambda chart: random_keep(chart, seed, share), [example])
    if not any(name == "shuffle" for name, _, _ in program):  # its two rows are a number in the code: the trial's
        assert settled.channel_map.locks == first.locks, "the rules let something pass that the trial had to lock"
    plan = Plan(settled.channel_map, settled.keep)
    assert parity(model, plan, example) <= TOLERANCE

    small = compact(model, plan).train()
    sum(output.sum() for output in small(*example)).backward()
    if all(parameter.numel() > 1 for parameter in model.parameters() if parameter.dim() > 1):
        assert count_macs(small, example) == plan.channel_map.macs(plan.keep)
    assert parity(small, settled_plan(small, example, seed + 1, share), example) <= TOLERANCE


@pytest.mark.slow
@settings(max_examples=NETS // 8, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(programs, st.integers(0, 9))
def test_a_repair_is_proven_and_never_makes_a_net_worse(program: Program, seed: int) -> None:
    model = randomized(RandomNet([("conv", 0, seed), *program]), seed).eval()
    seen, others = images(48, seed), images(16, seed + 100)
    try:
        result = prunekit.prune(model, calibration=seen, macs=0.75)
    except PlanError:  # next to nothing is free
        return
    assert result.masked is not None
    assert result.repair is not None
    assert result.max_relative_difference <= TOLERANCE
    prunekit.verify(result.masked, result.model, result.plan, [(others,)])
    if not result.repair.kept:
        assert result.notes
        return
    assert result.repair.after <= max(result.repair.before, 1e-9)
    # The report is of the model as it is handed out, on the images that only judged: the last ones.
    held = seen[-max(1, round(len(seen) * prunekit.RepairSettings().held_out)) :]
    small = result.model.eval()
    with torch.no_grad():
        pairs = [(a.double(), b.double()) for a, b in zip(model(held), small(held), strict=True)]
    shares = [float((a - b).square().sum() / (a - a.mean(0)).square().sum()) for a, b in pairs]
    assert sum(shares) / len(shares) == pytest.approx(result.repair.after, rel=1e-3, abs=1e-9)
