"""`FusedMixedPrecisionLamb`: LAMB that keeps float32 copies of 16-bit parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.compat.apex.optimizers.fused_lamb import FusedLAMB
from polyamp.backends.torch.compat.apex.optimizers.group_steps import Group
from polyamp.backends.torch.dtypes import SIXTEEN_BIT


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` whose state has float32 copies of the 16-bit parameters, which the steps update.

    >>> weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    >>> optimizer = FusedMixedPrecisionLamb([weight], lr=2.0**-10, weight_decay=0.0, use_nvlamb=True)
    >>> for _ in range(4):  # each step is smaller than bfloat16 can represent next to 1
    ...     weight.grad = torch.ones(1, dtype=torch.bfloat16)
    ...     optimizer.step()
    >>> weight.item()
    0.99609375

    Args:
        params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging, max_grad_norm,
            use_nvlamb: see `FusedLAMB`.
        step: the number of steps that were made before.
        reduced_precision_dtype: the 16-bit type to keep copies for; None is both.

    Raises:
        InvalidValueError: an option that has no meaning.
    """

    kept = (*FusedLAMB.kept, "reduced_precision_dtype")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        moments = (bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging)
        super().__init__(params, lr, *moments, True, max_grad_norm, use_nvlamb)
        self.reduced_precision_dtype = reduced_precision_dtype
        for group in self.param_groups:
            group["step"] = step

    def counted(self, group: Group) -> Any:
        """Return the number of a group's steps; Apex saves it as a tensor."""
        return int(super().counted(group))

    def wide(self, param: Tensor) -> Tensor:
        """Return the tensor that is updated: the parameter, or its float32 copy."""
        if param.dtype not in SIXTEEN_BIT or self.reduced_precision_dtype not in (None, param.dtype):
            return super().wide(param)
        state = self.state[param]
        if "master_param" not in state:
            state["master_param"] = super().wide(param)
        master: Tensor = state["master_param"]
        return master
