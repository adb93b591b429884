"""Attention: heads, and positions in heads, which are labels that two others decide on."""

from __future__ import annotations

from torch import Tensor, nn

HEADS = 4


class Attention(nn.Module):
    """Attention between an input and an output that stay."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, HEADS * depth) for _ in range(3))
        self.o = nn.Linear(HEADS * depth, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
