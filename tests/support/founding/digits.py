"""A small model of handwritten digits, in the form of those in examples/models: to test the tables in seconds."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import polyamp
from models.data import Data, Part
from models.on_torch.training import batches, evaluate, fit, seeded


def digits() -> Data:
    found = load_digits()
    x, y = found.images.astype("float32") / 16, found.target.astype("int32")
    return Data(Part(x[360:], y[360:]), Part(x[:360], y[:360]), classes=10)


def make() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).float(), batch[1].long())


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    model = seeded(make, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    fit(model, loss_of, batches(digits().train, size=64, steps=50, seed=seed), optimizer, policy)
    return evaluate(model, accuracy, batches(digits().test, size=360, steps=1, seed=0), policy)


def curve(policy: polyamp.Policy, seed: int, steps: int) -> list[float]:
    model = seeded(make, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return fit(model, loss_of, batches(digits().train, size=64, steps=steps, seed=seed), optimizer, policy)
