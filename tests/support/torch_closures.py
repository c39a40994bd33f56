"""Optimizers that evaluate their closure several times in a step, and change the parameters in between."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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


class Climbs(torch.optim.Optimizer):
    """github.com/davda54/sam: climbs by the gradients that are there, clears them, evaluates, comes back, descends."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def graded(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"] if param.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        params = self.graded()
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["old_p"] = param.data.clone()
            param.data.add_(param.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))  # which no version counts
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for param in self.graded():
            param.data = self.state[param]["old_p"]
        self.base.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        self.first_step()
        loss = torch.enable_grad()(closure)()
        self.second_step()
        return loss


REEVALUATING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4),
    "lbfgs_line_search": lambda params: torch.optim.LBFGS(params, max_iter=6, line_search_fn="strong_wolfe"),
    "sharpness": Sharpness,
    "climbs": Climbs,
}
