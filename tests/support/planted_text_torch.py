"""A small language model in PyTorch that a policy can damage; see ``planted_text.py``."""

from __future__ import annotations

import torch
from torch.nn import functional

import polyamp
from models.data import UNKNOWN
from support.planted_text import CONTEXT, HIDDEN, RATE, TEST, VOCABULARY, WIDTH, rows_of, windows
from support.planted_torch import LogProbabilities


class Norm(torch.nn.Module):
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
    text = torch.tensor(windows()).long()
    net = LanguageModel()
    opt = polyamp.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9), policy)
    for rows in rows_of(seed):
        chosen = text[rows]
        with polyamp.autocast(policy):
            loss = functional.nll_loss(net(chosen[:, :-1]), chosen[:, -1])
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
    with torch.no_grad(), polyamp.autocast(policy):
        return {"loss": float(functional.nll_loss(net(text[:TEST, :-1]), text[:TEST, -1]))}
