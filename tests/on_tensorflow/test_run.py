"""`polyamp run` of TensorFlow scripts: under a policy they are refused where they take gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow.run import begin
from polyamp.run import Refused, Session

v1 = tf.compat.v1


@contextmanager
def started(policy: str | None = "mixed_bfloat16") -> Iterator[Session]:
    with Session(None if policy is None else polyamp.policy(policy)) as session:
        begin(session)
        yield session


WEIGHT = tf.Variable(2.0)


def with_a_tape() -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = WEIGHT * WEIGHT
    return tape.gradient(loss, WEIGHT)


def in_version_1() -> Any:
    with tf.Graph().as_default():
        return v1.train.AdamOptimizer(0.1).minimize(v1.get_variable("w", []))


def between_tensors() -> Any:
    with tf.Graph().as_default():
        return tf.gradients(tf.zeros(2), tf.zeros(2))


@pytest.mark.parametrize("take", [with_a_tape, tf.function(with_a_tape), in_version_1, between_tensors])
def test_a_script_that_takes_gradients_is_refused_with_the_lines_to_write(take: Callable[[], Any]) -> None:
    with started(), pytest.raises(Refused, match=r"polyamp\.wrap_optimizer") as refused:
        take()
    assert "test_run.py:" in str(refused.value) or isinstance(take, tf.types.experimental.PolymorphicFunction)


def test_without_a_policy_it_runs_as_it_is() -> None:
    with started(None):
        assert float(with_a_tape()) == 4.0
    with started():
        pass
    assert float(with_a_tape()) == 4.0
