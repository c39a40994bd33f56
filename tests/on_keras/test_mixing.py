"""A user's layer whose code mixes float32 with 16 bits: promoted on TensorFlow too, or refused with its rule."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp

if keras.backend.backend() != "tensorflow":
    pytest.skip("the other backends promote", allow_module_level=True)

import tensorflow as tf

X = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
Y = X[:, :1]
ONES = np.ones((8, 16), "float32")
FORMATS = ["mixed_float16", "mixed_bfloat16"]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    keras.utils.clear_session()


def drop_path(x: Any) -> Any:
    return x / 0.5 * ops.floor(0.5 + keras.random.uniform((ops.shape(x)[0], 1), seed=0))


Function = Callable[[Any], Any]
PROMOTED: dict[str, Function] = {
    "stochastic depth": drop_path,
    "additive mask": lambda x: x + ops.convert_to_tensor(ONES),
    "product": lambda x: tf.constant(ONES) * x,
    "quotient": lambda x: x / (1 + tf.constant(ONES)),
    "where": lambda x: tf.where(x > 0, x, tf.constant(0.5)),
    "concatenation": lambda x: tf.concat([x, tf.constant(ONES)], -1),
    "stack": lambda x: tf.reduce_sum(tf.stack([x, tf.constant(ONES)]), 0),
    "sum of several": lambda x: tf.add_n([x, tf.constant(ONES)]),
    "product of matrices": lambda x: x @ tf.eye(16),
    "einsum": lambda x: tf.einsum("bi,ij->bj", x, tf.eye(16)),
    "update": lambda x: tf.tensor_scatter_nd_update(x, [[0]], tf.ones((1, 16))),
}
REFUSED: dict[str, Function] = {
    "bias": lambda x: tf.nn.bias_add(x, tf.ones((16,))),
    "branch": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: tf.ones_like(x, tf.float32)),
    "loop": lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * tf.ones((16,))), (0, x))[1],
    "scan": lambda x: tf.scan(lambda a, b: a + b * tf.ones((16,)), x),
}


class Own(layers.Layer):
    def __init__(self, function: Function, **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


class Block(layers.Layer):
    """A user's layer that calls the layer that mixes."""

    def __init__(self, function: Function, name: str) -> None:
        super().__init__()
        self.dense, self.inner = layers.Dense(16), Own(function, name=name)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return self.inner(self.dense(inputs)) + 0 * ops.sum(inputs)


KINDS: dict[str, Callable[..., Any]] = {
    "layer": Own,
    "lambda": lambda function, name: layers.Lambda(function, output_shape=(16,), name=name),
    "activation": lambda function, name: layers.Dense(16, activation=function, name=name),
    "block": Block,
}


def model_of(function: Function, policy: Any, kind: str = "layer") -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,), batch_size=8),
            layers.Dense(16),
            KINDS[kind](function, name="mine"),
            layers.Dense(1),
            layers.Dense(1),
        ]
    )
    opt = keras.optimizers.SGD(1e-3)
    if policy is not None:
        polyamp.convert(model, policy)
        opt = polyamp.wrap_optimizer(opt, policy, loss_scale=64.0)
    model.compile(opt, "mse")
    return model


def losses(model: keras.Model) -> list[float]:
    return [float(ops.mean(ops.square(model(X) - Y))), float(model.train_on_batch(X, Y))]


@pytest.mark.parametrize("policy", FORMATS)
@pytest.mark.parametrize("name", PROMOTED)
def test_a_mixture_is_promoted_as_on_other_backends(name: str, policy: str) -> None:
    expected = losses(model_of(PROMOTED[name], None))
    assert losses(model_of(PROMOTED[name], policy)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_the_users_code_in_other_places_is_promoted_too(kind: str) -> None:
    function = PROMOTED["additive mask"]
    assert losses(model_of(function, "mixed_bfloat16", kind)) == pytest.approx(
        losses(model_of(function, None, kind)), rel=0.05
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "layer") for name in REFUSED), *(("branch", kind) for kind in list(KINDS)[1:])]
)
def test_a_refusal_names_the_layer_and_the_rule_that_cures_it(name: str, kind: str) -> None:
    with pytest.raises(polyamp.PolyampError, match=r"layer 'mine'[\s\S]*rules=\{\"mine\": \"inner\"\}") as caught:
        model_of(REFUSED[name], "mixed_bfloat16", kind).train_on_batch(X, Y)
    assert isinstance(caught.value, TypeError)
    assert not isinstance(caught.value.__context__, polyamp.PolyampError)
    expected = losses(model_of(REFUSED[name], None, kind))
    for op_class in ("inner", "full"):
        policy = polyamp.policy("mixed_bfloat16", rules={"mine": op_class})
        assert losses(model_of(REFUSED[name], policy, kind)) == pytest.approx(expected, rel=0.05)


def test_a_direct_call_names_the_layer_too() -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="layer 'mine'"):
        model_of(REFUSED["scan"], "mixed_float16")(X)


def test_other_errors_stay_as_they_are() -> None:
    def fails(x: Any) -> Any:
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck") as caught:
        model_of(fails, "mixed_float16")(X)
    assert not isinstance(caught.value, polyamp.PolyampError)


def test_nothing_is_promoted_outside_of_converted_layers() -> None:
    model_of(PROMOTED["product"], "mixed_bfloat16")(X)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.ones((2,)) * tf.ones((2,), tf.bfloat16)
