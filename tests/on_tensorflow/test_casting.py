"""Casting trees of TensorFlow objects, eager and in graphs."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import cast
from support.harness import endless_trees


class Pair(NamedTuple):
    first: Any
    second: Any


def test_variables_come_back_as_tensors_and_containers_as_themselves() -> None:
    tree = {"pair": Pair(tf.Variable([1.0]), [tf.constant(2.0, tf.float64)]), "name": "a", "none": None}
    done = cast(tree, "bfloat16")
    assert isinstance(done["pair"], Pair)
    assert not isinstance(done["pair"].first, tf.Variable)
    assert [done["pair"].first.dtype, done["pair"].second[0].dtype] == [tf.bfloat16, tf.bfloat16]
    assert (done["name"], done["none"]) == ("a", None)


@pytest.mark.parametrize("leaf", [tf.constant(3), tf.constant([True]), tf.constant(1j), tf.constant("a"), 0.5])
def test_what_is_not_floating_stays_the_same_object(leaf: Any) -> None:
    assert cast([leaf], "float16")[0] is leaf


@pytest.mark.parametrize(
    "leaf",
    [
        tf.IndexedSlices(tf.ones((1, 2)), tf.constant([3]), tf.constant([5, 2])),
        tf.sparse.from_dense([[1.0, 0.0]]),
        tf.ragged.constant([[1.0], [2.0, 3.0]]),
        np.ones(2, np.float32),
    ],
    ids=["slices", "sparse", "ragged", "numpy"],
)
def test_other_floating_kinds_keep_their_kind(leaf: Any) -> None:
    done = cast({"x": leaf}, "float16")["x"]
    assert type(done) is type(leaf)
    assert done.dtype == np.float16


F16 = polyamp.policy("mixed_float16")
VERBS: dict[str, Any] = {
    "cast": lambda tree: F16.cast_to_compute(tree),
    "rewrite": lambda tree: polyamp.rewrite(lambda x: tf.reduce_sum(x[0]), tree, policy=F16),
    "explain": lambda tree: polyamp.explain(lambda x: tf.reduce_sum(x[0]), tree, policy=F16),
    "probe": lambda tree: polyamp.probe(lambda x: tf.reduce_sum(x[0]), tree, policy=F16),
    "lint": lambda tree: polyamp.lint(lambda x: tf.reduce_sum(x[0]), tree, policy=F16),
    "a rewritten function": lambda tree: polyamp.rewrite(len, policy=F16, backend="tensorflow")(tree),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["shared", "cyclic", "deep"])
def test_containers_that_are_no_trees_are_refused(kind: str, verb: str) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match=r"share parts many times over|limit of recursion"):
        VERBS[verb](endless_trees(tf.ones(2))[kind])
