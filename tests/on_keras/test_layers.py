"""Layers of class ``inner``, and layers that Python code calls: each returns the format that its caller computes in."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp
from polyamp.backends.keras.layers import amended

X = np.random.default_rng(0).standard_normal((8, 4, 16)).astype("float32")
Y = np.random.default_rng(1).standard_normal((8, 4, 2)).astype("float32")
LARGE = 1e5 * X  # beyond float16


@pytest.fixture(autouse=True)
def _fresh_names() -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)


def dtype(array: Any) -> str:
    return str(keras.backend.standardize_dtype(array.dtype))


def numbers(array: Any) -> np.ndarray:
    return ops.convert_to_numpy(ops.cast(array, "float32"))


def stack(*between: Any, head: bool = True) -> keras.Model:
    inputs = hidden = keras.Input((4, 16))
    for layer in between:
        hidden = layer(hidden)
    return keras.Model(inputs, layers.Dense(2, name="head")(hidden) if head else hidden)


@keras.saving.register_keras_serializable(package="polyamp_tests")
class RMSNorm(layers.Layer):
    """A user's norm, which squares its inputs."""

    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * ops.rsqrt(ops.mean(ops.square(inputs), -1, keepdims=True) + 1e-6) * self.gain


class T5LayerNorm(RMSNorm):
    pass


NORMS: dict[str, Any] = {
    "batch": layers.BatchNormalization,
    "layer": layers.LayerNormalization,
    "group": lambda: layers.GroupNormalization(4),
    "rms": layers.RMSNormalization,
    "own": RMSNorm,
    "own, of another name": T5LayerNorm,
}
SATURATING = {"sigmoid": lambda: layers.Activation("sigmoid"), "tanh": lambda: layers.Activation("tanh")}
INNER = {**NORMS, **SATURATING, "pool": lambda: layers.AveragePooling1D(4)}


@pytest.mark.backends
@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", INNER)
def test_it_returns_the_compute_format_and_keeps_its_parameters(name: str, compute: str) -> None:
    layer = INNER[name]()
    polyamp.convert(stack(layers.Dense(16), layer), f"mixed_{compute}")
    assert dtype(layer(ops.cast(X, compute))) == compute
    as_given = name == "group" and keras.__version__ < "3.15"  # by Keras' own code
    assert dtype(layer(X)) == ("float32" if as_given else compute)
    assert {variable.dtype for variable in layer.weights} <= {"float32"}


@pytest.mark.backends
@pytest.mark.parametrize("name", NORMS)
def test_data_beyond_the_format_are_normalised_unrounded(name: str) -> None:
    layer = NORMS[name]()
    model, training = stack(layer, layers.Dense(4)), {"training": True} if name == "batch" else {}
    expected = numbers(layer(LARGE, **training))
    polyamp.convert(model, "mixed_float16")
    np.testing.assert_allclose(numbers(layer(LARGE, **training)), expected, rtol=2.0**-10, atol=2.0**-20)


@pytest.mark.backends
def test_average_pooling_adds_up_in_float32() -> None:
    pool = layers.AveragePooling1D(4)
    polyamp.convert(stack(layers.Dense(16), pool), "mixed_float16")
    assert (numbers(pool(ops.full((1, 4, 16), 30_000.0, "float16"))) == 30_000).all()


def test_normalization_of_raw_features_takes_them_unrounded() -> None:
    layer = layers.Normalization(mean=1e6, variance=1e10)
    polyamp.convert(stack(layer, layers.Dense(4)), "mixed_float16")
    found = layer(np.full((2, 4, 16), 1.1e6, "float32"))
    assert dtype(found) == "float32"
    np.testing.assert_allclose(numbers(found), 1.0, rtol=2.0**-10)


@pytest.mark.backends
@pytest.mark.parametrize("name", ["batch", "own", "pool"])
def test_a_rule_gives_float32(name: str) -> None:
    layer = INNER[name]()
    polyamp.convert(stack(layers.Dense(16), layer), polyamp.policy("mixed_float16", rules={layer.name: "full"}))
    assert layer.compute_dtype == "float32"
    assert dtype(layer(ops.cast(X, "float16"))) == "float32"


@pytest.mark.backends
@pytest.mark.parametrize("kind", [layers.Softmax, lambda: layers.Activation("gelu"), lambda: layers.Dense(16)])
def test_a_rule_makes_any_layer_inner(kind: Any) -> None:
    layer = kind()
    model = stack(layers.Dense(16), layer)
    polyamp.convert(model, polyamp.policy("mixed_bfloat16", rules={layer.name: "inner"}))
    found = layer(X)
    assert dtype(found) == "bfloat16"
    polyamp.convert(model, "float32")
    np.testing.assert_array_equal(numbers(found), numbers(ops.cast(layer(X), "bfloat16")))


@pytest.mark.backends
def test_a_rule_that_is_tried_leaves_the_others_inner() -> None:
    own = RMSNorm()
    model = polyamp.convert(stack(layers.Dense(16, name="wide"), own), "mixed_float16")
    with amended(model, polyamp.policy("mixed_float16", rules={"wide": "full"})):
        assert dtype(own(X)) == "float16"
        assert np.isfinite(numbers(own(LARGE))).all()
    assert dtype(own(X)) == "float16"


# Layers that Python code calls.


