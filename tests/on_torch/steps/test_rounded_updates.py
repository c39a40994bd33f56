"""A control that rounds updates reaches every way in which PyTorch's optimizers step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyamp
from polyamp.backends.torch import GradScaler
from polyamp.backends.torch.apex import amp
from polyamp.backends.torch.attached import attach
from polyamp.controls import Control, broken, for_policy
from support.harness_torch import skipping_on_device

LOST, KEPT = -(2.0**-12), -(2.0**-10)  # the updates of a weight of 1.0 in float16
ROUNDED = Control("16-bit updates", update_format="float16")
UNSCALED = Control("no loss scaling", polyamp.LossScale.fixed(1))


def weights(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2, dtype=dtype))


def is_rounded(weight: torch.Tensor, steps: int = 1) -> bool:
    return weight.tolist() == [1.0, 1.0 - steps * KEPT]


def push(opt: Any, weight: torch.Tensor) -> None:
    opt.backward((weight * torch.tensor([LOST, KEPT])).sum())
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize(
    "options",
    [{}, {"foreach": True}, {"fused": True}, {"momentum": 1e-30}],
    ids=["plain", "foreach", "fused", "momentum"],
)
@pytest.mark.parametrize("wrapping", [{}, {"max_grad_norm": 1.0}, {"fused_step": True}], ids=str)
def test_every_kernel(options: dict[str, Any], wrapping: dict[str, Any]) -> None:
    weight = weights()
    with broken(ROUNDED):
        opt = polyamp.wrap_optimizer(torch.optim.SGD([weight], lr=1.0, **options), "mixed_float16", **wrapping)
    for steps in (1, 2):
        push(opt, weight)
        assert is_rounded(weight, steps)


@pytest.mark.parametrize("fused_step", [None, True])
def test_a_kernel_that_skips_on_the_device_rounds_nothing(fused_step: bool | None) -> None:
    weight = weights()
    plain = torch.optim.SGD([weight], lr=1.0, fused=True)
    with broken(ROUNDED):
        opt = skipping_on_device(polyamp.wrap_optimizer(plain, "mixed_float16", fused_step=fused_step))
    push(opt, weight)
    fine = torch.tensor([1.0 + 2.0**-13, 1.0])
    with torch.no_grad():
        weight.copy_(fine)
    weight.grad = torch.tensor([1.0, float("nan")])
    opt.step(scaled=True)
    assert not opt.last_step
    assert torch.equal(weight, fine)


@pytest.mark.parametrize("fused_step", [None, True])
@pytest.mark.parametrize("kind", [None, False])
def test_master_weights_of_every_kind(kind: Any, fused_step: bool | None) -> None:
    weight = weights(torch.bfloat16)
    with broken(for_policy("bfloat16")[0]):
        sgd = torch.optim.SGD([weight], lr=1.0)
        opt = polyamp.wrap_optimizer(sgd, "bfloat16", master_weights=kind, fused_step=fused_step)
    for _ in range(8):
        weight.grad = torch.tensor([-(2.0**-9), -(2.0**-7)], dtype=torch.bfloat16)
        opt.step()
    assert weight.tolist() == [1.0, 1.0 + 2.0**-4]


def test_an_attached_optimizer() -> None:
    weight = weights()
    sgd = torch.optim.SGD([weight], lr=1.0)
    with broken(ROUNDED) as tally:
        wrapper = attach(sgd, "mixed_float16")
    wrapper.backward((weight * torch.tensor([LOST, KEPT])).sum())
    sgd.step()
    assert is_rounded(weight)
    assert tally.reached == 1


def test_a_closure_that_is_evaluated_again() -> None:
    weight = torch.nn.Parameter(torch.full((3,), 0.7))
    with broken(ROUNDED):
        opt = polyamp.wrap_optimizer(torch.optim.LBFGS([weight], lr=0.1, max_iter=2), "mixed_float16")

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = (weight - 0.3).square().sum()
        opt.backward(loss)
        return loss

    opt.step(closure)
    assert opt.last_step
    assert not torch.equal(weight, torch.full((3,), 0.7))
    assert torch.equal(weight, weight.half().float())


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_scaler_with_plain_optimizers(policy: str) -> None:
    weight, control = weights(), for_policy(policy)[-1]
    lost, kept = (LOST, KEPT) if policy == "mixed_float16" else (-(2.0**-9), -(2.0**-7))
    sgd = torch.optim.SGD([weight], lr=1.0)
    with broken(control) as tally:
        scaler = GradScaler("cpu", policy=policy)
    for _ in range(4):
        sgd.zero_grad()
        scaler.scale((weight * torch.tensor([lost, kept])).sum()).backward()
        scaler.step(sgd)
        scaler.update()
    assert weight.tolist() == [1.0, 1.0 - 4 * kept]
    assert tally.reached == 1


@pytest.mark.parametrize("options", [{}, {"policy": "mixed_float16"}, {"loss_scale": polyamp.LossScale()}], ids=str)
def test_a_scaler_does_not_scale(options: dict[str, Any]) -> None:
    with broken(UNSCALED):
        scaler = GradScaler("cpu", **options)
    assert float(scaler.scale(torch.tensor(2.0))) == 2.0


def test_optimizers_that_share_a_loss_scale_are_each_reached() -> None:
    first, second = weights(), weights()
    plain = [torch.optim.SGD([weight], lr=1.0) for weight in (first, second)]
    with broken(ROUNDED) as tally:
        opts = polyamp.wrap_optimizer(plain, "mixed_float16")
    opts[0].backward(((first + second) * torch.tensor([LOST, KEPT])).sum())
    for opt in opts:
        opt.step()
    assert is_rounded(first)
    assert is_rounded(second)
    assert tally.reached == 2


def test_an_optimizer_without_hooks_is_not_reached() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
            self.defaults = inner.defaults

        def step(self, closure: Any = None) -> Any:
            return self.inner.step()

    weight = weights()
    with broken(ROUNDED) as tally:
        opt = polyamp.wrap_optimizer(Around(torch.optim.SGD([weight], lr=1.0)), "mixed_float16")
    push(opt, weight)
    assert tally.reached == 0
    assert weight.tolist() == [1.0 - LOST, 1.0 - KEPT]


@pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")
def test_the_scale_that_apex_shares_between_optimizers() -> None:
    model = torch.nn.Linear(2, 1)
    with broken(UNSCALED) as tally:
        _, opt = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level="O2", loss_scale=1024.0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), opt) as scaled:
        assert scaled.item() == model(torch.ones(1, 2)).sum().item()
        scaled.backward()
    assert tally.reached == 1
