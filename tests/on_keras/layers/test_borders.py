"""Layers that Python code adds up train under ``convert`` wherever they train under Keras' own mixed policies."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp

X = np.random.default_rng(0).standard_normal((8, 4, 16)).astype("float32")
Y = np.random.default_rng(1).standard_normal((8, 4, 2)).astype("float32")

# Keras 3.15 calls __array__ as NumPy 1 did.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")]


@pytest.fixture(autouse=True)
def _fresh_names() -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)


class TransformerBlock(layers.Layer):
    """A block as on keras.io, without attention, which JAX does not run in float16 on CPUs."""

    def __init__(self, norm: Any = layers.LayerNormalization) -> None:
        super().__init__()
        self.ffn = keras.Sequential([layers.Dense(32, activation="relu"), layers.Dense(16)])
        self.norm1, self.norm2 = norm(), norm()
        self.dropout = layers.Dropout(0.0)

    def call(self, inputs):
        out1 = self.norm1(inputs)
        return self.norm2(out1 + self.dropout(self.ffn(out1)))


class Residual(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.shortcut = layers.Conv1D(16, 1), layers.BatchNormalization(), layers.Dense(16)

    def call(self, inputs):
        return self.norm(self.conv(inputs)) + self.shortcut(inputs)


class Gate(layers.Layer):
    """A block with layers that the table keeps in float32, and others."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.dense, self.gate = layers.Dense(16), kind()

    def call(self, inputs):
        hidden = self.dense(inputs)
        return hidden * self.gate(hidden)


class RMSNorm(layers.Layer):
    """A user's norm, which squares its inputs."""

    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * ops.rsqrt(ops.mean(ops.square(inputs), -1, keepdims=True) + 1e-6) * self.gain


class T5LayerNorm(RMSNorm):
    pass


class Scaled(layers.Layer):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.norm, self.dense = kind(), layers.Dense(16)

    def call(self, inputs):
        return inputs + self.dense(self.norm(inputs * 1000.0))


def stack(*blocks: layers.Layer, head: bool = True) -> keras.Model:
    inputs = hidden = keras.Input((4, 16))
    for block in blocks:
        hidden = block(hidden)
    return keras.Model(inputs, layers.Dense(2, name="head")(hidden) if head else hidden)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = layers.Dense(16), layers.LayerNormalization(), layers.Dense(16)
        self.head = layers.Dense(2)

    def call(self, inputs):
        hidden = self.norm(self.first(inputs))
        return self.head(hidden + self.second(hidden))


def subclassed() -> keras.Model:
    model = Subclassed()
    model(X)
    return model


def nested() -> keras.Model:
    """Build a functional model that ends in a norm, and is called by Python code."""
    inputs = keras.Input((4, 16))
    body = keras.Model(inputs, layers.LayerNormalization()(layers.Dense(16)(inputs)))

    class Around(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.dense = body, layers.Dense(16)

        def call(self, inputs):
            hidden = self.body(inputs)
            return hidden + self.dense(hidden)

    return stack(Around())


MODELS = {
    "keras.io transformer block": lambda: stack(TransformerBlock(), TransformerBlock()),
    "rms norm": lambda: stack(TransformerBlock(layers.RMSNormalization)),
    "group norm": lambda: stack(TransformerBlock(lambda: layers.GroupNormalization(4))),
    "unit norm": lambda: stack(TransformerBlock(layers.UnitNormalization)),
    "own norm": lambda: stack(TransformerBlock(RMSNorm)),
    "residual block": lambda: stack(Residual()),
    "softmax": lambda: stack(Gate(layers.Softmax)),
    "softmax activation": lambda: stack(Gate(lambda: layers.Activation("softmax"))),
    "softplus": lambda: stack(Gate(lambda: layers.Activation("softplus"))),
    "subclassed": subclassed,
    "nested": nested,
    "a block that gives the outputs": lambda: stack(layers.Dense(16), TransformerBlock(), head=False),
}


NORMS = ("rms norm", "group norm", "own norm", "residual block")  # of squares beyond float16


def fitted(model: keras.Model, policy: str | None) -> list[float]:
    opt: Any = keras.optimizers.SGD(0.05)
    if policy is not None:
        polyamp.convert(model, policy)
        opt = polyamp.wrap_optimizer(opt, policy, loss_scale=2.0**6)
    model.compile(opt, "mse")
    targets = Y if model(X).shape[-1] == 2 else X
    return [float(loss) for loss in model.fit(X, targets, epochs=3, verbose=0, shuffle=False).history["loss"]]


@pytest.mark.filterwarnings("ignore:.*makes its outputs in Python code")
@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "mixed_bfloat16") for name in MODELS), *((name, "mixed_float16") for name in NORMS)]
)
def test_it_trains_near_float32(name: str, policy: str) -> None:
    weights = (model := MODELS[name]()).get_weights()
    expected = fitted(model, None)
    converted = MODELS[name]()
    converted.set_weights(weights)
    assert fitted(converted, policy) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("kind", [RMSNorm, T5LayerNorm])
