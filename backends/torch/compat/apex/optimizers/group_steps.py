"""What Apex's fused optimizers have in common: steps counted by group, and float32 arithmetic for all parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.errors import InvalidValueError, UsageError

Group = dict[str, Any]


class GroupSteps(torch.optim.Optimizer):
    """An optimizer that updates a parameter group at once, and counts its steps in ``group["step"]``.

    Parameters of 16 bits are updated in float32 and rounded once; their state is float32 too.

    A subclass defines `update`, names its state of zeros in ``moments``, and its other attributes in ``kept``.

    Args:
        params: parameters, or groups of them.
        defaults: options of the groups.
        set_grad_none: whether `zero_grad` removes gradients instead of filling them with zeros.
        amsgrad: is refused.

    Raises:
        InvalidValueError: a negative learning rate, ``eps`` or weight decay, a beta outside [0, 1), or ``amsgrad``.
    """

    moments: tuple[str, ...] = ()
    kept: tuple[str, ...] = ("set_grad_none",)

    def __init__(self, params: Any, defaults: Group, *, set_grad_none: bool, amsgrad: bool = False) -> None:
        name = type(self).__name__
        check_options(name, defaults)
        if amsgrad:
            raise InvalidValueError(
                f"{name} has no AMSGrad variant",
                where=f"{name}(amsgrad=)",
                found=amsgrad,
                allowed="False",
                fix="use torch.optim.AdamW(params, amsgrad=True)",
            )
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.kept}}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; None means as ``set_grad_none`` was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the loss, and is called first.

        Returns:
            The closure's loss, or None.

        Raises:
            UsageError: a gradient is sparse. Nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        chosen = [[param for param in group["params"] if param.grad is not None] for group in self.param_groups]
        self._check(param for params in chosen for param in params)
        self.begin([param.grad.to(_wide(param)) for params in chosen for param in params])
        for group, params in zip(self.param_groups, chosen, strict=True):
            if group["params"]:
                group["step"] = self.counted(group)
            if params:
                self._step_group(group, params)
        return loss

    def begin(self, grads: list[Tensor]) -> None:
        """Compute what is common to all groups, from all gradients; nothing here."""

    def counted(self, group: Group) -> Any:
        """Return the number of a group's steps, with the one that begins."""
        return group.get("step", 0) + 1

    def update(self, group: Group, weights: list[Tensor], grads: list[Tensor], *moments: list[Tensor]) -> None:
        """Update a group's weights and moments in place. The gradients must stay unchanged.

        Args:
            group: the parameter group.
            weights: float32 (float64 stays) values of the parameters that have a gradient.
            grads: their gradients, of the same types.
            *moments: a list for each name in ``moments``, in the same order as the weights.
        """
        raise NotImplementedError

    def wide(self, param: Tensor) -> Tensor:
        """Return the tensor that is updated for a parameter: itself, or a float32 copy if it has 16 bits."""
        return param.to(_wide(param))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of ``state_dict``, of this class or of Apex's. State of float32 stays float32."""
        super().load_state_dict(dict(state_dict))
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for index, param in zip(saved, chain.from_iterable(g["params"] for g in self.param_groups), strict=True):
            if param.dtype in SIXTEEN_BIT:
                for name, value in state_dict["state"].get(index, {}).items():
                    if isinstance(value, Tensor):
                        self.state[param][name] = value.to(param.device, copy=True)

    def _step_group(self, group: Group, params: list[Tensor]) -> None:
        weights = [self.wide(param) for param in params]
        for param, weight in zip(params, weights, strict=True):
            state = self.state[param]
            for name in self.moments:
                state[name] = state[name].to(weight.dtype) if name in state else torch.zeros_like(weight)
        moments = [[self.state[param][name] for param in params] for name in self.moments]
        grads = [param.grad.to(weight.dtype) for param, weight in zip(params, weights, strict=True)]  # type: ignore[union-attr]
        self.update(group, weights, grads, *moments)
        for param, weight in zip(params, weights, strict=True):
            if weight is not param:
                param.copy_(weight)

    def _check(self, params: Any) -> None:
        for param in params:
            if param.grad.is_sparse:
                raise UsageError(
                    "a sparse gradient",
                    where=f"{type(self).__name__}.step()",
                    found=f"a gradient of shape {tuple(param.shape)}",
                    allowed="dense gradients",
                    fix="use torch.optim.SparseAdam for embeddings with sparse=True",
                )


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options of an optimizer that have no meaning.

    >>> check_options("FusedLAMB", {"lr": 0.1, "betas": (0.9, 0.999)})

    Raises:
        InvalidValueError: a negative learning rate, momentum, ``eps`` or weight decay, or a beta outside [0, 1).
    """
    for option in ("lr", "momentum", "eps", "weight_decay"):
        if option in options and not options[option] >= 0:
            raise _bad(name, option, options[option], "0 or more")
    betas = options.get("betas", ())
    if not all(0 <= beta < 1 for beta in betas):
        raise _bad(name, "betas", betas, "two numbers in [0, 1)")


def _bad(name: str, option: str, found: object, allowed: str) -> InvalidValueError:
    return InvalidValueError(
        "an option has no meaning", where=f"{name}({option}=)", found=found, allowed=allowed, fix="change the option"
    )


def corrections(group: Group, *, of: tuple[float, ...]) -> list[float]:
    """Return ``1 - beta**step`` for each beta, or ones for a group without bias correction.

    >>> corrections({"bias_correction": True, "step": 2}, of=(0.5,))
    [0.75]
    """
    return [1 - beta ** int(group["step"]) if group["bias_correction"] else 1.0 for beta in of]


def norms(tensors: list[Tensor], order: float = 2) -> list[Tensor]:
    """Return the norm of each tensor. On a CPU, float32 sums of many elements lose digits, so those are in float64.

    >>> norms([torch.tensor([3.0, -4.0])]), norms([torch.tensor([3.0, -4.0])], float("inf"))
    ([tensor(5.)], [tensor(4.)])
    """
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return list(torch._foreach_norm(tensors, order))
    return [torch.linalg.vector_norm(one, order, dtype=torch.float64).to(one.dtype) for one in tensors]


def _wide(param: Tensor) -> torch.dtype:
    return torch.float32 if param.dtype in SIXTEEN_BIT else param.dtype
