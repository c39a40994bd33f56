"""`FusedAdagrad` (Duchi et al., "Adaptive Subgradient Methods", JMLR 2011)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.compat.apex.optimizers.group_steps import Group, GroupSteps
from polyamp.errors import warn_deprecated


class FusedAdagrad(GroupSteps):
    """Adagrad with the options and the saved state of ``apex.optimizers.FusedAdagrad``.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> weight.grad = torch.full((1,), 2.0)
    >>> FusedAdagrad([weight], lr=0.5).step()
    >>> weight.detach()
    tensor([0.5000])

    Args:
        params, lr, eps, weight_decay: as in `torch.optim.Adagrad`.
        set_grad_none: whether ``zero_grad()`` removes gradients.
        adagrad_w_mode: add the weight decay to the step instead of to the gradient.

    Raises:
        InvalidValueError: an option that has no meaning.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """

    moments = ("sum",)
    kept = ("set_grad_none", "adagrad_w_mode")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        warn_deprecated("apex.optimizers.FusedAdagrad(params)", "torch.optim.Adagrad(params)")
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none=set_grad_none)
        self.adagrad_w_mode = int(adagrad_w_mode)

    def update(self, group: Group, weights: list[Tensor], grads: list[Tensor], *moments: list[Tensor]) -> None:
        """Update the weights and the sums of squares; see `GroupSteps.update`."""
        (sums,) = moments
        decay, lr = group["weight_decay"], group["lr"]
        if decay and not self.adagrad_w_mode:
            grads = list(torch._foreach_add(grads, weights, alpha=decay))
        torch._foreach_addcmul_(sums, grads, grads)
        roots = torch._foreach_sqrt(sums)
        torch._foreach_add_(roots, group["eps"])
        if decay and self.adagrad_w_mode:
            torch._foreach_mul_(weights, 1 - lr * decay)
        torch._foreach_addcdiv_(weights, grads, roots, -lr)
