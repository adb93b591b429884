"""Second moments of layers' inputs against direct computation in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from prunekit.errors import ModelError, NonFiniteError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.statistics.calibration import calibrate
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.moments import InputMoments, MomentsCollector
from prunekit.statistics.patch_moments import collect_patches, dead_inputs, too_few_rows, with_raised_ridge
from prunekit.statistics.watch import find_consumers

TOKENS = ("shared", "attention", "attention.in_proj_weight", "attention.out_proj")
"""Modules of `Mixed` that see tokens."""


class Mixed(nn.Module):
    """Every kind of consumer: plain, grouped, depthwise, transposed, shared, linear, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.beside = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 2, 1)
        self.grouped, self.depthwise = nn.Conv2d(8, 12, 3, groups=4), nn.Conv2d(12, 12, 1, groups=12)
        self.back, self.shared = nn.ConvTranspose2d(12, 6, 2, groups=2), nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.beside(x)
        x = self.back(self.depthwise(self.grouped(self.stem(x).relu_())))
        x = self.shared(x.flatten(2).mT)
        x = self.shared(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed().double().eval()


def batches(*sizes: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, 3, 8, 8, dtype=torch.float64, generator=draw) for size in sizes]


def inputs_of(model: nn.Module, images: list[Tensor]) -> dict[str, np.ndarray]:
    """(channels, positions) of every consumer that is called, as plain hooks saw it."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for path, module in model.named_modules():

        def keep(module: nn.Module, arguments: tuple[Tensor, ...], path: str = path) -> None:
            axis = arguments[0].ndim - 3 if hasattr(module, "groups") else -1
            seen.setdefault(path, []).append(arguments[0].double().movedim(axis, 0).flatten(1))

        if hasattr(module, "groups") or isinstance(module, (nn.Linear, nn.MultiheadAttention)):
            handles.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        for batch in images:
            model(batch)
    for handle in handles:
        handle.remove()
    return {path: torch.cat(parts, 1).numpy() for path, parts in seen.items()}


def assert_are(moments: InputMoments, values: np.ndarray, *, rtol: float = 1e-11) -> None:
    groups, scale = moments.groups, np.sqrt((values**2).mean(1))
    within = np.kron(np.eye(groups), np.ones((len(values) // groups,) * 2))
    assert moments.count == values.shape[1]
    np.testing.assert_allclose(moments.mean, values.mean(1), atol=rtol * scale.max())
    np.testing.assert_allclose(moments.rms, scale, rtol=rtol)
    np.testing.assert_allclose(moments.gram / moments.count, values @ values.T / values.shape[1] * within,
                               atol=rtol * scale.max() ** 2)  # fmt: skip
    expected = np.cov(values, ddof=0).reshape(within.shape) * within
    np.testing.assert_allclose(moments.covariance, expected, atol=rtol * scale.max() ** 2)


def test_every_kind_of_consumer() -> None:
    model, images = mixed(), batches(3, 2)
    moments = calibrate(model, images, moments="full").moments
    expected = inputs_of(model, images)
    expected["attention.in_proj_weight"] = expected.pop("attention")
    assert set(expected) == {*moments} - {"attention.out_proj"}
    for path, values in expected.items():
        assert_are(moments[path], values)
    assert [moments[path].groups for path in ("stem", "grouped", "depthwise", "back")] == [1, 4, 12, 2]
    assert moments["shared"].count == 2 * moments["attention.in_proj_weight"].count


def test_the_output_projection_of_attention_is_seen_though_it_is_never_called() -> None:
    model, images = mixed(), batches(3, 2)
    found = calibrate(model, images, moments="full").moments["attention.out_proj"]
    with torch.no_grad():
        model.attention.out_proj.weight.copy_(torch.eye(6))
        model.attention.out_proj.bias.zero_()
    outputs: list[Tensor] = []
    handle = model.attention.register_forward_hook(lambda module, args, out: outputs.append(out[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in images:
            model(batch)
    handle.remove()
    assert_are(found, torch.cat(outputs).T.numpy(), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [models.resnet18, models.mobilenet_v2, lambda: models.SwinTransformer([4, 4], 24, [2, 4, 4], [1, 2, 4], [4, 4])],
    ids=["resnet18", "mobilenet_v2", "swin"],
)
def test_float32_models(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build().eval()
    images = [torch.randn(2, 3, 32, 32) for _ in range(2)]
    moments = calibrate(model, images, moments="full").moments
    assert set(moments) == set(find_consumers(model, images[0]))
    seen = {path: values for path, values in inputs_of(model, images).items() if path in moments}
    assert len(seen) > 20
    for path, values in seen.items():
        scale = np.sqrt((values**2).mean(1)) + 1e-30
        wanted = values.reshape(moments[path].groups, -1, values.shape[1])
        wanted = wanted @ wanted.transpose(0, 2, 1) / values.shape[1]
        ratio = scale.reshape(len(wanted), -1)
        error = np.abs(moments[path].blocks / moments[path].count - wanted) / (ratio[:, :, None] * ratio[:, None])
        assert error.max() < 5e-6, path


def test_a_large_mean_does_not_cost_the_variance_its_digits() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    images = [torch.randn(50, 4) * 1e-3 + torch.tensor([100.0, 0, -30, 0]) for _ in range(3)]
    moments = calibrate(model, images, moments="full").moments[""]
    expected = np.cov(torch.cat(images).double().numpy(), rowvar=False, ddof=0)
    np.testing.assert_allclose(moments.covariance, expected, atol=1e-3 * 1e-6)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "view"])
def test_any_memory_layout(layout: str) -> None:
    model, images = nn.Conv2d(6, 2, 1).double(), torch.randn(3, 6, 5, 4, dtype=torch.float64)
    if layout == "NHWC":
        images = images.to(memory_format=torch.channels_last)
    elif layout == "view":
        images = torch.randn(3, 12, 5, 8, dtype=torch.float64)[:, ::2, :, 1::2]
    moments = calibrate(model, [images], moments="full").moments[""]
    assert_are(moments, images.transpose(0, 1).flatten(1).numpy())


def test_merged_and_reloaded_equal_one_pass(tmp_path: Path) -> None:
    model, images = mixed(), batches(3, 1, 4)
    a, b, c = (calibrate(model, [part], moments="full", ranks=True) for part in images)
    whole = calibrate(model, [torch.cat(images)], moments="full", ranks=True)
    merged = ChannelStats.load(a.merge(b.merge(c)).save(tmp_path))
    assert list(merged.moments) == list(whole.moments)
    for path, moments in whole.moments.items():
        assert merged.moments[path].count == moments.count
        np.testing.assert_allclose(merged.moments[path].total, moments.total, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(merged.moments[path].blocks, moments.blocks, rtol=1e-11, atol=1e-11)
    assert not merged.moments["stem"].blocks.flags.writeable
    assert list(merged.ranks) == list(whole.ranks)
    for key, ranks in whole.ranks.items():
        assert merged.ranks[key].count == (3 if key.module in TOKENS else 1) * ranks.count
        assert key.module in TOKENS or (merged.ranks[key].total == ranks.total).all()
    with pytest.raises(UsageError, match=r"shapes \[\(8,\), \(4, 2, 2\)\] here, \[\(3,\), \(1, 3, 3\)\] there"):
        whole.moments["grouped"].merge(whole.moments["stem"])


def test_memory_is_stated_before_anything_runs_and_kept_to() -> None:
    collector = MomentsCollector(mixed(), batches(1)[0])
    assert sum(collector.bytes.values()) == 16 * (3**2 + 3**2 + 4 * 2**2 + 12 + 2 * 6**2 + 6**2 * 4)
    assert collector.memory == (
        "Gram matrices of 9 layers' inputs, over all positions, take 0.0 MiB, the largest 0.0 MiB (back, 12 channels)"
    )
    large = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 2))
    message = r"192 MiB, more than the limit of 100 MiB; .* '2': 4,096 channels, 192 MiB\. .* moments_ignore \(\[2\]\)"
    with pytest.raises(UsageError, match=message):
        MomentsCollector(large, torch.randn(2, 8), limit_mib=100)
    images = [torch.randn(3, 8)]
    assert list(calibrate(large, images, moments="full", moments_ignore=["2"], moments_limit_mib=1).moments) == ["0"]
    with pytest.raises(UsageError, match="moments_ignore: 'fc' matches no module path"):
        MomentsCollector(large, images[0], ignore=["fc"])


@pytest.mark.parametrize("channels", [4, 200])
@pytest.mark.parametrize("layout", ["maps", "tokens"])
def test_positions_of_large_maps_are_sampled(layout: str, channels: int) -> None:
    draw = torch.Generator().manual_seed(1)
    images = [torch.randn(6, channels, 20, 20, dtype=torch.float64, generator=draw) for _ in range(4)]
    model: nn.Module = nn.Conv2d(channels, 2, 1)
    if layout == "tokens":
        model, images = nn.Linear(channels, 2), [batch.flatten(2).mT.contiguous() for batch in images]
    model.double()
    sampled, again = (calibrate(model, images, moments="full", moments_positions=50).moments[""] for _ in range(2))
    assert sampled.count == 4 * 6 * 50
    np.testing.assert_array_equal(sampled.blocks, again.blocks)
    some = calibrate(model, images[:1], moments="full", moments_positions=50).moments[""]
    more = calibrate(model, [images[0], images[0]], moments="full", moments_positions=50).moments[""]
    assert not np.allclose(more.gram, 2 * some.gram)  # other positions in each batch
    covariance = sampled.covariance - np.eye(channels)
    assert np.abs(covariance).max() < 6 / sampled.count**0.5
    whole = calibrate(model, images, moments="full", moments_positions=400).moments[""]
    channels_first = [
        batch.transpose(0, 1).flatten(1) if layout == "maps" else batch.flatten(0, 1).T for batch in images
    ]
    assert_are(whole, torch.cat(channels_first, 1).numpy())


def test_windows_and_regions_share_what_an_image_may_have() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.view(-1, 5, 3))  # type: ignore[no-any-return]

    moments = calibrate(Windows(), [torch.randn(4, 100, 3)], moments="full", moments_positions=7).moments["layer"]
    assert moments.count == 4 * 7


def test_too_few_samples_say_their_rank() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 2)).double()
    stats = calibrate(model, [torch.randn(5, 12, dtype=torch.float64)], moments="full")
    assert stats.moments["0"].rank() == 5
    (said,) = stats.too_few_samples()
    assert "input of 0, the worst of 2, has rank 5 for 12 channels: 5 positions are too few" in said
    dead = torch.randn(99, 12, dtype=torch.float64) * (torch.arange(12) > 2)
    stats = calibrate(model, [dead], moments="full")
    assert stats.moments["0"].rank() == 9
    assert stats.too_few_samples() == []
    narrow = calibrate(model.float(), [torch.randn(5, 12)], moments="full")
    assert narrow.moments["0"].rank() == 5  # rounding of float32 is no rank


def test_too_few_patches_raise_the_ridge_and_say_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double().eval()
    images = torch.randn(9, 2, 4, 4, dtype=torch.float64)
    patches = collect_patches(model, [images], images=9)
    (said,) = too_few_rows(patches)
    assert "patches of 3 has rank 9 at most for 17 columns: 9 positions are too few, and its ridge is raised 10" in said
    raised = with_raised_ridge(patches, 0.01)
    first, last = patches.layers[0].grams[0], patches.layers[1].grams[0]
    torch.testing.assert_close(raised.layers[0].grams[0], first)
    pull = 0.09 * last.diagonal()[:-1].mean() * torch.eye(17, dtype=torch.float64)
    pull[-1] = 0
    torch.testing.assert_close(raised.layers[1].grams[0], last + pull)
    assert too_few_rows(collect_patches(model, [images.repeat(2, 1, 1, 1)], images=18)) == []
    linear = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 24), nn.Linear(24, 2)).double()
    (said,) = too_few_rows(collect_patches(linear, [torch.randn(5, 12, dtype=torch.float64)], images=5))
    assert "patches of 2, the worst of 3, has rank 5 at most for 25 columns" in said


def test_what_is_not_finite_is_named() -> None:
    model, images = mixed(), batches(2)
    with torch.no_grad():
        model.grouped.weight[3] = torch.nan
    stats = calibrate(model, images, moments="full")
    with pytest.raises(NonFiniteError, match="input of depthwise"):
        dataclasses.replace(stats, layers={}).require_finite()
    with pytest.raises(NonFiniteError, match="NaN or Inf in the input of depthwise"):
        calibrate(model, images, ranks=True)


def test_a_pass_that_raises_counts_for_nothing_and_hooks_go() -> None:
    model = mixed()
    collector = MomentsCollector(model, batches(1)[0])
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), collector:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3, 4, 4, dtype=torch.float64))
        for batch in batches(3, 2):
            model(batch)
    assert count_hooks(model) == 0
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    expected = calibrate(model, batches(3, 2), moments="full").moments
    for path, moments in collector.moments().items():
        np.testing.assert_array_equal(moments.blocks, expected[path].blocks)
    with pytest.raises(UsageError, match="no forward pass was seen"):
        MomentsCollector(model, batches(1)[0]).moments()


def test_a_compiled_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.compile(backend="eager")
    with pytest.raises(ModelError, match="compiled"):
        MomentsCollector(model, torch.randn(2, 2))


def test_autocast_does_not_touch_the_products() -> None:
    model, images = nn.Linear(8, 4), torch.randn(64, 8)
    collector = MomentsCollector(model, images[:2])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), collector:
        model(images)
    expected = (images.T.double() @ images.double()).numpy()
    np.testing.assert_allclose(collector.moments()[""].gram, expected, atol=1e-4)


def ranks_of(maps: Tensor) -> Iterator[int]:
    for channel in maps.unbind(1):
        yield sum(int(np.linalg.matrix_rank(one.numpy())) for one in channel)


def test_ranks_of_feature_maps() -> None:
    model, images = nn.Conv2d(3, 2, 1).double(), batches(4)[0].clone()
    images[:2, 1] = images[:2, 1, :1] * images[:2, 1, :, :1]
    images[:, 2, 3:] = 0
    ranks = calibrate(model, [images[:1], images[1:]], ranks=True).ranks["", "input", 0]
    assert ranks.count == 4
    np.testing.assert_array_equal(ranks.total, list(ranks_of(images)))
    np.testing.assert_array_equal(ranks.mean, [8, (1 + 1 + 8 + 8) / 4, 3])
    tokens = torch.randn(5, 7, 3, dtype=torch.float64)
    tokens[3:, :, 2] = 0
    ranks = calibrate(nn.Linear(3, 2).double(), [tokens], ranks=True).ranks["", "input", 0]
    np.testing.assert_array_equal(ranks.total, [5, 5, 3])
    flat = calibrate(nn.Linear(3, 2).double(), [tokens[3:, 0]], ranks=True).ranks["", "input", 0]
    np.testing.assert_array_equal(flat.total, [2, 2, 0])


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 6, 3, padding=2, bias=False),
        nn.Conv2d(4, 6, 3, padding=2, groups=2, bias=False),
        nn.Conv2d(4, 4, 3, padding=2, groups=4, bias=False),
        nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False),
    ],
)
def test_columns_are_what_a_layer_makes_of_one_channel(module: nn.Conv2d) -> None:
    consumer = find_consumers(module, torch.zeros(1, 4, 3, 3))[""]
    columns = consumer.columns(module.weight.detach())
    for channel in range(4):
        impulse = torch.zeros(1, 4, 1, 1)
        impulse[0, channel] = 1
        made = module(impulse).detach().flatten()  # each tap once
        np.testing.assert_array_equal(made[made != 0].sort()[0], columns[channel].sort()[0])


@pytest.mark.parametrize("images", [3, 64])  # with a raised ridge, and without
def test_channels_that_are_zero_all_along_are_said(images: int) -> None:
    torch.manual_seed(0)
    grouped = nn.Conv2d(4, 6, 3, groups=2)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), grouped, nn.Flatten(), nn.Linear(24, 3)).double().eval()
    seen = torch.randn(images, 2, 6, 6, dtype=torch.float64)
    assert dead_inputs(with_raised_ridge(collect_patches(model, [seen], images=images), 0.01)) == []
    with torch.no_grad():
        model[0].weight[1:3], model[0].bias[1:3] = -1e-3, -9.0
        grouped.weight[4], grouped.bias[4] = 0.0, 0.0
    raised = with_raised_ridge(collect_patches(model, [seen], images=images), 0.01)
    (said,) = dead_inputs(raised)
    assert said.endswith("cost nothing: 2 of 4 that 2 reads, 4 of 24 that 4 reads")
