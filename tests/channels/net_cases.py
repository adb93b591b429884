"""Small nets written by hand, each with one thing in it that pruning gets wrong easily."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[Any, ...]]
Factory = Callable[[], Case]
CASES: dict[str, tuple[Factory, tuple[str, ...]]] = {}
"""Name -> how to make the net with its example input, and parameters whose first axis must stay prunable."""


def case(*prunable: str) -> Callable[[Factory], Factory]:
    """Registers a net; `prunable` names parameters whose outputs must be free even after the trial."""

    def register(factory: Factory) -> Factory:
        CASES[factory.__name__] = (factory, prunable)
        return factory

    return register


def tokens(width: int = 6, length: int = 5) -> tuple[Tensor]:
    return (torch.randn(2, length, width, generator=torch.Generator().manual_seed(1)),)


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, **options)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


# Convolutions


@case("0.weight", "3.weight")
def conv_norm_relu_linear() -> Case:
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    return nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 6), nn.ReLU(), *pool), image()


@case("0.weight", "2.weight")
def grouped_by_whole_groups() -> Case:
    return nn.Sequential(conv(3, 16), nn.ReLU(), conv(16, 24, groups=8), nn.ReLU(), conv(24, 5, 1)), image()


@case("0.weight", "2.weight")
def grouped_by_columns() -> Case:
    return nn.Sequential(conv(3, 16), nn.ReLU(), conv(16, 12, groups=2), nn.ReLU(), conv(12, 5, 1)), image()


@case("0.weight", "2.weight")
def depthwise_with_multiplier() -> Case:
    return nn.Sequential(conv(3, 6), nn.ReLU(), conv(6, 18, groups=6, bias=False), nn.ReLU(), conv(18, 5, 1)), image()


@case("a.weight", "b.weight", "c.weight")
def grouped_after_cat() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.d(net.c(torch.cat([net.a(x), net.b(x)], 1)).relu())

    return Net(forward, a=conv(3, 8, 1), b=conv(3, 8, 1), c=conv(16, 16, groups=2), d=conv(16, 3, 1)), image()


@case("0.weight", "4.weight")
def transposed() -> Case:
    up = nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1)
    return nn.Sequential(conv(3, 8), nn.ReLU(), up, nn.ReLU(), conv(6, 5, 1), nn.ReLU(), conv(5, 3, 1)), image()


@case("0.weight")
def transposed_by_whole_groups() -> Case:
    up = nn.ConvTranspose2d(8, 12, 3, groups=4)
    return nn.Sequential(conv(3, 8), nn.ReLU(), up, nn.ReLU(), conv(12, 5, 1)), image()


@case("0.weight")
def transposed_by_columns() -> Case:
    up = nn.ConvTranspose2d(12, 8, 3, groups=2)
    return nn.Sequential(conv(3, 12), nn.ReLU(), up, nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight")
def transposed_depthwise() -> Case:
    up = nn.ConvTranspose2d(12, 12, 3, groups=12, bias=False)
    return nn.Sequential(conv(3, 12), nn.ReLU(), up, nn.ReLU(), conv(12, 5, 1)), image()


@case("0.weight", "3.weight")
def one_dimension() -> Case:
    layers = (nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 6, 3), nn.Flatten(), nn.Linear(24, 3))
    return nn.Sequential(*layers), (torch.randn(2, 2, 8),)


@case("0.weight", "4.weight")
def three_dimensions() -> Case:
    body = (nn.Conv3d(2, 8, 2), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, 6, 1))
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(48, 3)), (torch.randn(2, 2, 5, 5, 5),)


@case("0.weight", "3.weight")
def flatten_then_linear() -> Case:
    layers = (conv(3, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10), nn.ReLU(), nn.Linear(10, 4))
    return nn.Sequential(*layers), image()


@case("0.weight", "2.weight", "4.weight")
def padding_modes() -> Case:
    reflect, replicate = conv(8, 5, padding=1, padding_mode="reflect"), conv(5, 4, padding=1, padding_mode="replicate")
    return nn.Sequential(conv(3, 8), nn.ReLU(), reflect, nn.ReLU(), replicate, nn.ReLU(), conv(4, 4, 1)), image()


@case("0.weight", "3.weight")
def upsampling() -> Case:
    up = nn.Upsample(scale_factor=2, mode="bilinear")
    return nn.Sequential(conv(3, 8), nn.Upsample(scale_factor=2), nn.ReLU(), conv(8, 6, 1), up, conv(6, 4, 1)), image()


# Joins and splits


@case("a.weight")
def cat_with_itself() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.b(torch.cat([y, y], 1))

    return Net(forward, a=conv(3, 8), b=conv(16, 5, 1)), image()


@case("a.weight", "b.weight")
def cat_with_the_input() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.c(torch.cat([net.a(x), net.b(x).relu(), x], 1))

    return Net(forward, a=conv(3, 8, 1), b=conv(3, 6, 1), c=conv(17, 5, 1)), image()


@case("a.weight", "b.weight", "c.weight")
def dense_connections() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        first = net.a(x)
        second = net.b(first.relu())
        third = net.c(torch.cat([first, second], 1).relu())
        return net.d(torch.cat([first, second, third], 1))

    return Net(forward, a=conv(3, 8), b=conv(8, 4, 1), c=conv(12, 4, 1), d=conv(16, 5, 1)), image()


@case("c.weight", "a.weight", "b.weight")
def one_producer_of_two_groups() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.d(net.c(x) * torch.cat([net.a(x), net.b(x)], 1))

    return Net(forward, c=conv(3, 12, 1), a=conv(3, 8, 1), b=conv(3, 4, 1), d=conv(12, 5, 1)), image()


@case("a.weight", "b.weight")
def residual_in_place() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        out = net.n(net.b(y))
        out += y
        out.relu_()
        return net.c(out)

    return Net(forward, a=conv(3, 8, 1), b=conv(8, 8, 1), n=nn.BatchNorm2d(8), c=conv(8, 5, 1)), image()


@case("a.weight")
def chunk_and_gate() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        a, b = net.a(x).chunk(2, 1)
        return net.b(a * b.sigmoid())

    return Net(forward, a=conv(3, 16), b=conv(8, 5, 1)), image()


@case("0.weight")
def gated_linear_unit() -> Case:
    return nn.Sequential(conv(3, 16), nn.GLU(1), conv(8, 5, 1)), image()


@case("a.weight")
def halves_for_two_consumers() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        a, b = net.a(x).relu().chunk(2, 1)
        return net.b(a) + net.c(b)

    return Net(forward, a=conv(3, 16), b=conv(8, 5, 1), c=conv(8, 5, 1)), image()


@case("a.weight")
def channel_shuffle() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        n, c, h, w = y.shape
        return net.b(net.identity(y.view(n, 2, c // 2, h, w)).transpose(1, 2).reshape(n, c, h, w))

    return Net(forward, a=conv(3, 16), b=conv(16, 5, 1), identity=nn.Identity()), image()


@case("a.weight")
def shuffle_that_the_narrow_model_need_not_copy() -> Case:
    """With one channel in every group, `reshape` is a view: the narrow model runs other operators."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        n, c, h, w = y.shape
        y = y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return net.b(torch.relu(y)) + net.c(torch.relu(x))

    return Net(forward, a=conv(3, 4, 1), b=conv(4, 5, 1), c=conv(3, 5, 1)), image()


