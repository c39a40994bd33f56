"""`LARC`: layer-wise adaptive rates (You et al., "Large Batch Training of Convolutional Networks", 2017)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.compat.apex.optimizers.group_steps import norms
from polyamp.backends.torch.compat.attached import wrapper_of
from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer


class LARC(torch.optim.Optimizer):
    """An optimizer whose gradients are multiplied by a rate of their own for each parameter, before its step.

    The rate is ``trust_coefficient * |p| / (|grad| + weight_decay * |p| + eps)``, for unscaled gradients: wrap a
    `LARC` with `polyamp.wrap_optimizer`, or make one of a wrapped optimizer; both unscale before the rates.

    >>> weight = torch.full((1,), 2.0, requires_grad=True)
    >>> optimizer = LARC(torch.optim.SGD([weight], lr=0.5), trust_coefficient=0.25, clip=False, eps=0.0)
    >>> weight.grad = torch.full((1,), 100.0)
    >>> optimizer.step()  # the rate is 0.25 * 2 / 100
    >>> weight.detach()
    tensor([1.7500])

    Args:
        optimizer: any `torch.optim.Optimizer`, whose groups, state and options stay its own.
        trust_coefficient: the share of a parameter's norm that a step with a learning rate of 1 moves it.
        clip: use a rate that makes the learning rate at most the optimizer's; False multiplies the learning rate.
        eps: added to the denominator.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        # No super().__init__(): it would build groups and state of its own.
        self.optim = optimizer
        self.trust_coefficient, self.clip, self.eps = trust_coefficient, clip, eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim" or name.startswith("__"):  # copying and unpickling start without an optimizer
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The optimizer's default options."""
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the optimizer's state."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Multiply the gradients by their rates, which include the weight decay, and step the optimizer.

        Args:
            closure: computes the loss and its gradients, and is called first.

        Returns:
            The closure's loss; without one, the return value of the optimizer's ``step``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._unscale()
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            self._adapt(group, decay)
        with_decay = [group for group in self.param_groups if "weight_decay" in group]
        for group in with_decay:
            group["weight_decay"] = 0
        try:
            result = self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return result if closure is None else loss

    def _unscale(self) -> None:
        """Unscale the gradients if the optimizer is a wrapped one."""
        wrapped = self.optim if isinstance(self.optim, LossScaledOptimizer) else wrapper_of(self.optim)
        if wrapped is not None and not wrapped.window.is_unscaled:
            wrapped.unscale_()

    @torch.no_grad()
    def _adapt(self, group: dict[str, Any], decay: float) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        grads: list[Tensor] = [param.grad for param in params]
        if not params:
            return
        for param, grad, size, slope in zip(params, grads, norms(params), norms(grads), strict=True):
            both = (size != 0) & (slope != 0)
            rate = self.trust_coefficient * size / (slope + size * decay + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1)
            grad.add_(param * torch.where(both, decay, 0.0)).mul_(torch.where(both, rate, 1.0))
