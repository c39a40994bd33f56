"""Train the transformer of Attention Is All You Need (Vaswani et al., 2017), as FAIRseq trains it (Ott et al., 2018).

`BASE` and `BIG` are the published sizes, which make 63 and 214 million parameters with 37,000 words. Norms come after
the residual sums, positions are sines, and the output layer is the embedding of the target's words; ``shared`` makes it
the one of the source's words too, as for the published vocabulary of both languages. Labels are smoothed by 0.1, the
loss is the mean over words, and Adam (0.9, 0.98) warms up, then follows the inverse square root. `SMALL` has 2 + 2
layers of width 64. The data are sentences of Django in English and German.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import polyamp
from models.data import PAD, pairs
from models.on_torch.translation import translate


class Sizes(NamedTuple):
    width: int = 512
    inner: int = 2048
    heads: int = 8
    layers: int = 6
    """Of the encoder, and as many of the decoder."""
    dropout: float = 0.1


BASE = Sizes()
BIG = Sizes(width=1024, inner=4096, heads=16, dropout=0.3)
SMALL = Sizes(width=64, inner=256, heads=4, layers=2)
STEPS, BATCH, WARM_UP, LEARNING_RATE = 150, 32, 40, 2e-3


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.query, self.key, self.value, self.out = (nn.Linear(sizes.width, sizes.width) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            layer(of).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, of in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        dropout = self.dropout if self.training else 0.0
        found = scaled_dot_product_attention(query, key, value, mask, dropout)
        return self.out(found.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """The norm of x plus what a layer makes of it."""

    def __init__(self, layer: nn.Module, sizes: Sizes) -> None:
        super().__init__()
        self.layer, self.dropout, self.norm = layer, nn.Dropout(sizes.dropout), nn.LayerNorm(sizes.width)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.layer(x, *others)))


def feed_forward(sizes: Sizes) -> nn.Module:
    return nn.Sequential(nn.Linear(sizes.width, sizes.inner), nn.ReLU(), nn.Linear(sizes.inner, sizes.width))


class EncoderLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.inner = Residual(Attention(sizes), sizes), Residual(feed_forward(sizes), sizes)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(self.attention(x, x, mask))


class DecoderLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.source = Residual(Attention(sizes), sizes), Residual(Attention(sizes), sizes)
        self.inner = Residual(feed_forward(sizes), sizes)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        return self.inner(self.source(self.attention(x, x, mask), memory, memory_mask))


def positions(length: int, width: int) -> Tensor:
    """Return sines and cosines of shape (length, width), of wavelengths 2 pi to 20,000 pi."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class Transformer(nn.Module):
    def __init__(self, source_words: int, target_words: int, sizes: Sizes = BASE, *, shared: bool = False) -> None:
        super().__init__()
        self.sizes, self.dropout = sizes, nn.Dropout(sizes.dropout)
        self.target = nn.Embedding(target_words, sizes.width, PAD)
        self.source = self.target if shared else nn.Embedding(source_words, sizes.width, PAD)
        self.encoder = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.layers))
        self.decoder = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.layers))
        self.apply(_initialise)

    def embedded(self, embedding: nn.Embedding, words: Tensor) -> Tensor:
        places = positions(words.shape[1], self.sizes.width).to(words.device)
        return self.dropout(embedding(words) * self.sizes.width**0.5 + places)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen = (source != PAD)[:, None, None]
        before = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).tril()
        memory, x = self.embedded(self.source, source), self.embedded(self.target, target)
        for layer in self.encoder:
            memory = layer(memory, seen)
        for layer in self.decoder:
            x = layer(x, before, memory, seen)
        return nn.functional.linear(x, self.target.weight)


def _initialise(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    elif isinstance(layer, nn.Embedding):
        nn.init.normal_(layer.weight, std=layer.embedding_dim**-0.5)
        with torch.no_grad():
            layer.weight[PAD] = 0


def small() -> Transformer:
    return Transformer(pairs().words, pairs().classes, SMALL)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98))


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Return the accuracy of next words and the loss (nats a word) on test sentences, after training."""
    sizes = {"size": BATCH, "steps": STEPS, "warm_up": WARM_UP}
    return translate(small, optimizer_of, policy, seed, **sizes)
