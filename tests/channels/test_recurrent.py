"""Recurrent layers: the width of their state is free, and goes with every gate, layer and direction."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equivalence import TOLERANCE, Net, parity, random_keep, randomized, settled_plan
from net_registry import tokens
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.planning.plan import Plan


def read(layer: nn.Module, width: int) -> Net:
    return Net(lambda net, x: net.out(net.layer(net.a(x))[0]), a=nn.Linear(6, 8), layer=layer, out=nn.Linear(width, 3))


def test_a_narrow_lstm_built_by_hand_computes_the_same() -> None:
    model, (x,) = randomized(read(nn.LSTM(8, 6, batch_first=True), 6)).eval().double(), tokens()
    chart = trace(model, (x,))
    keep = np.ones(chart.n_labels, dtype=bool)
    rows = chart.labels["layer.weight_hh_l0"][1]
    assert rows is not None
    keep[rows[[1, 4]]] = False
    narrow, stay = nn.LSTM(8, 4, batch_first=True).double(), torch.tensor([0, 2, 3, 5])
    gates = (torch.arange(4)[:, None] * 6 + stay).flatten()
    with torch.no_grad():
        for name, parameter in narrow.named_parameters():
            old = getattr(model.layer, name)[gates]
            parameter.copy_(old[:, stay] if name == "weight_hh_l0" else old)
        by_hand = narrow(model.a(x.double()))[0] @ model.out.weight[:, stay].T + model.out.bias
        small = compact(model, Plan(chart, keep))
        assert small.layer.hidden_size == 4
        torch.testing.assert_close(small(x.double()), by_hand, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_state_and_projection_are_pruned_apart() -> None:
    model, example = randomized(read(nn.LSTM(8, 10, 2, proj_size=6, bidirectional=True), 12)).eval(), tokens()
    plan = settled_plan(model, example)
    assert parity(model, plan, example) <= TOLERANCE
    layer = compact(model, plan).layer
    assert layer.proj_size < 6
    assert layer.hidden_size < 10


@pytest.mark.parametrize("width", ["attribute", "cell"])
def test_a_state_on_the_default_device_is_followed(width: str) -> None:
    """Such a state stops the run on meta tensors; where an LSTM computes values, one operator of oneDNN would run."""

    def forward(net: Net, x: Tensor) -> Tensor:
        size = net.width if width == "attribute" else net.layer.hidden_size
        state = torch.zeros(1, x.shape[1], size, dtype=x.dtype)
        return net.out(net.layer(net.a(x), (state, state))[0])

    model = randomized(Net(forward, a=nn.Linear(6, 8), layer=nn.LSTM(8, 6), out=nn.Linear(6, 3))).eval()
    model.width = 6
    chart = trace(model, tokens())
    assert not any("mkldnn" in lock.operator for lock in chart.locks)
    plan = settled_plan(model, tokens())
    assert compact(model, plan).layer.hidden_size < 6
    assert parity(model, plan, tokens()) <= TOLERANCE


def test_a_state_of_a_number_in_the_code_is_locked_where_it_is_made() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.out(net.layer(net.a(x), torch.zeros(1, x.shape[1], 6, dtype=x.dtype))[0])

    model = randomized(Net(forward, a=nn.Linear(6, 8), layer=nn.GRU(8, 6), out=nn.Linear(6, 3))).eval()
    settled = run_trial(model, trace(model, tokens()), random_keep, [tokens()])
    (lock,) = (lock for lock in settled.channel_map.locks if lock.operator == "aten.zeros")
    assert "net.layer(net.a(x), torch.zeros(1, x.shape[1], 6" in lock.reason
    assert "make it in a method of a module" in lock.reason
    assert settled.compact.layer.hidden_size == 6
    assert settled.compact.layer.input_size < 8


def test_a_state_that_is_an_input_says_what_to_do() -> None:
    def forward(net: Net, x: Tensor, state: Tensor) -> Tensor:
        return net.out(net.cell(net.a(x), state))

    model = Net(forward, a=nn.Linear(6, 8), cell=nn.GRUCell(8, 7), out=nn.Linear(7, 3))
    locks = trace(model, (torch.randn(2, 6), torch.zeros(2, 7))).locks
    assert any("input (2, 7): if that is a state, let forward make it" in lock.reason for lock in locks)
