"""Recurrent layers, which run their own loop over time."""

from __future__ import annotations

from typing import Any

from equivalence import Net
from net_registry import Case, case, tokens
from torch import Tensor, nn


def _read(layer: nn.Module, features: int) -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.out(net.layer(net.a(x).relu())[0])

    return Net(forward, a=nn.Linear(6, 8), layer=layer, out=nn.Linear(features, 3)), tokens()


@case("a.weight")
def lstm() -> Case:
    return _read(nn.LSTM(8, 6, batch_first=True), 6)


@case("a.weight")
def lstm_of_two_directions_and_layers() -> Case:
    return _read(nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True), 12)


@case("a.weight")
def gru() -> Case:
    return _read(nn.GRU(8, 6, batch_first=True), 6)


@case("a.weight")
def plain_rnn() -> Case:
    return _read(nn.RNN(8, 6, batch_first=True), 6)


@case("a.weight")
def lstm_cell_in_a_loop() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        h, c = (x.new_zeros(x.shape[0], 6) for _ in range(2))
        for step in net.a(x).relu().unbind(1):
            h, c = net.cell(step, (h, c))
        return net.out(h)

    return Net(forward, a=nn.Linear(6, 8), cell=nn.LSTMCell(8, 6), out=nn.Linear(6, 3)), tokens()


@case("a.weight", "h.weight")
def recurrence_by_hand() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        state = net.a(x[:, 0]).tanh()
        for t in range(1, x.shape[1]):
            state = (net.a(x[:, t]) + net.h(state)).tanh()
        return net.out(state)

    return Net(forward, a=nn.Linear(6, 8), h=nn.Linear(8, 8), out=nn.Linear(8, 3)), tokens()
