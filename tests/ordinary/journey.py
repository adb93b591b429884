"""The journey of a network: pruned by example and by data, trained under masks, saved, loaded, exported to ONNX."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from network_registry import Network
from torch import Tensor, nn

import prunekit as pk
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather

SAMPLES = 32


def output_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What a model computes in eval mode, as it would in any other call that draws the same random numbers."""
    torch.manual_seed(0)
    with torch.no_grad():
        return gather(call(model.eval(), inputs))


def assert_same(want: list[Tensor], got: list[Tensor]) -> None:
    assert len(want) == len(got)
    for left, right in zip(want, got, strict=True):
        assert torch.equal(left, right), "the loaded model computes something else"


def loss_of(output: Any) -> Tensor:
    return torch.stack([one.float().square().mean() for one in gather(output) if one.requires_grad]).sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, network: Network) -> None:
    """One step of a training as people write it."""
    optimizer.zero_grad()
    loss = loss_of(model(*network.inputs(8)))
    loss.backward()
    optimizer.step()


class NotReachedError(Exception):
    """A step goes on with what an earlier one did not make."""


class Journey:
    """The steps, in order, each a method of its own; later ones go on with what earlier ones made."""

    def __init__(self, network: Network, folder: Path) -> None:
        torch.manual_seed(0)
        self.network, self.folder, self.model = network, folder, self.built(network)
        self.example, self.wanted = network.inputs(2), {**network.budget, "outputs": network.outputs}
        self.pruned: Any = None
        self.small: nn.Module | None = None

    @staticmethod
    def built(network: Network) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on how layers are faster
            return network.build()

    def by_example(self) -> Any:
        self.model.eval()
        self.pruned = pk.prune(self.model, self.example, **self.wanted)
        assert self.pruned.max_relative_difference < 1e-9
        self.pruned.model(*self.network.inputs(3))
        return self.pruned

    def by_data(self) -> Any:
        samples = self.network.inputs(SAMPLES)
        data = samples[0] if len(samples) == 1 else samples
        self.pruned = pk.prune(self.model.eval(), calibration=data, **self.wanted)
        assert self.pruned.max_relative_difference < 1e-9
        self.pruned.model(*self.network.inputs(3))
        return self.pruned

    def trained(self) -> Any:
        """Train under masks that come in two stages, and go on with the compact model."""
        torch.manual_seed(0)
        model = self.built(self.network).train()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        schedule = pk.ScheduleSettings("linear", rounds=2)
        with pk.Pruner(model, optimizer, self.example, schedule=schedule, steps=4, **self.wanted) as pruner:
            for _ in range(6):
                step(model, optimizer, self.network)
                pruner.step()
            small, optimizer = pruner.finish()
            plan = pruner.plan
        small.train()
        for _ in range(2):
            step(small, optimizer, self.network)
        self.small, self.plan = small, plan
        return pruner

    def saved_and_loaded(self) -> Any:
        """Save what was trained; load it into a model that the author's code builds, and that draws other weights."""
        if self.small is None:
            raise NotReachedError
        pk.save(self.small.eval(), self.folder / "model", self.plan)
        loaded = pk.load(self.folder / "model", lambda: self.built(self.network))
        inputs = self.network.inputs(4)
        assert_same(output_of(self.small, inputs), output_of(loaded, inputs))
        return loaded

    def to_onnx(self) -> Any:
        """Export the model that was pruned by data; the export itself is compared with it."""
        if self.pruned is None:
            raise NotReachedError
        return self.exported(self.pruned.model)

    def exported(self, model: nn.Module) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's exporter
            path = self.folder / "model.onnx"
            return pk.export(model, self.network.inputs(4), path=path, timed=(), log=lambda line: None)


STEPS: dict[str, Callable[[Journey], Any]] = {
    "by example": Journey.by_example,
    "by data": Journey.by_data,
    "trained": Journey.trained,
    "saved and loaded": Journey.saved_and_loaded,
    "ONNX": Journey.to_onnx,
}


def travel(journey: Journey, steps: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields each step with its result, or with the error that it raised."""
    for name in steps or STEPS:
        try:
            yield name, STEPS[name](journey)
        except Exception as error:  # whatever the network's code does: a cell of a table
            yield name, error
