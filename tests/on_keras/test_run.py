"""`polyamp run` on Keras scripts: losses as in float32, skipped steps, refusals."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp
from polyamp.backends.keras import LossScaledOptimizer
from polyamp.backends.keras.run import begin
from polyamp.run import Refused, Session

BACKEND = keras.backend.backend()
LINES = {"tensorflow": r"polyamp\.scale_loss", "jax": r"polyamp\.value_and_grad"}
pytestmark = pytest.mark.skipif(BACKEND == "torch", reason="refused there")

RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.standard_normal((64, size)).astype("float32") for size in (16, 8))


@contextmanager
def started(policy: Any = "mixed_float16") -> Iterator[Session]:
    with Session(None if policy is None else polyamp.policy(policy)) as session:
        if BACKEND != "torch":
            import_module(f"polyamp.backends.{BACKEND}.run").begin(session)  # which is called first
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
        assert model.get_layer("hidden").compute_dtype == policy.removeprefix("mixed_")
        assert session.is_applied
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
        warns = pytest.warns(polyamp.PolyampWarning, match="the loss was not finite")
        with warns if BACKEND == "tensorflow" else nullcontext():  # on JAX a later step warns
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
    def train_step(self, *data: Any) -> Any:  # on JAX with the state
        return super().train_step(*data)


class Takes(keras.Model):
    def train_step(self, *data: Any) -> Any:
        if BACKEND == "jax":
            import jax

            return jax.grad(lambda x: x * x)(1.0)
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self(X)
        return tape.gradient(loss, self.trainable_variables)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_training_step_of_its_own_may_call_keras_and_takes_no_gradients_itself(policy: str) -> None:
    full = in_float32(Calls)
    with started(policy):
        np.testing.assert_allclose(fitted(Calls)[0], full, rtol=2e-2)
        with pytest.raises(Refused, match=LINES[BACKEND]):
            fitted(Takes)


def test_a_model_without_an_input_shape_is_converted_once_keras_has_built_it() -> None:
    with started():
        model = keras.Sequential([layers.Dense(32), layers.Dense(8)])
        model.compile("sgd", "mse")
        if BACKEND == "tensorflow":  # where Keras builds it inside the training step
            with pytest.raises(polyamp.errors.UsageError, match=r"keras\.Input"):
                model.fit(X, Y, verbose=0)
            return
        model.fit(X, Y, verbose=0)
        assert [layer.compute_dtype for layer in model.layers] == ["float16", "float32"]


def test_a_wrapped_optimizer_of_its_own_is_refused() -> None:
    with started():
        opt = polyamp.wrap_optimizer(keras.optimizers.SGD(), "mixed_float16")
        with pytest.raises(polyamp.errors.UsageError, match="already"):
            model_of().compile(opt, "mse")
