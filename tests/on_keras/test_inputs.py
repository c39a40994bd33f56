"""Data of the user's stay unrounded until the first layer that computes in 16 bits, which casts them itself."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp
from support.harness_keras import to_numpy

pytestmark = pytest.mark.backends

X = (4000 + np.random.default_rng(0).standard_normal((16, 8))).astype("float32")
IMAGES = np.random.default_rng(0).uniform(0, 255, (4, 8, 8, 3)).astype("float32")
FORMATS = ["mixed_float16", "mixed_bfloat16"]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)


def numbers(values: Any) -> np.ndarray:
    return to_numpy(ops.cast(values, "float32"))


@keras.saving.register_keras_serializable(package="polyamp_tests")
class Features(layers.Layer):
    """A user's layer that reads an index from a matrix of floats."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.table = layers.Embedding(8192, 8)

    def build(self, shape):
        self.table.build(())

    def call(self, inputs):
        return self.table(ops.cast(inputs[:, 0], "int32")) + (inputs - 4000)


class Subclassed(keras.Model):
    def __init__(self, *before: Any) -> None:
        super().__init__()
        self.before, self.features, self.head = list(before), Features(), layers.Dense(2)

    def call(self, inputs):
        for layer in self.before:
            inputs = layer(inputs)
        return self.head(self.features(inputs))


class Residual(keras.Model):
    """A model that adds what 16-bit layers return to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = layers.Dense(8), layers.Dense(2)

    def call(self, inputs):
        inputs = (inputs - 4000) / 3
        return self.head(inputs + self.body(inputs) / (1 + inputs * inputs))


class Normed(Subclassed):
    def __init__(self) -> None:
        super().__init__(layers.Rescaling(1.0), layers.Flatten(), layers.Dropout(0.5), layers.ReLU())


def functional(*before: Any) -> keras.Model:
    inputs = hidden = keras.Input((8,))
    for layer in before:
        hidden = layer(hidden)
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(8)(hidden)))


def several_inputs() -> keras.Model:
    first, second = keras.Input((8,)), keras.Input((8,))
    both = layers.Subtract()([layers.Flatten()(first), layers.Rescaling(1.0, offset=1.0)(second)])
    return keras.Model([first, second], layers.Dense(2)(layers.Dense(8)(both)))


def called(model: keras.Model) -> keras.Model:
    model(X)
    return model


BINS = [3999.0, 3999.5, 4000.0, 4000.5]
MODELS: dict[str, Callable[[], keras.Model]] = {
    "rescaling": lambda: functional(layers.Rescaling(1.0, offset=-4000.0)),
    "normalization": lambda: functional(layers.Normalization(mean=4000.0, variance=1.0)),
    "discretization": lambda: functional(layers.Discretization(BINS, output_mode="one_hot"), layers.Flatten()),
    "bins as numbers": lambda: functional(layers.Discretization(BINS), layers.Embedding(8, 4), layers.Flatten()),
    "lambda": lambda: functional(layers.Lambda(lambda x: x - 4000)),
    "after other layers": lambda: functional(
        layers.Reshape((8, 1)), layers.Flatten(), layers.Dropout(0.5), layers.Lambda(lambda x: x - 4000)
    ),
    "after a pool": lambda: functional(
        layers.Reshape((8, 1)), layers.AveragePooling1D(2), layers.Rescaling(1.0, offset=-4000.0), layers.Flatten()
    ),
    "operations": lambda: functional(keras.layers.Identity(), lambda x: x - 4000.0),
    "nested": lambda: functional(
        keras.Sequential([keras.Input((8,)), layers.Rescaling(1.0), layers.ReLU()]), Features()
    ),
    "own layer": lambda: functional(Features()),
    "several inputs": several_inputs,
    "subclassed": lambda: called(Subclassed()),
    "subclassed, after other layers": lambda: called(Normed()),
    "residual": lambda: called(Residual()),
}


@pytest.mark.filterwarnings("ignore:.*makes its outputs in Python code")
@pytest.mark.parametrize("policy", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_data_beyond_the_format_are_not_rounded(name: str, policy: str) -> None:
    model = MODELS[name]()
    data = [X, X - 1] if name == "several inputs" else X
    expected = numbers(model(data))
    polyamp.convert(model, policy)
    assert policy.removeprefix("mixed_") in {layer.compute_dtype for layer in model._flatten_layers()}
    close = {"rtol": 0.02, "atol": 0.02 * np.abs(expected).max()}
    np.testing.assert_allclose(numbers(model(data)), expected, **close)
    np.testing.assert_allclose(model.predict(data, verbose=0), expected, **close)
    polyamp.convert(model, "float32")
    np.testing.assert_array_equal(numbers(model(data)), expected)


def test_what_comes_after_the_first_product_is_as_before() -> None:
    between = [layers.Flatten(), layers.Dense(8), layers.Dropout(0.5), layers.ReLU(), layers.Lambda(lambda x: x + 1)]
    polyamp.convert(functional(*between), "mixed_bfloat16")
    assert [layer.compute_dtype for layer in between] == ["float32", *["bfloat16"] * 4]


def test_a_rule_about_an_early_layer_comes_first() -> None:
    layer = layers.Flatten(name="early")
    polyamp.convert(functional(layer), polyamp.policy("mixed_bfloat16", rules={"early": "lower"}))
    assert layer.compute_dtype == "bfloat16"


@pytest.mark.parametrize("policy", FORMATS)
def test_a_file_keeps_what_comes_first_in_float32(policy: str, tmp_path: Any) -> None:
    model = polyamp.convert(functional(layers.Rescaling(1.0, offset=-4000.0), layers.ReLU()), policy)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numbers(loaded(X)), numbers(model(X)))


NEEDS: dict[str, dict[str, Any]] = {
    "Rescaling": {"scale": 2.0},
    "Resizing": {"height": 8, "width": 8},
    "CenterCrop": {"height": 8, "width": 8},
    "RandomPosterization": {"factor": 4},
    "RandomCrop": {"height": 8, "width": 8},
    "MaxNumBoundingBoxes": {"max_number": 1},
}
OF_IMAGES = [
    name
    for name, kind in vars(layers).items()
    if inspect.isclass(kind) and any(one.__name__ == "BaseImagePreprocessingLayer" for one in kind.__mro__)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Tensor.T is deprecated on 0-D tensors")
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # of MixUp on JAX
@pytest.mark.parametrize("name", OF_IMAGES)
def test_augmentation_runs_in_float32(name: str) -> None:
    kind = getattr(layers, name)
    parameters = inspect.signature(kind).parameters
    options = NEEDS.get(
        name, {key: 0.2 for key, one in parameters.items() if one.default is one.empty and one.kind == 1}
    )
    layer = kind(**options)
    model = keras.Sequential([keras.Input((8, 8, 3)), layer, layers.Flatten(), layers.Dense(4), layers.Dense(1)])
    polyamp.convert(model, "mixed_float16")
    assert layer.compute_dtype != "float16"
    assert np.isfinite(numbers(model(IMAGES, training=True))).all()
