"""Recurrent layers, which run their own loop over time."""

from __future__ import annotations

from typing import Any

import torch
from equivalence import Net
from net_registry import Case, case, tokens
from torch import Tensor, nn


def _read(layer: nn.Module, features: int) -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.out(net.layer(net.a(x).relu())[0])

    return Net(forward, a=nn.Linear(6, 8), layer=layer, out=nn.Linear(features, 3)), tokens()


@case("a.weight", "layer.weight_ih_l0")
def lstm() -> Case:
    return _read(nn.LSTM(8, 6, batch_first=True), 6)


@case("a.weight", "layer.weight_ih_l0", "layer.weight_ih_l1_reverse")
def lstm_of_two_directions_and_layers() -> Case:
    return _read(nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True), 12)


@case("a.weight", "layer.weight_ih_l0")
def gru() -> Case:
    return _read(nn.GRU(8, 6, batch_first=True), 6)


@case("a.weight", "layer.weight_ih_l0", "layer.weight_ih_l0_reverse")
def gru_of_two_directions() -> Case:
    return _read(nn.GRU(8, 6, bidirectional=True), 12)


@case("a.weight", "layer.weight_ih_l0")
def plain_rnn() -> Case:
    return _read(nn.RNN(8, 6, batch_first=True), 6)


@case("a.weight", "layer.weight_ih_l1")
def rnn_with_relu() -> Case:
    return _read(nn.RNN(8, 6, 2, nonlinearity="relu", bias=False), 6)


def _loop(cell: nn.Module) -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        state = None
        for step in net.a(x).relu().unbind(1):
            state = net.cell(step, state)
        return net.out(state[0] if isinstance(state, tuple) else state)

    return Net(forward, a=nn.Linear(6, 8), cell=cell, out=nn.Linear(7, 3)), tokens()


@case("a.weight", "cell.weight_ih")
def lstm_cell_that_makes_its_state() -> Case:
    return _loop(nn.LSTMCell(8, 7))


@case("a.weight", "cell.weight_ih")
def gru_cell_that_makes_its_state() -> Case:
    return _loop(nn.GRUCell(8, 7))


@case("a.weight", "layer.weight_ih_l0")
def state_of_the_layers_own_size() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.out(net.layer(net.a(x), torch.zeros(1, x.shape[1], net.layer.hidden_size, dtype=x.dtype))[0])

    return Net(forward, a=nn.Linear(6, 8), layer=nn.GRU(8, 6), out=nn.Linear(6, 3)), tokens()


class _Counted(nn.Module):
    """A recurrence with its size in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 7
        self.a, self.h, self.out = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.width)
        for step in x.unbind(1):
            state = (self.a(step) + self.h(state)).tanh()
        return self.out(state)


@case("a.weight", "h.weight")
def state_of_a_remembered_size() -> Case:
    return _Counted(), tokens()


class _Written(_Counted):
    """A recurrence whose first state is made as older code does, with its size written out."""

    def forward(self, x: Tensor) -> Tensor:
        state = next(self.parameters()).data.new(x.shape[0], 7).zero_()
        for step in x.unbind(1):
            state = (self.a(step) + self.h(state)).tanh()
        return self.out(state)


@case("a.weight", "h.weight")
def state_of_a_size_written_out() -> Case:
    return _Written(), tokens()


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


class _Cell(nn.Module):
    """A convolutional LSTM (Shi et al. 2015) that makes its first state in a method, for others to call."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Conv2d(inputs + width, 4 * width, 3, padding=1)

    def first_state(self, batch: int, size: Any) -> tuple[Tensor, Tensor]:
        weight = self.gates.weight
        return tuple(torch.zeros(batch, self.width, *size, dtype=weight.dtype, device=weight.device) for _ in "hc")  # type: ignore[return-value]

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, o, g = self.gates(torch.cat([x, h], 1)).split(self.width, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


@case("cells.0.gates.weight", "cells.1.gates.weight")
def states_that_the_outer_module_asks_for() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        states = [cell.first_state(len(x), x.shape[3:]) for cell in net.cells]
        for t in range(x.shape[1]):
            y = x[:, t]
            for index, cell in enumerate(net.cells):
                states[index] = cell(y, states[index])
                y = states[index][0]
        return net.out(y)

    video = torch.randn(2, 2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return Net(forward, cells=nn.ModuleList([_Cell(3, 7), _Cell(7, 5)]), out=nn.Conv2d(5, 2, 1)), (video,)


class _Stated(nn.Module):
    """Recurrences whose first states have their width in the code: as a number, a variable, an argument, an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"width": 7}
        self.a, self.out = nn.Linear(6, 28), nn.Linear(7, 3)
        self.h = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        width = 7
        states = [
            torch.zeros(len(x), 7, dtype=x.dtype),
            x.new_full((len(x), width), 0.5),
            self.ones(len(x), 7, x),
            x.new_empty(x.shape[0], self.sizes["width"]).fill_(0.25),
        ]
        for step in x.unbind(1):
            parts = self.a(step).chunk(4, 1)
            states = [(p + h(s)).tanh() for p, h, s in zip(parts, self.h, states, strict=True)]
        return self.out(states[0] + states[1] * states[2] + states[3])

    def ones(self, batch: int, width: int, x: Tensor) -> Tensor:
        return torch.ones(batch, width, dtype=x.dtype)


@case("a.weight", "h.0.weight")
def states_of_a_width_in_the_code() -> Case:
    return _Stated(), tokens()


class _Delta(nn.Module):
    """Linear attention that forgets, as the delta rule does in a chunk: a system over the positions of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values, self.out = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 3)
        self.heads, self.size = 3, 4

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x).view(*x.shape[:2], self.heads, self.size).transpose(1, 2)
        values = self.values(x).view(*x.shape[:2], self.heads, self.size).transpose(1, 2)
        system = torch.eye(x.shape[1], dtype=x.dtype) + (keys @ keys.mT).tril(-1)
        new = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
        return self.out(new.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@case("keys.weight", "values.weight")
def triangular_systems_of_positions() -> Case:
    return _Delta(), tokens()
