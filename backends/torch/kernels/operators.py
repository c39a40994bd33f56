"""The operators ``torch.ops.polyamp.*`` of a loss-scaled step, in PyTorch: one schema for every device.

This code runs on every device without compiled kernels, and is the reference for them: if the compiled extension is
loaded, its kernels for the CPU and CUDA take precedence. Importing this module defines the operators.

Arguments, in addition to the usual tensors of an optimizer's step:

- ``scale``: float32 scalar, the factor that the gradients were multiplied by.
- ``stats``: see `STATS`; a step whose ``stats[1]`` or ``stats[2]`` is not 0 is skipped. Ranks can combine their
  ``stats`` between `grad_stats` and the step.
- ``params`` and ``masters``: float32 parameters without masters, or 16-bit parameters with float32 masters.
- ``groups``, ``rules``: int64 and float64 on the CPU. ``rules[groups[i]]`` are the numbers of the i-th tensor; see
  `Adam` and `SGD`. ``lrs`` is empty, or has one scalar per group that replaces its learning rate.
- ``control``: int32, on the device: the loss-scale state (scales as bits).
- ``workspace``: the kernels' own memory, see `WORKSPACE`; it starts as zeros, and is not used here.
- ``settings``: float64 on the CPU, see `Settings`.
- ``report``: int32, written: the loss-scale state after the step, whether it was applied, whether losses were finite.

Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.kernels.control import APPLIED, LOSSES_FINITE, pack_, unpack, where
from polyamp.backends.torch.kernels.optimizers import DECOUPLED, MAXIMIZE, NESTEROV, SGD, Adam, Settings
from polyamp.backends.torch.step.masters import is_written
from polyamp.scale import advance

Tensors = Sequence[Tensor]

SCHEMAS = {
    "grad_stats": "(Tensor[] grads, Tensor[] losses, Tensor scale, Tensor(a!) stats, Tensor(b!) workspace) -> ()",
    "unscale_clip_": "(Tensor(a!)[] grads, Tensor scale, Tensor stats, float max_norm) -> ()",
    "adam_step_": """(Tensor(a!)[] params, Tensor(b!)[] masters, Tensor[] grads, Tensor(c!)[] exp_avgs,
        Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] steps, Tensor groups, Tensor rules, Tensor[] lrs, Tensor scale,
        Tensor stats, Tensor(f!) control, Tensor(g!) workspace, Tensor settings, Tensor(h!) report) -> ()""",
    "sgd_step_": """(Tensor(a!)[] params, Tensor(b!)[] masters, Tensor[] grads, Tensor(c!)[] momenta,
        Tensor groups, Tensor rules, Tensor[] lrs, Tensor scale, Tensor stats, Tensor(d!) control,
        Tensor(e!) workspace, Tensor settings, Tensor(f!) report) -> ()""",
}

STATS = 3
"""Number of float64 values in ``stats``: the sum of squares of the unscaled gradients, the number of their non-finite
elements, and the number of non-finite elements of the losses."""

WORKSPACE = 3 * 1024 + 1
"""Number of float64 values in ``workspace``: partial ``stats`` of up to 1024 blocks, and a ticket that counts blocks.

Calls that may run at the same time, on several streams, need one workspace each."""


def grad_stats(grads: Tensors, losses: Tensors, scale: Tensor, stats: Tensor, workspace: Tensor) -> None:
    """Read every gradient once, and write ``stats``."""
    inverse = _inverse(scale)
    squares = [(grad.float() * inverse).double().square().sum() for grad in grads]
    for place, found in enumerate((squares, _non_finite(grads), _non_finite(losses))):
        stats[place] = sum(found, start=torch.zeros((), dtype=torch.float64, device=stats.device))


def unscale_clip_(grads: Tensors, scale: Tensor, stats: Tensor, max_norm: float) -> None:
    """Unscale and clip in place, unless the step will be skipped."""
    factor, applied = _factor(scale, stats, max_norm)
    for grad in grads:
        grad.copy_(torch.where(applied, (grad.float() * factor).to(grad.dtype), grad))


def adam_step_(
    params: Tensors,
    masters: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    *rest: Any,
) -> None:
    """Step with Adam (Kingma and Ba, ICLR 2015), or with AdamW (Loshchilov and Hutter, ICLR 2019)."""
    # AdamW is Adam with decoupled weight decay.
    _step(_adam, Adam, params, masters, grads, (exp_avgs, exp_avg_sqs, steps), *rest)


def sgd_step_(params: Tensors, masters: Tensors, grads: Tensors, momenta: Tensors, *rest: Any) -> None:
    """Step with stochastic gradient descent with momentum, as in ``torch.optim.SGD``, without dampening."""
    _step(_sgd, SGD, params, masters, grads, (momenta,) if momenta else (), *rest)


def _step(
    update: Callable[..., tuple[Tensor, ...]],
    kind: type[Adam | SGD],
    params: Tensors,
    masters: Tensors,
    grads: Tensors,
    states: Sequence[Tensors],
    groups: Tensor,
    rules: Tensor,
    lrs: Tensors,
    scale: Tensor,
    stats: Tensor,
    control: Tensor,
    workspace: Tensor,
    settings: Tensor,
    report: Tensor,
) -> None:
    """Update every parameter and its states by the rule of its group, or none of them, and advance the loss scale."""
    numbers = Settings(*settings.tolist())
    factor, applied = _factor(scale, stats, numbers.max_norm)
    group_rules = [kind._make(row[: len(kind._fields)]) for row in _rules(rules, lrs)]
    for index, group in enumerate(groups.tolist()):
        param, before = params[index], [state[index] for state in states]
        values = followed(masters[index], param) if masters else param
        new, *after = update(group_rules[group], values, grads[index].float() * factor, *before)
        param.copy_(torch.where(applied, new.to(param.dtype), param))  # a skipped step keeps the bits
        if masters:
            masters[index].copy_(torch.where(applied, new, masters[index]))
        for state, value in zip(before, after, strict=True):
            state.copy_(torch.where(applied, value, state))
    if numbers.advance:  # as the last block of a kernel does
        pack_(control, advance(numbers.config, unpack(control), applied, where))
    report.zero_()
    report[:APPLIED] = control[:APPLIED]
    report[APPLIED], report[LOSSES_FINITE] = applied, stats[2] == 0


def followed(master: Tensor, param: Tensor) -> Tensor:
    """Return a master with its parameter's values where the two differ, because the parameter was written to."""
    return torch.where(is_written(param, master.to(param.dtype)), param.float(), master)


