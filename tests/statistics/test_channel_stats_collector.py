from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_layer_stats import assert_equals_reference, channels_first
from torch import Tensor, nn
from torchvision import models

from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.statistics.channel_stats_collector import StatsCollector, calibrate


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def recorded(model: nn.Module, batches: list[Tensor]) -> dict[tuple[str, str, int], list[Tensor]]:
    """Every activation of the leaves, copied by plain hooks: the reference."""
    seen: dict[tuple[str, str, int], list[Tensor]] = {}
    calls: dict[tuple[str, str], int] = {}
    handles = []

    def keep(path: str, side: str, tensor: Tensor) -> None:
        ordinal = calls[path, side] = calls.get((path, side), -1) + 1
        seen.setdefault((path, side, ordinal), []).append(tensor.detach().clone())

    for path, module in model.named_modules():
        if not list(module.children()):
            handles += [
                module.register_forward_pre_hook(lambda m, args, path=path: keep(path, "input", args[0])),
                module.register_forward_hook(lambda m, args, out, path=path: keep(path, "output", out)),
            ]
    with torch.no_grad():
        for batch in batches:
            calls.clear()
            model(batch)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_every_activation_equals_numpy(name: str) -> None:
    torch.manual_seed(0)
    model = getattr(models, name)(weights=None, num_classes=7).eval()
    batches = [torch.randn(size, 3, 32, 32) for size in (3, 2)]
    expected = recorded(model, batches)
    stats = calibrate(model, batches)
    assert set(stats) == set(expected)
    assert next(iter(stats)) == next(iter(expected))
    for key, tensors in expected.items():
        axis = -1 if isinstance(model.get_submodule(key[0]), nn.Linear) else 1
        values = np.concatenate([channels_first(tensor, axis) for tensor in tensors])
        assert_equals_reference(stats[key], values, rtol=1e-9)


def test_resnet50_relu_is_kept_apart_by_call() -> None:
    model = models.resnet50(weights=None).eval()
    stats = calibrate(model, [torch.randn(1, 3, 32, 32)], modules=["layer1.0.relu"])
    widths = [stats["layer1.0.relu", "output", call].channels for call in range(3)]
    assert widths == [64, 64, 256]
    assert len(stats) == 6


def test_values_are_taken_before_an_inplace_relu_overwrites_them() -> None:
    model = small_net()
    stats = calibrate(model, [torch.randn(4, 3, 8, 8)])
    assert (stats["1", "output", 0].min < 0).all()
    assert (stats["2", "input", 0].min < 0).all()
    assert (stats["2", "output", 0].min == 0).all()
    assert (stats["2", "output", 0].zero_fraction > 0).all()


def test_batches_calls_and_positions_all_count() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.conv(x))

    stats = calibrate(Twice(), [torch.randn(size, 2, 4, 5) for size in (3, 1, 2)])
    assert [stats["conv", "output", call].count.tolist() for call in (0, 1)] == [[120, 120], [120, 120]]
    assert ("conv", "output", 2) not in stats


def test_many_batches_are_merged() -> None:
    model, batches = small_net(), [torch.randn(2, 3, 8, 8) for _ in range(35)]
    merged, whole = calibrate(model, batches), calibrate(model, [torch.cat(batches)])
    assert merged["0", "output", 0].count[0] == 70 * 36
    np.testing.assert_allclose(merged["1", "output", 0].variance, whole["1", "output", 0].variance, rtol=1e-6)


def test_an_input_written_to_since_is_measured_again() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            out = self.first(x * 1)
            out += 1
            return self.second(out)

    x = torch.randn(5, 3)
    for guard in (torch.no_grad(), torch.inference_mode()):
        with guard, StatsCollector(model := Shifted()) as collector:
            model(x)
        stats = collector.stats()
        np.testing.assert_allclose(stats["second", "input", 0].mean, x.double().mean(0) + 1, rtol=1e-6)
        np.testing.assert_allclose(stats["first", "output", 0].mean, x.double().mean(0), rtol=1e-6)


def test_unchanged_inputs_are_not_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from prunekit.statistics import channel_stats_collector as module

    measured = []
    real = module.summarize
    monkeypatch.setattr(module, "summarize", lambda x, *rest: measured.append(x.shape) or real(x, *rest))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    stats = calibrate(model, [torch.randn(2, 3, 4, 4)])
    assert (len(measured), len(stats)) == (4, 6)


