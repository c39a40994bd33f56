"""Optimizers that evaluate their closure several times in a step, and change the parameters in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation: ascend, evaluate again, return and descend (Foret et al., 2021)."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        (group,) = self.param_groups
        climbs = [group["rho"] * param.grad for param in group["params"]]
        torch._foreach_add_(group["params"], climbs)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(group["params"], climbs)
        for param in group["params"]:
            self.state[param]["last"] = param.grad.clone()
            param.sub_(group["lr"] * param.grad)
        return loss


REEVALUATING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4),
    "lbfgs_line_search": lambda params: torch.optim.LBFGS(params, max_iter=6, line_search_fn="strong_wolfe"),
    "sharpness": Sharpness,
}
