"""Runs of `polyamp.parity` without a framework: lists of numbers, and a training that takes no time."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import polyamp
from polyamp.diagnosis.comparison import Comparison, Parity, Question, Run


def runs(values: Iterable[float]) -> tuple[Run, ...]:
    return tuple(Run(seed, {"loss": float(value)}) for seed, value in enumerate(values))


def compared(
    values: Sequence[float],
    reference: Sequence[float] | None = None,
    *,
    policy: str = "mixed_float16",
    control: str = "",
    **asked: Any,
) -> Comparison:
    """Compare losses with those of float32, which are 0 unless they are given; the margin is 1."""
    float32 = runs([0.0] * len(values) if reference is None else reference)
    question = Question(**{"margin": 1.0, "metric": "loss", **asked})
    return Comparison(policy, runs(values), float32, question, control)


def task(
    damage: Callable[[polyamp.Policy], float] = lambda policy: 0.0, noise: float = 0.001, calls: list[Any] | None = None
) -> Callable[[polyamp.Policy, int], dict[str, float]]:
    """Return a training without a framework: a loss that depends on the seed, and by some noise on the policy."""

    def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
        assert polyamp.current_policy() == policy
        if calls is not None:
            calls.append((str(policy), seed))
        low = policy.compute != "float32"
        other = np.random.default_rng([seed, low, len(str(policy))]).normal(0, noise) if low else 0.0
        return {"loss": 2 + np.random.default_rng(seed).normal(0, 0.3) + other + damage(policy), "steps": 7.0}

    return train


def quiet(train: Any, policy: Any = "mixed_float16", **options: Any) -> Parity:
    return polyamp.parity(train, policy, **{"progress": False, "controls": False, **options})
