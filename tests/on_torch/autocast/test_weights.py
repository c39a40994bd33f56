"""Casts of weights in a region: made once, and again after an update."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch.autocast import regions
from support.harness_torch import casts_of

pytestmark = pytest.mark.usefixtures("module_hooks_of_its_own")

X = torch.arange(12.0).reshape(3, 4) / 12
OVERRIDDEN = polyamp.policy("mixed_bfloat16", rules={"layer_norm": "lower"})

UPDATES: dict[str, Callable[[nn.Parameter], object]] = {
    "add_": lambda weight: weight.add_(1),
    "-= lr * g": lambda weight: weight.sub_(0.5 * torch.ones(4)),
    "copy_": lambda weight: weight.copy_(torch.full((4,), 5.0)),
    "item": lambda weight: weight.__setitem__(0, 7.0),
    "row": lambda weight: weight[0].add_(1),
    "data": lambda weight: weight.data.add_(1),
    "detach": lambda weight: weight.detach().mul_(3),
    "normal_": lambda weight: nn.init.normal_(weight),
    "lerp_": lambda weight: weight.lerp_(torch.full((4,), 9.0), 0.5),
    "foreach": lambda weight: torch._foreach_add_([weight], 1.0),
}


def linear() -> tuple[nn.Parameter, Callable[[], Tensor]]:
    layer = nn.Linear(4, 2)
    return layer.weight, lambda: layer(X)


def layer_norm() -> tuple[nn.Parameter, Callable[[], Tensor]]:
    layer = nn.LayerNorm(4)
    return layer.weight, lambda: layer(X)


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES.keys())
@pytest.mark.parametrize("make", [linear, layer_norm])
def test_an_update_inside_a_region_is_seen(
    make: Callable[[], tuple[nn.Parameter, Callable[[], Tensor]]], update: Callable[[nn.Parameter], object]
) -> None:
    """Native autocast serves the weight of before."""
    weight, run = make()
    with polyamp.autocast(OVERRIDDEN):
        before = run()
        with torch.no_grad():
            update(weight)
        after = run()
    with polyamp.autocast(OVERRIDDEN):
        assert torch.equal(after, run())
        assert not torch.equal(after, before)


def test_an_update_that_nothing_watches_is_seen_by_the_weights_version() -> None:
    weight, run = layer_norm()
    with polyamp.autocast(OVERRIDDEN):
        before = run()
        with torch.no_grad():
            weight.tanh_()
        assert not torch.equal(run(), before)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("fused_step", ["not wrapped", False, True])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", OVERRIDDEN], ids=["default", "rules"])
def test_an_optimizers_step_inside_a_region_is_seen(
    policy: polyamp.Policy | str, fused_step: bool | str, options: dict[str, bool]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    opt = torch.optim.SGD(model.parameters(), lr=0.5, **options)  # fused, it calls no other operator that is watched
    if fused_step != "not wrapped":
        opt = polyamp.wrap_optimizer(opt, "mixed_bfloat16", fused_step=fused_step)
    with polyamp.autocast(policy):
        model(X).float().square().sum().backward()
        before = model(X)
        opt.step()
        after = model(X)
    with polyamp.autocast(policy):
        assert torch.equal(after, model(X))
        assert not torch.equal(after, before)


@pytest.mark.parametrize(("make", "policy"), [(linear, "mixed_bfloat16"), (layer_norm, OVERRIDDEN)])
def test_a_weight_is_cast_once_in_a_region(
    make: Callable[[], tuple[nn.Parameter, Callable[[], Tensor]]], policy: polyamp.Policy | str
) -> None:
    _, run = make()
    with polyamp.autocast(policy):
        first, second = casts_of(run), casts_of(run)
    assert second == first - 2  # weight and bias
    with polyamp.autocast(policy):
        assert casts_of(run) == first


def test_the_setting_of_native_autocast_holds() -> None:
    _, run = layer_norm()
    torch.set_autocast_cache_enabled(False)
    try:
        with polyamp.autocast(OVERRIDDEN):
            assert casts_of(run) == casts_of(run)
            torch.set_autocast_cache_enabled(True)
        assert not torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(True)


def test_gradients_reach_a_weight_that_was_first_used_without_them() -> None:
    layer = nn.LayerNorm(4)
    with polyamp.autocast(OVERRIDDEN):
        with torch.no_grad():
            layer(X)
        layer(X).float().square().sum().backward()
    assert layer.weight.grad is not None


def test_casts_end_with_the_outermost_region() -> None:
    _, run = layer_norm()
    with polyamp.autocast(OVERRIDDEN):
        with polyamp.autocast(OVERRIDDEN):
            first = casts_of(run)
        assert casts_of(run) == first - 2
    with polyamp.autocast(OVERRIDDEN):
        assert casts_of(run) == first
    assert regions.casts_here() is None


def test_activations_are_updated_as_ever() -> None:
    with polyamp.autocast(OVERRIDDEN):
        x = X.clone().requires_grad_()
        y = x * 2
        y += 1
        y.mul_(3)
        y[0] = 0.0
        assert y.add_(1) is y
        y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([[0.0], [6.0], [6.0]]).expand(3, 4))
