"""Drive the PyTorch adapter with NumPy arrays; and helpers that the tests of that adapter share."""

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

import polyamp
from polyamp import Policy, StepResult
from polyamp.backends.torch import LossScaledOptimizer
from support.harness import Arrays


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a copy; bfloat16, which NumPy does not have, as ``ml_dtypes.bfloat16``."""
    tensor = tensor.detach().cpu().clone()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def skipping_on_device(made: Any, wanted: bool | None = True) -> Any:
    """Let fused optimizers skip in their own kernels on a CPU too, as they do on a GPU; or let the host decide.

    Args:
        made: a wrapped optimizer, or a list of them.
        wanted: True, False or None, which is the choice without this function.
    """
    if wanted is not None:
        for opt in made if isinstance(made, list) else [made]:
            opt.on_device = wanted
    return made


class TorchSession:
    """One wrapped torch optimizer and its parameters."""

    def __init__(self, params: dict[str, torch.Tensor], holder: LossScaledOptimizer) -> None:
        self.params = params
        self.holder = holder

    def step(self, grads: Arrays, loss: float | None = None) -> StepResult:
        for name, array in grads.items():
            param, grad = self.params[name], torch.from_numpy(np.array(array, np.float32))
            # A loss on the CPU is reported at once, one on another device at the next step.
            given = torch.ones((), device=param.device) if loss is None else torch.tensor(loss)
            param.grad = (grad.to(param.device) * self.holder.scale(given)).to(param.dtype)
        self.holder.step()
        self.holder.zero_grad()
        return self.holder.last_step

    def assign(self, weights: Arrays) -> None:
        with torch.no_grad():
            for name, array in weights.items():
                self.params[name].copy_(torch.from_numpy(array))

    def weights(self) -> dict[str, NDArray[Any]]:
        return {name: to_numpy(param) for name, param in self.params.items()}

    def memory(self) -> dict[str, NDArray[Any]]:
        trained = [param for group in self.holder.param_groups for param in group["params"]]
        kept = {f"trained/{index}": to_numpy(param) for index, param in enumerate(trained)}
        for index, param in enumerate(trained):
            for key, value in self.holder.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    kept[f"state/{index}/{key}"] = to_numpy(value)
        return kept

    def load_loss_scale(self, saved: Mapping[str, Any]) -> None:
        polyamp.load_loss_scale(self.holder, saved)


class TorchHarness:
    """PyTorch, driven with NumPy arrays.

    Args:
        device: the device of parameters and gradients.
        fused: use the fused optimizers, which skip steps by themselves on an accelerator.
        fused_step: whether polyamp's own operators run the steps; see `LossScaledOptimizer`.
        on_device: see `skipping_on_device`.
    """

    name = "torch"

    def __init__(
        self,
        device: str = "cpu",
        *,
        fused: bool = False,
        fused_step: bool | None = None,
        on_device: bool | None = None,
    ) -> None:
        self.device, self.fused, self.fused_step, self.on_device = device, fused, fused_step, on_device

    def start(
        self,
        weights: Arrays,
        policy: Policy,
        *,
        optimizer: Literal["sgd", "adam"] = "sgd",
        learning_rate: float = 0.1,
        **options: Any,
    ) -> TorchSession:
        dtype = getattr(torch, policy.param)
        arrays = {name: torch.from_numpy(np.array(w)).to(self.device, dtype) for name, w in weights.items()}
        params = {name: torch.nn.Parameter(array) for name, array in arrays.items()}
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        plain = kind(list(params.values()), lr=learning_rate, fused=self.fused or None)
        opt = polyamp.wrap_optimizer(plain, policy, fused_step=self.fused_step, **options)
        return TorchSession(params, skipping_on_device(opt, self.on_device))

    def plain_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)

    def tree(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}

    def arrays(self, tree: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
        return {name: to_numpy(tensor) for name, tensor in tree.items()}


X, Y = torch.arange(12.0).reshape(4, 3) / 12, torch.tensor([1.0, -1.0, 0.5, 2.0])


class ThirdParty(torch.optim.Optimizer):
    """An optimizer as users write them: own state and counters, closure evaluated first."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    total = self.state[param].setdefault("total", torch.zeros_like(param))
                    total.add_(param.grad.abs())
                    param.sub_(group["lr"] * param.grad / (total + 1))
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1),
    "sgd_foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "adam_fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adagrad_fused": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "third_party": ThirdParty,
}
FUSED = [
    name
    for name, make in OPTIMIZERS.items()
    if getattr(make([torch.ones(1, requires_grad=True)]), "_step_supports_amp_scaling", False)
]


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
        model.bias.fill_(0.05)
    return model


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    return (model(X).squeeze(1) - Y).square().mean()


def contents(opt: torch.optim.Optimizer) -> list[Any]:
    """Return everything that a step may change, as bytes."""
    params = [param for group in opt.param_groups for param in group["params"]]
    states = [sorted(opt.state.get(param, {}).items()) for param in params]
    options = [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]
    return [pickle.dumps([param.detach().numpy().copy() for param in params]), repr(states), repr(options)]


def casts_of(run: Callable[[], object]) -> int:
    """Return how many casts of weights ``run`` makes."""
    with torch.profiler.profile(acc_events=True) as profile:
        run()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")
