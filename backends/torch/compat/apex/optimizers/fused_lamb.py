"""`FusedLAMB` (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.compat.apex.optimizers.group_steps import Group, GroupSteps, corrections, norms


class FusedLAMB(GroupSteps):
    """LAMB with the options and the saved state of ``apex.optimizers.FusedLAMB``. PyTorch has no LAMB of its own.

    All gradients are clipped to a global norm; then each parameter moves by Adam's step, multiplied by the trust ratio:
    the parameter's norm divided by the step's.

    >>> weight = torch.full((1,), 4.0, requires_grad=True)
    >>> optimizer = FusedLAMB([weight], lr=0.5, weight_decay=0.0, use_nvlamb=True)
    >>> weight.grad = torch.ones(1)
    >>> optimizer.step()
    >>> round(weight.item(), 4)  # the step has norm 1, so the trust ratio is 4
    2.0

    Args:
        params, lr, betas, eps, weight_decay: as in `torch.optim.AdamW`, with an ``eps`` of 1e-6.
        bias_correction: False divides the moments by 1.
        amsgrad: is refused, as by Apex.
        adam_w_mode: False adds the weight decay to the gradient.
        grad_averaging: False adds whole gradients to the first moment, instead of ``1 - beta1`` of them.
        set_grad_none: whether ``zero_grad()`` removes gradients.
        max_grad_norm: clip all gradients to this global L2 norm.
        use_nvlamb: use the trust ratio for parameters without weight decay too.

    Raises:
        InvalidValueError: an option that has no meaning.
    """

    moments = ("exp_avg", "exp_avg_sq")
    kept: tuple[str, ...] = ("set_grad_none", "adam_w_mode", "use_nvlamb")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        options: Group = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        options |= {"weight_decay": weight_decay, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm}
        super().__init__(params, options, set_grad_none=set_grad_none, amsgrad=amsgrad)
        self.adam_w_mode, self.use_nvlamb = int(adam_w_mode), use_nvlamb
        self._clip: Tensor | None = None

    def begin(self, grads: list[Tensor]) -> None:
        """Compute what gradients are divided by: the global norm over the largest one, or 1."""
        if grads:
            each = torch.stack([norm.to(grads[0].device) for norm in norms(grads)])
            self._clip = (torch.linalg.vector_norm(each) / self.defaults["max_grad_norm"]).clamp(min=1)

    def update(self, group: Group, weights: list[Tensor], grads: list[Tensor], *moments: list[Tensor]) -> None:
        """Update the weights and both moments; see `GroupSteps.update`."""
        averages, squares = moments
        (beta1, beta2), decay, lr = group["betas"], group["weight_decay"], group["lr"]
        grads = list(torch._foreach_div(grads, self._clip.to(grads[0].device)))  # type: ignore[union-attr]
        if decay and not self.adam_w_mode:
            torch._foreach_add_(grads, weights, alpha=decay)
        torch._foreach_mul_(averages, beta1)
        torch._foreach_add_(averages, grads, alpha=1 - beta1 if group["grad_averaging"] else 1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        first, second = corrections(group, of=(beta1, beta2))
        roots = torch._foreach_sqrt(torch._foreach_div(squares, second))
        torch._foreach_add_(roots, group["eps"])
        steps = torch._foreach_div(torch._foreach_div(averages, first), roots)
        if decay and self.adam_w_mode:
            torch._foreach_add_(steps, weights, alpha=decay)
        if decay or self.use_nvlamb:
            torch._foreach_mul_(steps, _trust_ratios(weights, list(steps)))
        torch._foreach_mul_(steps, lr)
        torch._foreach_sub_(weights, steps)


def _trust_ratios(weights: list[Tensor], steps: list[Tensor]) -> list[Tensor]:
    pairs = zip(norms(weights), norms(steps), strict=True)
    return [torch.where((weight != 0) & (step != 0), weight / step, 1.0) for weight, step in pairs]
