"""Random sequences of steps, writes and restored states, next to a model: plain optax in float32, member by member."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp.backends.jax import apply_gradients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:autocast to .* changed nothing"),
    pytest.mark.filterwarnings("ignore:the loss was not finite"),
    pytest.mark.filterwarnings("ignore:.*its minimum"),
]

INNER = {
    "momentum": lambda: optax.sgd(0.125, momentum=0.5),
    "chain": lambda: optax.chain(optax.clip(2.0), optax.adam(0.125)),
    "multi_transform": lambda: optax.multi_transform(
        {"one": optax.sgd(0.125), "other": optax.adam(0.125)}, {"wide": "one", "own": "other"}
    ),
    "masked": lambda: optax.masked(optax.sgd(0.125, momentum=0.5), {"wide": True, "own": False}),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.125), 2),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.125), 2),
}
SCALE = polyamp.LossScale(init=2.0**4, interval=2, min=2.0**2, max=2.0**6)
POLICIES = {"float32": "mixed_float16", "float16": "float16", "bfloat16": "bfloat16"}  # by the dtype of one parameter
START = {"wide": np.array([1.0, -0.0], np.float32), "own": np.array([1.0, -2.0, 0.5], np.float32)}
TINY = 2.0**-9  # what 16 bits lose next to 1, so that master weights matter


@functools.cache
def stepping(inner: str, own: str, by: str, scaled_by: str, count: int, members: int) -> tuple[Any, Any]:
    """Return the wrapped optimizer, and ``step(params, state, micro_batches) -> (params, state)``."""
    tx = polyamp.wrap_optimizer(INNER[inner](), POLICIES[own], loss_scale=SCALE)

    def loss_fn(params: Any, x: Any) -> Any:
        return sum((params[name].astype(jnp.float32) * x[name]).sum() for name in params)

    def gradients(params: Any, state: Any, x: Any) -> Any:
        if scaled_by == "scale_loss":
            return jax.grad(lambda params: polyamp.scale_loss(loss_fn(params, x), state))(params)
        return polyamp.value_and_grad(loss_fn, POLICIES[own])(state, params, x)[1]

    def step(params: Any, state: Any, x: Any) -> Any:
        each = [gradients(params, state, jax.tree.map(lambda leaf, at=at: leaf[at], x)) for at in range(count)]
        total = jax.tree.map(lambda *leaves: sum(leaves), *each)
        if by == "apply_gradients":
            return apply_gradients(tx, total, state, params)
        updates, state = tx.update(total, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.vmap(step) if members else step
    return tx, mapped if by == "uncompiled" else jax.jit(mapped)


class Model:
    """One member: parameters in float32, the plain optimizer, and a scale that halves and doubles."""

    def __init__(self, inner: str, own: str) -> None:
        self.dtypes = {"wide": np.dtype("float32"), "own": jnp.dtype(own)}
        self.tx, self.full = INNER[inner](), {name: jnp.array(value) for name, value in START.items()}
        self.inner, self.scale, self.good = self.tx.init(self.full), SCALE.init, 0

    def params(self) -> dict[str, Any]:
        return {name: self.full[name].astype(dtype) for name, dtype in self.dtypes.items()}

    def halve(self) -> None:
        self.full = {name: value.astype(jnp.float32) * 0.5 for name, value in self.params().items()}

    def step(self, x: dict[str, Any]) -> None:
        scaled = [(x[name] * np.float32(self.scale)).astype(self.dtypes[name]) for name in START]
        sums = [functools.reduce(np.add, each).astype(np.float32) for each in scaled]
        if not all(np.isfinite(each).all() for each in (*sums, *(each.astype(np.float32) for each in scaled))):
            self.scale, self.good = max(self.scale / 2, SCALE.min), 0
            return
        updates, self.inner = self.tx.update({name: x[name].sum(0) for name in START}, self.inner, self.full)
        self.full = optax.apply_updates(self.full, updates)
        self.good = (self.good + 1) % SCALE.interval
        self.scale = self.scale if self.good else min(self.scale * 2, SCALE.max)


class Pair:
    """The wrapped optimizer's run, and a model of each of its members."""

    def __init__(self, inner: str, own: str, way: tuple[str, str], count: int, members: int) -> None:
        self.tx, self.run = stepping(inner, own, *way, count, members)
        self.models, self.count, self.members = [Model(inner, own) for _ in range(members or 1)], count, members
        self.params = self.joined([model.params() for model in self.models])
        self.state = (jax.vmap(self.tx.init) if members else self.tx.init)(self.params)

    def joined(self, trees: Any) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) if self.members else trees[0]

    def step(self, values: list[float], bad: float, place: int) -> None:
        """Take a step with these gradients; one element of one micro-batch of one member is bad, unless that is 0."""
        flat = np.tile(np.array(values, np.float32), (len(self.models), self.count, 1))
        if bad:
            flat[place % len(self.models), place % self.count, place % len(values)] = bad
        batches = [{"wide": each[:, :2], "own": each[:, 2:]} for each in flat]
        self.params, self.state = self.run(self.params, self.state, self.joined(batches))
        with np.errstate(over="ignore", invalid="ignore"):
            for model, batch in zip(self.models, batches, strict=True):
                model.step(batch)
        self.check()

    def halve(self) -> None:
        self.params = jax.tree.map(lambda leaf: leaf * 0.5, self.params)
        for model in self.models:
            model.halve()

    def pickle(self) -> None:
        self.state = pickle.loads(pickle.dumps(jax.device_get(self.state)))

    def load(self) -> None:
        if not self.members:
            saved = polyamp.save_loss_scale(self.state)
            self.state = polyamp.load_loss_scale(self.state._replace(loss_scale=jnp.float32(4.0)), saved)

    def set_scale(self) -> None:
        self.state = self.state._replace(loss_scale=jnp.full_like(self.state.loss_scale, 8.0))
        for model in self.models:
            model.scale = 8.0

    def check(self) -> None:
        assert np.ravel(self.state.loss_scale).tolist() == [model.scale for model in self.models]
        applied = not np.any(self.state.skipped_in_a_row)  # masters follow what was written in the next applied step
        masters = (applied and self.state.master_weights) or {}
        for name, dtype in self.models[0].dtypes.items():
            full = self.joined([model.full[name] for model in self.models])
            assert self.params[name].dtype == dtype
            for found, wanted in ((self.params[name], full.astype(dtype)), (masters.get(name), full)):
                if found is not None:
                    np.testing.assert_allclose(np.float32(found), np.float32(wanted), rtol=1e-6, atol=1e-7)


STEP = st.tuples(
    st.just("step"),
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5, -3.0, TINY]), min_size=5, max_size=5),
    st.sampled_from([0.0, 0.0, 0.0, np.inf, -np.inf, np.nan, 3e38]),  # the last overflows once it is scaled
    st.integers(0, 29),
)
OTHER = st.tuples(st.sampled_from(["halve", "pickle", "load", "set_scale"]))


@given(
    st.sampled_from(sorted(INNER)),
    st.sampled_from(sorted(POLICIES)),
    st.tuples(st.sampled_from(["update", "apply_gradients", "uncompiled"]), st.sampled_from(["scale_loss", "vag"])),
    st.integers(1, 2),
    st.sampled_from([0, 2]),
    st.lists(st.one_of(STEP, STEP, OTHER), min_size=1, max_size=12),
)
def test_sequences_of_steps(
    inner: str, own: str, way: tuple[str, str], count: int, members: int, events: list[Any]
) -> None:
    pair = Pair(inner, own, way, count, members)
    for name, *about in events:
        getattr(pair, name)(*about)
