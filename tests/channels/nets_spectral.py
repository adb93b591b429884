"""Nets that compute with frequencies and complex numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import Case, case, conv, tokens, weight
from torch import Tensor, nn


@case("a.weight", "b.weight")
def filter_of_frequencies() -> Case:
    """Real parameters that are seen as complex scale each channel's frequencies (GFNet)."""

    def forward(net: Any, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft2(net.a(x), dim=(2, 3), norm="ortho")
        x = torch.fft.irfft2(frequencies * torch.view_as_complex(net.scale), s=x.shape[2:], dim=(2, 3), norm="ortho")
        return net.c(F.gelu(net.b(x)))

    example = image()
    height, width = example[0].shape[2:]
    scale = weight(8, height, width // 2 + 1, 2)
    return Net(forward, a=conv(3, 8, padding=1), b=conv(8, 6, 1), c=conv(6, 3, 1), scale=scale), example


@case("a.weight", "b.weight")
def blocks_of_frequencies() -> Case:
    """Blocks of channels of the frequencies are mixed by a matrix each, in real and imaginary parts (AFNO)."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.a(x)
        found = torch.fft.fft(x, dim=1).unflatten(2, (net.first.shape[0], -1))
        real = torch.einsum("...bi,bio->...bo", found.real, net.first)
        imaginary = torch.einsum("...bi,bio->...bo", found.imag, net.first)
        mixed = F.softshrink(torch.stack([F.relu(real), F.relu(imaginary)], -1), 0.01)
        return net.c(F.gelu(net.b(torch.fft.ifft(torch.view_as_complex(mixed).flatten(2), dim=1).real + x)))

    return Net(forward, a=nn.Linear(6, 12), b=nn.Linear(12, 8), c=nn.Linear(8, 3), first=weight(4, 3, 3)), tokens()


@case("a.weight", "b.weight")
def complex_parameters() -> Case:
    """A complex matrix for each of the lowest frequencies, and none for the others (FNO)."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.a(x)
        found = torch.fft.rfft(x)
        mixed = torch.zeros_like(found)
        mixed[..., :3] = torch.einsum("bik,iok->bok", found[..., :3], net.matrix.to(found.dtype))
        return net.c(F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + net.b(x)))

    parts = {"a": nn.Conv1d(6, 8, 1), "b": nn.Conv1d(8, 8, 1), "c": nn.Conv1d(8, 3, 1)}
    matrix = nn.Parameter(torch.zeros(8, 8, 3, dtype=torch.complex64))
    return Net(forward, **parts, matrix=matrix), (tokens()[0].transpose(1, 2).contiguous(),)


@case("a.weight")
def rotated_by_complex_numbers() -> Case:
    """Pairs of positions in each head are turned as complex numbers (Llama's rotary embedding as Meta wrote it)."""

    def forward(net: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (-1, 4)) for part in (net.a, net.b, net.c))
        angles = torch.polar(torch.ones(5, 1, 2), torch.arange(10.0).view(5, 1, 2)).to(x.dtype.to_complex())
        q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(3, (2, 2))) * angles).flatten(3) for y in (q, k))
        shares = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
        return net.o(torch.einsum("bhts,bshd->bthd", shares, v).flatten(2))

    return Net(forward, a=nn.Linear(6, 16), b=nn.Linear(6, 16), c=nn.Linear(6, 16), o=nn.Linear(16, 3)), tokens()
