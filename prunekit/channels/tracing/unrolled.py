"""Recurrent layers as torch's own formulas in Python: what they multiply with their weights is read by `F.linear`.

Inside `nn.LSTM`, `nn.GRU` and `nn.RNN` one operator does all steps, so that neither what a hidden state's channels are
worth to the next step can be measured, nor a weight be fitted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def unroll(model: nn.Module) -> None:
    """Make recurrent layers compute step by step, in place; those with projections of their state stay."""
    for module in model.modules():
        if type(module) in _UNROLLED and not module.proj_size:
            module.__class__ = _UNROLLED[type(module)]


class _Unrolled(nn.RNNBase):
    """A recurrent layer that runs in Python on (T, N, C) inputs in eval mode, and as torch's on all others."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return what torch's layer does."""
        if not isinstance(input, Tensor) or input.dim() != 3 or self.training:
            return super().forward(input, hx)
        x, ends = input.transpose(0, 1) if self.batch_first else input, list[tuple[Tensor, ...]]()
        cells = isinstance(self, nn.LSTM)
        given = hx if cells or hx is None else (hx,)
        for layer in range(self.num_layers):
            found = []
            for suffix in (f"_l{layer}", f"_l{layer}_reverse")[: 1 + self.bidirectional]:
                blank = x.new_zeros(x.shape[1], self.hidden_size)
                state = (blank,) * (1 + cells) if given is None else tuple(each[len(ends)] for each in given)
                made, state = self._direction(x, state, suffix)
                found.append(made)
                ends.append(state)
            x = torch.cat(found, 2) if self.bidirectional else found[0]
        last = tuple(torch.stack(some) for some in zip(*ends, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, last if cells else last[0]

    def _direction(self, x: Tensor, state: tuple[Tensor, ...], suffix: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the hidden states of all steps, (T, N, H), and the last state."""
        weights = [getattr(self, f"{name}{suffix}") for name in ("weight_ih", "weight_hh")]
        biases = [getattr(self, f"{name}{suffix}") if self.bias else None for name in ("bias_ih", "bias_hh")]
        steps, made = F.linear(x, weights[0], biases[0]).unbind(), list[Tensor]()
        for given in reversed(steps) if suffix.endswith("_reverse") else steps:
            state = self.step(given, F.linear(state[0], weights[1], biases[1]), state)
            made.append(state[0])
        return torch.stack(made[::-1] if suffix.endswith("_reverse") else made), state

    def step(self, given: Tensor, read: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the next state, from products with the input and with the state."""
        raise NotImplementedError


class _UnrolledRNN(_Unrolled, nn.RNN):
    def step(self, given: Tensor, read: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ((given + read).relu() if self.nonlinearity == "relu" else (given + read).tanh(),)


class _UnrolledGRU(_Unrolled, nn.GRU):
    def step(self, given: Tensor, read: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (reset, update, new), (r, u, n) = given.chunk(3, 1), read.chunk(3, 1)
        share, made = (update + u).sigmoid(), (new + (reset + r).sigmoid() * n).tanh()
        return (made + share * (state[0] - made),)


class _UnrolledLSTM(_Unrolled, nn.LSTM):
    def step(self, given: Tensor, read: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        enter, forget, new, leave = (given + read).chunk(4, 1)
        cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * cell.tanh(), cell


_UNROLLED: dict[type[nn.Module], type[_Unrolled]] = {
    nn.RNN: _UnrolledRNN,
    nn.GRU: _UnrolledGRU,
    nn.LSTM: _UnrolledLSTM,
}
