"""Train and evaluate any PyTorch model under any policy: the loop that the models of this folder share.

>>> import polyamp
>>> from models.data import images
>>> from torch.nn.functional import cross_entropy
>>> model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), seed=0)
>>> policy, digits = polyamp.policy("mixed_bfloat16"), images(size=8)
>>> losses = fit(
...     model,
...     lambda model, batch: cross_entropy(model(batch[0]), batch[1].long()),
...     batches(digits.train, size=50, steps=30, seed=0),
...     torch.optim.AdamW(model.parameters(), lr=0.01),
...     policy,
... )
>>> losses[-1] < losses[0]
True
>>> def accuracy(model, batch):
...     return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}
>>> evaluate(model, accuracy, batches(digits.test, size=250, steps=4, seed=0), policy)["accuracy"] > 0.5
True
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import polyamp
from models.data import Part, batches_of
from models.on_torch.products import summed_in_float32


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a model in float32 whose weights, and random numbers from here on (dropout), the seed decides."""
    torch.manual_seed(seed)
    return make()


def batches(part: Part, size: int, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and labels of each step, in an order that the seed decides."""
    x, y = torch.from_numpy(part.x), torch.from_numpy(part.y)
    return [(x[rows], y[rows]) for rows in map(torch.from_numpy, batches_of(part, size, steps, seed))]


def fit(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    optimizer: Optimizer,
    policy: polyamp.Policy,
    *,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
    max_grad_norm: float | None = None,
) -> list[float]:
    """Train for one step on each batch, and return the losses."""
    opt = polyamp.wrap_optimizer(optimizer, policy, max_grad_norm=max_grad_norm)
    rates = schedule(opt) if schedule else None
    losses = []
    model.train()
    for batch in batches:
        with summed_in_float32(policy):
            with polyamp.autocast(policy):
                loss = loss_of(model, batch)
            opt.backward(loss)
        opt.step()
        opt.zero_grad()
        if rates:
            rates.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def evaluate(
    model: nn.Module,
    metrics_of: Callable[[nn.Module, Any], dict[str, Tensor]],
    batches: Collection[Any],
    policy: polyamp.Policy,
) -> dict[str, float]:
    """Return the mean of each metric over batches of the same size."""
    model.eval()
    with torch.no_grad(), summed_in_float32(policy), polyamp.autocast(policy):
        found = [metrics_of(model, batch) for batch in batches]
    return {name: sum(metrics[name].item() for metrics in found) / len(found) for name in found[0]}
