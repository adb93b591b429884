"""Ordinary networks: those of tutorials, courses and papers' small repositories, written as people write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Inputs = Callable[[int], tuple[Tensor, ...]]
"""Arguments of `forward` for as many samples as asked for."""
Build = TypeVar("Build", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class Network:
    """A network as its author would build it.

    Attributes:
        name: of its class or function.
        kind: of the file that it stands in.
        build: makes it, with random weights.
        inputs: of its forward.
        outputs: which of its outputs are read, as `prunekit.prune` takes it; None: all of them.
        budget: for pruning.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    outputs: Any
    budget: Mapping[str, float]


NETWORKS: dict[str, Network] = {}
USUAL = {"macs": 0.6}
"""Budget of most of them."""


def ordinary(
    inputs: Inputs, *arguments: Any, outputs: Any = None, budget: Mapping[str, float] = USUAL, **named: Any
) -> Callable[[Build], Build]:
    """Registers a class of networks, or a function that makes one, with what it is built of and called with."""

    def register(build: Build) -> Build:
        name = build.__name__
        if name in NETWORKS:
            raise ValueError(f"{name}: there is such a network already")
        kind = build.__module__.removeprefix("networks_")
        NETWORKS[name] = Network(name, kind, lambda: build(*arguments, **named), inputs, outputs, budget)
        return build

    return register


def images(channels: int, side: int) -> Inputs:
    return lambda count: (torch.rand(count, channels, side, side),)


def vectors(*widths: int) -> Inputs:
    """One argument (B, width) for each width."""
    return lambda count: tuple(torch.randn(count, width) for width in widths)


def series(*shape: int) -> Inputs:
    return lambda count: (torch.randn(count, *shape),)


def words(vocabulary: int, length: int) -> Inputs:
    return lambda count: (torch.randint(vocabulary, (count, length)),)


def numbers(*sizes: int) -> Inputs:
    """One argument (B,) of whole numbers below each size, as of users and items."""
    return lambda count: tuple(torch.randint(size, (count,)) for size in sizes)


def every_network() -> dict[str, Network]:
    """All networks: each file `networks_<kind>.py` beside this one is found by itself."""
    for file in sorted(Path(__file__).parent.glob("networks_*.py")):
        import_module(file.stem)
    return NETWORKS
