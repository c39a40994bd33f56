"""Losses that layers add are computed in float32: penalties on outputs and variables, and ``add_loss``."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp
import polyamp.backends.keras
from support.harness_keras import to_numpy

pytestmark = pytest.mark.backends

X = 10 * np.random.default_rng(0).standard_normal((64, 8)).astype("float32")
Y = X[:, :1]
FORMATS = ["mixed_float16", "mixed_bfloat16"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")


@keras.saving.register_keras_serializable(package="polyamp_tests")
class Divergence(layers.Layer):
    """A user's layer whose loss is a sum beyond float16."""

    def call(self, inputs):
        self.add_loss(1e-3 * ops.sum(ops.square(inputs)))
        return inputs


class InHelper(layers.Layer):
    def call(self, inputs):
        self._penalize(inputs)
        return inputs

    def _penalize(self, inputs):
        self.add_loss([1e-3 * ops.sum(ops.square(inputs))])


class Penalized(layers.Dense):
    """A product whose own code adds a loss."""

    def call(self, inputs):
        outputs = super().call(inputs)
        self.add_loss(1e-3 * ops.sum(ops.square(outputs)))
        return outputs


class Rounded(layers.Layer):
    """A user's layer that computes its loss in 16 bits, on purpose."""

    def call(self, inputs):
        self.add_loss(ops.mean(ops.cast(inputs, self.compute_dtype)))
        return inputs


class Encoder(keras.Model):
    """A model in Python code that adds a loss, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = layers.Dense(64), layers.Dense(1)

    def call(self, inputs):
        hidden = self.body(inputs)
        self.add_loss(1e-3 * ops.sum(ops.square(hidden)))
        return self.head(hidden)


def stack(*inner: Any) -> keras.Model:
    return keras.Sequential([keras.Input((8,)), *inner, layers.Dense(1)])


def encoder() -> keras.Model:
    model = Encoder()
    model(X)
    return model


def own_penalty(values: Any) -> Any:
    return 1e-3 * ops.sum(ops.square(values))


def shared() -> keras.Model:
    inputs, layer = keras.Input((8,)), layers.Dense(8, activity_regularizer="l2")
    return keras.Model(inputs, layers.Dense(1)(layer(layer(inputs))))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "activity": lambda: stack(layers.Dense(512, activity_regularizer="l2", kernel_regularizer="l2")),
    "activity, a function": lambda: stack(layers.Dense(512, activity_regularizer=own_penalty)),
    "activity of a head": lambda: keras.Sequential(
        [keras.Input((8,)), layers.Dense(8), layers.Dense(1, activity_regularizer="l1")]
    ),
    "ActivityRegularization": lambda: stack(layers.Dense(64), layers.ActivityRegularization(l1=0.1, l2=0.1)),
    "convolution": lambda: stack(
        layers.Reshape((8, 1)), layers.Conv1D(64, 1, activity_regularizer="l2"), layers.Flatten()
    ),
    "norm": lambda: stack(layers.Dense(64), layers.LayerNormalization(activity_regularizer="l2")),
    "add_loss": lambda: stack(layers.Dense(64), Divergence()),
    "add_loss on data": lambda: stack(Divergence(), layers.Dense(64)),
    "add_loss in a helper": lambda: stack(layers.Dense(64), InHelper()),
    "add_loss of a product": lambda: stack(layers.Dense(64), Penalized(512)),
    "add_loss, rounded": lambda: stack(layers.Dense(64), Rounded()),
    "nested": lambda: stack(stack(layers.Dense(64, activity_regularizer="l2"), Divergence())),
    "shared": shared,
    "model in code": encoder,
}


@pytest.mark.filterwarnings("ignore:.*makes its outputs in Python code")
@pytest.mark.parametrize("policy", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_added_losses_are_those_of_float32(name: str, policy: str) -> None:
    model = MODELS[name]()
    model(X)
    expected = [float(to_numpy(one)) for one in model.losses]
    polyamp.convert(model, policy)
    model(X)
    assert expected
    assert {keras.backend.standardize_dtype(one.dtype) for one in model.losses} == {"float32"}
    assert [float(to_numpy(one)) for one in model.losses] == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*makes its outputs in Python code")
@pytest.mark.parametrize("policy", FORMATS)
@pytest.mark.parametrize("name", ["activity", "add_loss", "model in code"])
def test_a_model_with_added_losses_trains_as_in_float32(name: str, policy: str) -> None:
    found = []
    for chosen in (None, policy):
        keras.utils.set_random_seed(0)
        model, opt = MODELS[name](), keras.optimizers.SGD(1e-5)
        if chosen:
            polyamp.convert(model, chosen)
            opt = polyamp.wrap_optimizer(opt, chosen, loss_scale=4.0)
        model.compile(opt, "mse")
        fitted = model.fit(X, Y, batch_size=32, shuffle=False, verbose=0).history["loss"][0]
        found.append([fitted, float(model.train_on_batch(X, Y)), model.evaluate(X, Y, batch_size=64, verbose=0)])
    assert found[1] == pytest.approx(found[0], rel=0.03)


@pytest.mark.parametrize("penalty", ["l2", keras.regularizers.L1L2(0.1, 0.2), own_penalty])
def test_a_file_has_the_users_penalty(penalty: Any, tmp_path: Any) -> None:
    model = stack(layers.Dense(512, activity_regularizer=penalty), Divergence(), layers.Dense(8))
    before = model.get_config()
    polyamp.convert(polyamp.convert(model, "mixed_float16"), "float32")
    assert model.get_config() == before
    if callable(penalty) and not isinstance(penalty, keras.regularizers.Regularizer):
        return  # Keras does not load functions that were not registered
    polyamp.convert(model, "mixed_bfloat16")
    model.compile("sgd", "mse")
    expected = model.evaluate(X, Y, batch_size=64, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0].activity_regularizer) is type(keras.regularizers.get(penalty))
    assert loaded.evaluate(X, Y, batch_size=64, verbose=0) == pytest.approx(expected, rel=0.02)
    loaded.compile(keras.optimizers.SGD(0.0), "mse")
    assert float(loaded.train_on_batch(X, Y)) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_a_penalty_on_a_variable_in_16_bits_is_computed_in_float32(stored: str) -> None:
    keras.config.set_dtype_policy(stored)
    model = stack(layers.Dense(512, kernel_initializer=keras.initializers.Constant(8.0), kernel_regularizer="l2"))
    polyamp.convert(model, stored)
    (loss,) = model.losses
    assert float(to_numpy(loss)) == pytest.approx(0.01 * 64 * 8 * 512, rel=0.01)
