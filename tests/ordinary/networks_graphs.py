"""Networks on points, graphs, pairs and tables: recommenders, embeddings to compare, and capsules."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from network_registry import images, numbers, ordinary, series, vectors
from torch import Tensor


@ordinary(lambda count: (torch.rand(count, 1, 28, 28), torch.rand(count, 1, 28, 28)))
class SiameseNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cnn1 = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(1, 4, kernel_size=3), nn.ReLU(inplace=True), nn.BatchNorm2d(4),
            nn.ReflectionPad2d(1), nn.Conv2d(4, 8, kernel_size=3), nn.ReLU(inplace=True), nn.BatchNorm2d(8),
            nn.MaxPool2d(4),
        )  # fmt: skip
        self.fc1 = nn.Sequential(nn.Linear(8 * 7 * 7, 64), nn.ReLU(inplace=True), nn.Linear(64, 5))

    def forward_once(self, x: Tensor) -> Tensor:
        output = self.cnn1(x)
        output = output.view(output.size()[0], -1)
        return self.fc1(output)

    def forward(self, input1: Tensor, input2: Tensor) -> tuple[Tensor, Tensor]:
        output1 = self.forward_once(input1)
        output2 = self.forward_once(input2)
        return output1, output2


@ordinary(images(1, 28))
class EmbeddingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convnet = nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.PReLU(), nn.MaxPool2d(2, stride=2), nn.Conv2d(8, 16, 5), nn.PReLU(), nn.MaxPool2d(2)
        )
        self.fc = nn.Sequential(nn.Linear(16 * 4 * 4, 32), nn.PReLU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        output = self.convnet(x)
        output = output.view(output.size()[0], -1)
        output = self.fc(output)
        output = output / output.pow(2).sum(1, keepdim=True).sqrt()
        return output


def conv_block(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels), nn.ReLU(), nn.MaxPool2d(2)
    )


@ordinary(series(6, 1, 16, 16))
class PrototypicalNetwork(nn.Module):
    """Episodes of six images: two classes, two of each to learn from, two to classify."""

    def __init__(self, x_dim: int = 1, hid_dim: int = 16, z_dim: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            conv_block(x_dim, hid_dim), conv_block(hid_dim, hid_dim), conv_block(hid_dim, z_dim)
        )

    def forward(self, episode: Tensor) -> Tensor:
        b, n = episode.shape[:2]
        z = self.encoder(episode.view(b * n, *episode.shape[2:]))
        z = z.view(b, n, -1)
        prototypes = torch.stack([z[:, 0:2].mean(1), z[:, 2:4].mean(1)], 1)
        query = z[:, 4:]
        dists = torch.pow(query.unsqueeze(2) - prototypes.unsqueeze(1), 2).sum(3)
        return F.log_softmax(-dists, dim=2)


@ordinary(numbers(50, 40), 50, 40, budget={"params": 0.6})
class MatrixFactorization(nn.Module):
    def __init__(self, n_users: int, n_items: int, n_factors: int = 16) -> None:
        super().__init__()
        self.user_factors = nn.Embedding(n_users, n_factors)
        self.item_factors = nn.Embedding(n_items, n_factors)
        self.user_biases = nn.Embedding(n_users, 1)
        self.item_biases = nn.Embedding(n_items, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        pred = self.user_biases(user) + self.item_biases(item)
        pred += (self.user_factors(user) * self.item_factors(item)).sum(dim=1, keepdim=True)
        return pred.squeeze()


@ordinary(numbers(50, 40))
class NeuralCollaborativeFiltering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding_user_mlp, self.embedding_item_mlp = nn.Embedding(50, 16), nn.Embedding(40, 16)
        self.embedding_user_mf, self.embedding_item_mf = nn.Embedding(50, 8), nn.Embedding(40, 8)
        self.fc_layers = nn.ModuleList()
        for in_size, out_size in pairwise([32, 24, 16]):
            self.fc_layers.append(nn.Linear(in_size, out_size))
        self.affine_output = nn.Linear(16 + 8, 1)

    def forward(self, user_indices: Tensor, item_indices: Tensor) -> Tensor:
        mlp_vector = torch.cat([self.embedding_user_mlp(user_indices), self.embedding_item_mlp(item_indices)], dim=-1)
        mf_vector = torch.mul(self.embedding_user_mf(user_indices), self.embedding_item_mf(item_indices))
        for idx, _ in enumerate(range(len(self.fc_layers))):
            mlp_vector = self.fc_layers[idx](mlp_vector)
            mlp_vector = nn.ReLU()(mlp_vector)
        vector = torch.cat([mlp_vector, mf_vector], dim=-1)
        return torch.sigmoid(self.affine_output(vector))


@ordinary(lambda count: (torch.randint(10, (count, 5)),), [10, 10, 10, 10, 10])
class DeepFM(nn.Module):
    def __init__(
        self, feature_sizes: list[int], embedding_size: int = 8, hidden_dims: tuple[int, ...] = (32, 32)
    ) -> None:
        super().__init__()
        self.field_size = len(feature_sizes)
        self.hidden_dims = hidden_dims
        self.embedding_size = embedding_size
        self.fm_first_order_embeddings = nn.ModuleList([nn.Embedding(size, 1) for size in feature_sizes])
        self.fm_second_order_embeddings = nn.ModuleList([nn.Embedding(size, embedding_size) for size in feature_sizes])
        all_dims = [self.field_size * embedding_size, *hidden_dims, 1]
        for i in range(1, len(hidden_dims) + 1):
            setattr(self, "linear_" + str(i), nn.Linear(all_dims[i - 1], all_dims[i]))
            setattr(self, "batchNorm_" + str(i), nn.BatchNorm1d(all_dims[i]))
            setattr(self, "dropout_" + str(i), nn.Dropout(0.5))

    def forward(self, Xi: Tensor) -> Tensor:
        first = torch.cat([emb(Xi[:, i]) for i, emb in enumerate(self.fm_first_order_embeddings)], 1)
        second = [emb(Xi[:, i]) for i, emb in enumerate(self.fm_second_order_embeddings)]
        summed = sum(second)
        squares = sum(item * item for item in second)
        fm = (summed * summed - squares) * 0.5
        deep_out = torch.cat(second, 1)
        for i in range(1, len(self.hidden_dims) + 1):
            deep_out = getattr(self, "linear_" + str(i))(deep_out)
            deep_out = getattr(self, "batchNorm_" + str(i))(deep_out)
            deep_out = getattr(self, "dropout_" + str(i))(deep_out)
        return torch.sum(first, 1) + torch.sum(fm, 1) + torch.sum(deep_out, 1)


@ordinary(lambda count: (torch.randn(count, 6), torch.randint(8, (count, 3))))
class TabularModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        emb_szs = [(8, 4), (8, 4), (8, 6)]
        self.embeds = nn.ModuleList([nn.Embedding(ni, nf) for ni, nf in emb_szs])
        self.emb_drop = nn.Dropout(0.4)
        self.bn_cont = nn.BatchNorm1d(6)
        layerlist: list[nn.Module] = []
        n_in = sum(nf for ni, nf in emb_szs) + 6
        for i in [32, 24]:
            layerlist += [nn.Linear(n_in, i), nn.ReLU(inplace=True), nn.BatchNorm1d(i), nn.Dropout(0.4)]
            n_in = i
        layerlist.append(nn.Linear(24, 2))
        self.layers = nn.Sequential(*layerlist)

    def forward(self, x_cont: Tensor, x_cat: Tensor) -> Tensor:
        embeddings = []
        for i, e in enumerate(self.embeds):
            embeddings.append(e(x_cat[:, i]))
        x = torch.cat(embeddings, 1)
        x = self.emb_drop(x)
        x_cont = self.bn_cont(x_cont)
        x = torch.cat([x, x_cont], 1)
        return self.layers(x)


@ordinary(lambda count: (torch.randn(count, 4), torch.randint(20, (count, 3))))
class DLRM(nn.Module):
    def __init__(self, m_spa: int = 8) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.Embedding(20, m_spa) for _ in range(3)])
        self.bot_l = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, m_spa), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(m_spa + 6, 24), nn.ReLU(), nn.Linear(24, 1), nn.Sigmoid())

    def interact_features(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        (batch_size, d) = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense_x: Tensor, lS_i: Tensor) -> Tensor:
        x = self.bot_l(dense_x)
        ly = [emb(lS_i[:, k]) for k, emb in enumerate(self.emb_l)]
        return self.top_l(self.interact_features(x, ly))


@ordinary(vectors(10, 12))
class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16))
        self.item = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
        self.temperature = nn.Parameter(torch.tensor(0.07))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, i = F.normalize(self.user(user), dim=-1), F.normalize(self.item(item), dim=-1)
        return (u * i).sum(-1) / self.temperature


class TNet(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, 16, 1), nn.Conv1d(16, 32, 1)
        self.fc1, self.fc2 = nn.Linear(32, 24), nn.Linear(24, k * k)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(16), nn.BatchNorm1d(32), nn.BatchNorm1d(24)

    def forward(self, input: Tensor) -> Tensor:
        bs = input.size(0)
        xb = F.relu(self.bn1(self.conv1(input)))
        xb = F.relu(self.bn2(self.conv2(xb)))
        pool = nn.MaxPool1d(xb.size(-1))(xb)
        flat = nn.Flatten(1)(pool)
        xb = F.relu(self.bn3(self.fc1(flat)))
        init = torch.eye(self.k, requires_grad=True).repeat(bs, 1, 1)
        matrix = self.fc2(xb).view(-1, self.k, self.k) + init
        return matrix


@ordinary(series(3, 32))
class PointNet(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.input_transform, self.feature_transform = TNet(k=3), TNet(k=16)
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 48, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(48)
        self.fc1, self.fc2 = nn.Linear(48, 32), nn.Linear(32, classes)
        self.bn3 = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(p=0.3)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        matrix3x3 = self.input_transform(input)
        xb = torch.bmm(torch.transpose(input, 1, 2), matrix3x3).transpose(1, 2)
        xb = F.relu(self.bn1(self.conv1(xb)))
        matrix64x64 = self.feature_transform(xb)
        xb = torch.bmm(torch.transpose(xb, 1, 2), matrix64x64).transpose(1, 2)
        xb = self.bn2(self.conv2(xb))
        xb = torch.max(xb, 2, keepdim=True)[0]
        xb = xb.view(-1, xb.size(1))
        xb = F.relu(self.bn3(self.dropout(self.fc1(xb))))
        return F.log_softmax(self.fc2(xb), dim=1), matrix3x3, matrix64x64


def graphs(count: int) -> tuple[Tensor, Tensor]:
    """Features (B, 8, 6) and normalized adjacency (B, 8, 8) of as many graphs."""
    adjacency = (torch.rand(count, 8, 8) > 0.6).float()
    adjacency = ((adjacency + adjacency.transpose(1, 2)) > 0).float() + torch.eye(8)
    return torch.randn(count, 8, 6), adjacency / adjacency.sum(-1, keepdim=True)


class GraphConvolution(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.FloatTensor(in_features, out_features))
        if bias:
            self.bias = nn.Parameter(torch.FloatTensor(out_features))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        stdv = 1.0 / self.weight.size(1) ** 0.5
        self.weight.data.uniform_(-stdv, stdv)
        if self.bias is not None:
            self.bias.data.uniform_(-stdv, stdv)

    def forward(self, input: Tensor, adj: Tensor) -> Tensor:
        support = torch.matmul(input, self.weight)
        output = torch.matmul(adj, support)
        if self.bias is not None:
            return output + self.bias
        else:
            return output

    def __repr__(self) -> str:
        return self.__class__.__name__ + " (" + str(self.in_features) + " -> " + str(self.out_features) + ")"


@ordinary(graphs)
class GCN(nn.Module):
    def __init__(self, nfeat: int = 6, nhid: int = 24, nclass: int = 3, dropout: float = 0.5) -> None:
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        x = self.gc2(x, adj)
        return F.log_softmax(x, dim=-1)


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features: int, out_features: int, alpha: float = 0.2, concat: bool = True) -> None:
        super().__init__()
        self.out_features = out_features
        self.concat = concat
        self.W = nn.Parameter(torch.empty(size=(in_features, out_features)))
        nn.init.xavier_uniform_(self.W.data, gain=1.414)
        self.a = nn.Parameter(torch.empty(size=(2 * out_features, 1)))
        nn.init.xavier_uniform_(self.a.data, gain=1.414)
        self.leakyrelu = nn.LeakyReLU(alpha)

    def forward(self, h: Tensor, adj: Tensor) -> Tensor:
        Wh = torch.matmul(h, self.W)
        Wh1 = torch.matmul(Wh, self.a[: self.out_features, :])
        Wh2 = torch.matmul(Wh, self.a[self.out_features :, :])
        e = self.leakyrelu(Wh1 + Wh2.transpose(1, 2))
        zero_vec = -9e15 * torch.ones_like(e)
        attention = torch.where(adj > 0, e, zero_vec)
        attention = F.softmax(attention, dim=2)
        h_prime = torch.matmul(attention, Wh)
        return F.elu(h_prime) if self.concat else h_prime


@ordinary(graphs)
class GAT(nn.Module):
    def __init__(self, nheads: int = 3) -> None:
        super().__init__()
        self.attentions = [GraphAttentionLayer(6, 8) for _ in range(nheads)]
        for i, attention in enumerate(self.attentions):
            self.add_module(f"attention_{i}", attention)
        self.out_att = GraphAttentionLayer(8 * nheads, 3, concat=False)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = torch.cat([att(x, adj) for att in self.attentions], dim=2)
        x = F.elu(self.out_att(x, adj))
        return F.log_softmax(x, dim=2)


@ordinary(graphs)
class GIN(nn.Module):
    def __init__(self, num_layers: int = 2, hidden: int = 24) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.eps = nn.Parameter(torch.zeros(num_layers))
        self.mlps, self.batch_norms = nn.ModuleList(), nn.ModuleList()
        for layer in range(num_layers):
            width = 6 if layer == 0 else hidden
            self.mlps.append(nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden)))
            self.batch_norms.append(nn.BatchNorm1d(hidden))
        self.linears_prediction = nn.ModuleList([nn.Linear(6 if i == 0 else hidden, 4) for i in range(num_layers + 1)])

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        hidden_rep = [x]
        h = x
        for layer in range(self.num_layers):
            pooled = torch.bmm(adj, h) + (1 + self.eps[layer]) * h
            pooled_rep = self.mlps[layer](pooled)
            h = self.batch_norms[layer](pooled_rep.view(-1, pooled_rep.size(-1))).view(pooled_rep.size())
            h = F.relu(h)
            hidden_rep.append(h)
        score_over_layer: Any = 0
        for layer, h in enumerate(hidden_rep):
            score_over_layer += F.dropout(self.linears_prediction[layer](h.sum(1)), 0.5, training=self.training)
        return score_over_layer


@ordinary(series(10, 4))
class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(4, 32), nn.ELU(inplace=True), nn.Linear(32, 32), nn.ELU(inplace=True))
        self.rho = nn.Sequential(nn.Linear(32, 24), nn.ELU(inplace=True), nn.Linear(24, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.rho(torch.sum(self.phi(x), 1))


def squash(s: Tensor, dim: int = -1) -> Tensor:
    squared_norm = torch.sum(s**2, dim=dim, keepdim=True)
    return squared_norm / (1 + squared_norm) * s / (torch.sqrt(squared_norm) + 1e-8)


@ordinary(images(1, 16))
class CapsNet(nn.Module):
    def __init__(self, num_caps: int = 4, caps_dim: int = 4, out_caps: int = 5, out_dim: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 5)
        self.capsules = nn.ModuleList([nn.Conv2d(16, num_caps, kernel_size=5, stride=2) for _ in range(caps_dim)])
        self.W = nn.Parameter(0.1 * torch.randn(1, num_caps * 16, out_caps, out_dim, caps_dim))
        self.num_iterations = 3
        self.decoder = nn.Sequential(nn.Linear(out_dim * out_caps, 32), nn.ReLU(), nn.Linear(32, 256), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.conv(x))
        u = [capsule(x).view(x.size(0), -1, 1) for capsule in self.capsules]
        u = squash(torch.cat(u, dim=-1))
        u_hat = torch.matmul(self.W, u[:, :, None, :, None]).squeeze(-1)
        b = torch.zeros(*u_hat.size()[:3], 1)
        for i in range(self.num_iterations):
            c = F.softmax(b, dim=2)
            v = squash((c * u_hat).sum(dim=1, keepdim=True))
            if i != self.num_iterations - 1:
                b = b + (u_hat * v).sum(-1, keepdim=True)
        v = v.squeeze(1)
        classes = (v**2).sum(dim=-1) ** 0.5
        return classes, self.decoder(v.view(v.size(0), -1))
