"""Random steps of the compiled operators against float64: on the CPU, on a GPU, and on fibers (see test_fibers.py)."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyamp import LossScale, advance
from polyamp.backends.torch.kernels.arguments import SGD, Adam
from polyamp.backends.torch.kernels.control import APPLIED, decode
from support.torch_operators import STORAGES, Problem, same

pytestmark = pytest.mark.slow

OFFSETS = [0, 0, 1, 3, 4, 8]  # elements after an aligned address
MOST = 40_000  # elements of a tensor


class Scattered(Problem):
    """Tensors at random places: of a parameter's streams, some are aligned and others are not."""

    def _place(self, tensor: Tensor, offset: int | None = None) -> Tensor:
        return super()._place(tensor, OFFSETS[int(torch.randint(len(OFFSETS), (), generator=self.random))])


def random_adam(chance: random.Random) -> Adam:
    betas = chance.uniform(0, 0.99), chance.uniform(0.5, 0.9999)
    return Adam(10 ** chance.uniform(-4, -1), *betas, 10 ** chance.uniform(-8, -3), decay(chance), chance.randrange(4))


def random_sgd(chance: random.Random) -> SGD:
    return SGD(10 ** chance.uniform(-4, -1), chance.choice([0.0, 0.5, 0.99]), decay(chance), chance.randrange(4))


def decay(chance: random.Random) -> float:
    return chance.choice([0.0, 0.1])


def random_size(chance: random.Random) -> int:
    """Small as often as large."""
    return int((MOST + 1) ** chance.random()) - 1


def spoil(problem: Problem, chance: random.Random) -> bool:
    """Make one element of a gradient inf or NaN, where there is an element."""
    filled = [grad for grad in problem.grads if grad.numel()]
    if filled:
        grad = chance.choice(filled)
        grad[chance.randrange(grad.numel())] = chance.choice([math.inf, -math.inf, math.nan])
    return bool(filled)


def check_close(found: Tensor, expected: Tensor, rtol: float) -> None:
    """Check that values agree to rounding, but for one in 10,000, which are within a step of the largest learning rate.

    Where a gradient and the weight decay cancel, Adam divides what rounding left of their sum by its own size.
    """
    error = (found.double() - expected).abs()
    far = ~(error <= 1e-6 + rtol * expected.abs())
    assert far.sum() <= math.ceil(far.numel() / 10_000), error.max()
    assert (error[far] <= 0.1).all(), error.max()


def step_and_compare(operators: Any, problem: Problem) -> None:
    values, firsts, seconds = problem.in_float64()
    problem.step(operators)
    check_close(torch.cat(list(problem.values())), torch.cat(list(values)), rtol=4e-7)
    for moments, wanted in ((problem.firsts, firsts), (problem.seconds, seconds)):
        for found, expected in zip(moments, wanted, strict=bool(moments)):
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def step_and_see_it_skipped(operators: Any, problem: Problem) -> None:
    before = problem.bits()
    problem.step(operators)
    assert same(problem.bits(), before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@given(
    rule=st.sampled_from([random_adam, random_sgd]),
    groups=st.sampled_from([1, 2, 3, 30]),
    storage=st.sampled_from(list(STORAGES)),
    tensors=st.sampled_from([1, 2, 7, 40, 300]),
    max_norm=st.sampled_from([math.inf, 1e3, 1.0]),
    scale=st.sampled_from([0.125, 1.0, 3.7, 1000.3, 2.0**12]),
    overflows=st.lists(st.booleans(), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_random_steps_are_those_of_float64(
    compiled: Any,
    device: str,
    rule: Any,
    groups: int,
    storage: str,
    tensors: int,
    max_norm: float,
    scale: float,
    overflows: list[bool],
    seed: int,
) -> None:
    chance = random.Random(seed)
    rules = [rule(chance) for _ in range(groups)]
    shapes = [(random_size(chance),) for _ in range(tensors)]
    config = LossScale(init=scale, min=2.0**-10, interval=2).in_float32()
    problem = Scattered(rules, storage, shapes, device=device, max_norm=max_norm, scale=scale, config=config, seed=seed)
    state = config.initial_state()
    for overflow in overflows:
        problem.new_gradients()
        overflows_now = overflow and spoil(problem, chance)
        bad_loss = chance.random() < 0.2
        finite = not (overflows_now or bad_loss)
        problem.losses = [torch.tensor(math.nan if bad_loss else 1.0, device=device)]
        if finite:
            step_and_compare(compiled, problem)
        else:
            step_and_see_it_skipped(compiled, problem)
        state = advance(config, state, finite)
        assert decode(problem.report.tolist())[0] == decode(problem.control.tolist())[0] == state
        assert problem.report[APPLIED : APPLIED + 2].tolist() == [finite, not bad_loss]
        problem.scale.fill_(state.scale)
