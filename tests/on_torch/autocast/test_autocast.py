"""Autocast by policy: formats, nesting, threads, exceptions, decorators, compilation, warnings."""

import contextvars
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.backends.torch import autocast
from polyamp.errors import UnsupportedError

A = torch.ones(2, 2)


def product() -> torch.dtype:
    return torch.mm(A, A).dtype


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("float32", torch.float32),
        ("mixed_float16", torch.float16),
        ("mixed_bfloat16", torch.bfloat16),
        ("O2", torch.float16),
        ("float64", torch.float32),
    ],
)
def test_products_run_in_the_compute_format(policy: str, dtype: torch.dtype) -> None:
    with polyamp.autocast(policy, backend="torch"):
        assert product() == dtype
    assert product() == torch.float32


def test_one_object_may_be_entered_again_inside_itself() -> None:
    """Native autocast, entered so, stays on afterwards."""
    region = polyamp.autocast("mixed_bfloat16")
    with region, region, region:
        assert product() == torch.bfloat16
    assert product() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_generators_leave_regions_in_any_order(order: tuple[int, ...]) -> None:
    """Native autocast, left so, stays on afterwards."""

    def inside(policy: str) -> Iterator[None]:
        with polyamp.autocast(policy):
            yield

    entered = [inside(policy) for policy in ("mixed_float16", "float32", "mixed_bfloat16")]
    formats = [torch.float16, torch.float32, torch.bfloat16]
    for one in entered:
        next(one)
    for count, place in enumerate(order):
        left = [formats[one] for one in range(3) if one not in order[:count]]
        assert product() == left[-1]
        assert next(entered[place], None) is None
    assert product() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("rules", [{"softmax": "full"}, {"*_norm": "full"}, None])
@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "O3"])
def test_rules_that_say_what_native_autocast_does_change_nothing(policy: str, rules: dict[str, str] | None) -> None:
    with autocast(polyamp.policy(policy, rules=rules)):
        assert torch.softmax(A.half(), 0).dtype == torch.float32


def test_tensorfloat32_tells_how_to_get_it() -> None:
    policy = polyamp.policy("p=f32,c=tf32,o=f32")
    with pytest.warns(polyamp.PolyampWarning, match="set_float32_matmul_precision"), autocast(policy):
        assert product() == torch.float32


def test_eight_bits_are_refused() -> None:
    with (
        pytest.raises(UnsupportedError, match="8-bit"),
        autocast(polyamp.policy("p=f32,c=float8_e4m3fn")),
    ):
        pass
    assert product() == torch.float32


def test_entering_at_every_step_leaves_nothing_behind() -> None:
    def step() -> tuple[int, int]:
        with polyamp.autocast("mixed_bfloat16"):
            (A.clone().requires_grad_() * 2).sum().backward()
        return len(contextvars.copy_context()), sum(
            type(one).__module__.startswith("polyamp.") for one in gc.get_objects()
        )

    assert step() == step()


def test_a_float16_region_and_an_optimizer_that_was_wrapped_without_a_policy_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # none of other tests: the region could have been for one that has a loss scale
    monkeypatch.setattr("polyamp.backends.torch.step.optimizer.ALIVE", weakref.WeakSet())

    def step(optimizer: Any, policy: str) -> None:
        with polyamp.autocast(policy):
            loss = model(torch.ones(3, 4)).float().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    model = torch.nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with polyamp.autocast("mixed_float16"):
        pass  # before the optimizer was wrapped: not one of its forward passes
    unscaled = polyamp.wrap_optimizer(plain)
    for _ in range(2):
        step(unscaled, "float32")  # which somebody chose
    step(polyamp.wrap_optimizer(plain, "mixed_float16", loss_scale=polyamp.LossScale.none()), "mixed_float16")
    with pytest.warns(polyamp.PolyampWarning, match="wrapped without a policy") as caught:
        step(unscaled, "mixed_float16")
    assert caught[0].filename == __file__
    for_bfloat16 = polyamp.wrap_optimizer(plain, "mixed_bfloat16")
    step(for_bfloat16, "mixed_bfloat16")
    with pytest.warns(polyamp.PolyampWarning, match="wrapped without a loss scale"):
        step(for_bfloat16, "mixed_float16")


def steps_of(policy: str, ahead: Any, by: str = "backward") -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy)
    run = ahead(model)
    for _ in range(3):
        loss = run(torch.ones(3, 4)).float().square().mean()
        optimizer.backward(loss) if by == "backward" else optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("by", ["backward", "scale"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_an_optimizer_for_16_bits_that_never_meets_a_region_is_reported(policy: str, by: str) -> None:
    def plain(model: torch.nn.Module) -> Any:
        with torch.no_grad(), polyamp.autocast(policy):
            model(torch.ones(3, 4))  # a validation before is no region of its losses
        return model

    with pytest.warns(polyamp.PolyampWarning, match="computed in float32 alone: nothing runs in 16 bits"):
        steps_of(policy, plain, by)


def in_native_autocast(model: torch.nn.Module) -> Any:
    return torch.autocast("cpu", torch.float16)(model)


def in_a_checkpoint(model: torch.nn.Module) -> Any:
    def run(x: torch.Tensor) -> Any:
        with polyamp.autocast("mixed_float16"):
            return model(x)

    return lambda x: checkpoint(run, x.clone().requires_grad_(), use_reentrant=True)


def rewritten(model: torch.nn.Module) -> Any:
    return polyamp.rewrite(model, torch.ones(3, 4), policy="mixed_float16")


@pytest.mark.parametrize("ahead", [in_native_autocast, in_a_checkpoint, rewritten])
def test_an_optimizer_whose_losses_have_16_bits_in_another_way_is_not_reported(ahead: Any) -> None:
    steps_of("mixed_float16", ahead)
