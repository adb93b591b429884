"""Schedules as pure functions: curves, pruning steps, units, and plans between two others."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torchvision
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import zeros

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.errors import UsageError
from prunekit.planning.candidates import PlanBounds
from prunekit.planning.schedules import ScheduleStep, settings_at_step, share_kept, timeline
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings, prune_contradictions

KINDS = ("oneshot", "iterative", "linear", "exponential", "cubic")
kinds = st.sampled_from(KINDS)
shares = st.floats(0.01, 1.0)


@given(kinds, shares, st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_what_is_left_falls_from_all_to_exactly_the_share_asked_for(kind: Any, final: float, at: list[float]) -> None:
    left = [share_kept(kind, progress, final) for progress in [0.0, *sorted(at), 1.0]]
    assert left[0] == 1.0
    assert left[-1] == final
    assert all(after <= before + 1e-12 for before, after in pairwise(left))
    assert min(left) >= final - 1e-12


@given(shares, st.integers(0, 50), st.integers(1, 50), st.integers(1, 40))
def test_cubic_is_the_papers_formula(final: float, begin: int, every: int, rounds: int) -> None:
    """s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3, Zhu & Gupta 2017, equation 1."""
    end = begin + rounds * every
    line = timeline(ScheduleSettings("cubic", unit="step", begin=begin, end=end, every=every), epochs=1, steps=end + 1)
    assert [stage.step for stage in line.pruning_steps] == [begin + every * index for index in range(1, rounds + 1)]
    for stage in line.pruning_steps:
        s_f, s_i = 1 - final, 0.0
        s_t = s_f + (s_i - s_f) * (1 - (stage.step - begin) / (rounds * every)) ** 3
        assert share_kept("cubic", stage.progress, final) == pytest.approx(1 - s_t, abs=1e-12)
        assert line.share_at(stage.step, final) == pytest.approx(1 - s_t, abs=1e-12)
    assert line.share_at(begin, final) == 1.0
    assert line.share_at(end + 1, final) == final


@given(
    kinds.filter(lambda kind: kind != "oneshot"),
    st.integers(1, 30),
    st.integers(2, 8),
    st.floats(0, 0.4),
    st.floats(0.5, 0.95),
    st.integers(1, 12),
)
def test_stages_rise_to_one_and_leave_time_to_recover(
    kind: Any, steps: int, epochs: int, begin: float, end: float, rounds: int
) -> None:
    settings = ScheduleSettings(kind, begin=begin * epochs, end=end * epochs, rounds=rounds)
    try:
        line = timeline(settings, epochs=epochs, steps=steps)
    except UsageError:
        assert (
            round(begin * epochs * steps) >= round(end * epochs * steps)
            or round(end * epochs * steps) >= epochs * steps
        )
        return
    assert 1 <= len(line.pruning_steps) <= rounds
    assert line.pruning_steps[-1].progress == 1.0
    assert line.pruning_steps[-1].step == (line.end if rounds > 1 or kind != "iterative" else line.begin)
    assert line.pruning_steps[-1].step < epochs * steps
    for before, after in pairwise(line.pruning_steps):
        assert before.step < after.step
        assert before.progress < after.progress


def random_scores(chart: ChannelMap, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).random(chart.n_labels)


@given(kinds, st.integers(1, 20), st.integers(3, 9), st.integers(0, 2))
def test_epochs_are_steps_in_another_unit(kind: Any, steps: int, epochs: int, begin: int) -> None:
    later = {} if kind == "oneshot" else {"end": epochs - 0.5, "every": 0.25}
    in_epochs = timeline(ScheduleSettings(kind, begin=begin, **later), epochs=epochs, steps=4 * steps)
    in_steps = timeline(
        ScheduleSettings(
            kind, unit="step", begin=4 * steps * begin, **{key: 4 * steps * value for key, value in later.items()}
        ),
        epochs=epochs,
        steps=4 * steps,
    )
    assert in_epochs.pruning_steps == in_steps.pruning_steps


def test_rounds_prune_the_same_share_of_what_is_left_and_recover_as_long() -> None:
    line = timeline(ScheduleSettings("iterative", rounds=3, rewind_lr=True), epochs=6, steps=10)
    assert [stage.step for stage in line.pruning_steps] == [0, 20, 40]
    left = [line.share_at(step, 0.125) for step in (0, 19, 20, 39, 40, 60)]
    assert left == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125, 0.125])
    assert line.restarts() == (20, 40)
    every = timeline(ScheduleSettings("iterative", begin=1, every=2.0), epochs=6, steps=10)
    assert [stage.step for stage in every.pruning_steps] == [10, 30]
    assert every.restarts() == ()


def test_masks_that_may_regrow_are_chosen_anew_until_they_freeze() -> None:
    settings = ScheduleSettings("linear", unit="step", begin=0, end=20, every=10, regrow=True, freeze=45)
    found = [(stage.step, stage.progress) for stage in timeline(settings, epochs=1, steps=50).pruning_steps]
    assert found == [(10, 0.5), (20, 1.0), (30, 1.0), (40, 1.0), (45, 1.0)]
    at_once = ScheduleSettings("oneshot", unit="step", begin=5, every=10, regrow=True, freeze=25)
    assert [stage.step for stage in timeline(at_once, epochs=1, steps=50).pruning_steps] == [5, 15, 25]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"begin": 5.0}, r"schedule\.begin: expected less than the 5 epochs of finetune \(50 steps\).*got 5 epochs"),
        ({"end": 5.0}, r"schedule\.end: expected less than the 5 epochs"),
        ({"unit": "step", "end": 50.0}, r"schedule\.end: .* got 50 steps"),
        ({"regrow": True, "freeze": 6.0}, r"schedule\.freeze: expected less than"),
        ({"begin": 2.0, "end": 1.0}, r"expected begin before end.* begin 20, end 10"),
        ({"end": 3.0, "regrow": True, "freeze": 2.0}, "freeze not before it"),
        ({"rounds": 2, "every": 1.0}, r"schedule\.every: expected nothing beside rounds"),
        ({"kind": "oneshot", "end": 1.0, "rounds": 2}, r"schedule\.end: .*; prune\.schedule\.rounds: expected nothing"),
        ({"kind": "oneshot", "every": 1.0}, r"schedule\.every: expected it together with freeze"),
        ({"freeze": 4.0}, r"schedule\.freeze: expected nothing, because regrow is false"),
        ({"rewind_lr": True}, r"schedule\.rewind_lr: expected false, because kind is 'cubic'"),
        ({"kind": "iterative", "score": "movement"}, "nothing has moved yet, got 0"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        timeline(ScheduleSettings(**changes), epochs=5, steps=10)


def test_clashes_with_the_rest_of_the_section_are_named() -> None:
    timed = PruneSettings(BudgetSettings(speedup=2.0), schedule=ScheduleSettings(regrow=True, score="movement"))
    assert [path for path, _ in prune_contradictions(asdict(timed))] == [("schedule", "regrow"), ("schedule", "score")]
    priced = PruneSettings(scope="per_mac", schedule=ScheduleSettings(score="movement"))
    assert [path for path, _ in prune_contradictions(asdict(priced))] == [("scope",)]
    assert not list(prune_contradictions(asdict(PruneSettings(scope="per_mac", schedule=ScheduleSettings()))))
    assert not list(prune_contradictions({"schedule": 3}))  # reported elsewhere


@pytest.fixture(scope="module")
def chart() -> ChannelMap:
    return trace(torchvision.models.resnet18(num_classes=4), (zeros(1, 3, 32, 32),))


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["uniform", "global", "per_mac", "capacity"])
@hypothesis_settings(max_examples=5)
@given(
    kind=st.sampled_from(("linear", "exponential", "cubic")),
    budget=st.fixed_dictionaries({"macs": st.floats(0.2, 0.6)}, optional={"params": st.floats(0.2, 0.6)}),
    round_to=st.sampled_from((1, 4, 16)),
)
def test_plans_are_nested_and_the_last_meets_the_budgets(
    chart: ChannelMap, scope: Any, kind: Any, budget: dict[str, float], round_to: int
) -> None:
    asked = PruneSettings(
        BudgetSettings(**budget), scope=scope, round_to=round_to, ratios={"layer3.0.conv1": 0.5},
        ignore=("conv1",), schedule=ScheduleSettings(kind),
    )  # fmt: skip
    keep = np.ones(chart.n_labels, dtype=bool)
    for index, progress in enumerate((0.1, 0.4, 0.7, 1.0)):
        stage = settings_at_step(asked, ScheduleStep(index, progress), {"macs": 1.0, "params": 1.0})
        scores = random_scores(chart, index)  # scored anew, and quite otherwise
        plan = make_plan(chart, scores, stage, bounds=PlanBounds(most=keep))
        assert not (plan.keep & ~keep).any()
        assert chart.macs(plan.keep) <= stage.budget.macs * chart.macs()  # type: ignore[operator]
        keep = plan.keep
    assert stage.budget == asked.budget
    assert stage.ratios == asked.ratios
    assert plan.widths()["layer3.0.conv1"] == (128, 256)


def test_plans_around_a_final_one_keep_all_of_it(chart: ChannelMap) -> None:
    final = make_plan(chart, random_scores(chart, 1), PruneSettings(BudgetSettings(macs=0.3), scope="global"))
    keep = np.ones(chart.n_labels, dtype=bool)
    for share in (0.8, 0.5, 0.35):
        settings = PruneSettings(BudgetSettings(macs=share), scope="global")
        plan = make_plan(chart, random_scores(chart, 2), settings, bounds=PlanBounds(keep, final.keep))
        assert not (final.keep & ~plan.keep).any()
        assert not (plan.keep & ~keep).any()
        assert share - 0.05 < chart.macs(plan.keep) / chart.macs() <= share
        keep = plan.keep


def test_a_stage_may_remove_nothing(chart: ChannelMap) -> None:
    settings = PruneSettings(BudgetSettings(macs=1.0))
    dense = np.ones(chart.n_labels, dtype=bool)
    plan = make_plan(chart, random_scores(chart), settings, bounds=PlanBounds(most=dense))
    assert plan.keep.all()
