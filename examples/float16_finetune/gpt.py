"""A small causal language model of bytes."""

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

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words, self.places = (nn.Embedding(count, config.width) for count in (VOCABULARY, config.context))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return torch.log_softmax(self.head(self.norm(x)).float(), -1)


def log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token but the first, in one pass."""
    return model(tokens[:, :-1]).gather(-1, tokens[:, 1:, None])[..., 0]


def text() -> Tensor:
    """Return Python's manual, as bytes."""
    pages = "\n".join(page for _, page in sorted(pydoc_data.topics.topics.items()))
    return torch.frombuffer(bytearray(pages.encode()), dtype=torch.uint8)
