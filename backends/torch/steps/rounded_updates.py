"""Updates rounded to 16 bits, as if there were no master weights; see `polyamp.controls`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import dtype_of


def can_round(optimizer: object) -> bool:
    """Return whether hooks can be set around an optimizer's step; some that wrap others have not run torch's set-up."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def round_updates(optimizer: torch.optim.Optimizer, format_name: str) -> None:
    """Round what an optimizer's steps change to a format, to nearest even; a second call for it does nothing."""
    # A tensor that a step leaves as it is, because its kernel skipped on the device for example, is not rounded.
    if optimizer not in _ROUNDED:
        hooks = _Hooks(dtype_of(format_name))
        optimizer.register_step_pre_hook(hooks.remember)
        optimizer.register_step_post_hook(hooks.round)
        _ROUNDED.add(optimizer)


_ROUNDED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class _Hooks:
    """The hooks before and after one optimizer's step; operators see the first one and unscale gradients before it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.before: list[tuple[Tensor, Tensor]] = []  # parameters, and their values before the step

    @torch.no_grad()
    def remember(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Copy the parameters."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        self.before = [(param, param.clone()) for param in params if param.is_floating_point()]

    @torch.no_grad()
    def round(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Round the parameters that have changed."""
        for param, before in self.before:
            param.copy_(torch.where((param != before).any(), param.to(self.dtype).to(param.dtype), param))
        self.before = []
