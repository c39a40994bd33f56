"""The state of a wrapped optimizer, saved and restored by polyamp, flax, orbax and pickle."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import serialization

import polyamp
from polyamp.backends.jax import LossScaleOptState
from support.harness import overflow_trace

CONFIG = polyamp.LossScale(init=2.0**10, interval=3, hysteresis=2)
TX = polyamp.wrap_optimizer(optax.adam(0.1), "O2", loss_scale=CONFIG)
PARAMS = {"w": jnp.ones((2, 3), jnp.float16), "b": jnp.ones(1)}


@jax.jit
def step(params: Any, state: Any, spoil: Any) -> Any:
    grads = jax.tree.map(lambda p: (state.loss_scale * spoil).astype(p.dtype) * jnp.ones_like(p), params)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train(held: Any, trace: list[bool]) -> Any:
    for finite in trace:
        held = step(*held, 1e-2 if finite else jnp.nan)
    return held


@pytest.fixture(scope="module")
def trained() -> Any:
    return train((PARAMS, TX.init(PARAMS)), overflow_trace(3, 10))


def through_orbax(state: Any, folder: Path) -> Any:
    saved = {"params": PARAMS, "opt_state": state, "step": 3}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "all", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "all", saved | {"opt_state": jax.eval_shape(lambda: state)})["opt_state"]


THROUGH: dict[str, Callable[[Any, Path], Any]] = {
    "flax": lambda state, _: serialization.from_bytes(TX.init(PARAMS), serialization.to_bytes(state)),
    "orbax": through_orbax,
    "pickle": lambda state, _: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("name", THROUGH)
def test_every_field_survives_and_training_continues_exactly(name: str, trained: Any, tmp_path: Path) -> None:
    params, state = trained
    restored = jax.tree.map(jnp.asarray, THROUGH[name](state, tmp_path))
    assert type(restored) is type(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert [str(leaf.dtype) for leaf in jax.tree.leaves(restored)] == [
        str(leaf.dtype) for leaf in jax.tree.leaves(state)
    ]
    rest = overflow_trace(4, 10)
    for one, other in zip(*(jax.tree.leaves(train((params, s), rest)) for s in (state, restored)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_loading_causes_no_new_trace(trained: Any) -> None:
    params, state = trained
    step(params, state, 1e-2)
    traced = step._cache_size()
    step(params, polyamp.load_loss_scale(state, polyamp.save_loss_scale(state)), 1e-2)
    assert step._cache_size() == traced


def test_leaves_are_named_after_their_fields(trained: Any) -> None:
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(trained[1])]
    assert names[:5] == [".loss_scale", ".good_steps", ".hysteresis", ".skipped_in_a_row", ".skipped"]
    assert ".master_weights['w']" in names
    assert set(serialization.to_state_dict(trained[1])) == set(LossScaleOptState._fields)


def test_state_prints_and_replaces_like_a_named_tuple(trained: Any) -> None:
    state = trained[1]
    assert isinstance(state, LossScaleOptState)
    assert repr(state).startswith("LossScaleOptState(loss_scale=")
    assert state._replace(inner_state=()).settings == CONFIG


def test_settings_are_part_of_the_tree_structure() -> None:
    other = polyamp.wrap_optimizer(optax.adam(0.1), "O2", loss_scale=polyamp.LossScale())
    assert jax.tree.structure(other.init(PARAMS)) != jax.tree.structure(TX.init(PARAMS))


@pytest.mark.parametrize("setting", [{"growth": 1 + 1e-9}, {"backoff": 1 - 1e-12}])
def test_settings_that_float32_rounds_to_nonsense_are_refused(setting: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match=next(iter(setting))):
        polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16", loss_scale=polyamp.LossScale(**setting))
