"""Random programs: the same operation has the same class and the same format in every framework."""

from __future__ import annotations

from typing import Any

import pytest

import polyamp
from polyamp.backends.jax import explain as explain_jax
from polyamp.backends.tensorflow import explain as explain_tensorflow
from polyamp.backends.torch.graphs.explain import explain as explain_torch
from support.random_programs import in_jax, in_tensorflow, in_torch, program

MOVING = {
    "broadcast",
    "reshape",
    "identity",
    "constant",
    "variable",
    "cast",
    "fill",
    "tile",
}  # each has one
WRITTEN_AS = {"relu": "maximum", "pow": "square"}  # by JAX and by PyTorch, whose classes are the same
SEEDS = range(12)


def decided(plan: polyamp.Plan) -> list[tuple[str, str, str]]:
    kept = (op for op in plan.operations if op.name not in MOVING and op.format != "as written")
    return sorted((WRITTEN_AS.get(op.name, op.name), op.op_class, op.format) for op in kept)


def plans(seed: int, policy: str) -> list[list[Any]]:
    run = program(seed)
    return [
        decided(explain(*made(run), policy=policy))
        for explain, made in ((explain_torch, in_torch), (explain_jax, in_jax), (explain_tensorflow, in_tensorflow))
    ]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_are_decided_alike(seed: int, policy: str) -> None:
    torch, jax, tensorflow = plans(seed, policy)
    assert torch == jax == tensorflow != []
