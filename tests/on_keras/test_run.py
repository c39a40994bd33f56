"""`polyamp run` on Keras scripts on TensorFlow: losses as in float32, skipped steps, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp
from polyamp.backends.keras import LossScaledOptimizer
from polyamp.backends.keras.run import begin
from polyamp.run import Session, running

reason = "refused there: see on_jax/test_run.py"
pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason=reason)

RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.standard_normal((64, size)).astype("float32") for size in (16, 8))


@contextmanager
def started(policy: Any = "mixed_float16") -> Iterator[Session]:
    with running(Session(None if policy is None else polyamp.policy(policy))) as session:
        import_module("polyamp.backends.tensorflow.run").begin(session)  # which is called first
        begin(session)
        yield session


def model_of(kind: type[keras.Model] = keras.Model) -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,))
    hidden = layers.BatchNormalization()(layers.Dense(32, activation="tanh", name="hidden")(inputs))
    return kind(inputs, layers.Dense(8)(hidden))


def fitted(kind: type[keras.Model] = keras.Model) -> tuple[list[float], keras.Model]:
    model = model_of(kind)
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    history = model.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0).history
    return history.get("own", history.get("loss")), model


def test_nothing_is_turned_on_without_a_policy() -> None:
    full, _ = fitted()
    with started(None) as session:
        again, model = fitted()
    assert again == full
    assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert session.holders == []


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_fit_matches_float32(policy: str) -> None:
    full, _ = fitted()
    with started(policy) as session:
        low, model = fitted()
        assert model.predict(X, verbose=0).dtype == np.float32
        assert ops.dtype(model(X)) == "float32"
        assert all(variable.dtype == "float32" for variable in model.variables)
        if policy == "mixed_float16":
            assert session.holders[-1] is model.optimizer
            assert isinstance(model.optimizer, LossScaledOptimizer)
            assert (polyamp.health(model).steps, polyamp.health(model).skipped) == (4, 0)
    assert low != full
    np.testing.assert_allclose(low, full, rtol=2e-3 if policy == "mixed_float16" else 2e-2)
    again, model = fitted()
    assert again == full  # Keras is as it was
    assert model.dtype_policy.name == "float32"
    assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_a_batch_that_overflows_is_skipped_whole() -> None:
    with started():
        model = model_of()
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
        model.train_on_batch(X, Y)
        before = [np.array(variable) for variable in model.variables]
        model.train_on_batch(X * 1e20, Y * 1e20)
        after = [np.array(variable) for variable in model.variables]
        assert all(map(np.array_equal, before, after))  # batch statistics too
        assert polyamp.health(model).skipped == 1


def test_it_compiles_again_and_again() -> None:
    with started() as session:
        model = model_of()
        model.compile("sgd", "mse")
        first = model.optimizer
        model.compile(first, "mae")
        assert model.optimizer is first
        assert session.holders[-1] is first
        assert session.holders.count(first) == 1


# Loops and steps of the script's own.


@pytest.mark.parametrize("how", ["train_step", "eager", "graph", "compiled model"])
def test_own_loops_match_float32_and_skip(how: str) -> None:
    import tensorflow as tf

    class Own(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, *_ = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"own": loss}

    def loop() -> tuple[list[float], keras.Model, Any]:
        model, opt = model_of(), keras.optimizers.Adam(0.01)
        if how == "compiled model":
            model.compile(opt, "mse")
            opt = model.optimizer

        def step(x: Any) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - Y))
            grads, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.5)
            opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss

        run = step if how == "eager" else tf.function(step)
        losses = [float(run(tf.constant(X))) for _ in range(6)]
        before = [np.array(one) for one in [*model.trainable_variables, *opt.variables]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the loss is not finite, which eager code reports
            run(tf.fill(X.shape, np.float32(np.inf)))
        after = [np.array(one) for one in [*model.trainable_variables, *opt.variables]]
        return losses, model, all(map(np.array_equal, before, after))

    if how == "train_step":
        full, _ = fitted(Own)
        with started() as session:
            half, model = fitted(Own)
            model.train_on_batch(X, Y * np.float32(np.inf))
            assert type(model.optimizer) is keras.optimizers.Adam
            assert int(model.optimizer.iterations) == 4
    else:
        full, _, is_same = loop()
        assert not is_same
        with started() as session:
            half, _, is_same = loop()
        assert is_same
    scaler = session.holders[-1]
    assert (polyamp.health(scaler).skipped, scaler.loss_scale) == (1, 2.0**15)
    assert half != full
    np.testing.assert_allclose(half, full, rtol=2e-3)


# What is refused.


@pytest.mark.parametrize(
    "use",
    [
        lambda: keras.config.set_dtype_policy("mixed_bfloat16"),
        lambda: keras.mixed_precision.set_global_policy("bfloat16"),
        lambda: layers.Dense(2, dtype="float16"),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ],
)
def test_mixed_precision_of_its_own_is_refused(use: Callable[[], Any]) -> None:
    with started(), pytest.raises(polyamp.errors.UsageError, match="mixed precision of its own"):
        use()
    assert keras.config.dtype_policy().name == "float32"


def test_a_wrapped_optimizer_of_its_own_is_refused() -> None:
    with started():
        opt = polyamp.wrap_optimizer(keras.optimizers.SGD(), "mixed_float16")
        with pytest.raises(polyamp.errors.UsageError, match="mixed precision of its own"):
            model_of().compile(opt, "mse")


def test_keras_may_begin_before_tensorflow_does() -> None:
    import tensorflow as tf

    with running(Session(polyamp.policy("mixed_float16"))) as session:  # as where TensorFlow imports Keras
        begin(session)
        import_module("polyamp.backends.tensorflow.run").begin(session)
        weight, opt = keras.Variable([1.0, 2.0]), keras.optimizers.SGD(0.5)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        opt.apply_gradients([(tape.gradient(loss, weight), weight)])
        np.testing.assert_array_equal(weight.numpy(), [0.0, 0.0])
        assert polyamp.health(session.holders[-1]).steps == 1
