"""`FusedAdam`: Adam and AdamW, by the arithmetic of `torch.optim.Adam`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from polyamp.backends.torch.compat.apex.optimizers.group_steps import Group, GroupSteps
from polyamp.errors import UsageError, warn_deprecated

_NEVER = 2.0**60  # steps, after which 1 - beta**step is 1


class FusedAdam(GroupSteps):
    """Adam, or AdamW by default, with the options and the saved state of ``apex.optimizers.FusedAdam``.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> optimizer = FusedAdam([weight], lr=0.5, weight_decay=0.5)
    >>> weight.grad = torch.tensor([1.0, -2.0])
    >>> optimizer.step()
    >>> weight.detach(), optimizer.param_groups[0]["step"]
    (tensor([0.2500, 1.2500]), 1)

    Args:
        params, lr, betas, eps, weight_decay: as in `torch.optim.AdamW`, with a weight decay of 0.
        bias_correction: False divides the moments by 1.
        adam_w_mode: False adds the weight decay to the gradient, as `torch.optim.Adam` does.
        amsgrad: is refused, as by Apex.
        set_grad_none: whether ``zero_grad()`` removes gradients.
        capturable: keep learning rate and step as tensors, so that a CUDA graph can capture `step`.
        master_weights: keep float32 copies of 16-bit parameters in the state, and update those. Here this does not need
            ``capturable``.

    Raises:
        InvalidValueError: an option that has no meaning.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """

    moments = ("exp_avg", "exp_avg_sq")
    kept = ("set_grad_none", "adam_w_mode", "capturable", "master_weights")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        instead = "torch.optim.AdamW(params, weight_decay=0.0, fused=True); with adam_w_mode=False, torch.optim.Adam"
        warn_deprecated("apex.optimizers.FusedAdam(params)", instead)
        options: Group = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        options["weight_decay"] = weight_decay
        super().__init__(params, options, set_grad_none=set_grad_none, amsgrad=amsgrad)
        self.adam_w_mode = int(adam_w_mode)
        self.capturable, self.master_weights = capturable, master_weights
        if capturable:
            for group in self.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=_device(group))

    def step(self, closure: Any = None, *removed: Any, **also_removed: Any) -> Any:
        """Update the parameters; see `GroupSteps.step`.

        Raises:
            UsageError: an argument of Apex's first FusedAdam, such as ``scale=``, which it removed in 2019.
        """
        if removed or any(value is not None for value in also_removed.values()):
            raise UsageError(
                "FusedAdam.step has no scale and no gradients of its own",
                where="FusedAdam.step(closure)",
                found=", ".join(also_removed) or f"{len(removed)} more arguments",
                allowed="a closure",
                fix="opt = polyamp.wrap_optimizer(opt, policy), then opt.backward(loss) and opt.step()",
            )
        return super().step(closure)

    def counted(self, group: Group) -> Any:
        """Return the number of a group's steps; a tensor if steps are captured."""
        if not self.capturable:
            return super().counted(group)
        before = group.get("step", torch.zeros(1, dtype=torch.int, device=_device(group)))
        return before.add_(1) if isinstance(before, Tensor) else torch.tensor([before + 1], device=_device(group))

    def wide(self, param: Tensor) -> Tensor:
        """Return the tensor that is updated: the parameter, its master copy, or a new float32 copy."""
        if not self.master_weights:
            return super().wide(param)
        state = self.state[param]
        if "master_param" not in state:
            state["master_param"] = super().wide(param)
        master: Tensor = state["master_param"] if super().wide(param) is not param else param
        return master

    def update(self, group: Group, weights: list[Tensor], grads: list[Tensor], *moments: list[Tensor]) -> None:
        """Update the weights and both moments; see `GroupSteps.update`."""
        averages, squares = moments
        on_device = self.capturable and weights[0].device.type != "cpu"
        before = group["step"] - 1 if group["bias_correction"] else _NEVER
        count = torch.as_tensor(before, dtype=torch.float32, device=weights[0].device if on_device else "cpu")
        beta1, beta2 = group["betas"]
        adam(
            weights,
            grads,
            averages,
            squares,
            max_exp_avg_sqs=[],
            state_steps=[count.reshape(()).clone() for _ in weights],
            capturable=on_device,
            decoupled_weight_decay=bool(self.adam_w_mode),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"] if on_device else float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _device(group: Group) -> torch.device:
    return group["params"][0].device if group["params"] else torch.device("cpu")
