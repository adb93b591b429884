"""Networks for text, sound and time series: recurrent ones with states in Python, convolutions along time."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from network_registry import ordinary, series, words
from torch import Tensor
from torch.nn.utils.parametrizations import weight_norm


@ordinary(words(50, 12))
class LSTMClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden_dim, self.n_layers = 32, 2
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, self.hidden_dim, self.n_layers, dropout=0.5, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(self.hidden_dim, 1)
        self.sig = nn.Sigmoid()

    def init_hidden(self, batch_size: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters()).data
        return (
            weight.new(self.n_layers, batch_size, self.hidden_dim).zero_(),
            weight.new(self.n_layers, batch_size, self.hidden_dim).zero_(),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch_size = x.size(0)
        hidden = self.init_hidden(batch_size)
        lstm_out, hidden = self.lstm(self.embedding(x), hidden)
        lstm_out = lstm_out.contiguous().view(-1, self.hidden_dim)
        out = self.sig(self.fc(self.dropout(lstm_out)))
        out = out.view(batch_size, -1)
        return out[:, -1]


@ordinary(series(28, 28))
class RNNOnImages(nn.Module):
    def __init__(self, input_size: int = 28, hidden_size: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
        self.fc = nn.Linear(hidden_size, 10)

    def forward(self, x: Tensor) -> Tensor:
        h0 = torch.zeros(self.num_layers, x.size(0), self.hidden_size).to(x.device)
        c0 = torch.zeros(self.num_layers, x.size(0), self.hidden_size).to(x.device)
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out[:, -1, :])


@ordinary(words(50, 12))
class GRUClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.gru = nn.GRU(16, 24, batch_first=True)
        self.out = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h_0 = self._init_state(batch_size=x.size(0))
        x, _ = self.gru(x, h_0)
        h_t = x[:, -1, :]
        return self.out(h_t)

    def _init_state(self, batch_size: int = 1) -> Tensor:
        weight = next(self.parameters()).data
        return weight.new(1, batch_size, 24).zero_()


@ordinary(words(50, 12))
class BiLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.rnn = nn.LSTM(16, 20, num_layers=2, bidirectional=True)
        self.fc = nn.Linear(20 * 2, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, text: Tensor) -> Tensor:
        text = text.permute(1, 0)
        embedded = self.dropout(self.embedding(text))
        output, (hidden, cell) = self.rnn(embedded)
        hidden = self.dropout(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1))
        return self.fc(hidden)


@ordinary(words(40, 10), outputs=lambda output: output[0])
class CharRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(40, 16)
        self.rnn = nn.GRU(16, 24, batch_first=True)
        self.decoder = nn.Linear(24, 40)

    def init_hidden(self, batch_size: int) -> Tensor:
        return torch.FloatTensor(1, batch_size, 24).zero_()

    def forward(self, input: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if hidden is None:
            hidden = self.init_hidden(input.size(0))
        output, hidden = self.rnn(self.encoder(input), hidden)
        output = self.decoder(output.reshape(output.size(0) * output.size(1), output.size(2)))
        return output, hidden


@ordinary(lambda count: (torch.randn(count, 20), torch.zeros(count, 32)))
class NamesRNN(nn.Module):
    def __init__(self, input_size: int = 20, hidden_size: int = 32, output_size: int = 18) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size + hidden_size, hidden_size)
        self.h2o = nn.Linear(hidden_size, output_size)
        self.softmax = nn.LogSoftmax(dim=1)

    def forward(self, input: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        combined = torch.cat((input, hidden), 1)
        hidden = torch.tanh(self.i2h(combined))
        output = self.softmax(self.h2o(hidden))
        return output, hidden


@ordinary(series(10, 8))
class LSTMByHand(nn.Module):
    def __init__(self, input_sz: int = 8, hidden_sz: int = 24) -> None:
        super().__init__()
        self.input_sz = input_sz
        self.hidden_size = hidden_sz
        self.W = nn.Parameter(torch.Tensor(input_sz, hidden_sz * 4))
        self.U = nn.Parameter(torch.Tensor(hidden_sz, hidden_sz * 4))
        self.bias = nn.Parameter(torch.Tensor(hidden_sz * 4))
        self.head = nn.Linear(hidden_sz, 3)
        self.init_weights()

    def init_weights(self) -> None:
        stdv = 1.0 / self.hidden_size**0.5
        for weight in self.parameters():
            weight.data.uniform_(-stdv, stdv)

    def forward(self, x: Tensor) -> Tensor:
        bs, seq_sz, _ = x.size()
        hidden_seq = []
        h_t, c_t = torch.zeros(bs, self.hidden_size).to(x.device), torch.zeros(bs, self.hidden_size).to(x.device)
        HS = self.hidden_size
        for t in range(seq_sz):
            gates = x[:, t, :] @ self.W + h_t @ self.U + self.bias
            i_t, f_t, g_t, o_t = (
                torch.sigmoid(gates[:, :HS]),
                torch.sigmoid(gates[:, HS : HS * 2]),
                torch.tanh(gates[:, HS * 2 : HS * 3]),
                torch.sigmoid(gates[:, HS * 3 :]),
            )
            c_t = f_t * c_t + i_t * g_t
            h_t = o_t * torch.tanh(c_t)
            hidden_seq.append(h_t.unsqueeze(0))
        hidden = torch.cat(hidden_seq, dim=0)
        hidden = hidden.transpose(0, 1).contiguous()
        return self.head(hidden[:, -1])


@ordinary(series(20))
class SineForecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 24)
        self.lstm2 = nn.LSTMCell(24, 24)
        self.linear = nn.Linear(24, 1)

    def forward(self, input: Tensor, future: int = 2) -> Tensor:
        outputs = []
        h_t = torch.zeros(input.size(0), 24, dtype=input.dtype)
        c_t = torch.zeros(input.size(0), 24, dtype=input.dtype)
        h_t2 = torch.zeros(input.size(0), 24, dtype=input.dtype)
        c_t2 = torch.zeros(input.size(0), 24, dtype=input.dtype)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


@ordinary(words(60, 16))
class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        V, D, C, Ci, Co, Ks = 60, 24, 3, 1, 16, [3, 4, 5]
        self.embed = nn.Embedding(V, D)
        self.convs = nn.ModuleList([nn.Conv2d(Ci, Co, (K, D)) for K in Ks])
        self.dropout = nn.Dropout(0.5)
        self.fc1 = nn.Linear(len(Ks) * Co, C)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x.unsqueeze(1)
        xs = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        xs = [F.max_pool1d(i, i.size(2)).squeeze(2) for i in xs]
        x = torch.cat(xs, 1)
        return self.fc1(self.dropout(x))


@ordinary(words(60, 16))
class FastText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 24, padding_idx=1)
        self.fc1, self.fc2 = nn.Linear(24, 32), nn.Linear(32, 4)

    def forward(self, text: Tensor) -> Tensor:
        embedded = self.embedding(text)
        pooled = F.avg_pool2d(embedded, (embedded.shape[1], 1)).squeeze(1)
        return self.fc2(F.relu(self.fc1(pooled)))


class Encoder(nn.Module):
    def __init__(self, input_dim: int, emb_dim: int, enc_hid_dim: int, dec_hid_dim: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(input_dim, emb_dim)
        self.rnn = nn.GRU(emb_dim, enc_hid_dim, bidirectional=True)
        self.fc = nn.Linear(enc_hid_dim * 2, dec_hid_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.dropout(self.embedding(src))
        outputs, hidden = self.rnn(embedded)
        hidden = torch.tanh(self.fc(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1)))
        return outputs, hidden


class Attention(nn.Module):
    def __init__(self, enc_hid_dim: int, dec_hid_dim: int) -> None:
        super().__init__()
        self.attn = nn.Linear((enc_hid_dim * 2) + dec_hid_dim, dec_hid_dim)
        self.v = nn.Linear(dec_hid_dim, 1, bias=False)

    def forward(self, hidden: Tensor, encoder_outputs: Tensor) -> Tensor:
        src_len = encoder_outputs.shape[0]
        hidden = hidden.unsqueeze(1).repeat(1, src_len, 1)
        encoder_outputs = encoder_outputs.permute(1, 0, 2)
        energy = torch.tanh(self.attn(torch.cat((hidden, encoder_outputs), dim=2)))
        attention = self.v(energy).squeeze(2)
        return F.softmax(attention, dim=1)


class Decoder(nn.Module):
    def __init__(self, output_dim: int, emb_dim: int, enc_hid: int, dec_hid: int, attention: nn.Module) -> None:
        super().__init__()
        self.output_dim = output_dim
        self.attention = attention
        self.embedding = nn.Embedding(output_dim, emb_dim)
        self.rnn = nn.GRU((enc_hid * 2) + emb_dim, dec_hid)
        self.fc_out = nn.Linear((enc_hid * 2) + dec_hid + emb_dim, output_dim)

    def forward(self, input: Tensor, hidden: Tensor, encoder_outputs: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(input.unsqueeze(0))
        a = self.attention(hidden, encoder_outputs).unsqueeze(1)
        weighted = torch.bmm(a, encoder_outputs.permute(1, 0, 2)).permute(1, 0, 2)
        output, hidden = self.rnn(torch.cat((embedded, weighted), dim=2), hidden.unsqueeze(0))
        assert (output == hidden).all()
        prediction = self.fc_out(torch.cat((output.squeeze(0), weighted.squeeze(0), embedded.squeeze(0)), dim=1))
        return prediction, hidden.squeeze(0)


@ordinary(lambda count: (torch.randint(30, (count, 7)), torch.randint(25, (count, 5))))
class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(30, 12, 16, 20, 0.5)
        self.decoder = Decoder(25, 12, 16, 20, Attention(16, 20))

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        src, trg = src.t(), trg.t()
        batch_size = src.shape[1]
        trg_len = trg.shape[0]
        outputs = torch.zeros(trg_len, batch_size, self.decoder.output_dim)
        encoder_outputs, hidden = self.encoder(src)
        input = trg[0, :]
        for t in range(1, trg_len):
            output, hidden = self.decoder(input, hidden, encoder_outputs)
            outputs[t] = output
            input = trg[t]
        return outputs


class Chomp1d(nn.Module):
    def __init__(self, chomp_size: int) -> None:
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.chomp_size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_inputs: int, n_outputs: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        padding = (kernel_size - 1) * dilation
        self.conv1 = weight_norm(nn.Conv1d(n_inputs, n_outputs, kernel_size, padding=padding, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(n_outputs, n_outputs, kernel_size, padding=padding, dilation=dilation))
        self.net = nn.Sequential(
            self.conv1, Chomp1d(padding), nn.ReLU(), nn.Dropout(0.2), self.conv2, Chomp1d(padding), nn.ReLU()
        )
        self.downsample = nn.Conv1d(n_inputs, n_outputs, 1) if n_inputs != n_outputs else None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        res = x if self.downsample is None else self.downsample(x)
        return self.relu(out + res)


@ordinary(series(4, 20))
class TCN(nn.Module):
    def __init__(self, num_channels: tuple[int, ...] = (16, 16, 24), kernel_size: int = 2) -> None:
        super().__init__()
        layers = []
        for i in range(len(num_channels)):
            dilation_size = 2**i
            in_channels = 4 if i == 0 else num_channels[i - 1]
            layers += [TemporalBlock(in_channels, num_channels[i], kernel_size, dilation=dilation_size)]
        self.network = nn.Sequential(*layers)
        self.linear = nn.Linear(num_channels[-1], 5)

    def forward(self, x: Tensor) -> Tensor:
        y1 = self.network(x)
        return self.linear(y1[:, :, -1])


@ordinary(series(1, 32))
class WaveNet(nn.Module):
    def __init__(self, layers: int = 3, residual: int = 16, skip: int = 24, classes: int = 12) -> None:
        super().__init__()
        self.start_conv = nn.Conv1d(1, residual, kernel_size=1)
        self.filter_convs, self.gate_convs = nn.ModuleList(), nn.ModuleList()
        self.residual_convs, self.skip_convs = nn.ModuleList(), nn.ModuleList()
        for i in range(layers):
            self.filter_convs.append(nn.Conv1d(residual, residual, 2, dilation=2**i))
            self.gate_convs.append(nn.Conv1d(residual, residual, 2, dilation=2**i))
            self.residual_convs.append(nn.Conv1d(residual, residual, 1))
            self.skip_convs.append(nn.Conv1d(residual, skip, 1))
        self.end_conv_1 = nn.Conv1d(skip, 32, 1)
        self.end_conv_2 = nn.Conv1d(32, classes, 1)
        self.layers = layers

    def forward(self, input: Tensor) -> Tensor:
        x = self.start_conv(input)
        skip = 0
        for i in range(self.layers):
            residual = x
            filter = torch.tanh(self.filter_convs[i](x))
            gate = torch.sigmoid(self.gate_convs[i](x))
            x = filter * gate
            s = self.skip_convs[i](x)
            try:
                skip = skip[:, :, -s.size(2) :]  # type: ignore[index]
            except TypeError:
                skip = 0
            skip = s + skip
            x = self.residual_convs[i](x)
            x = x + residual[:, :, -x.size(2) :]
        x = F.relu(skip)  # type: ignore[arg-type]
        x = F.relu(self.end_conv_1(x))
        return self.end_conv_2(x)


@ordinary(series(1, 1600))
class M5(nn.Module):
    def __init__(self, n_input: int = 1, n_output: int = 10, stride: int = 8, n_channel: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(n_input, n_channel, kernel_size=80, stride=stride)
        self.bn1 = nn.BatchNorm1d(n_channel)
        self.pool1 = nn.MaxPool1d(4)
        self.conv2 = nn.Conv1d(n_channel, 2 * n_channel, kernel_size=3)
        self.bn2 = nn.BatchNorm1d(2 * n_channel)
        self.pool2 = nn.MaxPool1d(4)
        self.fc1 = nn.Linear(2 * n_channel, n_output)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(F.relu(self.bn1(self.conv1(x))))
        x = self.pool2(F.relu(self.bn2(self.conv2(x))))
        x = F.avg_pool1d(x, x.shape[-1])
        x = x.permute(0, 2, 1)
        x = self.fc1(x)
        return F.log_softmax(x, dim=2)


@ordinary(series(4, 3, 16, 16))
class CNNLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU())
        self.lstm = nn.LSTM(input_size=12 * 16, hidden_size=24, num_layers=1)
        self.fc = nn.Linear(24, 5)

    def forward(self, x_3d: Tensor) -> Tensor:
        hidden = None
        for t in range(x_3d.size(1)):
            x = self.cnn(x_3d[:, t, :, :, :])
            x = x.view(x.size(0), -1)
            out, hidden = self.lstm(x.unsqueeze(0), hidden)
        return self.fc(out[-1, :, :])


@ordinary(series(1, 20, 40))
class CRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2, 2),
            nn.Conv2d(8, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2, 2),
        )  # fmt: skip
        self.linear = nn.Linear(16 * 5, 24)
        self.rnn = nn.GRU(24, 24, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(48, 12)

    def forward(self, images: Tensor) -> Tensor:
        bs, _, _, _ = images.size()
        x = self.cnn(images)
        x = x.permute(0, 3, 1, 2)
        x = x.view(bs, x.size(1), -1)
        x = F.relu(self.linear(x))
        x, _ = self.rnn(x)
        x = self.fc(x)
        return F.log_softmax(x.permute(1, 0, 2), 2)
