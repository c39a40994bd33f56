"""Small trainings in PyTorch that a policy, a loss scale or an optimizer can damage; see ``planted_jax.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional

import polyamp
from polyamp.backends.torch.dtypes import dtype_of
from polyamp.diagnosis.calibrate import Calibration
from support.planted import FITTING, HIDDEN, OVERFLOWING, RATE, digits, rows_of

Optimizer = Callable[[Iterable[Any], polyamp.Policy], torch.optim.Optimizer]


class Norm(torch.nn.Module):
    """A layer norm written out: its variance does not fit float16 where the values are beyond 256."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class LogProbabilities(torch.nn.Module):
    """A log softmax written out: its epsilon is 0 in float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(x, -1) + 1e-12).log()


class Classifier(torch.nn.Module):
    """A network on raw counts, normalised by a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(64, HIDDEN), Norm()
        self.second, self.probabilities = torch.nn.Linear(HIDDEN, 10), LogProbabilities()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.probabilities(self.second(torch.relu(self.norm(self.first(x)))))


def sgd(params: Iterable[Any], policy: polyamp.Policy) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE, momentum=0.9)


def adam(params: Iterable[Any], policy: polyamp.Policy) -> torch.optim.Optimizer:
    """Adam with second moments in the compute format: where those underflow, nothing but its epsilon is left."""
    optimizer, dtype = torch.optim.Adam(params, lr=RATE / 40), dtype_of(policy.compute)

    def store(*_: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].to(dtype))

    optimizer.register_step_post_hook(store)
    return optimizer


def classify(policy: polyamp.Policy, seed: int, make: Optimizer = sgd, largest: float = FITTING) -> dict[str, float]:
    torch.manual_seed(seed)
    x, y, test_x, test_y = map(torch.from_numpy, digits(largest))
    net = Classifier()
    opt = polyamp.wrap_optimizer(make(net.parameters(), policy), policy)
    for rows in rows_of(seed):
        with polyamp.autocast(policy):
            loss = functional.nll_loss(net(x[rows]), y[rows])
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
    with torch.no_grad(), polyamp.autocast(policy):
        return {"loss": float(functional.nll_loss(net(test_x), test_y))}


def classify_with_adam(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(policy, seed, make=adam)


def classify_overflowing(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    return classify(policy, seed, largest=OVERFLOWING)


def calibrated() -> Calibration:
    """Return what `polyamp.calibrate` finds for a fresh network on two batches whose values float16 does not hold."""
    torch.manual_seed(100)
    x, y, *_ = map(torch.from_numpy, digits(OVERFLOWING))
    net, batches = Classifier(), [(x[rows], y[rows]) for rows in rows_of(100)[:2]]
    return polyamp.calibrate(lambda x, y: functional.nll_loss(net(x), y), batches, "mixed_float16", backend="torch")
