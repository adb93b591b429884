"""Movement scores: what training did to the weights of each channel."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.criteria.gradient import Movement
from prunekit.errors import ArtifactError
from prunekit.hooks.hook import count_hooks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def chart_of(model: nn.Module) -> ChannelMap:
    return trace(model, (torch.zeros(2, 1, 4, 4),))


def test_it_is_the_papers_sum_over_all_slices_of_a_channel() -> None:
    """S = -sum over steps of w * dL/dw, Sanh et al. 2020, equation 5, written out entry by entry."""
    model = net()
    chart, optimizer = chart_of(model), Adam(model.parameters(), lr=0.01)
    want = np.zeros(chart.n_labels)
    channel = chart.labels["0.weight"][0]
    assert channel is not None
    with Movement(model, chart, optimizer) as movement:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 1, 4, 4)).square().sum().backward()
            for index, label in enumerate(channel):
                for weight in (model[0].weight, model[0].bias, model[1].weight, model[1].bias):
                    want[label] -= (weight[index] * weight.grad[index]).sum().item()
                columns = slice(4 * index, 4 * index + 4)  # behind the flatten, of 2 x 2 positions
                want[label] -= (model[4].weight[:, columns] * model[4].weight.grad[:, columns]).sum().item()
            optimizer.step()
        found = movement.scores()
    assert found[0] == np.inf
    assert found[channel] == pytest.approx(want[channel], rel=1e-4)
    assert len(set(found[channel])) == 4
    assert not optimizer._optimizer_step_pre_hooks
    assert count_hooks(model) == 0


def test_a_fused_optimizers_loss_scale_and_skipped_steps_do_not_count() -> None:
    found = []
    for scale in (1.0, 2.0**14):
        model = net()
        chart, optimizer = chart_of(model), Adam(model.parameters(), lr=0.0, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with Movement(model, chart, optimizer) as movement:
            for images in (
                torch.ones(5, 1, 4, 4),
                torch.full((5, 1, 4, 4), torch.inf),
                torch.eye(4).expand(5, 1, 4, 4),
            ):
                model.eval()
                optimizer.zero_grad()
                scaler.scale(model(images).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
            found.append(movement.scores())
    assert np.isfinite(found[0][1:]).all()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3, atol=1e-6)


def test_a_state_goes_on_and_another_models_is_refused() -> None:
    model = net()
    chart, optimizer = chart_of(model), SGD(model.parameters(), lr=0.1)
    with Movement(model, chart, optimizer) as movement:
        model(torch.randn(5, 1, 4, 4)).square().sum().backward()
        optimizer.step()
        state = copy.deepcopy(movement.state_dict())
        first = movement.scores()
        optimizer.step()
        assert not np.array_equal(movement.scores(), first)
        movement.load_state_dict(state)
        assert np.array_equal(movement.scores(), first)
        with pytest.raises(ArtifactError, match=r"0\.weight:0 is of another model"):
            movement.load_state_dict({"0.weight:0": torch.zeros(5)})
        with pytest.raises(ArtifactError, match="of another model"):
            movement.load_state_dict({"9.weight:0": torch.zeros(5)})
