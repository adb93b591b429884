"""Recurrent layers are scored and fitted by what each step multiplies with their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import Net
from torch import nn

import prunekit as pk
from prunekit.channels.tracing.substitutes import substituted_copy


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bidirectional": True, "num_layers": 2}])
def test_step_by_step_they_compute_what_torch_does(layer: Any, options: dict[str, Any]) -> None:
    model, x = layer(5, 7, bias=not options, **options).double().eval(), torch.randn(4, 6, 5).double()
    copy = substituted_copy(model, own=lambda name: False)
    assert type(copy) is not layer
    first = model(x)
    torch.testing.assert_close(copy(x), first, rtol=0, atol=1e-12)
    torch.testing.assert_close(copy(x, first[1]), model(x, first[1]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_states_that_are_copies_go_without_an_error(layer: Any) -> None:
    """The next step reads the state, too: what it read of a copy has to be added to what it reads of the other."""
    torch.manual_seed(0)
    model = Net(lambda net, x: net.out(net.layer(x)[0]), layer=layer(4, 12, batch_first=True), out=nn.Linear(12, 3))
    with torch.no_grad():
        for name, value in model.get_submodule("layer").named_parameters():
            gates = value.unflatten(0, (-1, 12))
            gates[:, 6:] = gates[:, :6]
            if name == "weight_hh_l0":
                value.mul_(2)
    pruned = pk.prune(model.eval(), calibration=torch.randn(64, 10, 4), channels=0.5, round_to=1)
    assert pruned.model.get_submodule("layer").hidden_size == 6
    assert pruned.repair is not None
    assert pruned.repair.before > 0.05
    assert pruned.repair.after < 1e-4
