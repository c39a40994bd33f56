"""A small causal language model of bytes, as two programs: `log_probs` trains it, `sample` and `replay` decode it."""

import pydoc_data.topics
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY = 256


@dataclass(frozen=True)
class Config:
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, width = config.heads, config.width
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if cache is None:  # training: all positions at once, in a fused kernel
            seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:  # decoding: one position, which sees the cache
            key, value = (
                torch.cat([*old, new], 2) for old, new in zip((cache[:1], cache[1:]), (key, value), strict=True)
            )
            cache[:] = key, value
            seen = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1) @ value
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words, self.places = (nn.Embedding(count, config.width) for count in (VOCABULARY, config.context))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, VOCABULARY)

    def forward(self, tokens: Tensor, start: int = 0, caches: list[list[Tensor]] | None = None) -> Tensor:
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)
        return torch.log_softmax(self.head(self.norm(x)).float(), -1)


def log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token but the first, in one pass: the training program."""
    return model(tokens[:, :-1]).gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def replay(model: GPT, tokens: Tensor) -> Tensor:
    """Return the same log-probabilities, position by position with a cache: the inference program."""
    caches = [[] for _ in model.blocks]
    found = [model(tokens[:, at : at + 1], at, caches) for at in range(tokens.shape[1] - 1)]
    return torch.cat(found, 1).gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def sample(model: GPT, tokens: Tensor, length: int, seed: int = 0) -> Tensor:
    """Return the tokens with sampled ones behind them."""
    random = torch.Generator(tokens.device).manual_seed(seed)
    caches = [[] for _ in model.blocks]
    for at in range(length - 1):
        found = model(tokens[:, at : at + 1], at, caches)[:, -1]
        if at + 1 == tokens.shape[1]:
            tokens = torch.cat([tokens, torch.multinomial(found.exp(), 1, generator=random)], 1)
    return tokens


def text() -> Tensor:
    """Return Python's manual, as bytes."""
    pages = "\n".join(page for _, page in sorted(pydoc_data.topics.topics.items()))
    return torch.frombuffer(bytearray(pages.encode()), dtype=torch.uint8)
