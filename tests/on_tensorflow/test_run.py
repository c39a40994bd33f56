"""`polyamp run` of TensorFlow scripts: the old graph rewrite is there; under a policy they are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow.run import begin
from polyamp.run import Session

v1 = tf.compat.v1


def test_without_a_policy_only_the_graph_rewrite_is_there() -> None:
    with Session(None) as session:
        begin(session)
        assert hasattr(tf.train.experimental, "enable_mixed_precision_graph_rewrite")
        with pytest.warns(polyamp.PolyampWarning, match="needs a GPU"):
            opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(v1.train.AdamOptimizer(0.1))
        assert session.holders == [opt]
        assert len(session.interfaces) == 1
    assert not hasattr(tf.train.experimental, "enable_mixed_precision_graph_rewrite")
    assert not tf.config.optimizer.get_experimental_options().get("auto_mixed_precision")


def take_a_gradient() -> None:
    with tf.GradientTape() as tape:
        loss = tf.Variable(1.0) * 2.0
    tape.gradient(loss, loss)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    "use",
    [take_a_gradient, lambda: v1.train.AdamOptimizer(0.1), lambda: tf.gradients(tf.zeros(2), tf.zeros(2))],
)
def test_under_a_policy_a_script_is_refused_with_the_lines_to_write(use: Callable[[], Any], policy: str) -> None:
    with Session(polyamp.policy(policy)) as session, tf.Graph().as_default():
        begin(session)
        with pytest.raises(polyamp.errors.UsageError, match=r"polyamp\.wrap_optimizer") as refused:
            use()
    assert "polyamp.rewrite" in str(refused.value)
    assert "test_run.py:" in str(refused.value)
