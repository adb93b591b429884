from __future__ import annotations

import torch
from torch import Tensor, nn

import prunekit
from prunekit.hooks.hook import count_hooks

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.conv2, self.out = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv2(self.relu(self.norm(self.conv1(x)))).mean((2, 3)))  # type: ignore[no-any-return]


def test_layers_of_a_channel_group_in_dense_masked_and_compact_models() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    nn.init.uniform_(model.norm.running_mean)
    plan = prunekit.plan(model, (IMAGES,), channels=0.5)
    small = prunekit.compact(model, plan).eval()
    group = next(group for group in plan.channel_map.groups if group.name == "conv1")
    with torch.no_grad():
        with prunekit.capture(model, group) as dense:
            model(IMAGES)
        with prunekit.masked(model, plan, restore=True), prunekit.capture(model, group) as masked:
            model(IMAGES)
        with prunekit.capture(small, group) as compact:
            small(IMAGES)
    for record in (dense, masked, compact):
        assert [entry.path for entry in record] == ["conv1", "norm"]
    kept = plan.keep[group.labels]
    for one, other in zip(masked, compact, strict=True):
        torch.testing.assert_close(one.value[:, kept], other.value, rtol=1e-4, atol=1e-5)
        assert not one.value[:, ~kept].any()
    assert all(entry.value[:, ~kept].any() for entry in dense)
    assert count_hooks(model) == count_hooks(small) == 0


def test_a_group_of_attention_s_heads_is_seen_where_they_are_made() -> None:
    """Not in what the attention module returns, whose channels are others."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).eval()
    tokens = torch.randn(2, 5, 8)
    groups = prunekit.trace(model, (tokens,)).groups
    heads = next(group for group in groups if any(name == "self_attn.in_proj_weight" for name, _ in group.slots))
    with prunekit.capture(model, heads) as record, torch.no_grad():
        model(tokens)
    assert [(entry.path, entry.shape) for entry in record] == [("self_attn.in_proj_weight", (2, 5, 24))]
