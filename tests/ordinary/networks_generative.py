"""Generative models: pixel by pixel, by flows, by diffusion, by mixtures, and radiance fields."""

from __future__ import annotations

import math
from typing import Any

import torch
from network_registry import images, ordinary, vectors
from torch import Tensor, nn
from torch.nn import functional as F


class MaskedConv2d(nn.Conv2d):
    def __init__(self, mask_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert mask_type in {"A", "B"}
        self.register_buffer("mask", self.weight.data.clone())
        _, _, kH, kW = self.weight.size()
        self.mask.fill_(1)
        self.mask[:, :, kH // 2, kW // 2 + (mask_type == "B") :] = 0
        self.mask[:, :, kH // 2 + 1 :] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


@ordinary(images(1, 14))
def PixelCNN() -> nn.Module:
    fm = 16
    return nn.Sequential(
        MaskedConv2d("A", 1, fm, 7, 1, 3, bias=False), nn.BatchNorm2d(fm), nn.ReLU(True),
        MaskedConv2d("B", fm, fm, 7, 1, 3, bias=False), nn.BatchNorm2d(fm), nn.ReLU(True),
        MaskedConv2d("B", fm, fm, 7, 1, 3, bias=False), nn.BatchNorm2d(fm), nn.ReLU(True), nn.Conv2d(fm, 8, 1),
    )  # fmt: skip


class MaskedConvFunctional(nn.Conv2d):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mask = torch.ones_like(self.weight)
        mask[:, :, self.kernel_size[0] // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, self.stride, self.padding)


class GatedActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        _, c, _, _ = x.shape
        assert c % 2 == 0, "x must have an even number of channels."
        x, gate = x[:, : c // 2, :, :], x[:, c // 2 :, :, :]
        return torch.tanh(x) * torch.sigmoid(gate)


@ordinary(images(1, 14))
def GatedPixelCNN() -> nn.Module:
    return nn.Sequential(
        MaskedConvFunctional(1, 32, 5, padding=2), GatedActivation(), MaskedConvFunctional(16, 32, 3, padding=1),
        GatedActivation(), nn.Conv2d(16, 8, 1),
    )  # fmt: skip


class MaskedLinear(nn.Linear):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.register_buffer("mask", torch.ones(out_features, in_features))

    def set_mask(self, mask: Tensor) -> None:
        self.mask.data.copy_(mask.T)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.mask * self.weight, self.bias)


@ordinary(vectors(12))
class MADE(nn.Module):
    def __init__(self, nin: int = 12, hidden: tuple[int, ...] = (48, 48)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        hs = [nin, *hidden, nin * 2]
        for h0, h1 in zip(hs, hs[1:]):
            layers.extend([MaskedLinear(h0, h1), nn.ReLU()])
        layers.pop()
        self.net = nn.Sequential(*layers)
        m = {-1: torch.arange(nin)}
        for i, h in enumerate(hidden):
            m[i] = torch.arange(h) % (nin - 1)
        masks = [m[i - 1][:, None] <= m[i][None, :] for i in range(len(hidden))]
        last = m[len(hidden) - 1][:, None] < m[-1][None, :]
        masks.append(torch.cat([last, last], dim=1))
        for layer, mask in zip([one for one in self.net.modules() if isinstance(one, MaskedLinear)], masks):
            layer.set_mask(mask.float())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mu, log_sigma = self.net(x).chunk(2, dim=1)
        return mu, log_sigma


class CouplingLayer(nn.Module):
    def __init__(self, num_inputs: int, num_hidden: int, mask: Tensor) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.mask = mask
        self.scale_net = nn.Sequential(
            nn.Linear(num_inputs, num_hidden), nn.Tanh(), nn.Linear(num_hidden, num_hidden), nn.Tanh(),
            nn.Linear(num_hidden, num_inputs),
        )  # fmt: skip
        self.translate_net = nn.Sequential(
            nn.Linear(num_inputs, num_hidden), nn.ReLU(), nn.Linear(num_hidden, num_hidden), nn.ReLU(),
            nn.Linear(num_hidden, num_inputs),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.mask
        masked_inputs = inputs * mask
        log_s = self.scale_net(masked_inputs) * (1 - mask)
        t = self.translate_net(masked_inputs) * (1 - mask)
        return inputs * torch.exp(log_s) + t, log_s.sum(-1, keepdim=True)


@ordinary(vectors(8))
class RealNVP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(0, 8) % 2
        self.layers = nn.ModuleList([CouplingLayer(8, 32, mask if i % 2 == 0 else 1 - mask) for i in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros(x.size(0), 1)
        for layer in self.layers:
            x, change = layer(x)
            log_det += change
        return x, log_det


@ordinary(vectors(8))
class NICE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 24), nn.LeakyReLU(), nn.Linear(24, 24), nn.LeakyReLU(), nn.Linear(24, 4))] * 1
            + [nn.Sequential(nn.Linear(4, 24), nn.LeakyReLU(), nn.Linear(24, 4)) for _ in range(2)]
        )
        self.scaling = nn.Parameter(torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        for i, net in enumerate(self.nets):
            x1, x2 = x[:, ::2], x[:, 1::2]
            if i % 2 == 0:
                x2 = x2 + net(x1)
            else:
                x1 = x1 + net(x2)
            x = torch.stack((x1, x2), dim=2).view(x.size(0), -1)
        return torch.exp(self.scaling) * x


@ordinary(vectors(6), n_hidden=32, n_gaussians=5)
class MixtureDensityNetwork(nn.Module):
    def __init__(self, n_hidden: int, n_gaussians: int) -> None:
        super().__init__()
        self.z_h = nn.Sequential(nn.Linear(6, n_hidden), nn.Tanh(), nn.Linear(n_hidden, n_hidden), nn.Tanh())
        self.z_pi = nn.Linear(n_hidden, n_gaussians)
        self.z_mu = nn.Linear(n_hidden, n_gaussians)
        self.z_sigma = nn.Linear(n_hidden, n_gaussians)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z_h = self.z_h(x)
        pi = F.softmax(self.z_pi(z_h), -1)
        mu = self.z_mu(z_h)
        sigma = torch.exp(self.z_sigma(z_h))
        return pi, mu, sigma


class SinusoidalPositionEmbeddings(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, time: Tensor) -> Tensor:
        device = time.device
        half_dim = self.dim // 2
        embeddings = math.log(10000) / (half_dim - 1)
        embeddings = torch.exp(torch.arange(half_dim, device=device) * -embeddings)
        embeddings = time[:, None] * embeddings[None, :]
        return torch.cat((embeddings.sin(), embeddings.cos()), dim=-1)


class DiffusionBlock(nn.Module):
    def __init__(self, in_ch: int, out_ch: int, time_emb_dim: int, up: bool = False) -> None:
        super().__init__()
        self.time_mlp = nn.Linear(time_emb_dim, out_ch)
        if up:
            self.conv1 = nn.Conv2d(2 * in_ch, out_ch, 3, padding=1)
            self.transform: nn.Module = nn.ConvTranspose2d(out_ch, out_ch, 4, 2, 1)
        else:
            self.conv1 = nn.Conv2d(in_ch, out_ch, 3, padding=1)
            self.transform = nn.Conv2d(out_ch, out_ch, 4, 2, 1)
        self.conv2 = nn.Conv2d(out_ch, out_ch, 3, padding=1)
        self.bnorm1 = nn.BatchNorm2d(out_ch)
        self.bnorm2 = nn.BatchNorm2d(out_ch)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.bnorm1(self.relu(self.conv1(x)))
        time_emb = self.relu(self.time_mlp(t))
        time_emb = time_emb[(...,) + (None,) * 2]
        h = h + time_emb
        h = self.bnorm2(self.relu(self.conv2(h)))
        return self.transform(h)


@ordinary(lambda count: (torch.rand(count, 3, 16, 16), torch.randint(100, (count,))))
class SimpleDiffusionUnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        down_channels, up_channels, time_emb_dim = (8, 16, 24), (24, 16, 8), 16
        self.time_mlp = nn.Sequential(
            SinusoidalPositionEmbeddings(time_emb_dim), nn.Linear(time_emb_dim, time_emb_dim), nn.ReLU()
        )
        self.conv0 = nn.Conv2d(3, down_channels[0], 3, padding=1)
        self.downs = nn.ModuleList(
            [DiffusionBlock(down_channels[i], down_channels[i + 1], time_emb_dim) for i in range(2)]
        )
        self.ups = nn.ModuleList(
            [DiffusionBlock(up_channels[i], up_channels[i + 1], time_emb_dim, up=True) for i in range(2)]
        )
        self.output = nn.Conv2d(up_channels[-1], 3, 1)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        t = self.time_mlp(timestep)
        x = self.conv0(x)
        residual_inputs = []
        for down in self.downs:
            x = down(x, t)
            residual_inputs.append(x)
        for up in self.ups:
            residual_x = residual_inputs.pop()
            x = torch.cat((x, residual_x), dim=1)
            x = up(x, t)
        return self.output(x)


class LinearAttention2d(nn.Module):
    def __init__(self, dim: int, heads: int = 2, dim_head: int = 8) -> None:
        super().__init__()
        self.scale = dim_head**-0.5
        self.heads = heads
        hidden_dim = dim_head * heads
        self.to_qkv = nn.Conv2d(dim, hidden_dim * 3, 1, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(hidden_dim, dim, 1), nn.GroupNorm(1, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        qkv = self.to_qkv(x).chunk(3, dim=1)
        q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in qkv)
        q = q.softmax(dim=-2) * self.scale
        k = k.softmax(dim=-1)
        context = torch.einsum("b h d n, b h e n -> b h d e", k, v)
        out = torch.einsum("b h d e, b h d n -> b h e n", context, q)
        return self.to_out(out.reshape(b, -1, h, w))


class ResnetTimeBlock(nn.Module):
    def __init__(self, dim: int, dim_out: int, time_emb_dim: int, groups: int = 4) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_emb_dim, dim_out * 2))
        self.proj1, self.norm1 = nn.Conv2d(dim, dim_out, 3, padding=1), nn.GroupNorm(groups, dim_out)
        self.proj2, self.norm2 = nn.Conv2d(dim_out, dim_out, 3, padding=1), nn.GroupNorm(groups, dim_out)
        self.act = nn.SiLU()
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x: Tensor, time_emb: Tensor) -> Tensor:
        scale, shift = self.mlp(time_emb)[:, :, None, None].chunk(2, dim=1)
        h = self.norm1(self.proj1(x))
        h = self.act(h * (scale + 1) + shift)
        h = self.act(self.norm2(self.proj2(h)))
        return h + self.res_conv(x)


@ordinary(lambda count: (torch.rand(count, 3, 8, 8), torch.rand(count)))
class DenoisingUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(SinusoidalPositionEmbeddings(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
        self.init_conv = nn.Conv2d(3, 16, 7, padding=3)
        self.block1, self.attn1 = ResnetTimeBlock(16, 16, 32), LinearAttention2d(16)
        self.down = nn.Conv2d(16, 32, 4, 2, 1)
        self.mid = ResnetTimeBlock(32, 32, 32)
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(32, 16, 3, padding=1))
        self.block2 = ResnetTimeBlock(32, 16, 32)
        self.final = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        t = self.time(time)
        x = self.init_conv(x)
        h = self.block1(x, t)
        h = self.attn1(h) + h
        x = self.mid(self.down(h), t)
        x = self.block2(torch.cat((self.up(x), h), dim=1), t)
        return self.final(x)


@ordinary(vectors(3, 3))
class NeRF(nn.Module):
    def __init__(self, D: int = 4, W: int = 32, skips: tuple[int, ...] = (2,)) -> None:
        super().__init__()
        self.skips = skips
        self.input_ch, self.input_ch_views = 3 + 3 * 2 * 4, 3
        self.pts_linears = nn.ModuleList(
            [nn.Linear(self.input_ch, W)]
            + [nn.Linear(W, W) if i not in self.skips else nn.Linear(W + self.input_ch, W) for i in range(D - 1)]
        )
        self.views_linears = nn.ModuleList([nn.Linear(self.input_ch_views + W, W // 2)])
        self.feature_linear = nn.Linear(W, W)
        self.alpha_linear = nn.Linear(W, 1)
        self.rgb_linear = nn.Linear(W // 2, 3)

    def embed(self, x: Tensor) -> Tensor:
        fns = [x]
        for freq in 2.0 ** torch.linspace(0.0, 3, steps=4):
            for p_fn in [torch.sin, torch.cos]:
                fns.append(p_fn(x * freq))
        return torch.cat(fns, -1)

    def forward(self, pts: Tensor, views: Tensor) -> Tensor:
        input_pts = self.embed(pts)
        h = input_pts
        for i, _ in enumerate(self.pts_linears):
            h = self.pts_linears[i](h)
            h = F.relu(h)
            if i in self.skips:
                h = torch.cat([input_pts, h], -1)
        alpha = self.alpha_linear(h)
        feature = self.feature_linear(h)
        h = torch.cat([feature, views], -1)
        for i, _ in enumerate(self.views_linears):
            h = F.relu(self.views_linears[i](h))
        rgb = self.rgb_linear(h)
        return torch.cat([rgb, alpha], -1)


class SineLayer(nn.Module):
    def __init__(self, in_features: int, out_features: int, is_first: bool = False, omega_0: float = 30) -> None:
        super().__init__()
        self.omega_0 = omega_0
        self.is_first = is_first
        self.in_features = in_features
        self.linear = nn.Linear(in_features, out_features)
        self.init_weights()

    def init_weights(self) -> None:
        with torch.no_grad():
            if self.is_first:
                self.linear.weight.uniform_(-1 / self.in_features, 1 / self.in_features)
            else:
                bound = math.sqrt(6 / self.in_features) / self.omega_0
                self.linear.weight.uniform_(-bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        return torch.sin(self.omega_0 * self.linear(input))


@ordinary(vectors(2))
class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        net: list[nn.Module] = []
        net.append(SineLayer(2, 32, is_first=True))
        for _ in range(2):
            net.append(SineLayer(32, 32))
        net.append(nn.Linear(32, 1))
        self.net = nn.Sequential(*net)

    def forward(self, coords: Tensor) -> tuple[Tensor, Tensor]:
        coords = coords.clone().detach().requires_grad_(True)
        return self.net(coords), coords
