"""A built Keras model's layers compute by a policy and its rules, and are compiled again."""

from collections.abc import Iterator

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp

X = np.random.default_rng(0).standard_normal((8, 5, 6)).astype("float32")
Y = np.random.default_rng(1).standard_normal((8, 2)).astype("float32")


@pytest.fixture(autouse=True)
def _fresh_names() -> Iterator[None]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")


def transformer() -> keras.Model:
    inputs = keras.Input((5, 6))
    hidden = layers.MultiHeadAttention(2, 3, name="attention")(inputs, inputs)
    hidden = layers.LayerNormalization(name="norm")(layers.Add(name="add")([hidden, inputs]))
    hidden = keras.Sequential([keras.Input((5, 6)), layers.Dense(4, name="wide"), layers.Dense(6)], name="mlp")(hidden)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Flatten(name="flat")(hidden)))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = layers.Dense(4, name="body"), layers.Dense(2, name="head")

    def call(self, inputs):
        return self.head(ops.mean(self.body(inputs), axis=1))


def compute(model: keras.Model, *path: str) -> str:
    for name in path:
        model = next(layer for layer in model._flatten_layers(include_self=False) if layer.name == name)
    return model.compute_dtype


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("attention",), "float16"),
        (("attention", "query"), "float16"),
        (("attention", "softmax"), "float32"),
        (("add",), "float16"),
        (("norm",), "float16"),
        (("mlp", "wide"), "float16"),
        (("flat",), "float16"),
        (("head",), "float32"),
    ],
)
def test_layers_compute_as_the_table_says_and_the_head_in_float32(path: tuple[str, ...], expected: str) -> None:
    assert compute(polyamp.convert(transformer(), "mixed_float16"), *path) == expected


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_outputs_are_float32_variables_stay_and_values_are_close(name: str) -> None:
    model = transformer()
    before, weights = ops.convert_to_numpy(model(X)), model.get_weights()
    outputs = polyamp.convert(model, name)(X)
    assert keras.backend.standardize_dtype(outputs.dtype) == "float32"
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    assert all(np.array_equal(old, new) for old, new in zip(weights, model.get_weights(), strict=True))
    np.testing.assert_allclose(ops.convert_to_numpy(outputs), before, atol=0.1)
    assert not np.array_equal(ops.convert_to_numpy(outputs), before)


@pytest.mark.parametrize(
    ("pattern", "path", "op_class", "expected"),
    [
        ("mlp/wide", ("mlp", "wide"), "full", "float32"),
        ("mlp.*", ("mlp", "wide"), "full", "float32"),
        ("attention/query", ("attention", "query"), "full", "float32"),
        ("layer_norm", ("norm",), "lower", "float16"),
        ("head", ("head",), "lower", "float16"),
        ("softmax", ("attention", "softmax"), "lower", "float16"),
    ],
)
def test_rules_come_first(pattern: str, path: tuple[str, ...], op_class: str, expected: str) -> None:
    model = polyamp.convert(transformer(), polyamp.policy("mixed_float16", rules={pattern: op_class}))
    assert compute(model, *path) == expected


def test_kept_layers_are_not_touched() -> None:
    model = polyamp.convert(transformer(), "mixed_float16")
    polyamp.convert(model, polyamp.policy("mixed_bfloat16", rules={"mlp/wide": "keep"}))
    assert (compute(model, "mlp", "wide"), compute(model, "attention")) == ("float16", "bfloat16")


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has float64 switched off")
def test_float64_layers_are_not_touched() -> None:
    exact = layers.Dense(3, dtype="float64", name="exact")
    model = keras.Sequential([keras.Input((4,)), exact, layers.Dense(3), layers.Dense(2)])
    assert compute(polyamp.convert(model, "mixed_bfloat16"), "exact") == "float64"


def test_a_rule_that_matches_nothing_is_reported() -> None:
    with pytest.warns(polyamp.PolyampWarning, match="'decoder' of .* matched nothing"):
        polyamp.convert(transformer(), polyamp.policy("mixed_float16", rules={"decoder": "full"}))


def test_a_policy_that_changes_nothing_is_reported() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.warns(polyamp.PolyampWarning, match="changed nothing"):
        polyamp.convert(model, "mixed_float16")


def test_softmax_activation_and_several_heads_stay_in_float32() -> None:
    inputs = keras.Input((6,))
    scores = layers.Dense(3, name="scores")(inputs)
    shares, value = layers.Activation("softmax", name="shares")(scores), layers.Dense(1, name="value")(scores)
    model = keras.Model(inputs, [shares, value])
    polyamp.convert(model, "mixed_float16")
    assert [compute(model, name) for name in ("scores", "shares", "value")] == ["float16", "float32", "float32"]


def test_a_recurrent_head_stays_in_float32_with_its_cell() -> None:
    model = keras.Sequential([keras.Input((5, 6)), layers.Dense(4), layers.LSTM(3, name="recurrent")])
    polyamp.convert(model, "mixed_bfloat16")
    assert (compute(model, "recurrent"), compute(model, "recurrent", "lstm_cell")) == ("float32", "float32")