@case("a.weight")
def channels_into_the_batch_and_back() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        n, c, h, w = y.shape
        return net.b(F.avg_pool2d(y.reshape(n * c, 1, h, w), 2).reshape(n, c, h // 2, w // 2))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def flipped_channels() -> Case:
    return Net(lambda net, x: net.b(net.a(x).flip(1)), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight", "f.weight")
def channels_last_tokens() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.g(F.gelu(net.f(net.a(x).flatten(2).transpose(1, 2)))).mean(1)

    return Net(forward, a=conv(3, 8), f=nn.Linear(8, 12), g=nn.Linear(12, 4)), image()


@case("a.weight", "u.weight")
def squeeze_and_excite() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.b(y * net.v(net.u(F.adaptive_avg_pool2d(y, 1)).relu()).sigmoid())

    return Net(forward, a=conv(3, 8), u=conv(8, 4, 1), v=conv(4, 8, 1), b=conv(8, 5, 1)), image()


# Weights used in unusual ways


@case("0.weight")
def tied_weights() -> Case:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    net[4].weight = net[2].weight
    return net, (torch.randn(4, 6),)


@case("0.weight")
def one_module_twice() -> Case:
    twice = conv(8, 8, 3, padding=1)
    return nn.Sequential(conv(3, 8), nn.ReLU(), twice, nn.ReLU(), twice, nn.ReLU(), conv(8, 4, 1)), image()


@case("a", "b")
def parameters_used_directly() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = F.batch_norm(F.conv2d(x, net.a, net.bias), net.mean, net.running_var, net.scale, net.shift)
        return torch.einsum("nchw,oc->nohw", F.conv2d(y.relu(), net.b), net.c)

    buffers = {"mean": torch.zeros(8), "running_var": torch.ones(8)}
    vectors = {"bias": weight(8), "scale": weight(8), "shift": weight(8)}
    return Net(forward, a=weight(8, 3, 3, 3), b=weight(6, 8, 1, 1), c=weight(5, 6), **buffers, **vectors), image()


@case("encode.weight")
def decoder_uses_the_encoders_weight() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return F.linear(net.encode(x).relu(), net.encode.weight.t())

    return Net(forward, encode=nn.Linear(6, 8)), (torch.randn(4, 6),)


@case("a.weight", "b.weight")
def standardised_weights() -> Case:
    def standard(w: Tensor) -> Tensor:
        return (w - w.mean((2, 3), keepdim=True)) / (w.std((2, 3), keepdim=True) + 1e-2)

    def forward(net: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, standard(net.a.weight), net.a.bias).relu()
        return net.c(F.conv2d(y, standard(net.b.weight), net.b.bias))

    return Net(forward, a=conv(3, 8), b=conv(8, 6), c=conv(6, 4, 1)), image()


@case("a.weight", "kernel")
def grouped_with_computed_weight() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.c(F.conv2d(net.a(x).relu(), net.kernel.sigmoid(), groups=2))

    return Net(forward, a=conv(3, 16), kernel=weight(12, 8, 1, 1), c=conv(12, 4, 1)), image()


@case("a.weight")
def layer_scale_of_zero() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.c(y + net.gamma * net.b(y))

    return Net(forward, a=conv(3, 8), b=conv(8, 8, 1), c=conv(8, 3, 1), gamma=weight(8, 1, 1)), image()


@case("a.weight")
def float_buffer_per_channel() -> Case:
    return Net(lambda net, x: net.b(net.a(x) * net.t), a=conv(3, 8), b=conv(8, 5, 1), t=torch.ones(8, 1, 1)), image()


@case("2.weight")
def spectral_norm() -> Case:
    first = nn.utils.parametrizations.spectral_norm(conv(3, 8))
    return nn.Sequential(first, nn.ReLU(), conv(8, 4, 1), nn.ReLU(), conv(4, 2, 1)), image()


# Norms and activations


@case("0.weight")
def norm_without_affine() -> Case:
    return nn.Sequential(conv(3, 8, bias=False), nn.BatchNorm2d(8, affine=False), nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight")
def norm_without_statistics() -> Case:
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    return nn.Sequential(conv(3, 8), norm, nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight")
def instance_norm_with_statistics() -> Case:
    norm = nn.InstanceNorm2d(8, track_running_stats=True)
    return nn.Sequential(conv(3, 8), norm, nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight")
def instance_norm_with_affine() -> Case:
    return nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight")
def instance_norm() -> Case:
    return nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8), nn.ReLU(), conv(8, 5, 1)), image()


@case("2.weight")
def layer_norm_locks_its_channels() -> Case:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), tokens()


@case("3.weight")
def group_norm_locks_its_channels() -> Case:
    layers = (conv(3, 8), nn.GroupNorm(4, 8), nn.ReLU(), conv(8, 6, 1), nn.ReLU(), conv(6, 5, 1))
    return nn.Sequential(*layers), image()


@case("0.weight", "2.weight")
def prelu() -> Case:
    return nn.Sequential(conv(3, 8), nn.PReLU(8), conv(8, 6, 1), nn.PReLU(), conv(6, 5, 1)), image()


@case("0.weight")
def sigmoid_before_conv() -> Case:
    return nn.Sequential(conv(3, 8), nn.Sigmoid(), conv(8, 5, 3, padding=1)), image()


@case("0.weight")
def sigmoid_before_norm() -> Case:
    layers = (conv(3, 8), nn.Sigmoid(), nn.BatchNorm2d(8, affine=False), conv(8, 5, 1))
    return nn.Sequential(*layers), image()


@case("a.weight")
def activations_by_hand() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).clamp(min=0)
        return net.b(y**2 + y * torch.sigmoid(1.702 * y))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def gate_by_comparison() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y * (y > y.amax((2, 3), keepdim=True) * 0.5))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def indicator_that_is_one_at_zero() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b((y.relu() <= 0).to(y.dtype))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def copied_into_new_zeros() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        z = y.new_zeros(y.shape)
        z.copy_(y)
        return net.b(z)

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def in_place_on_views() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        y.view(y.shape[0], -1).add_(1.0)
        y[:, :, 1:] *= 3
        y[:] = y - 2
        return net.b(y)

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


# Attention


class Attention(nn.Module):
    """Multi-head self-attention with views; `sizes` are the numbers that the view fixes."""

    def __init__(self, heads: int, depth: int) -> None:
        super().__init__()
        self.view = (heads, depth)
        width = 12
        self.inner = nn.Linear(6, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)  # (N, L, 12)
        q, k, v = (part(x).view(*x.shape[:2], *self.view).transpose(1, 2) for part in (self.q, self.k, self.v))
        attention = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)  # (N, heads, L, L)
        return self.out(x + self.o((attention @ v).transpose(1, 2).flatten(2)))


