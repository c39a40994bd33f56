"""`polyamp.profile` of steps whose composition is known, in every framework."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import polyamp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(512, 250)).astype(np.float32)
WEIGHTS = {
    "inner": RNG.normal(size=(250, 256)).astype(np.float32),
    "outer": RNG.normal(size=(256, 16)).astype(np.float32),
}


def torch_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Make a training step with a product of a size that is not divisible by 8 at ``inner``, and one at ``outer``."""
    model = torch.nn.Sequential()
    for name, weight in WEIGHTS.items():
        model.add_module(name, torch.nn.Linear(*weight.shape))
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), "mixed_bfloat16")

    def step(x: torch.Tensor) -> torch.Tensor:
        with polyamp.autocast("mixed_bfloat16"):
            loss = model(x).square().mean()
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        return loss

    return step, (torch.from_numpy(X),)


def jax_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    tx = polyamp.wrap_optimizer(optax.sgd(1e-3), "mixed_bfloat16")

    def loss_fn(params: Any, x: Any) -> Any:
        for name, weight in params.items():
            with jax.named_scope(name):
                x = x @ weight
        return jnp.square(x).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = polyamp.value_and_grad(loss_fn, "mixed_bfloat16")(state, params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = {name: jnp.asarray(weight) for name, weight in WEIGHTS.items()}
    return step, (params, tx.init(params), jnp.asarray(X))


STEPS = {"torch": torch_step, "jax": jax_step}


@pytest.fixture(params=STEPS, scope="module")
def report(request, tmp_path_factory) -> Any:
    step, args = STEPS[request.param]()
    return polyamp.profile(step, *args, runs=2, folder=tmp_path_factory.mktemp("traces"))


def test_the_shares_are_those_of_the_whole_step(report) -> None:
    assert sum(report.shares.values()) == pytest.approx(1)
    assert sum(one.share for one in report.work) + report.shares["host"] == pytest.approx(1)
    assert all(0 <= part <= 1 for part in report.shares.values())


def test_products_casts_and_the_optimizer_are_found_at_their_places(report) -> None:
    found = {(one.name, one.where): one for one in report.work}
    for where in ("inner", "outer"):
        assert found["matmul", where].kind in ("16-bit products", "other compute")
        assert found["matmul", where].times >= 1
    assert found["update", ""].kind == "optimizer"
    assert any(one.kind == "casts" and one.where == "inner" for one in report.work)
