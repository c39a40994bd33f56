"""Casting, ownership and updates of any pytree."""

import dataclasses
import subprocess
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx

import polyamp
from polyamp import adapters
from polyamp.backends import jax as amp
from support.harness import endless_trees

FLOAT16 = polyamp.policy("mixed_float16")


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    name: str = dataclasses.field(metadata={"static": True}, default="dense")


def dtypes(tree: Any) -> list[str]:
    return [str(leaf.dtype) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]


LEAVES = {
    "float32": (jnp.ones(2), "float16"),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), "float16"),
    "numpy": (np.ones(2, np.float64), "float16"),
    "numpy bfloat16": (np.ones(2, ml_dtypes.bfloat16), "float16"),
    "numpy scalar": (np.float32(1e6), "float16"),
    "abstract": (jax.ShapeDtypeStruct((2,), jnp.float32), "float16"),
    "integer": (jnp.arange(2), "int32"),
    "boolean": (np.array([True]), "bool"),
    "complex": (jnp.ones(2, jnp.complex64), "complex64"),
    "key": (jax.random.key(0), "key<fry>"),
    "float0": (np.zeros(2, jax.dtypes.float0), "[('float0', 'V')]"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_floating_leaves_are_cast_and_others_left(name: str) -> None:
    leaf, expected = LEAVES[name]
    cast = amp.cast(leaf, "float16")
    assert str(cast.dtype) == expected
    assert isinstance(cast, np.ndarray | np.generic) == isinstance(leaf, np.ndarray | np.generic)
    assert cast is leaf or expected == "float16"


@pytest.mark.parametrize("leaf", [1.0, 2, True, "text", None, jax.nn.relu], ids=str)
def test_leaves_that_are_no_arrays_are_left(leaf: Any) -> None:
    assert amp.cast({"a": leaf}, "float16") == {"a": leaf}


TREES = {
    "dataclass": lambda: Layer(jnp.ones(2)),
    "named tuple": lambda: Pair(jnp.ones(2), [jnp.ones(1)]),
    "equinox": lambda: eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)),
    "linen": lambda: linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 2))),
    "numpy": lambda: {"x": np.ones(3, np.float32)},
    "nnx state": lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
    "nnx module": lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", TREES)
def test_policy_casts_every_kind_of_tree(name: str) -> None:
    tree = TREES[name]()
    assert adapters.adapter_within(tree) is amp.adapter
    cast = FLOAT16.cast_to_compute(tree)
    assert type(cast) is type(tree)
    assert set(dtypes(cast)) == {"float16"}
    assert set(dtypes(tree)) == {"float32"}


def test_casting_works_inside_jit_and_so_without_a_host_sync() -> None:
    assert dtypes(jax.jit(FLOAT16.cast_to_compute)({"w": jnp.ones(2), "n": jnp.arange(2)})) == ["int32", "float16"]


def test_float64_that_is_switched_off_is_told() -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="jax_enable_x64"):
        amp.cast(jnp.ones(2), "float64")
    with jax.enable_x64(True):
        assert amp.cast(jnp.ones(2, jnp.float32), "float64").dtype == np.float64


def test_apply_updates_keeps_dtypes_and_takes_none() -> None:
    params = {"half": jnp.ones(1, jnp.bfloat16), "kept": jnp.ones(1), "act": jax.nn.relu}
    new = amp.apply_updates(params, {"half": jnp.array([0.5]), "kept": None, "act": None})
    assert (new["half"].dtype, new["half"].tolist()) == (jnp.bfloat16, [1.5])
    assert new["kept"] is params["kept"]
    assert new["act"] is params["act"]


@pytest.mark.parametrize("applied", [True, False, jnp.array(True), jnp.array(False)], ids=str)
def test_select(applied: Any) -> None:
    new, old = {"mean": jnp.array([jnp.nan])}, {"mean": jnp.zeros(1)}
    assert np.isnan(amp.select(applied, new, old)["mean"]).tolist() == [bool(applied)]