@case("inner.weight", "q.weight")
def attention_with_any_number_of_heads() -> Case:
    return Attention(-1, 2), tokens()


@case()
def attention_with_any_depth() -> Case:
    return Attention(3, -1), tokens()


@case()
def attention_with_fixed_sizes() -> Case:
    return Attention(3, 4), tokens()


@case("q.weight")
def fused_attention() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], -1, 2).transpose(1, 2) for part in (net.q, net.k, net.v))
        return net.o(F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2).flatten(2))

    return Net(forward, q=nn.Linear(6, 12), k=nn.Linear(6, 12), v=nn.Linear(6, 12), o=nn.Linear(12, 4)), tokens()


@case()
def attention_module() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.i(x)
        return net.o(net.m(y, y, y)[0])

    module = nn.MultiheadAttention(12, 3, batch_first=True)
    return Net(forward, i=nn.Linear(6, 12), m=module, o=nn.Linear(12, 4)), tokens()


@case()
def causal_mask_of_infinities() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        scores = y @ y.transpose(1, 2)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return net.b(scores.masked_fill(mask, float("-inf")).softmax(-1) @ y)

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 5)), tokens()


@case()
def mask_of_the_lowest_number_before_a_width() -> Case:
    """The largest number of a run says nothing of the size of the others."""

    def forward(net: Any, x: Tensor) -> Tensor:
        scores = x @ x.transpose(1, 2)
        y = scores.masked_fill(net.mask, torch.finfo(scores.dtype).min).softmax(-1) @ net.a(x)
        return net.b(y / y.shape[-1] ** 0.5)

    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 5), mask=mask), tokens()


