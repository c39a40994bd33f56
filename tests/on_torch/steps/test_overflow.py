"""What a skipped step says: which parameters, by name, and whether a smaller loss scale can help."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler, LossScaledOptimizer
from polyamp.skips import NONFINITE_LOSS
from support.harness_torch import skipping_on_device


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def overflow(opt: LossScaledOptimizer, net: torch.nn.Module, **spoiled: float) -> None:
    opt.zero_grad()
    opt.backward(net(torch.ones(2, 3)).mean())
    for name, value in spoiled.items():
        net.get_parameter(name.replace("_", ".", 1)).grad.view(-1)[0] = value
    opt.step()


def named_optimizer(net: torch.nn.Module) -> LossScaledOptimizer:
    names = [(f"given.{name}", param) for name, param in net.named_parameters()]
    return polyamp.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), "fp16", named_parameters=names)


def optimizer_of_named(net: torch.nn.Module) -> LossScaledOptimizer:
    return polyamp.wrap_optimizer(torch.optim.SGD(net.named_parameters(), lr=0.1), "fp16")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda net: polyamp.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), "fp16"), "2.bias"),
        (named_optimizer, "given.2.bias"),
        (optimizer_of_named, "2.bias"),
    ],
    ids=["names found in the module", "names given", "names of the optimizer"],
)
def test_a_skip_names_the_parameters(make: Callable[[Any], LossScaledOptimizer], name: str) -> None:
    net = model()
    opt = make(net)
    overflow(opt, net)
    assert opt.last_step.reason == ""
    overflow(opt, net, **{"2_bias": math.nan})
    assert opt.last_step.reason.startswith(f"gradients were not finite: {name} (1 NaN of 1)")
    assert [found.name for found in opt.overflowed()] == [name]
    reason = opt.last_step.reason
    opt.zero_grad()
    assert opt.last_step.reason == reason
    assert opt.overflowed() == []


def test_master_weights_go_by_the_names_of_their_parameters() -> None:
    net = model()
    plain = torch.optim.SGD(polyamp.convert(net, "O3").parameters(), lr=0.1)
    opt = polyamp.wrap_optimizer(plain, "O2", loss_scale=LossScale(init=8.0))
    opt.zero_grad()
    opt.backward(net(torch.ones(2, 3, dtype=torch.float16)).mean())
    net.get_parameter("0.weight").grad[1] = math.inf
    opt.step()
    assert "0.weight (3 inf of 12)" in opt.last_step.reason


def test_parameters_of_no_module_go_by_their_place() -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(8)]
    opt = LossScaledOptimizer(torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], lr=0.1))
    for weight in weights[1:]:
        weight.grad = torch.full((2,), math.inf)
    opt.step(scaled=True)
    assert "group 1, parameter 0 of shape (2,) (2 inf of 2)" in opt.last_step.reason
    assert "and 2 more parameters" in opt.last_step.reason
    assert len(opt.overflowed()) == 7


def test_a_step_that_the_device_skipped_is_explained_when_somebody_asks() -> None:
    net = model()
    made = torch.optim.AdamW(net.parameters(), fused=True)
    opt = skipping_on_device(polyamp.wrap_optimizer(made, "mixed_float16"))
    overflow(opt, net)
    overflow(opt, net, **{"0_bias": math.inf})
    assert isinstance(opt.last_step.flag, torch.Tensor)
    assert "0.bias (1 inf of 4)" in opt.last_step.reason
    opt.zero_grad()
    assert opt.last_step.reason == "gradients were not finite"


def test_one_loss_of_several_that_is_not_finite_is_the_reason() -> None:
    net = model()
    opt = optimizer_of_named(net)
    for factor in (math.inf, 1.0):
        with warnings.catch_warnings(action="ignore"):
            opt.backward(net(torch.ones(2, 3)).mean() * factor)
    opt.step()
    assert opt.last_step.reason.startswith(NONFINITE_LOSS)


def test_too_many_skips_raise_with_the_parameters_and_the_verdict() -> None:
    net = model()
    opt = polyamp.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), loss_scale=LossScale(max_skips=2))
    overflow(opt, net, **{"2_weight": math.inf})
    with pytest.raises(polyamp.errors.LossScaleError, match="2 steps in a row") as caught:
        overflow(opt, net, **{"2_weight": math.inf, "0_weight": math.nan})
    assert "0.weight (1 NaN of 12), 2.weight (1 inf of 4); the loss was finite" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(1.0, "the loss was finite"), (math.nan, NONFINITE_LOSS)],
)
def test_the_scaler_tells_a_bad_forward_pass_from_a_scale_that_is_too_high(value: float, verdict: str) -> None:
    net = model()
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler("cpu", loss_scale=LossScale(max_skips=2))
    polyamp.errors.forget_warnings()
    for _ in range(2):
        plain.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", polyamp.PolyampWarning)
            scaler.scale(net(torch.ones(2, 3)).mean() * value).backward()
        net.get_parameter("0.bias").grad[0] = math.nan
        scaler.step(plain)
        assert verdict in scaler.last_step.reason
        if scaler.last_step.skipped_in_a_row == 0:
            scaler.update()
            assert scaler.last_step.skipped_in_a_row == 1
    with pytest.raises(polyamp.errors.LossScaleError, match=verdict):
        scaler.update()


def test_sparse_complex_and_empty_gradients_are_looked_through() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    weights = [torch.ones(2, dtype=torch.complex64), torch.ones(0)]
    params = [*embedding.parameters(), *(weight.requires_grad_() for weight in weights)]
    opt = LossScaledOptimizer(torch.optim.SGD(params, lr=0.1))
    opt.backward(embedding(torch.tensor([1, 1])).sum() + weights[0].abs().sum() + weights[1].sum())
    embedding.weight.grad._values()[0, 0] = math.inf
    weights[0].grad[1] = complex(0.0, math.nan)
    opt.step()
    assert [found[1:] for found in opt.overflowed()] == [(1, 0, 2), (0, 1, 4)]
    assert opt.overflowed()[0].name == "weight"
