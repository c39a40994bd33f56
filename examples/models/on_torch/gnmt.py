"""Train GNMT (Wu et al., Google's Neural Machine Translation System, 2016), in the form of MLPerf: "GNMT v2".

The encoder has four LSTM layers of 1,024 cells, the first one in both directions; so has the decoder, in one. From the
third layer on, a layer's input is added to its output. The decoder's first layer looks at the source through normalised
Bahdanau attention (2015; Salimans and Kingma, 2016), and every later layer reads what it found. Both languages share
32,320 words and their embedding: 160.6 million parameters. Here the cells are 64 and the vocabularies are separate; the
backward layer reads the padding first. The data are sentences of Django in English and
German; the commonest word is 24% of all words.
"""

import torch
from torch import Tensor, nn

import polyamp
from models.data import PAD, pairs
from models.on_torch.recurrent import LSTM
from models.on_torch.translation import translate

CELLS, STEPS, BATCH, WARM_UP, LEARNING_RATE = 64, 150, 32, 30, 1e-2


class Attention(nn.Module):
    """Bahdanau attention whose vector of scores has a length of its own: g * v / |v|."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.bias, self.vector = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.empty(width))
        self.length = nn.Parameter(torch.tensor(width**-0.5))
        nn.init.uniform_(self.vector, -0.1, 0.1)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        sums = self.query(x)[:, :, None] + self.key(memory)[:, None] + self.bias
        scores = sums.tanh() @ (self.length * self.vector / self.vector.norm())
        return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ memory


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.forward_layer, self.backward_layer = LSTM(width, width), LSTM(width, width)
        self.layers = nn.ModuleList([LSTM(2 * width, width), LSTM(width, width), LSTM(width, width)])
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        x = torch.cat([self.forward_layer(x), self.backward_layer(x.flip(1)).flip(1)], -1)
        x = self.layers[0](self.dropout(x))
        for layer in self.layers[1:]:
            x = x + layer(self.dropout(x))
        return x


class Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.attention = LSTM(width, width), Attention(width)
        self.layers = nn.ModuleList(LSTM(2 * width, width) for _ in range(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        x = self.first(self.dropout(x))
        found = self.attention(x, memory, seen)
        x = self.layers[0](self.dropout(torch.cat([x, found], -1)))
        for layer in self.layers[1:]:
            x = x + layer(self.dropout(torch.cat([x, found], -1)))
        return x


class GNMT(nn.Module):
    def __init__(self, source_words: int, target_words: int, width: int = 1024, *, shared: bool = False) -> None:
        super().__init__()
        self.target = nn.Embedding(target_words, width, PAD)
        self.source = self.target if shared else nn.Embedding(source_words, width, PAD)
        self.encoder, self.decoder = Encoder(width), Decoder(width)
        self.head = nn.Linear(width, target_words)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.uniform_(weight, -0.1, 0.1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.source(source))
        return self.head(self.decoder(self.target(target), memory, source != PAD))


def small() -> GNMT:
    return GNMT(pairs().words, pairs().classes, CELLS)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), LEARNING_RATE)


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Return the accuracy of next words and the loss (nats a word) on test sentences, after training."""
    sizes = {"size": BATCH, "steps": STEPS, "warm_up": WARM_UP}
    return translate(small, optimizer_of, policy, seed, **sizes, max_grad_norm=5.0)
