"""Products that are multiplications, and integers that become floating values: neither is rounded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp
from support.jax_scenarios import POLICIES

L = 4097
P = {"f": 1e4 ** -(jnp.arange(8.0) / 8), "planes": jnp.full((2, 8), 0.1), "w": jnp.eye(8)}
X, IDS = jnp.ones((L, 8)), jnp.arange(L)
NOTHING = (((), ()), ((), ()))

MULTIPLIED: dict[str, Callable[[Any, Any], Any]] = {
    "einsum": lambda p, ids: jnp.einsum("i,j->ij", ids, p["f"]),
    "einsum of a range": lambda p, ids: jnp.einsum("i,j->ij", jnp.arange(L), p["f"]),
    "einsum of a floating range": lambda p, ids: jnp.einsum("i,j->ij", jnp.arange(L, dtype=jnp.float32), p["f"]),
    "einsum over a batch": lambda p, ids: jnp.einsum("bi,bj->bij", ids[None], p["f"][None])[0],
    "matmul": lambda p, ids: ids.astype(jnp.float32)[:, None] @ p["f"][None],
    "dot_general": lambda p, ids: jax.lax.dot_general(ids.astype(jnp.float32), p["f"], NOTHING),
    "tensordot": lambda p, ids: jnp.tensordot(ids, p["f"], 0),
}
SUMMED: dict[str, Callable[[Any, Any], Any]] = {
    "of an argument": lambda p, ids: jnp.stack([ids, ids // 2], -1) @ p["planes"],
    "of a range": lambda p, ids: jnp.stack([jnp.arange(float(L))] * 2, -1) @ p["planes"],
    "of a constant": lambda p, ids: jnp.stack([IDS, IDS], -1).astype(jnp.float32) @ p["planes"],
}
CASES = [(angles, name) for cases, name in ((MULTIPLIED, "mul"), (SUMMED, "matmul")) for angles in cases.values()]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("angles", "name"), CASES)
def test_positions_times_frequencies_are_not_rounded(angles: Any, name: str, policy: str) -> None:
    def loss(p: Any, x: Any, ids: Any) -> Any:
        return (jnp.sin(angles(p, ids)) * (x @ p["w"])).mean()

    exact = jax.value_and_grad(loss)(P, X, IDS)
    found = jax.jit(jax.value_and_grad(polyamp.autocast(loss, policy)))(P, X, IDS)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert jnp.linalg.norm(ours - theirs) <= 2.0**-5 * jnp.linalg.norm(theirs)
    product = next(
        op for op in polyamp.explain(loss, P, X, IDS, policy=policy).operations if op.native == "dot_general"
    )
    assert (product.name, product.format) == (name, "float32")
    assert name == "mul" or product.reason.startswith("integers beyond ")


def formats(function: Callable[..., Any]) -> list[tuple[str, str]]:
    plan = polyamp.explain(function, P, jnp.ones((4, 8)), jnp.arange(4), policy="mixed_bfloat16")
    named = ("dot_general", "mul", "integer_pow", "reduce_sum")
    return [(op.name, op.format) for op in plan.operations if op.native in named]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda p, x, ids: (x @ p["w"])[:, :1] @ p["w"][:1], [("matmul", "bfloat16"), ("mul", "bfloat16")]),
        (lambda p, x, ids: jax.nn.one_hot(ids, 8) @ p["w"], [("matmul", "bfloat16")]),
        (lambda p, x, ids: (ids > 2) @ x, [("matmul", "bfloat16")]),
        (lambda p, x, ids: ids.astype(jnp.uint8).astype(jnp.float32) @ x, [("matmul", "bfloat16")]),
        (lambda p, x, ids: jnp.arange(4) @ x, [("matmul", "bfloat16")]),
        (lambda p, x, ids: ids @ x, [("matmul", "float32")]),
        (
            lambda p, x, ids: jnp.einsum("id,id->i", x @ p["w"], x @ p["w"]),
            [("matmul", "bfloat16")] * 2 + [("square", "float32")],
        ),
    ],
)
def test_what_is_decided_of_products(function: Callable[..., Any], expected: list[tuple[str, str]]) -> None:
    assert formats(function) == expected


def test_the_gradient_of_a_product_is_one_though_it_sums_nothing() -> None:
    """With one row, the gradient of the weight is an outer product."""

    def gradient(p: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(p["w"])

    plan = polyamp.explain(gradient, P, X[:1], policy="mixed_bfloat16")
    products = [(op.name, op.format) for op in plan.operations if op.native == "dot_general"]
    assert products == [("matmul", "bfloat16")] * 2


# --- squared distances that are written out ---------------------------------------------------------------------------


def squares(a: Any) -> Any:
    return (a**2).sum(-1)


DISTANCES: dict[str, Callable[[Any, Any], Any]] = {
    "a2 - 2ab + b2": lambda a, b: squares(a)[:, None] - 2 * a @ b.T + squares(b),
    "(a2 + b2) - 2ab": lambda a, b: (a * a).sum(1, keepdims=True) + (b * b).sum(1) - 2 * jnp.matmul(a, b.T),
    "a2 + (b2 - 2ab)": lambda a, b: squares(a)[:, None] + (squares(b) - (2 * a) @ b.T),
    "-2ab + a2 + b2": lambda a, b: -2 * jnp.einsum("id,jd->ij", a, b) + jnp.square(a).sum(1)[:, None] + squares(b),
    "einsum": lambda a, b: jnp.einsum("id,id->i", a, a)[:, None] + jnp.vecdot(b, b) - 2 * a @ b.T,
    "norms": lambda a, b: jnp.linalg.norm(a, axis=1)[:, None] ** 2 + jnp.linalg.norm(b, axis=1) ** 2 - 2 * a @ b.T,
    "of a codebook alone": lambda a, b: squares(b) - 2 * a @ b.T,
    "a kernel": lambda a, b: jnp.exp((2 * a @ b.T - squares(a)[:, None] - squares(b)) / 5000),
}
F, RANDOM = "mixed_bfloat16", np.random.default_rng(0)
ROWS = jnp.asarray(100 * RANDOM.random((16, 8)), jnp.bfloat16).astype(jnp.float32)
CODES = {"codes": jnp.asarray(100 * RANDOM.random((16, 8)), jnp.float32), "w": jnp.eye(8)}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("distance", DISTANCES.values(), ids=list(DISTANCES))
def test_the_product_in_a_distance_is_not_rounded(distance: Any, inside: bool) -> None:
    def loss(p: Any, x: Any) -> Any:
        found = distance(x @ p["w"], p["codes"])
        return (found * jnp.cos(jnp.arange(found.size).reshape(found.shape))).sum()

    exact = jax.value_and_grad(loss)(CODES, ROWS)
    mixed = [polyamp.autocast(jax.value_and_grad(loss), F), jax.value_and_grad(polyamp.autocast(loss, F))][inside]
    found = jax.jit(mixed)(CODES, ROWS)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert jnp.linalg.norm(ours - theirs) <= 1e-2 * jnp.linalg.norm(theirs)


def test_other_products_of_what_is_squared_stay_in_16_bits() -> None:
    def loss(p: Any, x: Any) -> Any:
        return jax.nn.log_softmax(x @ p["w"] @ p["codes"].T).mean() + 0.1 * ((x @ p["w"]) ** 2).mean()

    plan = polyamp.explain(loss, CODES, ROWS, policy=F)
    assert {op.format for op in plan.operations if op.native == "dot_general"} == {"bfloat16"}