@case()
def factory_before_a_width() -> Case:
    """A tensor made by `torch.ones` must not put the trial out of step with the trace."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x) * torch.ones(1, dtype=x.dtype)
        return net.b(y / y.shape[-1] ** 0.5)

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 5)), tokens()


# What the model's own code fixes: to be found and locked


@case()
def split_of_a_fixed_size() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        a, b = net.a(x).split(8, 1)
        return net.b(a * b.sigmoid())

    return Net(forward, a=conv(3, 16), b=conv(8, 5, 1)), image()


@case()
def split_of_a_fixed_size_that_raises_nothing() -> Case:
    return Net(lambda net, x: net.b(torch.cat(net.a(x).split(8, 1)[::-1], 1)), a=conv(3, 16), b=conv(16, 5, 1)), image()


@case()
def fixed_size_in_a_view() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(net.a(x).relu().mean((2, 3)).reshape(-1, 4, 2).flatten(1))

    return Net(forward, a=conv(3, 8), b=nn.Linear(8, 5)), image()


@case()
def fixed_size_in_a_module() -> Case:
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Unflatten(1, (4, 2)), nn.Flatten())
    return nn.Sequential(conv(3, 8), *pool, nn.Linear(8, 5)), image()


@case()
def fixed_groups_in_a_function() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(F.conv2d(x, net.a).relu(), net.b, groups=8).relu(), net.c)

    return Net(forward, a=weight(8, 3, 3, 3), b=weight(8, 1, 3, 3), c=weight(5, 8, 1, 1)), image()


@case()
def scale_by_the_width() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.b(y / y.shape[1] ** 0.5)

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def sum_over_the_width() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.b(x) * (y.sum(1, keepdim=True) / y.shape[1])

    return Net(forward, a=conv(3, 8, padding=1), b=conv(3, 5, 1)), image()


@case()
def mean_over_channels() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.b(y - y.mean(1, keepdim=True))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def softmax_over_channels() -> Case:
    return nn.Sequential(conv(3, 8), nn.Softmax(1), conv(8, 5, 1)), image()


@case()
def cumulative_sum_over_channels() -> Case:
    return Net(lambda net, x: net.b(net.a(x).cumsum(1)), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def sum_of_sigmoids() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(x) * torch.sigmoid(net.a(x)).sum(1, keepdim=True)

    return Net(forward, a=conv(3, 8, padding=1), b=conv(3, 5, 1)), image()


@case()
def normalised_over_channels() -> Case:
    return Net(lambda net, x: net.b(F.normalize(net.a(x), dim=1)), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def normalised_over_positions() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y / y.norm(dim=(2, 3), keepdim=True))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def gram_matrix() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).flatten(2)
        return net.b((y @ y.transpose(1, 2)).flatten(1))

    return Net(forward, a=conv(3, 6), b=nn.Linear(36, 3)), image()


@case()
def shifted_channels() -> Case:
    return Net(lambda net, x: net.b(F.pad(net.a(x), (0, 0, 0, 0, 1, -1))), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def first_half_of_the_channels_overwritten() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        y[:, :4] = 1.0
        return net.b(y)

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def shape_changed_in_place() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).mean((2, 3))
        y.unsqueeze_(-1).unsqueeze_(-1)
        return net.b(y)

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def plain_tensor_attribute() -> Case:
    net = Net(lambda net, x: net.b(net.a(x) * net.scale), a=conv(3, 8), b=conv(8, 5, 1))
    object.__setattr__(net, "scale", torch.rand(1, 8, 1, 1) + 0.5)
    return net, image()


@case()
def operator_without_a_rule() -> Case:
    return nn.Sequential(conv(3, 8), nn.ReLU(), nn.PixelShuffle(2), conv(2, 5, 1)), image()


@case()
def width_decides_the_path() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, net.a)
        if y.shape[1] < 8:
            y = y * 2
        return F.conv2d(y, net.b)

    return Net(forward, a=weight(8, 3, 1, 1), b=weight(4, 8, 1, 1)), image()


# Train mode, inputs and outputs


@case("a.weight")
def functional_dropout() -> Case:
    return Net(lambda net, x: net.b(F.dropout(net.a(x), 0.5, net.training)), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("2.weight")
def circular_padding() -> Case:
    ring = conv(8, 5, padding=1, padding_mode="circular")
    return nn.Sequential(conv(3, 8), nn.ReLU(), ring, nn.ReLU(), conv(5, 4, 1)), image()


@case("a.weight")
def several_inputs() -> Case:
    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return net.c(net.a(x).relu() + net.b(y))

    return Net(forward, a=nn.Linear(4, 8), b=nn.Linear(5, 8), c=nn.Linear(8, 2)), (torch.randn(2, 4), torch.randn(2, 5))


@case("a.weight")
def nested_inputs_and_outputs() -> Case:
    def forward(net: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        y = net.a(inputs["x"]) + net.a(inputs["more"][0])
        return {"scores": net.b(y), "more": (net.c(y.relu()), [y.sum(1) * 0 + 1])}

    example = {"x": torch.randn(2, 4), "more": [torch.randn(2, 4)]}
    return Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3), c=nn.Linear(8, 2)), (example,)


@case()
def features_in_the_output() -> Case:
    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = net.a(x)
        return net.b(y.relu()), y

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()
