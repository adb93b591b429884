"""Networks of reinforcement learning: values, policies, both in one, with noise in the weights and with states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from network_registry import images, ordinary, series, vectors
from torch import Tensor
from torch.distributions import Normal


@ordinary(vectors(4))
class CartPoleDQN(nn.Module):
    def __init__(self, n_observations: int = 4, n_actions: int = 2) -> None:
        super().__init__()
        self.layer1 = nn.Linear(n_observations, 128)
        self.layer2 = nn.Linear(128, 128)
        self.layer3 = nn.Linear(128, n_actions)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.layer1(x))
        x = F.relu(self.layer2(x))
        return self.layer3(x)


@ordinary(lambda count: (torch.randint(256, (count, 4, 42, 42)).float(),))
class AtariDQN(nn.Module):
    def __init__(self, input_shape: tuple[int, ...] = (4, 42, 42), n_actions: int = 6) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(input_shape[0], 8, kernel_size=8, stride=4), nn.ReLU(),
            nn.Conv2d(8, 16, kernel_size=4, stride=2), nn.ReLU(), nn.Conv2d(16, 16, kernel_size=2, stride=1), nn.ReLU(),
        )  # fmt: skip
        conv_out_size = self._get_conv_out(input_shape)
        self.fc = nn.Sequential(nn.Linear(conv_out_size, 64), nn.ReLU(), nn.Linear(64, n_actions))

    def _get_conv_out(self, shape: tuple[int, ...]) -> int:
        o = self.conv(torch.zeros(1, *shape))
        return int(np.prod(o.size()))

    def forward(self, x: Tensor) -> Tensor:
        fx = x.float() / 256
        conv_out = self.conv(fx).view(fx.size()[0], -1)
        return self.fc(conv_out)


@ordinary(images(4, 42))
class DuelingDQN(nn.Module):
    def __init__(self, n_actions: int = 6) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(4, 8, kernel_size=8, stride=4), nn.ReLU(), nn.Conv2d(8, 16, kernel_size=4, stride=2), nn.ReLU()
        )
        conv_out_size = self._get_conv_out((4, 42, 42))
        self.fc_adv = nn.Sequential(nn.Linear(conv_out_size, 32), nn.ReLU(), nn.Linear(32, n_actions))
        self.fc_val = nn.Sequential(nn.Linear(conv_out_size, 32), nn.ReLU(), nn.Linear(32, 1))

    def _get_conv_out(self, shape: tuple[int, ...]) -> int:
        o = self.conv(torch.zeros(1, *shape))
        return int(np.prod(o.size()))

    def forward(self, x: Tensor) -> Tensor:
        adv, val = self.adv_val(x)
        return val + (adv - adv.mean(dim=1, keepdim=True))

    def adv_val(self, x: Tensor) -> tuple[Tensor, Tensor]:
        conv_out = self.conv(x).view(x.size()[0], -1)
        return self.fc_adv(conv_out), self.fc_val(conv_out)


@ordinary(vectors(8))
class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(8, 64)
        self.action_head = nn.Linear(64, 4)
        self.value_head = nn.Linear(64, 1)
        self.saved_actions: list[Any] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.affine1(x))
        action_prob = F.softmax(self.action_head(x), dim=-1)
        state_values = self.value_head(x)
        return action_prob, state_values


class NoisyLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, std_init: float = 0.4) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.std_init = std_init
        self.weight_mu = nn.Parameter(torch.empty(out_features, in_features))
        self.weight_sigma = nn.Parameter(torch.empty(out_features, in_features))
        self.register_buffer("weight_epsilon", torch.empty(out_features, in_features))
        self.bias_mu = nn.Parameter(torch.empty(out_features))
        self.bias_sigma = nn.Parameter(torch.empty(out_features))
        self.register_buffer("bias_epsilon", torch.empty(out_features))
        self.reset_parameters()
        self.reset_noise()

    def reset_parameters(self) -> None:
        mu_range = 1 / math.sqrt(self.in_features)
        self.weight_mu.data.uniform_(-mu_range, mu_range)
        self.weight_sigma.data.fill_(self.std_init / math.sqrt(self.in_features))
        self.bias_mu.data.uniform_(-mu_range, mu_range)
        self.bias_sigma.data.fill_(self.std_init / math.sqrt(self.out_features))

    def _scale_noise(self, size: int) -> Tensor:
        x = torch.randn(size)
        return x.sign().mul_(x.abs().sqrt_())

    def reset_noise(self) -> None:
        epsilon_in = self._scale_noise(self.in_features)
        epsilon_out = self._scale_noise(self.out_features)
        self.weight_epsilon.copy_(epsilon_out.ger(epsilon_in))
        self.bias_epsilon.copy_(epsilon_out)

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            return F.linear(
                input,
                self.weight_mu + self.weight_sigma * self.weight_epsilon,
                self.bias_mu + self.bias_sigma * self.bias_epsilon,
            )
        else:
            return F.linear(input, self.weight_mu, self.bias_mu)


@ordinary(vectors(8))
class NoisyDQN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 48)
        self.noisy1 = NoisyLinear(48, 48)
        self.noisy2 = NoisyLinear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.linear(x))
        x = F.relu(self.noisy1(x))
        return self.noisy2(x)

    def reset_noise(self) -> None:
        self.noisy1.reset_noise()
        self.noisy2.reset_noise()


@ordinary(vectors(8))
class CategoricalDQN(nn.Module):
    def __init__(self, out_dim: int = 4, atom_size: int = 11) -> None:
        super().__init__()
        self.support = torch.linspace(-10, 10, atom_size)
        self.out_dim = out_dim
        self.atom_size = atom_size
        self.layers = nn.Sequential(
            nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, out_dim * atom_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        dist = self.dist(x)
        return torch.sum(dist * self.support, dim=2)

    def dist(self, x: Tensor) -> Tensor:
        q_atoms = self.layers(x).view(-1, self.out_dim, self.atom_size)
        dist = F.softmax(q_atoms, dim=-1)
        return dist.clamp(min=1e-3)


@ordinary(vectors(8, 3))
class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(8 + 3, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.l4, self.l5, self.l6 = nn.Linear(8 + 3, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        sa = torch.cat([state, action], 1)
        q1 = F.relu(self.l1(sa))
        q1 = F.relu(self.l2(q1))
        q1 = self.l3(q1)
        q2 = F.relu(self.l4(sa))
        q2 = F.relu(self.l5(q2))
        q2 = self.l6(q2)
        return q1, q2


@ordinary(vectors(8))
class GaussianPolicy(nn.Module):
    def __init__(self, num_inputs: int = 8, num_actions: int = 3, hidden_dim: int = 48) -> None:
        super().__init__()
        self.linear1 = nn.Linear(num_inputs, hidden_dim)
        self.linear2 = nn.Linear(hidden_dim, hidden_dim)
        self.mean_linear = nn.Linear(hidden_dim, num_actions)
        self.log_std_linear = nn.Linear(hidden_dim, num_actions)
        self.action_scale = torch.tensor(1.0)
        self.action_bias = torch.tensor(0.0)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.relu(self.linear1(state))
        x = F.relu(self.linear2(x))
        mean = self.mean_linear(x)
        log_std = torch.clamp(self.log_std_linear(x), min=-20, max=2)
        normal = Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        action = y_t * self.action_scale + self.action_bias
        log_prob = normal.log_prob(x_t)
        log_prob -= torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        log_prob = log_prob.sum(1, keepdim=True)
        return action, log_prob, torch.tanh(mean) * self.action_scale + self.action_bias


def layer_init(layer: Any, std: float = np.sqrt(2), bias_const: float = 0.0) -> Any:
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


@ordinary(vectors(8))
class PPOAgent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(8, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )  # fmt: skip
        self.actor_mean = nn.Sequential(
            layer_init(nn.Linear(8, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, 3), std=0.01),
        )  # fmt: skip
        self.actor_logstd = nn.Parameter(torch.zeros(1, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        action_mean = self.actor_mean(x)
        action_logstd = self.actor_logstd.expand_as(action_mean)
        probs = Normal(action_mean, torch.exp(action_logstd))
        return action_mean, probs.entropy().sum(1), self.critic(x)


@ordinary(series(6, 8))
class DRQN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 32)
        self.gru = nn.GRUCell(32, 24)
        self.fc2 = nn.Linear(24, 4)

    def init_hidden(self) -> Tensor:
        return self.fc1.weight.new_zeros(1, 24)

    def forward(self, inputs: Tensor) -> Tensor:
        h = self.init_hidden().expand(inputs.shape[0], -1)
        qs = []
        for t in range(inputs.shape[1]):
            x = F.relu(self.fc1(inputs[:, t]))
            h = self.gru(x, h)
            qs.append(self.fc2(h))
        return torch.stack(qs, dim=1)