# Each product and sum is rounded to float32 separately, in the order of the kernels (csrc/update_rules.h): the CPU
# kernels return the same bits.


def _adam(
    rule: Adam, values: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    step = step + 1
    beta1, beta2, flags = rule.beta1, rule.beta2, int(rule.flags)
    if flags & MAXIMIZE:
        grad = -grad
    if flags & DECOUPLED:
        values = values * _decay(rule, like=values)
    elif rule.weight_decay:
        grad = grad + rule.weight_decay * values
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + ((1 - beta2) * grad) * grad
    # In float64, with the betas rounded to float32: otherwise early steps are off by 1 part in 10**5.
    bias1, bias2 = (1 - torch.full_like(step, beta, dtype=torch.float64) ** step for beta in (beta1, beta2))
    step_size, root = (rule.lr / bias1).float(), bias2.sqrt().float()
    new = values - step_size * (exp_avg / (exp_avg_sq.sqrt() / root + rule.eps))
    return new, exp_avg, exp_avg_sq, step


def _decay(rule: Adam, like: Tensor) -> Tensor | float:
    rate = rule.lr.to(like.device, torch.float64) if isinstance(rule.lr, Tensor) else rule.lr
    decay = 1 - rate * rule.weight_decay
    return decay.float() if isinstance(decay, Tensor) else decay


def _sgd(rule: SGD, values: Tensor, grad: Tensor, momentum: Tensor | None = None) -> tuple[Tensor, ...]:
    flags = int(rule.flags)
    if flags & MAXIMIZE:
        grad = -grad
    if rule.weight_decay:
        grad = grad + rule.weight_decay * values
    if momentum is None:
        return (values - rule.lr * grad,)
    momentum = rule.momentum * momentum + grad
    update = grad + rule.momentum * momentum if flags & NESTEROV else momentum
    return values - rule.lr * update, momentum


def _inverse(scale: Tensor) -> Tensor:
    return scale.double().reciprocal().float()


def _factor(scale: Tensor, stats: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the float32 factor for gradients, and whether the step is applied, as a boolean scalar."""
    # The 1e-6 in the divisor is that of ``torch.nn.utils.clip_grad_norm_``.
    clip = torch.clamp(max_norm / (stats[0].sqrt() + 1e-6), max=1.0)
    return (_inverse(scale).double() * clip).float() if max_norm < math.inf else _inverse(scale), (stats[1:] == 0).all()


def _non_finite(tensors: Tensors) -> list[Tensor]:
    return [tensor.isfinite().logical_not_().sum().double() for tensor in tensors]


def _rules(rules: Tensor, lrs: Tensors) -> list[list[float | Tensor]]:
    rows: list[list[float | Tensor]] = rules.float().tolist()
    for row, lr in zip(rows, lrs, strict=False):
        row[0] = lr
    return rows


_library = torch.library.Library("polyamp", "DEF")  # type: ignore[no-untyped-call] # for as long as the process lives

for _name, _schema in SCHEMAS.items():
    _library.define(_name + " ".join(_schema.split()))  # type: ignore[no-untyped-call]
    _library.impl(_name, globals()[_name], "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"polyamp::{_name}", lambda *_: None, lib=_library)