class TransformerBlock(layers.Layer):
    """A block as on keras.io, without attention, which JAX does not run in float16 on CPUs."""

    def __init__(self, norm: Any = layers.LayerNormalization) -> None:
        super().__init__()
        self.ffn = keras.Sequential([layers.Dense(32, activation="relu"), layers.Dense(16)])
        self.norm1, self.norm2 = norm(), norm()

    def call(self, inputs):
        out1 = self.norm1(inputs)
        return self.norm2(out1 + self.ffn(out1))


@keras.saving.register_keras_serializable(package="polyamp_tests")
class Gate(layers.Layer):
    """A block with a layer that the table keeps in float32, and another."""

    def __init__(self, activation: str = "softmax", **options: Any) -> None:
        super().__init__(**options)
        self.dense, self.gate = layers.Dense(16), layers.Activation(activation)

    def build(self, shape):
        self.dense.build(shape)
        self.gate.build(shape)

    def call(self, inputs):
        hidden = self.dense(inputs)
        return hidden * self.gate(hidden)


class Residual(layers.Layer):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.shortcut = inner, layers.Dense(16)

    def call(self, inputs):
        return self.inner(inputs) + self.shortcut(inputs)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = TransformerBlock(), layers.Dense(2)

    def call(self, inputs):
        return self.head(self.body(inputs))


def subclassed() -> keras.Model:
    model = Subclassed()
    model(X)
    return model


MODELS = {
    "keras.io transformer block": lambda: stack(TransformerBlock(), TransformerBlock()),
    "own norm": lambda: stack(TransformerBlock(RMSNorm)),
    "unit norm": lambda: stack(TransformerBlock(layers.UnitNormalization)),
    "residual block": lambda: stack(Residual(keras.Sequential([layers.Conv1D(16, 1), layers.BatchNormalization()]))),
    "softmax": lambda: stack(Gate()),
    "softplus activation": lambda: stack(Gate("softplus")),
    "subclassed": subclassed,
    "a model that ends in a norm": lambda: stack(Residual(stack(layers.LayerNormalization(), head=False))),
    "a block that gives the outputs": lambda: stack(layers.Dense(16), TransformerBlock(), head=False),
}


def fitted(model: keras.Model, policy: str | None) -> list[float]:
    opt: Any = keras.optimizers.SGD(0.05)
    if policy is not None:
        polyamp.convert(model, policy)
        opt = polyamp.wrap_optimizer(opt, policy, loss_scale=2.0**6)
    model.compile(opt, "mse")
    targets = Y if model(X).shape[-1] == 2 else X
    return [float(model.train_on_batch(X, targets)) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*makes its outputs in Python code")
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "mixed_bfloat16") for name in MODELS),
        ("own norm", "mixed_float16"),
        ("residual block", "mixed_float16"),
    ],
)
def test_code_that_calls_layers_trains_near_float32(name: str, policy: str) -> None:
    weights = (model := MODELS[name]()).get_weights()
    expected = fitted(model, None)
    converted = MODELS[name]()
    converted.set_weights(weights)
    assert fitted(converted, policy) == pytest.approx(expected, rel=0.03)


def test_a_softmax_in_code_computes_in_float32() -> None:
    block = Gate()
    polyamp.convert(stack(block), "mixed_bfloat16")
    exact = ops.cast(ops.softmax(ops.convert_to_tensor(X)), "bfloat16")
    np.testing.assert_array_equal(numbers(block.gate(X)), numbers(exact))


def test_a_rule_about_a_whole_block_keeps_all_of_it_in_float32() -> None:
    block = TransformerBlock()
    model = stack(block, layers.Dense(16))
    polyamp.convert(model, polyamp.policy("mixed_float16", rules={block.name: "full"}))
    assert {layer.compute_dtype for layer in block._flatten_layers()} == {"float32"}
    assert np.isfinite(numbers(model(X))).all()


@pytest.mark.parametrize("rule", ["ffn", "norm1"])
def test_a_rule_about_one_layer_of_a_block_does_not_break_it(rule: str) -> None:
    block = TransformerBlock()
    block.ffn.name, block.norm1.name = "ffn", "norm1"
    model = stack(block)
    polyamp.convert(model, polyamp.policy("mixed_float16", rules={rule: "full"}))
    assert np.isfinite(numbers(model(X))).all()


def test_a_rule_about_an_operation_inside_of_a_layer_is_about_the_layer() -> None:
    model = stack(layers.Dense(16, name="hot"), layers.Dense(16))
    rules = {f"{model.name}/hot/matmul": "full", f"{model.name}/hot/add": "full"}
    polyamp.convert(model, polyamp.policy("mixed_float16", rules=rules))
    assert model.get_layer("hot").compute_dtype == "float32"


@pytest.mark.backends
def test_converting_back_gives_the_first_bits_and_leaves_no_border_behind() -> None:
    block = Gate()
    model = stack(block, *(kind() for kind in (*NORMS.values(), *SATURATING.values())))
    before = numbers(model(X))
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        polyamp.convert(model, policy)
    assert np.array_equal(numbers(model(X)), before)
    assert "call" not in vars(block.gate)


@pytest.mark.backends
def test_a_saved_model_computes_as_keras_has_it(tmp_path: Any) -> None:
    """Keras saves the layers' dtype policies, and no borders."""
    model = polyamp.convert(stack(Gate(), *(NORMS[name]() for name in list(NORMS)[:-1])), "mixed_float16")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(numbers(loaded(X)), numbers(model(X)), atol=0.02)