def test_a_float32_first_layer_of_a_sequential_model_takes_large_inputs() -> None:
    model = keras.Sequential([keras.Input((2,)), layers.LayerNormalization(), layers.Dense(4), layers.Dense(1)])
    polyamp.convert(model, "mixed_float16")
    assert np.isfinite(ops.convert_to_numpy(model(np.array([[1e6, -1e6]], "float32")))).all()


def test_a_subclassed_model_is_told_that_its_head_is_unknown() -> None:
    model = Subclassed()
    model(X)
    with pytest.warns(polyamp.PolyampWarning, match="Python code"):
        polyamp.convert(model, "mixed_float16")
    polyamp.convert(model, polyamp.policy("mixed_float16", rules={"head": "full"}))
    assert keras.backend.standardize_dtype(model(X).dtype) == "float32"


@pytest.mark.parametrize("make", [Subclassed, lambda: keras.Sequential([layers.Dense(2)])])
def test_an_unbuilt_model_is_refused(make) -> None:
    with pytest.raises(polyamp.errors.UsageError, match="not built"):
        polyamp.convert(make(), "mixed_float16")


@pytest.mark.parametrize("name", ["O2", "O3", "float16", "bfloat16"])
def test_parameters_are_not_stored_anew_and_nothing_is_changed(name: str) -> None:
    model = transformer()
    with pytest.raises(polyamp.errors.UnsupportedError, match="set_dtype_policy"):
        polyamp.convert(model, name)
    assert {layer.compute_dtype for layer in model._flatten_layers()} == {"float32"}


@pytest.mark.parametrize("formats", [{"compute": "tensorfloat32"}, {"compute": "float8_e4m3fn"}])
def test_formats_without_a_keras_policy_are_refused(formats: dict[str, str]) -> None:
    with pytest.raises(polyamp.errors.UnsupportedError, match="no dtype policy"):
        polyamp.convert(transformer(), polyamp.policy(param="float32", output="float32", **formats))


def test_a_model_built_in_16_bits_takes_the_policy_that_stores_them() -> None:
    keras.config.set_dtype_policy("bfloat16")
    norm = layers.BatchNormalization(name="norm")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), norm, layers.Dense(2)])
    assert compute(polyamp.convert(model, "bfloat16"), "norm") == "bfloat16"
    with pytest.raises(polyamp.errors.UnsupportedError, match="stored in bfloat16"):
        polyamp.convert(model, "mixed_bfloat16")


def test_a_plain_optimizer_under_float16_is_reported() -> None:
    model = transformer()
    model.compile("sgd", "mse")
    with pytest.warns(polyamp.PolyampWarning, match="SGD, which does not scale the loss"):
        polyamp.convert(model, "mixed_float16")


def stack(dtype: str | None = None) -> keras.Model:
    wide = layers.Dense(3, name="wide", dtype=dtype)
    return keras.Sequential([keras.Input((4,)), wide, layers.Dense(3), layers.Dense(2, name="head")], name="stack")


ONE_LAYER = {"stack/wide": "lower", "*": "full"}  # and so the model itself stays in float32


def test_a_converted_part_of_a_model_that_keras_does_not_wrap_is_reported() -> None:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(polyamp.convert(stack(), "mixed_float16")(inputs)))
    model.compile("sgd", "mse")
    with pytest.warns(polyamp.PolyampWarning, match="SGD, which does not scale the loss"):
        model.train_on_batch(np.ones((2, 4)), np.ones((2, 1)))


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (None, polyamp.policy("mixed_bfloat16", rules=ONE_LAYER)),
        ("mixed_float16", polyamp.policy("float32")),
        (None, polyamp.policy("mixed_float16", rules=ONE_LAYER, loss_scale=polyamp.LossScale.none())),
    ],
)
def test_nothing_is_reported_where_there_is_nothing_to_scale(dtype: str | None, policy: polyamp.Policy) -> None:
    model = stack(dtype)
    model.compile(keras.optimizers.SGD(0.0), "mse", auto_scale_loss=False)
    polyamp.convert(model, policy)
    model.train_on_batch(np.ones((2, 4)), np.ones((2, 2)))


@pytest.mark.backends
def test_compiled_functions_are_made_anew() -> None:
    model = keras.Sequential([keras.Input((5, 6)), layers.Flatten(), layers.Dense(8, "relu"), layers.Dense(2)])
    model.compile(polyamp.wrap_optimizer(keras.optimizers.SGD(0.0), "mixed_float16"), "mse")
    polyamp.convert(model, "float32")
    model.fit(X, Y, verbose=0)
    losses = [model.evaluate(X, Y, verbose=0)]
    predictions = [model.predict(X, verbose=0)]
    for name in ("mixed_bfloat16", "mixed_float16", "float32"):
        polyamp.convert(model, name)
        fitted = model.fit(X, Y, verbose=0).history["loss"][0]
        losses.append(model.evaluate(X, Y, verbose=0))
        predictions.append(model.predict(X, verbose=0))
        assert fitted == pytest.approx(losses[-1], rel=1e-6)
    assert len(set(losses)) == 3
    assert losses[0] == losses[-1]
    assert not np.array_equal(predictions[0], predictions[1])
    np.testing.assert_array_equal(predictions[0], predictions[-1])
