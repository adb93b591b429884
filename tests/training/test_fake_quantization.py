"""Quantization-aware training: layers compute as int8 would, masked entries stay zero, and nothing is left behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchao  # noqa: F401  # it is among the packages of the tests, which without it would say nothing
from process_group import together
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import fuse_conv_bn_eval
from torch.optim import SGD
from training_models import CPU, Ends, EndsAfter, net, splits

from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.masks.masked_model import masked
from prunekit.measure.verification import verify
from prunekit.planning.plan import Plan
from prunekit.settings.train import AverageSettings, CheckpointSettings, DistillSettings, TrainSettings
from prunekit.training.callbacks.callback import Callback, ContextCallback, TrainingRun
from prunekit.training.callbacks.fake_quantization import FakeQuantization, quantizable, require_quantizable
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit
from prunekit.utils import availability

INT8 = TrainSettings(epochs=2, lr=0.05, distill=None, fake_quantize="int8")
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def int8_rows(weight: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A weight's integers, and the scale of each output channel."""
    rows = weight.detach().numpy().reshape(len(weight), -1)
    scale = np.maximum(np.abs(rows).max(1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
    return np.round(rows * (np.float32(1) / scale)).astype(np.int8), scale


def as_weight(weight: Tensor) -> Tensor:
    integers, scale = int8_rows(weight)
    return torch.from_numpy(integers.astype(np.float32) * scale).reshape(weight.shape)


def as_input(x: Tensor) -> Tensor:
    values = x.detach().numpy()
    low, high = min(values.min(), np.float32(0)), max(values.max(), np.float32(0))
    scale = (high - low) / np.float32(255)
    zero = -128 - np.round(low / scale)
    integers = np.clip(np.round(values * (np.float32(1) / scale)) + zero, -128, 127).astype(np.int8)
    return torch.from_numpy((integers.astype(np.float32) - zero) * scale)


def by_hand(model: nn.Module, x: Tensor) -> Tensor:
    for module in model.children():
        if isinstance(module, nn.Conv2d):
            x = F.conv2d(as_input(x), as_weight(module.weight), module.bias, module.stride, module.padding)
        elif isinstance(module, nn.Linear):
            x = F.linear(as_input(x), as_weight(module.weight), module.bias)
        else:
            x = module(x)
    return x


def in_int8(model: nn.Module) -> Any:
    optimizer = SGD(model.parameters(), lr=0.1)
    return FakeQuantization().active(TrainingRun(model, optimizer, CPU, 1, 1))


def half_of(model: nn.Module) -> Plan:
    chart = trace(copy.deepcopy(model), (X,))
    keep = np.arange(chart.n_labels) % 2 == 0
    return Plan(chart, keep)


def trained(settings: TrainSettings = INT8, *parts: Callback, plan: Plan | None = None, **options: Any) -> nn.Module:
    model = net()
    if plan is not None:

        def hold(run: TrainingRun) -> Any:
            return masked(run.model, plan, run.optimizer, restore=False)

        parts = (ContextCallback(hold), *parts)
    asked = build_callbacks(settings, CallbackInputs(splits(), 16, teacher=net(5), masks=lambda: plan))
    fit(model, splits(), settings, **{"device": CPU, "seed": 1, "batch": 16, "callbacks": [*parts, *asked]} | options)
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layers_compute_what_int8_computes(layout: torch.memory_format) -> None:
    model = net().eval()
    with torch.no_grad():
        model[1].running_var.uniform_(0.5, 2)
        model[0].weight[2] = 0
    before, plain = copy.deepcopy(model.state_dict()), model(X)
    assert [*quantizable(model)] == ["0", "5"]
    with in_int8(model), torch.no_grad():
        seen = model(X.to(memory_format=layout))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(model[5](input=torch.ones(2, 128)), by_hand(model[5:], torch.ones(2, 128)))
    assert torch.equal(seen, by_hand(model, X))
    assert not torch.equal(seen, plain)
    assert count_hooks(model) == 0
    assert torch.equal(model(X), plain)


def test_gradients_pass_rounding_straight_through() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    largest = layer.weight.gather(1, layer.weight.abs().argmax(1, keepdim=True))
    assert set(largest.sign().flatten().tolist()) == {-1, 1}
    x = torch.randn(5, 6, requires_grad=True)
    with in_int8(nn.Sequential(layer)):
        layer(x).square().sum().backward()
    rounded = as_input(x).requires_grad_(True)
    weight = as_weight(layer.weight).requires_grad_(True)
    F.linear(rounded, weight, layer.bias).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad, rtol=1e-6, atol=1e-6)
    assert x.grad is not None
    assert rounded.grad is not None
    inside = (x > x.min()) & (x < x.max())
    torch.testing.assert_close(x.grad[inside], rounded.grad[inside], rtol=1e-6, atol=1e-6)


def test_weights_ahead_of_batchnorm_come_to_the_integers_of_folded_ones() -> None:
    model = net().eval()
    with torch.no_grad():
        model[1].running_var.uniform_(0.5, 2)
        model[1].weight.uniform_(-2, 2)
    folded = fuse_conv_bn_eval(model[0], model[1])
    signs = np.sign(model[1].weight.detach().numpy())[:, None]
    assert (signs < 0).any()
    assert np.array_equal(int8_rows(model[0].weight)[0] * signs, int8_rows(folded.weight)[0])


@pytest.mark.parametrize(
    "settings",
    [{}, {"average": AverageSettings(decay=0.5)}, {"precision": "bf16"}, {"distill": DistillSettings()}],
    ids=["plain", "average", "bf16", "distill"],
)
def test_masked_channels_stay_zero_and_masked_equals_compact(settings: dict[str, Any]) -> None:
    plan = half_of(net())
    model = trained(TrainSettings(**{"epochs": 2, "fake_quantize": "int8", "distill": None} | settings), plan=plan)
    mask = plan.mask("0.weight")
    assert mask is not None
    assert not model[0].weight[~mask.expand_as(model[0].weight)].any()
    assert model[0].weight.any()
    model.eval()
    small = compact(model, plan)
    verify(model, small, plan, [(X,)], strict=True)
    with torch.no_grad():
        wanted = by_hand(model, X)
        with in_int8(small):
            assert torch.equal(by_hand(small, X), small(X))
            torch.testing.assert_close(small(X), wanted, rtol=1e-5, atol=1e-5)


def test_epochs_and_the_start_are_compared_in_int8() -> None:
    model, settings = net(), INT8
    with in_int8(model), torch.no_grad():
        model.eval()
        inputs = torch.stack([splits().validation[index][0] for index in range(20)])
        labels = torch.tensor([splits().validation[index][1] for index in range(20)])
        wanted = (
            F.cross_entropy(model(inputs[:16]), labels[:16]) * 16 + F.cross_entropy(model(inputs[16:]), labels[16:]) * 4
        )
    history = fit(
        net(),
        splits(),
        settings,
        device=CPU,
        seed=1,
        batch=16,
        callbacks=build_callbacks(settings, CallbackInputs(splits(), 16)),
    )
    assert history.start is not None
    assert history.start.validation_loss == pytest.approx(wanted.item() / 20, abs=1e-6)


def test_training_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    plan, kept = half_of(net()), CheckpointSettings(every_steps=1)
    whole = trained(plan=plan)
    with pytest.raises(Ends):
        trained(INT8, EndsAfter(6), plan=plan, checkpoints=Checkpoints(tmp_path, kept, facts={}))
    resumed = trained(INT8, EndsAfter(10**9), plan=plan, checkpoints=Checkpoints(tmp_path, kept, facts={}))
    assert same(whole, resumed)
    assert not same(whole, trained(TrainSettings(epochs=2, lr=0.05, distill=None), plan=plan))
    assert count_hooks(whole) == 0


def test_nothing_is_left_after_an_error_inside_a_layer() -> None:
    class Breaking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert self.weight is not weight
            raise KeyboardInterrupt

    layer = Breaking(6, 3)
    weight = layer.weight
    with pytest.raises(KeyboardInterrupt), in_int8(nn.Sequential(layer)):
        layer(torch.ones(1, 6))
    assert layer.weight is weight
    assert "weight" not in vars(layer)


class Odd(nn.Module):
    """Layers of every kind: with weights of one number, shared, computed, read by attention, called without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(3, 3, 1, groups=3)
        self.up = nn.ConvTranspose2d(3, 3, 2, 2)
        self.embed, self.head = nn.Embedding(4, 8), nn.Linear(8, 4)
        self.head.weight = self.embed.weight
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.twice = nn.Linear(8, 8)
        self.double = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.depthwise(x)).flatten(2).transpose(1, 2)[..., :1] + self.embed(torch.arange(4)).mean(0)
        x = self.twice(self.twice(self.normed(self.attention(x, x, x)[0])))
        assert not len(self.head(x[:0]))
        return self.head(x).mean(1)  # type: ignore[no-any-return]


def test_odd_layers_are_seen_in_int8_or_left() -> None:
    torch.manual_seed(0)
    model = Odd()
    assert [*quantizable(model)] == ["depthwise", "head", "twice"]
    with in_int8(model):
        model(X).sum().backward()
    wanted = {name for name, _ in model.named_parameters() if not name.startswith("double")}
    assert {name for name, one in model.named_parameters() if one.grad is not None} == wanted


def test_activations_may_be_computed_again() -> None:
    from torch.utils.checkpoint import checkpoint

    found = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        model = net().eval()
        with in_int8(model):
            run(model, X).sum().backward()
        found.append([one.grad for one in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def shared(sharding: Any) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
    settings = TrainSettings(epochs=1, lr=0.05, distill=None, fake_quantize="int8", sharding=sharding)
    fit(model, splits(), settings, device=CPU, seed=1, batch=22, callbacks=[FakeQuantization()])
    return model.state_dict()


@pytest.mark.slow
def test_shards_of_two_processes_train_what_replicas_do(tmp_path: Path) -> None:
    replicas = together(2, tmp_path / "replicas", shared, "replicas")
    shards = together(2, tmp_path / "shards", shared, "full")
    for name, wanted in replicas[0].items():
        torch.testing.assert_close(shards[0][name], wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(replicas[1][name], wanted)


def test_what_is_missing_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"fake_quantize: expected Linear layers .* and Embedding has none; leave it"):
        require_quantizable(nn.Embedding(3, 4))
    with pytest.raises(UsageError, match=r"fake_quantize is set, and no FakeQuantization is among the callbacks"):
        fit(net(), splits(), INT8, device=CPU, seed=1, batch=16)
    real = availability.find_spec
    monkeypatch.setattr(availability, "find_spec", lambda name: None if name == "torchao" else real(name))
    with pytest.raises(UsageError, match=r"fake_quantize needs torchao, not installed here"):
        trained()
