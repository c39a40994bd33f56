"""`FusedSGD`: `torch.optim.SGD` with Apex's options."""

from __future__ import annotations

from typing import Any

import torch

from polyamp.backends.torch.compat.apex.optimizers.group_steps import check_options
from polyamp.errors import InvalidValueError, warn_deprecated


class FusedSGD(torch.optim.SGD):
    """SGD with the options of ``apex.optimizers.FusedSGD``.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> optimizer = FusedSGD([weight], lr=0.5, momentum=0.5, weight_decay=0.5, wd_after_momentum=True)
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    ...     print(weight.item())
    0.25
    -0.5625

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as in `torch.optim.SGD`.
        wd_after_momentum: add the weight decay to the step instead of to the gradient, so that momentum does not
            multiply it.
        materialize_master_grads: has no effect: polyamp unscales into the gradients of the master weights.
        set_grad_none: whether ``zero_grad()`` removes gradients.

    Raises:
        InvalidValueError: an option that has no meaning.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        warn_deprecated("apex.optimizers.FusedSGD(params, lr)", "torch.optim.SGD(params, lr, fused=True)")
        check_options("FusedSGD", {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if nesterov and (momentum <= 0 or dampening != 0):
            raise InvalidValueError(
                "Nesterov momentum without momentum, or with dampening",
                where="FusedSGD(nesterov=True)",
                found=f"momentum={momentum}, dampening={dampening}",
                allowed="a positive momentum, and no dampening",
                fix="set momentum=0.9 and dampening=0, or nesterov=False",
            )
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        names = ("wd_after_momentum", "materialize_master_grads", "set_grad_none")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; None means as ``set_grad_none`` was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Update the parameters; see `torch.optim.SGD.step`."""
        if not self.wd_after_momentum:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:  # p - lr * (momentum + decay * p) = (1 - lr * decay) * p - lr * momentum
            self._decay(group)
            group["weight_decay"] = 0
        try:
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss

    @torch.no_grad()
    def _decay(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        if params and group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
