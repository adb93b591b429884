"""Pruning in a loop of Accelerate whose checkpoints it writes itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import prunekit as pk

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(32) % 4


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def begun(seed: int, precision: str) -> tuple[Any, ...]:
    """What one script makes: accelerator, model, optimizer, rates, batches, pruner."""
    torch.manual_seed(seed)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 4)
    model, optimizer, rates, batches = accelerator.prepare(model, optimizer, rates, batches)
    pruner = pk.Pruner(model, optimizer, X[:1], macs=0.5, steps=7, criterion="taylor")
    accelerator.register_for_checkpointing(pruner)
    return accelerator, model, optimizer, rates, batches, pruner


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_goes_on_from_saved_states_as_without_a_break(precision: str, tmp_path: Path) -> None:
    def train(it: tuple[Any, ...], epochs: range) -> None:
        accelerator, model, optimizer, rates, batches, pruner = it
        for epoch in epochs:
            for inputs, targets in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(inputs), targets))
                    optimizer.step()
                    rates.step()
                    optimizer.zero_grad()
                pruner.step()
            accelerator.save_state(tmp_path / str(epoch), safe_serialization=True)

    whole = begun(0, precision)
    train(whole, range(3))
    again = begun(7, precision)
    again[0].load_state(tmp_path / "0")
    assert len(again[5].changes) == 4
    train(again, range(1, 3))
    assert again[5].changes == whole[5].changes
    assert again[5].done
    for one, other in zip(whole[1].state_dict().values(), again[1].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    small, optimizer = again[5].finish()
    assert optimizer is again[2]
    small = again[0].prepare_model(small)
    again[0].backward(small(X).square().mean())
    optimizer.step()
