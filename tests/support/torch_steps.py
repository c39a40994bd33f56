"""The same training in three ways, for the tests of fused steps: with polyamp's kernels, without them, and by torch.

`Plain` writes out the contract of a wrapped optimizer: test the gradients, clip them, step or do nothing.
"""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import polyamp
from polyamp import LossScale

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCALE = LossScale(init=2.0**10, interval=4)
OVERFLOWS = {1: math.inf, 4: math.nan, 5: -math.inf, 9: math.inf}

optim = torch.optim
COVERED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda params, **more: optim.Adam(params, **{"lr": 0.02, **more}),
    "adam-l2": lambda params, **more: optim.Adam(params, **{"lr": 0.02, "weight_decay": 0.1, **more}),
    "adam-maximize": lambda params, **more: optim.Adam(
        params, **{"lr": 0.02, "betas": (0.8, 0.95), "maximize": True, **more}
    ),
    "adamw": lambda params, **more: optim.AdamW(params, **{"lr": 0.02, "weight_decay": 0.1, **more}),
    "adamw-maximize": lambda params, **more: optim.AdamW(params, **{"lr": 0.02, "eps": 1e-5, "maximize": True, **more}),
    "sgd": lambda params, **more: optim.SGD(params, **{"lr": 0.1, **more}),
    "sgd-l2-maximize": lambda params, **more: optim.SGD(
        params, **{"lr": 0.1, "weight_decay": 0.1, "maximize": True, **more}
    ),
    "momentum": lambda params, **more: optim.SGD(params, **{"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, **more}),
    "nesterov": lambda params, **more: optim.SGD(params, **{"lr": 0.05, "momentum": 0.9, "nesterov": True, **more}),
    "nesterov-l2-maximize": lambda params, **more: optim.SGD(
        params, **{"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "maximize": True, **more}
    ),
}
STEP_OPERATORS = {name: "adam_step_" if name.startswith("adam") else "sgd_step_" for name in COVERED}


class Way(NamedTuple):
    """A model and its optimizer."""

    model: nn.Module
    opt: Any


class Plain:
    """The plain optimizer, with the tests and the clipping of a step written around it."""

    def __init__(self, inner: torch.optim.Optimizer, max_norm: float | None = None) -> None:
        self.inner, self.max_norm = inner, max_norm

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        params = [param for group in self.inner.param_groups for param in group["params"] if param.grad is not None]
        if all(bool(values_of(param.grad).isfinite().all()) for param in params):
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(params, self.max_norm)
            self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


class Calls(TorchDispatchMode):
    """A mode that records which of polyamp's operators ran, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "polyamp":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class NoSync(TorchDispatchMode):
    """A mode that fails if a tensor's value is copied to the host."""

    READS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def values_of(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def network(device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)).to(device, dtype)


def loss_of(model: nn.Module, batch: int = 0) -> Tensor:
    device, dtype = next((param.device, param.dtype) for param in model.parameters())
    dtype = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
    generator = torch.Generator().manual_seed(batch)
    x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
    return (model(x.to(device, dtype)).float() - y.to(device)).square().mean()


def wrapped(inner: torch.optim.Optimizer, fused: bool | None, **options: Any) -> Any:
    return polyamp.wrap_optimizer(inner, fused_step=fused, **{"loss_scale": SCALE, **options})


def ways(
    make: Callable[[Any], torch.optim.Optimizer],
    build: Callable[[], nn.Module] = network,
    **options: Any,
) -> tuple[Way, Way, Way]:
    """Return three ways: with polyamp's kernels, without, and plain; their models have the same weights."""
    first = build()
    models = [first, copy.deepcopy(first), copy.deepcopy(first)]
    inner = [make(model.parameters()) for model in models]
    plain = Plain(inner[2], options.get("max_grad_norm"))
    loops = [wrapped(inner[0], True, **options), wrapped(inner[1], False, **options), plain]
    return tuple(map(Way, models, loops))  # type: ignore[return-value]


def spoil(model: nn.Module, bad: float) -> None:
    """Put a value into the last gradient that is not None."""
    grads = [param.grad for param in model.parameters() if param.grad is not None and param.grad.numel()]
    values_of(grads[-1]).flatten()[-1:].fill_(bad)


def train(
    way: Way,
    steps: Iterable[int],
    overflows: dict[int, float] = OVERFLOWS,
    loss: Callable[[nn.Module, int], Tensor] = loss_of,
    micro_batches: int = 1,
) -> list[list[Tensor]]:
    """Train, and return the parameters after every step."""
    history = []
    for step in steps:
        way.opt.zero_grad()
        for micro in range(micro_batches):
            way.opt.backward(loss(way.model, step + micro) / micro_batches)
        if step in overflows:
            spoil(way.model, overflows[step])
        way.opt.step()
        history.append([param.detach().clone() for param in way.model.parameters()])
    return history


def close(one: Any, other: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def state_of(opt: Any) -> dict[int, dict[str, Any]]:
    """Return the optimizer's state on the CPU by the index of the parameter, without empty entries."""
    inner = opt.inner
    params = [param for group in inner.param_groups for param in group["params"]]
    kept = {place: inner.state[param] for place, param in enumerate(params) if inner.state.get(param)}
    filled = {place: {k: v for k, v in state.items() if v is not None} for place, state in kept.items()}
    return tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), filled)


def everything(way: Way) -> list[Any]:
    """Return all values that a skipped step must not change, bit for bit."""
    saved = way.opt.state_dict()
    saved.pop("policy", None)  # words, which torch does not compare
    saved.pop("loss_scale")
    return copy.deepcopy([list(way.model.parameters()), saved])


def operators(run: Callable[[], Any]) -> list[str]:
    """Return the names of polyamp's operators that ``run`` called."""
    with Calls() as calls:
        run()
    return calls.names