def test_no_hook_stays_also_on_an_error_and_on_a_copy() -> None:
    model = small_net()
    with pytest.raises(RuntimeError), StatsCollector(model):
        model(torch.randn(1, 4, 8, 8))
    assert count_hooks(model) == 0
    with StatsCollector(model) as collector:
        clone = copy.deepcopy(model)
        model(torch.randn(2, 3, 8, 8))
        clone(torch.randn(2, 3, 8, 8))
    assert collector._model is model
    assert count_hooks(model) == 0


def test_only_whole_forward_passes_of_the_model_itself_count() -> None:
    model = small_net().eval()
    with StatsCollector(model) as collector, torch.no_grad():
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3, 9, 9))
        model[0](torch.randn(2, 3, 8, 8))
        model(torch.randn(2, 3, 8, 8))
    assert collector.stats()["0", "output", 0].count.tolist() == [2 * 36] * 8
    assert ("0", "output", 1) not in collector.stats()


def test_modules_that_return_more_than_a_tensor() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"n": 3, "all": (x.long(), [x * 2, x * 3])}

    class Silent(nn.Module):
        def forward(self, x: dict[str, Any]) -> int:
            return 3

    model, x = nn.Sequential(Odd(), Silent()), torch.randn(4, 3)
    stats = calibrate(model, [(x, "label")])
    np.testing.assert_allclose(stats["0", "output", 0].mean, (x * 2).double().mean(0), rtol=1e-9)
    assert ("1", "output", 0) not in stats


def test_channel_axes() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.act = nn.Embedding(10, 6), nn.LayerNorm(6), nn.GELU()

        def forward(self, ids: Tensor) -> Tensor:
            return self.act(self.norm(self.embed(ids)))

    model, batches = Tokens(), [torch.randint(10, (2, length)) for length in (4, 5)]
    with StatsCollector(model, axes={"act": -1}) as collector:
        for ids in batches:
            model(ids)
    stats = collector.stats()
    assert [stats[path, "output", 0].channels for path in ("embed", "norm", "act")] == [6, 6, 6]
    assert ("embed", "input", 0) not in stats
    assert calibrate(model, batches)["act", "output", 0].channels == 6  # numbers of tokens tell what a sequence is
    with pytest.raises(UsageError, match="input of 1: expected 4 channels as before, got 5"):  # and these do not
        calibrate(nn.Sequential(model.norm, model.act), [torch.randn(2, length, 6) for length in (4, 5)])
    wrong = pytest.raises(UsageError, match="axes names channel axis 5, but the shape is")
    with wrong, StatsCollector(model, axes={"act": 5}):
        model(batches[0])


def test_containers_and_the_model_itself() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), nn.Conv2d(4, 2, 1))
    stats = calibrate(model, [torch.randn(2, 3, 4, 4)], modules=["", "0"], inputs=False)
    assert [tuple(key) for key in stats] == [("0", "output", 0), ("", "output", 0)]
    assert str(next(reversed(list(stats)))) == "output of the model"


def test_collect_restores_the_mode_and_changes_nothing() -> None:
    model = small_net()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    calibrate(model, [torch.randn(2, 3, 8, 8)])
    assert [module.training for module in model] == [True, False, True, True, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_what_is_asked_wrongly() -> None:
    model = small_net()
    with pytest.raises(UsageError, match="no module 'conv9'"):
        StatsCollector(model, modules=["conv9"])
    with pytest.raises(UsageError, match="axes: '9' is not among"):
        StatsCollector(model, axes=dict.fromkeys(["9", "8", "7", "6", "5"], 1))  # the first of them
    with pytest.raises(UsageError, match="no forward pass was seen"):
        calibrate(model, [])
    with pytest.raises(ModelError, match="compiled"), StatsCollector(torch.compile(model, backend="eager")):
        pass


def test_a_recomputed_forward_is_counted_once() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.linear, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Checkpointed()
    with StatsCollector(model) as collector:
        model(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert collector.stats()["linear", "output", 0].count.tolist() == [4, 4, 4]
