"""Regions with rules under activation checkpointing: the second run computes the same bits."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.backends.torch import autocast

pytestmark = pytest.mark.usefixtures("module_hooks_of_its_own")

torch.manual_seed(0)
X = torch.randn(4, 8)
LOWER = polyamp.policy("mixed_bfloat16", rules={"softmax": "lower", "layer_norm": "lower"})
PATHS = polyamp.policy("mixed_bfloat16", rules={"layers.*.norm": "lower", "head": "lower"})

Run = Callable[..., Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.softmax(self.norm(self.linear(x)), -1) + x
        return result


class Model(nn.Module):
    """Layers, each checkpointed by ``run``, with another region inside one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))

    def forward(self, x: Tensor, run: Run) -> Tensor:
        for layer in self.layers:
            x = run(layer, x)
        result: Tensor = self.head(x)
        return result


def plain(fn: Run, *args: Any) -> Any:
    return fn(*args)


def reentrant(fn: Run, *args: Any) -> Any:
    return checkpoint(fn, *args, use_reentrant=True)


def not_reentrant(fn: Run, *args: Any) -> Any:
    return checkpoint(fn, *args, use_reentrant=False)


class ModelWithRegions(Model):
    """The checkpointed function enters regions itself; its last node is recorded under another policy."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        def fn(x: Tensor) -> Tensor:
            first = torch.softmax(self.layers[0](x), -1)
            with autocast(polyamp.policy("mixed_bfloat16", rules={"softmax": "full"})):
                second = torch.softmax(first, -1)
            with autocast(polyamp.policy("float32")):
                third = torch.softmax(self.layers[1](x), -1)
            with autocast(polyamp.policy("mixed_bfloat16")):
                return torch.softmax(first * second.to(first.dtype), -1) * third

        result: Tensor = self.head(run(fn, x))
        return result


def gradients(kind: type[Model], run: Run, policy: polyamp.Policy, *, inside: bool = False) -> list[Tensor]:
    model, x = kind(), X.clone().requires_grad_()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) + index).reshape(parameter.shape) / 3)
    with polyamp.autocast(policy):
        loss = model(x, run).float().square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("policy", [LOWER, PATHS], ids=["operations", "paths"])
@pytest.mark.parametrize("kind", [Model, ModelWithRegions])
@pytest.mark.parametrize("run", [reentrant, not_reentrant])
def test_gradients_are_those_without_checkpointing(
    run: Run, kind: type[Model], policy: polyamp.Policy, inside: bool
) -> None:
    ours, plainly = (gradients(kind, how, policy, inside=inside) for how in (run, plain))
    assert all(map(torch.equal, ours, plainly))


def watched_softmax() -> tuple[Callable[[Tensor], Tensor], list[torch.dtype]]:
    """A function, and the types of softmax's results in each of its runs."""
    seen = []

    def fn(x: Tensor) -> Tensor:
        result = torch.softmax(x, -1)
        seen.append(result.dtype)
        return result * result

    return fn, seen


def in_a_new_thread(fn: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


@pytest.mark.parametrize("call", [in_a_new_thread, plain], ids=["threads", "one thread"])
@pytest.mark.parametrize("run", [reentrant, not_reentrant])
def test_a_policy_of_a_later_region_does_not_reach_what_is_run_again(run: Run, call: Run) -> None:
    # As on CUDA, where autograd has a thread for each device. The threads number their nodes alike.
    fn, seen = watched_softmax()

    def first() -> Tensor:
        with polyamp.autocast(LOWER):
            return run(fn, X.clone().requires_grad_()).float().sum()

    def later() -> None:
        with polyamp.autocast(polyamp.policy("mixed_bfloat16", rules={"exp": "lower"})):
            torch.softmax(X.clone().requires_grad_() * 2, -1).exp().log().exp().log().exp()

    loss = call(first)
    call(later)
    call(loss.backward)
    assert seen == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("run", [plain, reentrant, not_reentrant])
def test_a_function_with_torchs_decorators_has_its_region_backward_too(run: Run) -> None:
    softmax, seen = watched_softmax()

    class Watched(torch.autograd.Function):
        forward = staticmethod(torch.amp.custom_fwd(lambda _, x: x + softmax(x) * 0, device_type="cpu"))
        backward = staticmethod(torch.amp.custom_bwd(lambda _, grad: grad + softmax(X) * 0, device_type="cpu"))

    with polyamp.autocast(LOWER):
        loss = run(Watched.apply, X.clone().requires_grad_()).sum()
    with polyamp.autocast("mixed_bfloat16"):
        loss.backward()
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("run", [reentrant, not_reentrant])
def test_native_regions_are_run_again_natively(run: Run) -> None:
    fn, seen = watched_softmax()
    x = X.clone().requires_grad_()
    with polyamp.autocast(LOWER):
        _ = torch.softmax(x * 2, -1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(fn, x).sum()
    loss.backward()
    assert seen == [torch.float32, torch.float32]


def test_hooks_on_modules_stay_as_long_as_the_graph() -> None:
    layer, x, hooks = Layer(), X.clone().requires_grad_(), nn.modules.module._global_forward_pre_hooks
    before = list(hooks)
    with polyamp.autocast(LOWER):
        loss = not_reentrant(layer, x).float().sum()
    assert list(hooks) != before
    loss.backward()
    del loss
    assert list(hooks) == before
