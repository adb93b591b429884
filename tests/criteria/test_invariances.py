"""What must not change a criterion's verdict: the order of the channels, and scales that the network does not feel."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from criteria_nets import Scores, SmallNet, data, scored, small_net
from hypothesis import given, settings
from hypothesis import strategies as st

from prunekit.known_names import CRITERIA

LEARNED = [name for name in CRITERIA.declared if CRITERIA.get(name).needs and name != "elimination"]
quick = settings(max_examples=6)


def permuted(model: SmallNet, order: list[int]) -> SmallNet:
    """The same function, with the channels between conv1 and conv2 in another order."""
    result = copy.deepcopy(model)
    for tensor in (*result.conv1.parameters(), *result.norm1.parameters(), *result.norm1.buffers()):
        if tensor.ndim:
            tensor.data = tensor.data[order]
    result.conv2.weight.data = result.conv2.weight.data[:, order]
    return result


@pytest.mark.slow
@quick
@given(st.permutations(range(6)), st.integers(0, 100))
def test_permuted_channels_get_permuted_scores(order: list[int], seed: int) -> None:
    model = small_net(seed)
    before, after = scored(model, data()), scored(permuted(model, order), data())
    for name in set(LEARNED) - {"obd"}:  # whose random signs do not move with the channels
        for weight, moved in (("conv1.weight", order), ("conv2.weight", range(5))):
            expected = before.along(name, weight)[list(moved)]
            atol = 1e-9 * expected.max()
            np.testing.assert_allclose(after.along(name, weight), expected, rtol=1e-7, atol=atol, err_msg=name)


def all_scores(model: SmallNet) -> dict[str, Scores]:
    net = scored(model, data())
    return {name: net(name) for name in LEARNED}


@pytest.mark.slow
@quick
@given(st.floats(0.01, 100), st.integers(0, 100))
def test_scaled_weights(scale: float, seed: int) -> None:
    model = small_net(seed)
    before = all_scores(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
    after = all_scores(model)
    for name in ("l1", "l2", "fpgm", "bn_scale"):
        np.testing.assert_allclose(after[name], before[name] * scale, rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(after["lamp"], before["lamp"], rtol=1e-9)


@pytest.mark.slow
@quick
@given(st.floats(0.01, 100), st.integers(0, 100))
def test_scales_that_cancel_leave_what_the_network_does_as_it_is(scale: float, seed: int) -> None:
    model = small_net(seed)
    before = all_scores(model)
    with torch.no_grad():  # a ReLU passes a positive scale on, and the next weight takes it back
        model.norm1.weight *= scale
        model.norm1.bias *= scale
        model.conv2.weight /= scale
    after = all_scores(model)
    for name in ("taylor", "taylor2", "obd", "apoz", "wanda"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-6, atol=1e-12, err_msg=name)
