"""`FusedNovoGrad` (Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.compat.apex.optimizers.group_steps import Group, GroupSteps, corrections, norms
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.errors import InvalidValueError, StateError


class FusedNovoGrad(GroupSteps):
    """NovoGrad with the options and the saved state of ``apex.optimizers.FusedNovoGrad``. PyTorch has none of its own.

    The second moment is one number for each parameter: a running norm of its gradient.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> optimizer = FusedNovoGrad([weight], lr=0.5)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> optimizer.step()
    >>> weight.detach(), optimizer.param_groups[0]["exp_avg_sq"][1]
    (tensor([0.9905, 0.9874]), tensor([5.]))

    Args:
        params, lr, betas, eps, weight_decay: as in `torch.optim.Adam`.
        bias_correction: False divides the moments by 1.
        amsgrad: is refused, as by Apex.
        reg_inside_moment: apply norm and weight decay before the first moment instead of after it.
        grad_averaging: False adds whole gradients to the first moment, instead of ``1 - beta1`` of them.
        norm_type: 2 for the L2 norm, 0 for the largest absolute value.
        init_zero: start the norms at 0 instead of at the first gradient's.
        set_grad_none: whether ``zero_grad()`` removes gradients.

    Raises:
        InvalidValueError: an option that has no meaning.
    """

    moments = ("exp_avg",)
    kept = ("set_grad_none", "moment_mode")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise InvalidValueError(
                "an option has no meaning",
                where="FusedNovoGrad(norm_type=)",
                found=norm_type,
                allowed="2 (L2 norm) and 0 (largest absolute value)",
                fix="choose one of those",
            )
        options: Group = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        options |= {"weight_decay": weight_decay, "grad_averaging": grad_averaging}
        options |= {"norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, options, set_grad_none=set_grad_none, amsgrad=amsgrad)
        self.moment_mode = int(not reg_inside_moment)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of ``state_dict``, of this class or of Apex's."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if group["params"] and "exp_avg_sq" in group:
                group["exp_avg_sq"] = [norms.to(group["params"][0].device) for norms in group["exp_avg_sq"]]

    def update(self, group: Group, weights: list[Tensor], grads: list[Tensor], *moments: list[Tensor]) -> None:
        """Update the weights, the first moments and the norms; see `GroupSteps.update`."""
        (averages,) = moments
        (beta1, beta2), decay, lr = group["betas"], group["weight_decay"], group["lr"]
        first, second = corrections(group, of=(beta1, beta2))
        denominators = self._norms(group, grads) / second**0.5 + group["eps"]
        by_norm = list(denominators.to(grads[0].device).unbind())
        share = 1 - beta1 if group["grad_averaging"] else 1
        if not self.moment_mode:
            grads = list(torch._foreach_div(grads, by_norm))
            torch._foreach_add_(grads, weights, alpha=decay)
        torch._foreach_mul_(averages, beta1)
        torch._foreach_add_(averages, grads, alpha=share)
        steps = torch._foreach_div(averages, first)
        if self.moment_mode:
            torch._foreach_div_(steps, by_norm)
            torch._foreach_add_(steps, weights, alpha=decay)
        torch._foreach_mul_(steps, lr)
        torch._foreach_sub_(weights, steps)

    def _norms(self, group: Group, grads: list[Tensor]) -> Tensor:
        """Return the group's running norms, one for each gradient, after blending these gradients in.

        The state has them in two tensors, of the parameters with 16 and with 32 bits, as Apex does.
        """
        params = [param for param in group["params"] if param.grad is not None]
        low = torch.tensor([param.dtype in SIXTEEN_BIT for param in params])
        order = float("inf") if group["norm_type"] == 0 else 2
        now = torch.stack([norm.to(grads[0].device) for norm in norms(grads, order)])
        if "exp_avg_sq" not in group:
            first = torch.zeros_like(now) if group["init_zero"] else now
            group["exp_avg_sq"] = [first[low.to(now.device)], first[~low.to(now.device)]]
        saved = group["exp_avg_sq"]
        if [len(one) for one in saved] != [int(low.sum()), int((~low).sum())]:
            raise StateError(
                "NovoGrad keeps a norm for each parameter with a gradient, and there are others now",
                where="FusedNovoGrad.step()",
                found=f"{len(params)} parameters with gradients",
                allowed=f"the same {len(saved[0]) + len(saved[1])} parameters as at the first step",
                fix="leave parameters that get no gradient out of the optimizer",
            )
        before, beta = torch.empty_like(now), group["betas"][1]
        before[low.to(now.device)], before[~low.to(now.device)] = saved
        blended: Tensor = beta * before + (1 - beta) * now
        if group["norm_type"] == 2:
            blended = (beta * before.square() + (1 - beta) * now.square()).sqrt()
        group["exp_avg_sq"] = [blended[low.to(now.device)], blended[~low.to(now.device)]]
        return blended
