"""Wrapped ``tf.compat.v1.train`` optimizers: in graphs of a Session, in ``tf.function``, and eager."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp import LossScale
from polyamp.backends.tensorflow import LossScaledOptimizer, LossScaler

v1 = tf.compat.v1

KINDS: dict[str, Any] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
    "rmsprop": lambda: v1.train.RMSPropOptimizer(0.1),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
}
START = np.array([1.0, -2.0, 3.0], np.float32)


class Graph:
    """One optimizer in a graph of a Session; the gradient of its loss is fed in."""

    def __init__(self, make: Any, *, initializer: Any = START, dtype: Any = tf.float32) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.factor = v1.placeholder(tf.float32, [3])
            self.weight = v1.get_variable("weight", dtype=dtype, initializer=tf.constant(initializer, dtype))
            self.steps = v1.train.get_or_create_global_step()
            self.opt = make()
            loss = tf.reduce_sum(tf.cast(self.weight, tf.float32) * self.factor)
            self.train = self.opt.minimize(loss, global_step=self.steps)
            self.saver = v1.train.Saver()
            self.session = v1.Session()
            self.session.run(v1.global_variables_initializer())

    def step(self, factor: Any) -> None:
        self.session.run(self.train, {self.factor: factor})

    def values(self) -> dict[str, bytes]:
        """Return all variables except the loss scale and its counters."""
        ours = {variable.name for variable in getattr(getattr(self.opt, "scaler", None), "stored", ())}
        with self.graph.as_default():
            chosen = [variable for variable in v1.global_variables() if variable.name not in ours]
        return {variable.name: self.session.run(variable).tobytes() for variable in chosen}

    def state(self) -> list[float]:
        values = (self.session.run(variable).tolist() for variable in self.opt.scaler.stored)
        return [*itertools.chain(*(one if isinstance(one, list) else [one] for one in values))]


def wrapped(kind: str = "sgd", **options: Any) -> LossScaledOptimizer:
    return polyamp.wrap_optimizer(KINDS[kind](), "mixed_float16", **options)


def wrapped_sgd(rate: float, loss_scale: LossScale, norm: float | None = None) -> LossScaledOptimizer:
    return LossScaledOptimizer(v1.train.GradientDescentOptimizer(rate), loss_scale, norm)


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_session_scaled_steps_are_the_plain_ones_and_skipped_ones_are_none(kind: str) -> None:
    scaled, plain = Graph(lambda: wrapped(kind)), Graph(KINDS[kind])
    for factor in ([1.0, 2.0, 3.0], [0.5, -1.0, 1e-3]):
        scaled.step(factor)
        plain.step(factor)
    assert scaled.values() == plain.values()
    before = scaled.values()
    scaled.step([1.0, np.inf, 0.0])
    assert scaled.values() == before
    assert scaled.state() == [2.0**15, 0, 0, 1, 1, 3, 0, 1, 0, 2.0**16]
    scaled.step([1.0, 1.0, 1.0])
    plain.step([1.0, 1.0, 1.0])
    assert scaled.values() == plain.values()


def test_in_a_session_a_loss_that_is_never_finite_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    graph = Graph(wrapped)
    with pytest.warns(polyamp.PolyampWarning, match="the loss was not finite"):
        graph.step([np.nan] * 3)
    for _ in range(2):
        graph.step([np.nan] * 3)  # a second warning would be logged
    assert not caplog.messages


def test_in_a_session_the_result_of_a_step_is_its_tensors() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        grad, weight = v1.placeholder(tf.float32, [1]), v1.get_variable("w", initializer=tf.constant([1.0]))
        result = LossScaler(LossScale(init=8.0)).step(v1.train.GradientDescentOptimizer(1.0), [(grad, weight)])
        session.run(v1.global_variables_initializer())
        seen = [session.run((result.applied, result.scale), {grad: [value]}) for value in (8.0, np.nan, 4.0)]
        assert [(bool(applied), float(scale)) for applied, scale in seen] == [(True, 8.0), (False, 4.0), (True, 4.0)]
        assert session.run(weight).tolist() == [-1.0]


def test_a_saver_keeps_the_state_and_the_masters(tmp_path: Path) -> None:
    def make() -> LossScaledOptimizer:
        return wrapped("momentum", loss_scale=LossScale(init=8.0, interval=2))

    first, second = (Graph(make, dtype=tf.float16) for _ in range(2))
    for factor in ([2.0**-10] * 3, [np.inf] * 3, [1e-3] * 3):
        first.step(factor)
    with first.graph.as_default():
        path = first.saver.save(first.session, str(tmp_path / "saved"), write_meta_graph=False)
    with second.graph.as_default():
        second.saver.restore(second.session, path)
    for graph in (first, second):
        graph.step([2.0**-11] * 3)
    assert second.values() == first.values()
    assert second.state() == first.state()
    assert any(name.startswith("weight_master") for name in first.values())


@pytest.mark.parametrize("mode", ["eager", "function", "xla"])
def test_sparse_rows_are_unscaled_tested_and_clipped(mode: str) -> None:
    table, opt = tf.Variable(tf.ones((5, 2))), wrapped_sgd(1.0, LossScale(init=8.0), 1.0)

    def step(values: tf.Tensor) -> None:
        opt.apply_gradients([(tf.IndexedSlices(values, tf.constant([1, 3]), tf.constant([5, 2])), table)])

    run = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    run(tf.constant([[np.nan, 0.0], [0.0, 0.0]]))
    assert np.array_equal(table.numpy(), np.ones((5, 2)))
    run(tf.constant([[12.0, 0.0], [0.0, 16.0]]))  # the gradient of the loss times 4 has a norm of 5
    np.testing.assert_allclose(table.numpy()[[1, 3]], [[0.4, 1.0], [1.0, 0.2]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16])
def test_a_checkpoint_keeps_state_slots_and_masters(dtype: tf.DType, tmp_path: Path) -> None:
    def start() -> tuple[tf.Variable, LossScaledOptimizer, tf.train.Checkpoint]:
        weight, opt = tf.Variable(tf.cast(START, dtype)), wrapped("adam", loss_scale=LossScale(init=8.0, interval=2))
        return weight, opt, tf.train.Checkpoint(weight=weight, opt=opt)

    weight, opt, checkpoint = start()
    for value in (1.0, np.inf, 1.0):
        opt.apply_gradients([(tf.fill([3], tf.cast(value, dtype)), weight)])
    path = checkpoint.save(tmp_path / "saved")
    again, restored, other = start()
    status = other.restore(path)
    for one, parameter in ((opt, weight), (restored, again)):
        one.apply_gradients([(tf.fill([3], tf.cast(0.5, dtype)), parameter)])
    status.assert_consumed()
    assert polyamp.save_loss_scale(restored) == polyamp.save_loss_scale(opt)
    pairs = zip((again, *restored.variables()), (weight, *opt.variables()), strict=True)
    assert all(one.numpy().tobytes() == two.numpy().tobytes() for one, two in pairs)


def test_a_step_without_gradients_is_left_to_the_inner_optimizer() -> None:
    with pytest.raises(ValueError, match="No gradients provided"):
        wrapped().apply_gradients([(None, tf.Variable([1.0]))])


@pytest.mark.parametrize(
    "make", [LossScaledOptimizer, lambda opt: v1.mixed_precision.MixedPrecisionLossScaleOptimizer(opt, "dynamic")]
)
def test_a_wrapped_optimizer_is_refused(make: Any) -> None:
    with pytest.raises(polyamp.errors.UsageError, match="wrapped already"):
        polyamp.wrap_optimizer(make(v1.train.GradientDescentOptimizer(0.1)), "mixed_float16")
