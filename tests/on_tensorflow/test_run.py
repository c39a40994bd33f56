"""`polyamp run` on TensorFlow scripts: products in 16 bits, and float16 loops of their own, which are refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow.autocast.lowering import everywhere
from polyamp.backends.tensorflow.run import begin
from polyamp.run import Session

v1 = tf.compat.v1
RANDOM = np.random.default_rng(0)
A, X = ((RANDOM.standard_normal(shape) * 0.2).astype("float32") for shape in ((32, 10), (64, 32)))
MODES = ["eager", "graph", "xla"]


@contextmanager
def started(policy: str | None = "mixed_float16") -> Iterator[Session]:
    with Session(None if policy is None else polyamp.policy(policy)) as session:
        begin(session)
        yield session


def with_a_tape(mode: str) -> list[float]:
    a, opt = tf.Variable(A), keras.optimizers.SGD(5.0)

    def step(x: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ a - 1.0))
        opt.apply_gradients([(tape.gradient(loss, a), a)])
        return loss

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "xla")
    return [float(step(tf.constant(X))) for _ in range(5)]


def test_nothing_is_turned_on_without_a_policy() -> None:
    with started(None) as session:
        assert everywhere() is None
        assert hasattr(tf.train.experimental, "enable_mixed_precision_graph_rewrite")
        assert with_a_tape("eager") == with_a_tape("eager")
        assert (session.holders, session.interfaces, session.unchecked) == ([], {}, set())


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_with_a_tape_matches_float32_in_bfloat16(mode: str) -> None:
    full = with_a_tape(mode)
    with started("mixed_bfloat16") as session:
        low = with_a_tape(mode)
    assert session.operations["matmul"].keys() == {"bfloat16"}
    assert session.unchecked, "nothing skips its steps, which the report says"
    assert low != full
    assert low[-1] < 0.95 * low[0]
    np.testing.assert_allclose(low, full, rtol=2e-2)
    assert with_a_tape(mode) == full  # TensorFlow is as it was


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_with_a_tape_is_refused_in_float16_with_the_lines_to_write(mode: str) -> None:
    with started() as session, pytest.raises(polyamp.errors.UsageError, match=r"polyamp\.wrap_optimizer") as refused:
        with_a_tape(mode)
    assert session.refusal is not None
    assert "test_run.py:" in str(refused.value) or mode != "eager"


@pytest.mark.parametrize("use", [lambda: v1.train.AdamOptimizer(0.1), lambda: tf.gradients(tf.zeros(2), tf.zeros(2))])
def test_what_else_takes_gradients_is_refused_in_float16_alone(use: Callable[[], Any]) -> None:
    with started("mixed_bfloat16"), tf.Graph().as_default():
        use()
    with started(), tf.Graph().as_default():
        with pytest.raises(polyamp.errors.UsageError, match=r"polyamp\.wrap_optimizer") as refused:
            use()
        assert "test_run.py:" in str(refused.value)
