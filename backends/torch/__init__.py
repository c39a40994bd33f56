"""PyTorch: a `torch.optim.Optimizer` around any other, autocast and graphs by policy, modules stored by the rules.

>>> import torch, polyamp.backends.torch as amp
>>> opt = amp.LossScaledOptimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1))
>>> isinstance(opt, torch.optim.Optimizer)
True
"""

import importlib
from typing import TYPE_CHECKING, Any

from polyamp.errors import importing

with importing("torch", extra="torch"):
    import torch  # noqa: F401

from polyamp.backends.torch.adapter import adapter
from polyamp.backends.torch.autocast.context import autocast
from polyamp.backends.torch.casting import cast
from polyamp.backends.torch.convert import convert  # not later: importing its file would put the module in its place
from polyamp.backends.torch.step.optimizer import LossScaledOptimizer

if TYPE_CHECKING:
    from polyamp.backends.torch.compat.grad_scaler import GradScaler
    from polyamp.backends.torch.graphs.rewrite import explain, rewrite
    from polyamp.backends.torch.step.schedules import AppliedSteps, select
    from polyamp.backends.torch.verbs import why_not_fused

__all__ = [
    "AppliedSteps",
    "GradScaler",
    "LossScaledOptimizer",
    "adapter",
    "autocast",
    "cast",
    "convert",
    "explain",
    "rewrite",
    "select",
    "why_not_fused",
]


# What a training step does not need is loaded when it is used.
_LATER = {
    "AppliedSteps": "step.schedules",
    "GradScaler": "compat.grad_scaler",
    "explain": "graphs.rewrite",
    "rewrite": "graphs.rewrite",
    "select": "step.schedules",
    "why_not_fused": "verbs",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
