"""The update is marked in graphs, and the marks do not change the names of variables."""

from typing import Any

import pytest
import tensorflow as tf

import polyamp
from polyamp import LossScale
from polyamp.backends.tensorflow import LossScaler

v1 = tf.compat.v1
SCOPE = "train/polyamp_update"
SETTINGS = pytest.mark.parametrize("settings", [LossScale(init=8.0), LossScale.none()], ids=["scaled", "plain"])


def graph_of(step: Any, dtype: tf.DType = tf.float32) -> Any:
    def scoped(grad: tf.Tensor) -> None:
        with tf.name_scope("train"):
            step(grad)

    return tf.function(scoped, autograph=False).get_concrete_function(tf.TensorSpec([2], dtype)).graph


def nodes_of(graph: Any) -> list[str]:
    return [node.name for node in graph.as_graph_def().node]


@SETTINGS
def test_all_of_a_step_is_marked(settings: LossScale) -> None:
    weight, scaler = tf.Variable([1.0, 2.0]), LossScaler(settings, 1.0)
    opt = v1.train.AdamOptimizer(0.1)
    names = nodes_of(graph_of(lambda grad: scaler.step(opt, [(grad, weight)])))
    unmarked = [name for name in names if not name.startswith(f"{SCOPE}/")]
    assert unmarked == ["grad"]
    assert names.count(f"{SCOPE}/polyamp_finite") == int(settings.check)


@SETTINGS
def test_a_saver_finds_the_names_of_the_plain_optimizer(settings: LossScale) -> None:
    def names(wrap: Any) -> set[str]:
        with tf.Graph().as_default():
            weight = v1.get_variable("weight", initializer=tf.constant([1.0, 2.0]))
            with tf.name_scope("train"):
                opt = wrap(v1.train.AdamOptimizer(0.1))
                opt.minimize(tf.reduce_sum(weight), var_list=[weight])
            return {variable.name for variable in (weight, *getattr(opt, "inner", opt).variables())}

    def wrap(plain: Any) -> Any:
        return polyamp.wrap_optimizer(plain, "mixed_float16", loss_scale=settings)

    def last(names: set[str]) -> set[str]:  # without the scopes that a conditional leaves
        return {name.rpartition("/")[2] for name in names}

    assert last(names(wrap)) == last(names(lambda plain: plain))
    assert not [name for name in names(wrap) if "polyamp" in name]
