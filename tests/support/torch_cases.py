"""Models for the tests of rewriting, each with arguments."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[Any, ...]]


class Product(torch.autograd.Function):
    """Written without a thought of autocast: its backward pass multiplies a 16-bit gradient by a float32 weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.mm(grad, weight.t()), torch.mm(x.t(), grad)


class Block(nn.Module):
    """A transformer block as in GPT."""

    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class GPT(nn.Module):
    """Two blocks between tied embeddings; returns the loss if there are labels."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Block(dropout=dropout) for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ConvNet(nn.Module):
    """A convolution, a batch norm, and an activation in place."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        return self.head(self.dropout(F.max_pool2d(x, 2).mean((2, 3))))


class Recurrent(nn.Module):
    """An LSTM and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        x, state = self.lstm(x)
        return self.head(x), state


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))


_SIZES: dict[str, Any] = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}

MODELS: dict[str, Callable[[], Case]] = {
    "mlp": lambda: (mlp(), (torch.randn(6, 8),)),
    "layer": lambda: (nn.Sequential(nn.Linear(8, 4), nn.GELU()), (torch.randn(6, 8),)),
    "conv": lambda: (ConvNet(), (torch.randn(4, 3, 8, 8),)),
    "encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(**_SIZES), 1, enable_nested_tensor=False),
        (torch.randn(3, 5, 16),),
    ),
    "decoder": lambda: (nn.TransformerDecoderLayer(**_SIZES), (torch.randn(3, 5, 16), torch.randn(3, 4, 16))),
    "lstm": lambda: (Recurrent(), (torch.randn(3, 5, 8),)),
    "gru": lambda: (nn.GRU(8, 8, batch_first=True), (torch.randn(3, 5, 8),)),
    "block": lambda: (Block(), (torch.randn(3, 5, 16), torch.ones(5, 5, dtype=torch.bool).tril())),
    "gpt": lambda: (GPT(), (torch.randint(0, 32, (3, 7)), torch.randint(0, 32, (3, 7)))),
}


def case(name: str) -> Case:
    """Return a model and its arguments, the same values every time."""
    torch.manual_seed(0)
    return MODELS[name]()
