"""Random nets with random plans: masked == compact, and by the rules alone."""

from __future__ import annotations

import torch
from equivalence import TOLERANCE, parity, random_keep, randomised, settled_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_nets import SIZE, STEPS, RandomNet

from prunekit.channels import trace
from prunekit.channels.trial import settle
from prunekit.compaction import compact
from prunekit.measure import count_macs
from prunekit.planning import Plan

number = st.integers(0, 47)
programs = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), number, number), min_size=2, max_size=9)


@settings(max_examples=250, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(programs, st.integers(0, 9), st.sampled_from([0.2, 0.5, 0.9]))
def test_masked_equals_compact(program: list[tuple[str, int, int]], seed: int, share: float) -> None:
    example = (torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)),)
    model = randomised(RandomNet([("conv", 0, seed), *program]), seed).eval()
    first = trace(model, example)
    settled = settle(model, first, lambda chart: random_keep(chart, seed, share), [example])
    if not any(name == "shuffle" for name, _, _ in program):  # its two rows are a number in the code: the trial's
        assert settled.channel_map.locks == first.locks, "the rules let something pass that the trial had to lock"
    plan = Plan(settled.channel_map, settled.keep)
    assert parity(model, plan, example) <= TOLERANCE

    small = compact(model, plan).train()
    sum(output.sum() for output in small(*example)).backward()
    if all(parameter.numel() > 1 for parameter in model.parameters() if parameter.dim() > 1):
        assert count_macs(small, example) == plan.channel_map.macs(plan.keep)
    assert parity(small, settled_plan(small, example, seed + 1, share), example) <= TOLERANCE
