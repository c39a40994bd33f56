"""The class `inner`: layers that compute in float32, from unrounded data, and return the compute format."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp
from polyamp.backends.keras.layers import amended

X = np.random.default_rng(0).standard_normal((8, 4, 4, 16)).astype("float32")
LARGE = 1e5 * X  # beyond float16

# Keras 3.15 calls __array__ as NumPy 1 did.
pytestmark = [pytest.mark.backends, pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")]


@keras.saving.register_keras_serializable(package="polyamp_tests")
class OwnRMSNorm(layers.Layer):
    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * ops.rsqrt(ops.mean(ops.square(inputs), -1, keepdims=True) + 1e-6) * self.gain


NORMS: dict[str, Any] = {
    "batch": layers.BatchNormalization,
    "layer": layers.LayerNormalization,
    "group": lambda: layers.GroupNormalization(4),
    "rms": layers.RMSNormalization,
    "own": OwnRMSNorm,
}
OF_SATURATION = {"sigmoid": lambda: layers.Activation("sigmoid"), "tanh": lambda: layers.Activation("tanh")}
POOLS = {"pool": lambda: layers.AveragePooling2D(4)}
INNER = {**NORMS, **OF_SATURATION, **POOLS}


def model_of(*between: Any) -> keras.Model:
    inputs = hidden = keras.Input((4, 4, 16))
    for layer in between:
        hidden = layer(hidden)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Dense(4)(hidden)))


def dtype(array: Any) -> str:
    return str(keras.backend.standardize_dtype(array.dtype))


def numbers(array: Any) -> np.ndarray:
    return ops.convert_to_numpy(ops.cast(array, "float32"))


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", INNER)
def test_it_returns_the_compute_format_and_keeps_its_parameters(name: str, compute: str) -> None:
    layer = INNER[name]()
    polyamp.convert(model_of(layers.Dense(16), layer), f"mixed_{compute}")
    assert dtype(layer(ops.cast(X, compute))) == compute
    assert dtype(layer(X)) == compute
    assert {variable.dtype for variable in layer.weights} <= {"float32"}


@pytest.mark.parametrize("name", NORMS)
def test_data_beyond_the_format_are_normalised_unrounded(name: str) -> None:
    layer = NORMS[name]()
    model = model_of(layer)
    expected = numbers(layer(LARGE, training=True) if name == "batch" else layer(LARGE))
    polyamp.convert(model, "mixed_float16")
    found = layer(LARGE, training=True) if name == "batch" else layer(LARGE)
    np.testing.assert_allclose(numbers(found), expected, rtol=2.0**-10, atol=2.0**-20)


def test_average_pooling_adds_up_in_float32() -> None:
    pool = layers.AveragePooling2D(4)
    polyamp.convert(model_of(pool), "mixed_float16")
    data = np.full((1, 4, 4, 16), 30_000.0, "float32")
    assert (numbers(pool(ops.cast(data, "float16"))) == 30_000).all()


def test_normalization_of_raw_features_takes_them_unrounded() -> None:
    layer = layers.Normalization(mean=1e6, variance=1e10)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(4)(layer(inputs))))
    polyamp.convert(model, "mixed_float16")
    found = layer(np.full((2, 4), 1.1e6, "float32"))
    assert dtype(found) == "float16"
    np.testing.assert_allclose(numbers(found), 1.0, rtol=2.0**-10)


@pytest.mark.parametrize("name", [*NORMS, *POOLS])
def test_a_rule_gives_float32_as_before(name: str) -> None:
    layer = INNER[name]()
    kinds = dict.fromkeys(("batch_norm", "layer_norm", "group_norm", "rms_norm", "avg_pool"), "full")
    with pytest.warns(polyamp.PolyampWarning, match="matched nothing"):
        polyamp.convert(model_of(layers.Dense(16), layer), polyamp.policy("mixed_float16", rules=kinds))
    assert layer.compute_dtype == "float32"
    assert dtype(layer(ops.cast(X, "float16"))) == "float32"


@pytest.mark.parametrize("kind", [layers.Softmax, lambda: layers.Activation("gelu"), lambda: layers.Dense(16)])
def test_a_rule_makes_any_layer_inner(kind: Any) -> None:
    layer = kind()
    model = model_of(layers.Dense(16), layer)
    polyamp.convert(model, polyamp.policy("mixed_bfloat16", rules={layer.name: "inner"}))
    found = layer(X)
    assert dtype(found) == "bfloat16"
    polyamp.convert(model, "float32")
    exact = layer(X)
    assert dtype(exact) == "float32"
    np.testing.assert_array_equal(numbers(found), numbers(ops.cast(exact, "bfloat16")))


def test_converting_back_gives_the_first_bits() -> None:
    model = model_of(*(kind() for kind in (*NORMS.values(), *OF_SATURATION.values())))
    before = numbers(model(X))
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        polyamp.convert(model, policy)
    np.testing.assert_array_equal(numbers(model(X)), before)


def test_a_rule_that_is_tried_leaves_the_others_inner() -> None:
    own = OwnRMSNorm()
    model = polyamp.convert(model_of(layers.Dense(16, name="wide"), own), "mixed_float16")
    with amended(model, polyamp.policy("mixed_float16", rules={"wide": "full"})):
        assert dtype(own(X)) == "float16"
        assert np.isfinite(numbers(own(LARGE))).all()
    assert dtype(own(X)) == "float16"


def test_saved_norms_compute_as_keras_has_them(tmp_path: Any) -> None:
    model = polyamp.convert(model_of(*(kind() for kind in NORMS.values())), "mixed_float16")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(numbers(loaded(X)), numbers(model(X)), atol=0.02)
