"""A small language model in PyTorch that a policy can damage: the next word of Python's manual, from four before it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

import polyamp
from support.planted_torch import LogProbabilities

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from models.data import UNKNOWN, words

VOCABULARY, CONTEXT, WIDTH, HIDDEN = 256, 4, 16, 32
BATCH, STEPS, RATE = 64, 30, 0.1
TEST = 500


class Norm(torch.nn.Module):
    """A layer norm with BERT's epsilon, which is 0 in float16: of a word without an embedding it divides 0 by 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()


class LanguageModel(torch.nn.Module):
    """A network as that of Bengio and others (2003)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = torch.nn.Embedding(VOCABULARY, WIDTH, padding_idx=UNKNOWN), Norm()
        self.hidden, self.next = torch.nn.Linear(CONTEXT * WIDTH, HIDDEN), torch.nn.Linear(HIDDEN, VOCABULARY)
        self.probabilities = LogProbabilities()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        known = self.norm(self.words(words)).flatten(1)
        return self.probabilities(self.next(torch.relu(self.hidden(known))))


def predict(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    random, text = np.random.default_rng(seed), torch.from_numpy(words(VOCABULARY)).long()
    windows = text.unfold(0, CONTEXT + 1, 1)
    net = LanguageModel()
    opt = polyamp.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9), policy)
    for _ in range(STEPS):
        chosen = windows[TEST + random.integers(len(windows) - TEST, size=BATCH)]
        with polyamp.autocast(policy):
            loss = functional.nll_loss(net(chosen[:, :-1]), chosen[:, -1])
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
    with torch.no_grad(), polyamp.autocast(policy):
        return {"loss": float(functional.nll_loss(net(windows[:TEST, :-1]), windows[:TEST, -1]))}
