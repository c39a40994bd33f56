"""Loops over datasets are rewritten with their bodies; functions that a rewrite does not enter are reported."""

import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp

RANDOM = np.random.default_rng(0)
WEIGHT = tf.Variable(RANDOM.standard_normal((4, 3)).astype("float32"))
X = RANDOM.standard_normal((8, 4)).astype("float32")


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(X).batch(4)


def summed(data: Any) -> Any:
    total = tf.constant(0.0)
    for batch in data:
        total += tf.reduce_sum(batch @ WEIGHT)
    return total


def with_a_break(data: Any) -> Any:
    total = tf.constant(0.0)
    for batch in data:
        total += tf.reduce_sum(batch @ WEIGHT)
        if total > 1e6:
            break
    return total


def enumerated(data: Any) -> Any:
    total = tf.constant(0.0)
    for index, batch in data.enumerate():
        total += tf.cast(index + 1, tf.float32) * tf.reduce_sum(batch @ WEIGHT)
    return total


def reduced(data: Any) -> Any:
    return data.reduce(tf.constant(0.0), lambda total, batch: total + tf.reduce_sum(batch @ WEIGHT))


LOOPS = [summed, with_a_break, enumerated, reduced]


def products(plan: polyamp.Plan) -> set[str]:
    return {one.format for one in plan.operations if one.name == "matmul"}


@pytest.mark.filterwarnings("error::polyamp.PolyampWarning")
@pytest.mark.parametrize("loop", LOOPS)
def test_the_body_of_a_loop_runs_in_16_bits(loop: Any) -> None:
    fast = polyamp.rewrite(loop, policy="mixed_bfloat16", backend="tensorflow")
    exact, found = float(loop(dataset())), float(fast(dataset()))
    assert found == pytest.approx(exact, abs=0.02 * float(np.abs(X @ WEIGHT.numpy()).sum()))
    assert found != exact
    assert products(fast.plan) == {"bfloat16"}


def test_an_epoch_trains_as_its_steps_do() -> None:
    def trained(*, is_epoch: bool) -> Any:
        weight = tf.Variable(tf.ones((4, 3)))
        opt = polyamp.wrap_optimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), "mixed_float16")

        def step(batch: Any) -> None:
            with tf.GradientTape() as tape:
                scaled = opt.scale_loss(tf.reduce_mean(tf.square(batch @ weight)))
            opt.apply_gradients([(tape.gradient(scaled, weight), weight)])

        def epoch(data: Any) -> None:
            for batch in data:
                step(batch)

        fast = polyamp.rewrite(epoch if is_epoch else step, policy="mixed_float16", backend="tensorflow")
        for data in [dataset()] if is_epoch else dataset():
            fast(data)
        assert (opt.last_step.applied, opt.scaler.state.steps.numpy()) == (True, 2)
        return weight.numpy()

    np.testing.assert_array_equal(trained(is_epoch=True), trained(is_epoch=False))


def mapped(data: Any) -> Any:
    total = tf.constant(0.0)
    for batch in data.map(lambda batch: batch @ WEIGHT):
        total += tf.reduce_sum(batch)
    return total


def filtered(data: Any) -> Any:
    total = tf.constant(0.0)
    for batch in data.filter(lambda batch: tf.reduce_sum(batch @ WEIGHT) > -1e9):
        total += tf.reduce_sum(batch)
    return total


@pytest.mark.parametrize(
    ("loop", "operation"),
    [(mapped, "MapDataset"), (filtered, "FilterDataset")],
)
def test_an_operation_whose_functions_are_not_entered_is_named_with_its_place(loop: Any, operation: str) -> None:
    fast = polyamp.rewrite(loop, policy="mixed_float16", backend="tensorflow")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = fast(dataset())
    assert float(found) == pytest.approx(float(loop(dataset())), abs=1e-2)
    told = [str(one.message) for one in said if issubclass(one.category, polyamp.PolyampWarning)]
    assert len(told) == 1
    assert operation in told[0]
    assert "test_datasets.py:" in told[0]


def test_a_step_in_a_loop_is_recorded() -> None:
    weight = tf.Variable(tf.ones((4, 3)))
    opt = polyamp.wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), "mixed_float16")

    def epoch(data: Any) -> Any:
        total = tf.constant(0.0)
        for batch in data:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(batch @ weight))
                scaled = opt.scale_loss(loss)
            opt.apply_gradients([(tape.gradient(scaled, weight), weight)])
            total += loss
        return total

    before = weight.numpy()
    found = polyamp.probe(epoch, dataset(), policy="mixed_float16", backend="tensorflow")
    assert np.array_equal(weight.numpy(), before)
    largest = {one.name: one.spread.largest for one in found.recording.observations}
    assert largest["matmul"] > 0.1
    assert found.window is not None
