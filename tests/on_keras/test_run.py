"""`polyamp run` on Keras scripts on TensorFlow: losses as in float32, skipped steps, refusals."""

import functools
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
from polyamp.run import Session

reason = "refused there: see test_jax.py"
pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason=reason)

RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.standard_normal((64, size)).astype("float32") for size in (16, 8))


@contextmanager
def started(policy: Any = "mixed_float16") -> Iterator[Session]:
    with Session(None if policy is None else polyamp.policy(policy)) as session:
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
    return history["loss"], model


@functools.cache
def in_float32(kind: type[keras.Model]) -> list[float]:
    return fitted(kind)[0]


def test_nothing_is_turned_on_without_a_policy() -> None:
    full = in_float32(keras.Model)
    with started(None) as session:
        again, model = fitted()
    assert again == full
    assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert session.holders == []


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_fit_matches_float32(policy: str) -> None:
    full = in_float32(keras.Model)
    with started(policy) as session:
        low, model = fitted()
        assert model.predict(X, verbose=0).dtype == np.float32
        assert ops.dtype(model(X)) == "float32"
        assert all(variable.dtype == "float32" for variable in model.variables)
        assert session.holders[-1] is model.optimizer
        assert isinstance(model.optimizer, LossScaledOptimizer)
        assert (polyamp.health(model).steps, polyamp.health(model).skipped) == (4, 0)
    assert low != full
    np.testing.assert_allclose(low, full, rtol=2e-3 if policy == "mixed_float16" else 2e-2)
    again, model = fitted()
    assert again == full  # Keras is as it was
    assert model.dtype_policy.name == "float32"
    assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize(("policy", "factor"), [("mixed_float16", 1e20), ("mixed_bfloat16", 1e30)])
def test_a_batch_that_overflows_is_skipped_whole(policy: str, factor: float) -> None:
    with started(policy):
        model = model_of()
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
        model.train_on_batch(X, Y)
        before = [np.array(variable) for variable in model.variables]
        with pytest.warns(polyamp.PolyampWarning, match="the loss was not finite"):
            model.train_on_batch(X * factor, Y * factor)
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


class Calls(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Takes(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_training_step_of_its_own_may_call_keras_and_takes_no_float16_gradients_itself(policy: str) -> None:
    full = [in_float32(kind) for kind in (Calls, Takes)]
    with started(policy):
        np.testing.assert_allclose(fitted(Calls)[0], full[0], rtol=2e-2)
        if policy == "mixed_bfloat16":
            np.testing.assert_allclose(fitted(Takes)[0], full[1], rtol=2e-2)
            return
        with pytest.raises(polyamp.errors.UsageError, match=r"polyamp\.scale_loss"):
            fitted(Takes)


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
