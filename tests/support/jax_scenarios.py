"""Small programs, and functions that read the formats of a traced program, for the tests of autocast in JAX."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp

POLICIES = ("mixed_bfloat16", "mixed_float16")
# A policy, and whether autocast is inside the transformation (grad, vmap, ...) or around it. The format and the
# order are independent, so two of the four pairs are enough.
MODES = [("mixed_bfloat16", True), ("mixed_float16", False)]
TOLERANCE = {"mixed_bfloat16": 3e-2, "mixed_float16": 4e-3}  # about 8 and 4 units of rounding (2**-8 and 2**-11)
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
PRECISE = ("exp", "exp2", "log", "log1p", "pow", "rsqrt")
PRECISE_AS_WRITTEN = (
    "square",
    "integer_pow",
    "reduce_sum",
    "cumsum",
)  # JAX's derivatives make some


@pytest.fixture(autouse=True)
def quickly_compiled() -> Iterator[None]:
    """Compile in half the time, into slower code, in every test module that imports this: programs run once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


class Ran(NamedTuple):
    """One equation of a traced program, at any depth of loops and calls."""

    name: str
    inputs: tuple[Any, ...]  # abstract values
    outputs: tuple[Any, ...]
    path: str

    @property
    def floats(self) -> set[str]:
        """Return the floating-point dtypes of inputs and outputs."""
        dtypes = (getattr(aval, "dtype", None) for aval in (*self.inputs, *self.outputs))
        return {str(dtype) for dtype in dtypes if dtype is not None and jnp.issubdtype(dtype, jnp.floating)}


def trace(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Ran]:
    """Return all equations of a function's jaxpr and of its inner jaxprs.

    Each call makes a new function, since JAX caches the jaxpr of a function for every policy.
    """
    return list(walk(jax.make_jaxpr(lambda *own: fn(*own), **options)(*args)))


def walk(jaxpr: Any, path: str = "") -> Iterator[Ran]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        here = f"{path}/{equation.source_info.name_stack}"
        avals = (tuple(atom.aval for atom in atoms) for atoms in (equation.invars, equation.outvars))
        yield Ran(equation.primitive.name, *avals, here)
        for inner in _inner(equation.params.values()):
            yield from walk(inner, here)


def _inner(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _inner(value)
        elif hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield value


def only(ran: Iterable[Ran], *names: str, within: str = "") -> list[Ran]:
    return [op for op in ran if op.name in names and within in op.path]


def dots(fn: Callable[..., Any], *args: Any, within: str = "") -> list[set[str]]:
    """Return the floating-point dtypes of every matrix product and convolution."""
    return [op.floats for op in only(trace(fn, *args), *PRODUCTS, within=within)]


def formats(fn: Callable[..., Any], *args: Any, of: tuple[str, ...] = PRECISE, within: str = "") -> set[str]:
    """Return all floating-point dtypes of the operations ``of``; empty if there are none."""
    return set[str]().union(*(op.floats for op in only(trace(fn, *args), *of, within=within)))


class Reference:
    """What a function does without autocast: its results and the number of its products, computed once."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self.fn, self.args = fn, args
        traced = jax.jit(fn).trace(*args)
        self.products, self.results = len(only(walk(traced.jaxpr), *PRODUCTS)), traced.lower().compile()(*args)

    def check(self, mixed: Callable[..., Any], policy: str, *, outside: bool | None, factor: float = 1.0) -> None:
        """Assert as many products, all of them low, exponentials and powers in float32, and results that are close.

        If autocast is outside the derivative, it sees the operations that JAX makes for it: then sums are in float32
        too. Under None only the products are looked at.
        """
        traced = jax.jit(lambda *own: mixed(*own)).trace(*self.args)
        ran = list(walk(traced.jaxpr))
        assert self.products
        assert [op.floats for op in only(ran, *PRODUCTS)] == [{low(policy)}] * self.products
        if outside is not None:
            precise = only(ran, *(PRECISE + PRECISE_AS_WRITTEN if outside else PRECISE))
            assert set[str]().union(*(op.floats for op in precise)) <= {"float32"}
        assert_close(traced.lower().compile()(*self.args), self.results, policy, factor)


def assert_close(ours: Any, theirs: Any, policy: str, factor: float = 1.0) -> None:
    """Assert the same structure and types, and a small distance in norm over the whole tree."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert described(ours) == described(theirs)
    assert relative_error(ours, theirs) < TOLERANCE[policy] * factor


def described(tree: Any) -> list[Any]:
    return [
        (jnp.shape(leaf), jnp.result_type(leaf), getattr(leaf, "weak_type", None)) for leaf in jax.tree.leaves(tree)
    ]


def relative_error(ours: Any, theirs: Any) -> float:
    """Return the norm of the difference divided by the norm, in float64, over all numeric leaves."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    wide = [(np.asarray(a).astype(np.complex128), np.asarray(b).astype(np.complex128)) for a, b in pairs]
    assert all(np.isfinite(a).all() for a, _ in wide)
    error = sum(float(np.sum(np.abs(a - b) ** 2)) for a, b in wide)
    return float(np.sqrt(error / max(sum(float(np.sum(np.abs(b) ** 2)) for _, b in wide), 1e-30)))


def residuals(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the shapes that ``fn`` keeps for its backward pass; arguments with equal shapes are not distinguished."""
    return jax.tree.leaves(jax.eval_shape(lambda *own: jax.vjp(fn, *own)[1], *args))


def saved_bytes(fn: Callable[..., Any], *args: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in residuals(fn, *args))


def low(policy: str) -> str:
    return polyamp.policy(policy).compute


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Return random numbers of NumPy; JAX would compile a program for every shape, even in a collection only."""
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


MLP = {"w1": normal(1, 8, 16, scale=0.35), "b1": normal(2, 16), "w2": normal(3, 16, 4, scale=0.25)}
X = normal(4, 6, 8)


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of a two-layer net: 2 products forward, 3 more in the parameters' gradient."""
    scores = jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]
    return -jax.nn.log_softmax(scores)[:, 0].mean()


CELL = {"w": normal(5, 12, 12, scale=0.25), "u": normal(6, 8, 12, scale=0.3), "b": normal(7, 12, scale=0.1)}
SEQUENCE = normal(8, 10, 6, 8)


def rnn_turn(cell: Any, state: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(state @ cell["w"] + x @ cell["u"] + cell["b"])


def rnn(cell: Any, xs: jax.Array, **options: Any) -> jax.Array:
    """Return the mean square of a scan's last state and of all states."""

    def body(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = rnn_turn(cell, state, x)
        return state, state

    last, states = jax.lax.scan(body, jnp.zeros((xs.shape[1], 12)), xs, **options)
    return jnp.square(last).mean() + jnp.square(states).mean()


BLOCK = {name: normal(seed, 16, 16, scale=0.25) for seed, name in enumerate(("q", "k", "v", "o"), start=10)}
TOKENS = normal(9, 2, 5, 16)


def attention(weights: Any, x: jax.Array, mask: jax.Array | None = None, fill: float | None = None) -> jax.Array:
    """Return attention with one head and a residual connection: 6 products forward."""
    q, k, v = (x @ weights[name] for name in "qkv")
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / 4.0
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min if fill is None else fill)
    return x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v) @ weights["o"]


def attention_loss(weights: Any, x: jax.Array) -> jax.Array:
    return jnp.square(attention(weights, x)).mean()