TX, PARAMS = polyamp.wrap_optimizer(optax.sgd(0.1), FLOAT16), {"w": jnp.ones(2)}
STATE = TX.init(PARAMS)
WALKS = {
    "cast": FLOAT16.cast_to_compute,
    "init": TX.init,
    "update": lambda tree: TX.update(tree, STATE, PARAMS),
    "apply_gradients": lambda tree: amp.apply_gradients(TX, PARAMS, STATE, tree),
    "apply_updates": lambda tree: amp.apply_updates(tree, tree),
    "select": lambda tree: amp.select(True, tree, tree),
    "value_and_grad": lambda tree: polyamp.value_and_grad(lambda p, x: p.sum(), FLOAT16)(STATE, PARAMS, tree),
    "aux": lambda tree: polyamp.value_and_grad(lambda p: (p["w"] @ p["w"], tree), "float32", has_aux=True)(
        STATE, PARAMS
    ),
    "scale_loss": lambda tree: polyamp.scale_loss(jnp.float32(1), tree),
    "autocast": lambda tree: amp.autocast(lambda tree: 1, FLOAT16)(tree),
    "results": lambda tree: polyamp.autocast(lambda w: tree, FLOAT16)(jnp.ones(2)),
    "explain": lambda tree: polyamp.explain(lambda tree: 1, tree, policy=FLOAT16),
    "probe": lambda tree: polyamp.probe(lambda tree: 1, tree, policy=FLOAT16),
    "lint": lambda tree: polyamp.lint(lambda tree: 1, tree, policy=FLOAT16),
    "health": polyamp.health,
    "check_limits": amp.check_limits,
}


@pytest.mark.parametrize("kind", ["shared", "cyclic", "deep"])
@pytest.mark.parametrize("verb", WALKS)
def test_a_tree_that_no_walk_comes_to_the_end_of_is_refused(verb: str, kind: str) -> None:
    with pytest.raises(polyamp.PolyampError, match=r"leaves|nested too deeply"):
        WALKS[verb](endless_trees(jnp.ones(1))[kind])


OBJECTS = {"w": np.array([object(), None])}
MISSING = {
    "update of nothing": lambda: TX.update(None, STATE, PARAMS),
    "nothing to apply": lambda: amp.apply_gradients(TX, None, STATE, PARAMS),
    "no gradients": lambda: amp.apply_gradients(TX, {"w": None}, STATE, PARAMS),
    "optax": lambda: amp.apply_gradients(optax.sgd(0.1), {}, optax.sgd(0.1).init(PARAMS), PARAMS),
    "no updates": lambda: amp.apply_updates(PARAMS, None),
    "no parameters": lambda: amp.apply_gradients(TX, PARAMS, STATE, None),
    "numbers as parameters": lambda: amp.apply_gradients(TX, PARAMS, STATE, {"w": 1.0}),
    "objects as gradients": lambda: TX.update(OBJECTS, STATE, PARAMS),
    "objects as updates": lambda: amp.apply_updates(PARAMS, OBJECTS),
    "objects as parameters": lambda: amp.apply_updates(OBJECTS, PARAMS),
}


@pytest.mark.parametrize("kind", MISSING)
def test_gradients_and_updates_that_are_missing_are_not_a_step_of_nothing(kind: str) -> None:
    with pytest.raises(polyamp.PolyampError, match=r"do not have the structure|no parameter to update"):
        MISSING[kind]()


WITHOUT = """
import sys
sys.modules.update(optax=None, flax=None, equinox=None)
import jax.numpy as jnp, polyamp, polyamp.backends.jax as amp
assert polyamp.policy("mixed_float16").cast_to_compute({"w": jnp.ones(2)})["w"].dtype == jnp.float16
try:
    amp.wrap_optimizer(object(), "mixed_float16")
except polyamp.errors.MissingFrameworkError as error:
    print(error)
"""


@pytest.mark.slow
def test_jax_alone_is_enough_to_cast_and_a_missing_optax_is_told() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert "optax is not installed" in run.stdout
    assert 'pip install "polyamp[jax]"' in run.stdout
