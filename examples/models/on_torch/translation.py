"""Translate English to German: the loss, the metrics and the training that the translation models share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import polyamp
from models.data import PAD, START, pairs
from models.on_torch.training import batches, evaluate, fit, seeded

LABEL_SMOOTHING = 0.1
"""Of Vaswani et al. (2017) and of GNMT in MLPerf."""


def scores(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the scores of every next word, given the source and the words of the target before it."""
    source, target = batch
    start = torch.full_like(target[:, :1], START)
    return model(source, torch.cat([start, target[:, :-1]], 1))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over the words of the batch, padding left out."""
    return _mean(scores(model, batch), batch[1], LABEL_SMOOTHING)


def metrics_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    found, target = scores(model, batch), batch[1]
    right = (found.argmax(-1) == target)[target != PAD]
    return {"token_accuracy": right.float().mean(), "loss": _mean(found, target)}


def _mean(found: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    words = target.flatten().long()
    return cross_entropy(found.flatten(0, 1), words, ignore_index=PAD, label_smoothing=smoothing)


def warmed_up(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Return a learning rate that rises for ``steps`` and then falls with the inverse of the step's square root."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / steps, (steps / (step + 1)) ** 0.5))


def translate(
    make: Callable[[], nn.Module],
    optimizer_of: Callable[[nn.Module], Optimizer],
    policy: polyamp.Policy,
    seed: int,
    *,
    size: int,
    steps: int,
    warm_up: int,
    max_grad_norm: float | None = None,
) -> dict[str, float]:
    """Train a model on batches of ``size`` pairs; return the share of right next words, and the loss, in test pairs."""
    data, model = pairs(), seeded(make, seed)
    fit(
        model,
        loss_of,
        batches(data.train, size, steps, seed),
        optimizer_of(model),
        policy,
        schedule=lambda opt: warmed_up(opt, warm_up),
        max_grad_norm=max_grad_norm,
    )
    return evaluate(model, metrics_of, batches(data.test, len(data.test.x), 1, seed=0), policy)
