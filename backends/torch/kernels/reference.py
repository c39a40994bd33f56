"""The operators ``torch.ops.polyamp.*`` in PyTorch: used without compiled kernels, and the reference for them.

Arguments, in addition to the usual tensors of an optimizer's step:

- ``scale``: float32 scalar, the factor that the gradients were multiplied by.
- ``stats``: see `STATS`; a step whose ``stats[1]`` or ``stats[2]`` is not 0 is skipped. Ranks may combine them between
  the two calls.
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
from collections.abc import Sequence

import torch
from torch import Tensor

from polyamp.backends.torch.kernels.arguments import DECOUPLED, MAXIMIZE, NESTEROV, SGD, Adam, Settings
from polyamp.backends.torch.kernels.control import APPLIED, LOSSES_FINITE, pack_, unpack, where
from polyamp.scale import advance

Tensors = Sequence[Tensor]


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
    """Step with Adam (Kingma and Ba, ICLR 2015), or with AdamW (Loshchilov and Hutter, ICLR 2019)."""
    # AdamW is Adam with decoupled weight decay.
    numbers = Settings(*settings.tolist())
    factor, applied = _factor(scale, stats, numbers.max_norm)
    group_rules = [Adam._make(row) for row in _rules(rules, lrs)]
    for index, group in enumerate(groups.tolist()):
        rule, values = group_rules[group], (masters or params)[index]
        new, *moments = _adam(
            rule, values, grads[index].float() * factor, exp_avgs[index], exp_avg_sqs[index], steps[index] + 1
        )
        _write(params, masters, index, torch.where(applied, new, values), applied)
        for moment, after in zip((exp_avgs[index], exp_avg_sqs[index]), moments, strict=True):
            moment.copy_(torch.where(applied, after, moment))
        steps[index].add_(applied)
    _finish(applied, stats, control, numbers, report)


def sgd_step_(
    params: Tensors,
    masters: Tensors,
    grads: Tensors,
    momenta: Tensors,
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
    """Step with stochastic gradient descent with momentum, as in ``torch.optim.SGD``, without dampening."""
    numbers = Settings(*settings.tolist())
    factor, applied = _factor(scale, stats, numbers.max_norm)
    group_rules = [SGD._make(row[:4]) for row in _rules(rules, lrs)]
    for index, group in enumerate(groups.tolist()):
        rule, values = group_rules[group], (masters or params)[index]
        momentum = momenta[index] if momenta else None
        new, after = _sgd(rule, values, grads[index].float() * factor, momentum)
        _write(params, masters, index, torch.where(applied, new, values), applied)
        if momentum is not None:
            momentum.copy_(torch.where(applied, after, momentum))
    _finish(applied, stats, control, numbers, report)


# Each product and sum is rounded to float32 separately, in the order of the kernels (csrc/update_rules.h): the CPU
# kernels return the same bits.


def _adam(
    rule: Adam, values: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
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
    return values - step_size * (exp_avg / (exp_avg_sq.sqrt() / root + rule.eps)), exp_avg, exp_avg_sq


def _decay(rule: Adam, like: Tensor) -> Tensor | float:
    rate = rule.lr.to(like.device, torch.float64) if isinstance(rule.lr, Tensor) else rule.lr
    decay = 1 - rate * rule.weight_decay
    return decay.float() if isinstance(decay, Tensor) else decay


def _sgd(rule: SGD, values: Tensor, grad: Tensor, momentum: Tensor | None) -> tuple[Tensor, Tensor]:
    flags = int(rule.flags)
    if flags & MAXIMIZE:
        grad = -grad
    if rule.weight_decay:
        grad = grad + rule.weight_decay * values
    if momentum is None:
        return values - rule.lr * grad, grad
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


def _write(params: Tensors, masters: Tensors, index: int, values: Tensor, applied: Tensor) -> None:
    """Write float32 values to the master, if there is one, and to the parameter; a skipped step keeps the bits."""
    param = params[index]
    if masters:
        masters[index].copy_(values)
    param.copy_(torch.where(applied, values.to(param.dtype), param))


def _finish(applied: Tensor, stats: Tensor, control: Tensor, numbers: Settings, report: Tensor) -> None:
    """Do the work of a kernel's last block: count, advance the loss scale, and report."""
    if numbers.advance:
        pack_(control, advance(numbers.config, unpack(control), applied, where))
    report.zero_()
    report[:APPLIED] = control[:APPLIED]
    report[APPLIED], report[LOSSES_FINITE] = applied, stats[2] == 0
