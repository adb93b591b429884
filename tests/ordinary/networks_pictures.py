"""Networks from images to images: autoencoders, generators, U-Nets, super-resolution, diffusion, style transfer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from network_registry import images, ordinary
from torch import Tensor


@ordinary(images(1, 28))
class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(28 * 28, 128), nn.ReLU(True), nn.Linear(128, 64), nn.ReLU(True), nn.Linear(64, 12)
        )
        self.decoder = nn.Sequential(
            nn.Linear(12, 64), nn.ReLU(True), nn.Linear(64, 128), nn.ReLU(True), nn.Linear(128, 28 * 28), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.size(0), -1)
        x = self.decoder(self.encoder(x))
        return x.view(x.size(0), 1, 28, 28)


@ordinary(images(1, 28))
class ConvAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.t_conv1 = nn.ConvTranspose2d(8, 16, 2, stride=2)
        self.t_conv2 = nn.ConvTranspose2d(16, 1, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.t_conv1(x))
        return torch.sigmoid(self.t_conv2(x))


@ordinary(images(1, 28))
class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 100)
        self.fc21 = nn.Linear(100, 20)
        self.fc22 = nn.Linear(100, 20)
        self.fc3 = nn.Linear(20, 100)
        self.fc4 = nn.Linear(100, 784)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z: Tensor) -> Tensor:
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 784))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


@ordinary(images(3, 32))
class ConvVAE(nn.Module):
    def __init__(self, latent_dim: int = 16, hidden_dims: Any = None) -> None:
        super().__init__()
        modules = []
        if hidden_dims is None:
            hidden_dims = [8, 16, 32]
        in_channels = 3
        for h_dim in hidden_dims:
            modules.append(
                nn.Sequential(
                    nn.Conv2d(in_channels, out_channels=h_dim, kernel_size=3, stride=2, padding=1),
                    nn.BatchNorm2d(h_dim),
                    nn.LeakyReLU(),
                )
            )
            in_channels = h_dim
        self.encoder = nn.Sequential(*modules)
        self.fc_mu = nn.Linear(hidden_dims[-1] * 16, latent_dim)
        self.fc_var = nn.Linear(hidden_dims[-1] * 16, latent_dim)
        modules = []
        self.decoder_input = nn.Linear(latent_dim, hidden_dims[-1] * 16)
        hidden_dims.reverse()
        for i in range(len(hidden_dims) - 1):
            modules.append(
                nn.Sequential(
                    nn.ConvTranspose2d(
                        hidden_dims[i], hidden_dims[i + 1], kernel_size=3, stride=2, padding=1, output_padding=1
                    ),
                    nn.BatchNorm2d(hidden_dims[i + 1]),
                    nn.LeakyReLU(),
                )
            )
        self.decoder = nn.Sequential(*modules)
        self.final_layer = nn.Sequential(
            nn.ConvTranspose2d(hidden_dims[-1], 3, kernel_size=3, stride=2, padding=1, output_padding=1), nn.Tanh()
        )

    def forward(self, input: Tensor) -> list[Tensor]:
        result = torch.flatten(self.encoder(input), start_dim=1)
        mu, log_var = self.fc_mu(result), self.fc_var(result)
        z = torch.randn_like(mu) * torch.exp(0.5 * log_var) + mu if self.training else mu
        result = self.decoder_input(z)
        result = result.view(-1, 32, 4, 4)
        return [self.final_layer(self.decoder(result)), input, mu, log_var]


class VectorQuantizerEMA(nn.Module):
    def __init__(self, num_embeddings: int, embedding_dim: int, decay: float = 0.99, epsilon: float = 1e-5) -> None:
        super().__init__()
        self._embedding_dim = embedding_dim
        self._num_embeddings = num_embeddings
        self._embedding = nn.Embedding(num_embeddings, embedding_dim)
        self._embedding.weight.data.normal_()
        self.register_buffer("_ema_cluster_size", torch.zeros(num_embeddings))
        self._ema_w = nn.Parameter(torch.Tensor(num_embeddings, embedding_dim))
        self._ema_w.data.normal_()
        self._decay = decay
        self._epsilon = epsilon

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        input_shape = inputs.shape
        flat_input = inputs.view(-1, self._embedding_dim)
        distances = (
            torch.sum(flat_input**2, dim=1, keepdim=True)
            + torch.sum(self._embedding.weight**2, dim=1)
            - 2 * torch.matmul(flat_input, self._embedding.weight.t())
        )
        encoding_indices = torch.argmin(distances, dim=1).unsqueeze(1)
        encodings = torch.zeros(encoding_indices.shape[0], self._num_embeddings, device=inputs.device)
        encodings.scatter_(1, encoding_indices, 1)
        quantized = torch.matmul(encodings, self._embedding.weight).view(input_shape)
        if self.training:
            self._ema_cluster_size = self._ema_cluster_size * self._decay + (1 - self._decay) * torch.sum(encodings, 0)
            n = torch.sum(self._ema_cluster_size.data)
            self._ema_cluster_size = (
                (self._ema_cluster_size + self._epsilon) / (n + self._num_embeddings * self._epsilon) * n
            )
            dw = torch.matmul(encodings.t(), flat_input)
            self._ema_w = nn.Parameter(self._ema_w * self._decay + (1 - self._decay) * dw)
            self._embedding.weight = nn.Parameter(self._ema_w / self._ema_cluster_size.unsqueeze(1))
        e_latent_loss = F.mse_loss(quantized.detach(), inputs)
        quantized = inputs + (quantized - inputs).detach()
        return 0.25 * e_latent_loss, quantized.permute(0, 3, 1, 2).contiguous()


class PlainVectorQuantizer(nn.Module):
    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_embeddings, embedding_dim)
        self.embedding.weight.data.uniform_(-1 / num_embeddings, 1 / num_embeddings)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.permute(0, 2, 3, 1).contiguous()
        z_flattened = z.view(-1, z.shape[-1])
        d = torch.cdist(z_flattened, self.embedding.weight)
        z_q = self.embedding(torch.argmin(d, dim=1)).view(z.shape)
        loss = torch.mean((z_q.detach() - z) ** 2) + 0.25 * torch.mean((z_q - z.detach()) ** 2)
        z_q = z + (z_q - z).detach()
        return loss, z_q.permute(0, 3, 1, 2).contiguous()


class VQModel(nn.Module):
    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self._encoder = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 16, 3, 1, 1)
        )
        self._pre_vq_conv = nn.Conv2d(16, 8, kernel_size=1, stride=1)
        self._vq_vae = quantizer
        self._decoder = nn.Sequential(
            nn.Conv2d(8, 32, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self._pre_vq_conv(self._encoder(x))
        loss, quantized = self._vq_vae(z)
        return loss, self._decoder(quantized)


@ordinary(images(3, 16))
def VQVAE() -> nn.Module:
    return VQModel(PlainVectorQuantizer(24, 8))


@ordinary(images(3, 16))
def VQVAEWithEMA() -> nn.Module:
    return VQModel(VectorQuantizerEMA(24, 8))


def weights_init(m: nn.Module) -> None:
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


@ordinary(lambda count: (torch.randn(count, 24, 1, 1),), 24, 8, 3)
class DCGANGenerator(nn.Module):
    def __init__(self, nz: int, ngf: int, nc: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 4), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        self.apply(weights_init)

    def forward(self, input: Tensor) -> Tensor:
        return self.main(input)


@ordinary(images(3, 32), 3, 8)
class DCGANDiscriminator(nn.Module):
    def __init__(self, nc: int, ndf: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 4), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 4, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        )  # fmt: skip
        self.apply(weights_init)

    def forward(self, input: Tensor) -> Tensor:
        output = self.main(input)
        return output.view(-1, 1).squeeze(1)


@ordinary(lambda count: (torch.randn(count, 16), torch.randint(10, (count,))))
class ConditionalGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label_emb = nn.Embedding(10, 10)

        def block(in_feat: int, out_feat: int, normalize: bool = True) -> list[nn.Module]:
            layers: list[nn.Module] = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat, 0.8))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.img_shape = (1, 16, 16)
        self.model = nn.Sequential(
            *block(16 + 10, 32, normalize=False),
            *block(32, 64),
            nn.Linear(64, int(math.prod(self.img_shape))),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        gen_input = torch.cat((self.label_emb(labels), noise), -1)
        img = self.model(gen_input)
        return img.view(img.size(0), *self.img_shape)


class DoubleConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, mid_channels: int | None = None) -> None:
        super().__init__()
        if not mid_channels:
            mid_channels = out_channels
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, mid_channels, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(mid_channels),
            nn.ReLU(inplace=True), nn.Conv2d(mid_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, bilinear: bool) -> None:
        super().__init__()
        if bilinear:
            self.up: nn.Module = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(in_channels, out_channels, in_channels // 2)
        else:
            self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
            self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        diffY = x2.size()[2] - x1.size()[2]
        diffX = x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diffX // 2, diffX - diffX // 2, diffY // 2, diffY - diffY // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNetBase(nn.Module):
    def __init__(self, n_channels: int, n_classes: int, bilinear: bool) -> None:
        super().__init__()
        factor = 2 if bilinear else 1
        self.inc = DoubleConv(n_channels, 8)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(16, 32 // factor))
        self.up1 = Up(32, 16 // factor, bilinear)
        self.up2 = Up(16, 8, bilinear)
        self.outc = nn.Conv2d(8, n_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3, x2)
        x = self.up2(x, x1)
        return self.outc(x)


@ordinary(images(3, 18))
def UNet() -> nn.Module:
    return UNetBase(3, 2, bilinear=False)


@ordinary(images(3, 16))
def UNetBilinear() -> nn.Module:
    return UNetBase(3, 2, bilinear=True)


@ordinary(images(1, 16), features=[8, 16])
class UNetInLists(nn.Module):
    def __init__(self, features: list[int]) -> None:
        super().__init__()
        self.ups = nn.ModuleList()
        self.downs = nn.ModuleList()
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        in_channels = 1
        for feature in features:
            self.downs.append(DoubleConv(in_channels, feature))
            in_channels = feature
        for feature in reversed(features):
            self.ups.append(nn.ConvTranspose2d(feature * 2, feature, kernel_size=2, stride=2))
            self.ups.append(DoubleConv(feature * 2, feature))
        self.bottleneck = DoubleConv(features[-1], features[-1] * 2)
        self.final_conv = nn.Conv2d(features[0], 1, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        skip_connections = []
        for down in self.downs:
            x = down(x)
            skip_connections.append(x)
            x = self.pool(x)
        x = self.bottleneck(x)
        skip_connections = skip_connections[::-1]
        for idx in range(0, len(self.ups), 2):
            x = self.ups[idx](x)
            skip_connection = skip_connections[idx // 2]
            if x.shape != skip_connection.shape:
                x = F.interpolate(x, size=skip_connection.shape[2:])
            concat_skip = torch.cat((skip_connection, x), dim=1)
            x = self.ups[idx + 1](concat_skip)
        return self.final_conv(x)


@ordinary(images(3, 16))
class SegNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv11, self.bn11 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv21, self.bn21 = nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.conv21d, self.bn21d = nn.Conv2d(24, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv11d = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x11 = F.relu(self.bn11(self.conv11(x)))
        x1p, id1 = F.max_pool2d(x11, kernel_size=2, stride=2, return_indices=True)
        x21 = F.relu(self.bn21(self.conv21(x1p)))
        x2p, id2 = F.max_pool2d(x21, kernel_size=2, stride=2, return_indices=True)
        x2d = F.max_unpool2d(x2p, id2, kernel_size=2, stride=2)
        x21d = F.relu(self.bn21d(self.conv21d(x2d)))
        x1d = F.max_unpool2d(x21d, id1, kernel_size=2, stride=2)
        return self.conv11d(x1d)


@ordinary(images(1, 16), upscale_factor=2)
class ESPCN(nn.Module):
    def __init__(self, upscale_factor: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 32, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(32, 32, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(32, 16, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(16, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        nn.init.orthogonal_(self.conv1.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.conv4.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))


class SRResidual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, kernel_size=3, padding=1), nn.BatchNorm2d(channels)
        self.prelu = nn.PReLU()
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.prelu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        return x + residual


@ordinary(images(3, 12), scale_factor=4)
class SRResNet(nn.Module):
    def __init__(self, scale_factor: int) -> None:
        upsample_block_num = int(math.log(scale_factor, 2))
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(3, 16, kernel_size=9, padding=4), nn.PReLU())
        self.block2, self.block3 = SRResidual(16), SRResidual(16)
        self.block7 = nn.Sequential(nn.Conv2d(16, 16, kernel_size=3, padding=1), nn.BatchNorm2d(16))
        block8: list[nn.Module] = []
        for _ in range(upsample_block_num):
            block8 += [nn.Conv2d(16, 16 * 4, kernel_size=3, padding=1), nn.PixelShuffle(2), nn.PReLU()]
        block8.append(nn.Conv2d(16, 3, kernel_size=9, padding=4))
        self.block8 = nn.Sequential(*block8)

    def forward(self, x: Tensor) -> Tensor:
        block1 = self.block1(x)
        block7 = self.block7(self.block3(self.block2(block1)))
        return (torch.tanh(self.block8(block1 + block7)) + 1) / 2


class ConvLayer(nn.Module):
    def __init__(self, cin: int, cout: int, kernel_size: int, stride: int, upsample: int | None = None) -> None:
        super().__init__()
        self.upsample = upsample
        self.reflection_pad = nn.ReflectionPad2d(kernel_size // 2)
        self.conv2d = nn.Conv2d(cin, cout, kernel_size, stride)

    def forward(self, x: Tensor) -> Tensor:
        if self.upsample:
            x = F.interpolate(x, mode="nearest", scale_factor=self.upsample)
        return self.conv2d(self.reflection_pad(x))


class StyleResidual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.in1 = ConvLayer(channels, channels, 3, 1), nn.InstanceNorm2d(channels, affine=True)
        self.conv2, self.in2 = ConvLayer(channels, channels, 3, 1), nn.InstanceNorm2d(channels, affine=True)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        out = self.relu(self.in1(self.conv1(x)))
        out = self.in2(self.conv2(out))
        return out + residual


@ordinary(images(3, 24))
class StyleTransformerNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.in1 = ConvLayer(3, 8, 9, 1), nn.InstanceNorm2d(8, affine=True)
        self.conv2, self.in2 = ConvLayer(8, 16, 3, 2), nn.InstanceNorm2d(16, affine=True)
        self.res1, self.res2 = StyleResidual(16), StyleResidual(16)
        self.deconv1, self.in4 = ConvLayer(16, 8, 3, 1, upsample=2), nn.InstanceNorm2d(8, affine=True)
        self.deconv3 = ConvLayer(8, 3, 9, 1)
        self.relu = nn.ReLU()

    def forward(self, X: Tensor) -> Tensor:
        y = self.relu(self.in1(self.conv1(X)))
        y = self.relu(self.in2(self.conv2(y)))
        y = self.res2(self.res1(y))
        y = self.relu(self.in4(self.deconv1(y)))
        return self.deconv3(y)