@pytest.mark.parametrize("place", ["in code", "in a graph"])
def test_a_users_own_norm_is_known_by_its_name_and_computes_in_float32(kind: Any, place: str) -> None:
    norm = kind()
    block = Scaled(lambda: norm) if place == "in code" else norm
    factor = 1.0 if place == "in code" else 1e3
    model = polyamp.convert(stack(layers.Rescaling(factor), block), "mixed_float16")
    assert np.isfinite(ops.convert_to_numpy(model(X))).all()  # squares beyond float16
    assert keras.backend.standardize_dtype(norm(X).dtype) == "float16"


def test_a_softmax_in_code_computes_in_float32() -> None:
    block = Gate(layers.Softmax)
    polyamp.convert(stack(block), "mixed_bfloat16")
    scores = ops.convert_to_numpy(ops.cast(block.gate(X), "float32"))
    exact = ops.convert_to_numpy(ops.cast(ops.softmax(ops.convert_to_tensor(X)), "bfloat16"))
    np.testing.assert_array_equal(scores, exact.astype("float32"))


def test_a_rule_about_a_whole_block_keeps_all_of_it_in_float32() -> None:
    block = TransformerBlock()
    model = stack(block, layers.Dense(16))
    polyamp.convert(model, polyamp.policy("mixed_float16", rules={block.name: "full"}))
    assert {layer.compute_dtype for layer in block._flatten_layers()} == {"float32"}
    assert np.isfinite(ops.convert_to_numpy(model(X))).all()


@pytest.mark.parametrize("rule", ["ffn", "norm1"])
def test_a_rule_about_one_layer_of_a_block_does_not_break_it(rule: str) -> None:
    block = TransformerBlock()
    block.ffn.name, block.norm1.name = "ffn", "norm1"
    model = stack(block)
    polyamp.convert(model, polyamp.policy("mixed_float16", rules={rule: "full"}))
    assert np.isfinite(ops.convert_to_numpy(model(X))).all()


def test_converting_again_leaves_no_border_behind() -> None:
    block = Gate(layers.Softmax)
    model = stack(block)
    before = ops.convert_to_numpy(model(X))
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        polyamp.convert(model, policy)
    assert np.array_equal(ops.convert_to_numpy(model(X)), before)
    assert "call" not in vars(block.gate)


@keras.saving.register_keras_serializable(package="polyamp_tests")
class SavedGate(layers.Layer):
    def build(self, shape):
        self.gate = layers.Softmax()
        self.dense = layers.Dense(shape[-1])
        self.dense.build(shape)
        self.gate.build(shape)

    def call(self, inputs):
        hidden = self.dense(inputs)
        return hidden * self.gate(hidden)


def test_a_model_that_was_saved_runs(tmp_path: Any) -> None:
    """Keras saves the layers' dtype policies, and no borders."""
    model = polyamp.convert(stack(SavedGate()), "mixed_float16")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(ops.convert_to_numpy(loaded(X)), ops.convert_to_numpy(model(X)), atol=0.02)


def test_a_rule_about_an_operation_inside_of_a_layer_is_about_the_layer() -> None:
    model = stack(layers.Dense(16, name="hot"), layers.Dense(16))
    rules = {f"{model.name}/hot/matmul": "full", f"{model.name}/hot/add": "full"}
    polyamp.convert(model, polyamp.policy("mixed_float16", rules=rules))
    assert model.get_layer("hot").compute_dtype == "float32"
