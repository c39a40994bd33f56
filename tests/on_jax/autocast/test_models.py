"""Models of flax linen, flax NNX, equinox and haiku, unchanged: gradients and statistics."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import polyamp
from support.jax_scenarios import MODES, TOKENS, Reference, X, assert_close, dots, normal, relative_error
from support.jax_scenarios import quickly_compiled as quickly_compiled

pytestmark = pytest.mark.slow

BF16 = "mixed_bfloat16"
IMAGES = normal(0, 4, 8, 8, 3)
SENTENCES = jnp.asarray(np.random.default_rng(1).integers(0, 50, (4, 10)), jnp.int32)


class Cnn(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (4, 8):
            x = linen.relu(linen.BatchNorm(use_running_average=False)(linen.Conv(features, (3, 3))(x)))
            x = linen.max_pool(x, (2, 2), strides=(2, 2))
        x = linen.avg_pool(x, (2, 2))
        return linen.Dense(10)(x.reshape(x.shape[0], -1))


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        y = linen.LayerNorm()(x)
        mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + linen.MultiHeadDotProductAttention(4)(y, mask=mask)
        y = linen.Dense(32)(linen.gelu(linen.Dense(64)(linen.LayerNorm()(x))))
        return x + y, None


class Transformer(linen.Module):
    how: str

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = linen.Embed(50, 32)
        x = embed(tokens)
        block = linen.remat(Block) if "remat" in self.how else Block
        if "scan" in self.how:
            rolled = linen.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = rolled()(x, None)
        else:
            x, _ = block()(x)
        return embed.attend(linen.LayerNorm()(x))  # the embedding once more: shared weights


def cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


@functools.cache
def model_of(name: str) -> tuple[Callable[..., Any], Any]:
    """Return a loss function that also returns the new state, with its parameters and inputs."""
    return MODELS[name]()


def linen_loss(model: linen.Module, inputs: jax.Array, labels: jax.Array) -> tuple[Callable[..., Any], Any]:
    variables = jax.jit(model.init)(jax.random.key(2), inputs)
    params, state = variables["params"], {key: value for key, value in variables.items() if key != "params"}

    def loss(params: Any, inputs: jax.Array) -> Any:
        scores, new = model.apply({"params": params, **state}, inputs, mutable=list(state))
        return cross_entropy(scores, labels), new

    return loss, (params, inputs)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x + self.second(self.drop(nnx.relu(self.norm(self.first(x)))))
        return jnp.tanh(y + self.attend(y[None])[0])


def nnx_loss() -> tuple[Callable[..., Any], Any]:
    definition, params, others = nnx.split(NnxBlock(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, x: jax.Array) -> Any:
        model = nnx.merge(definition, params, others, copy=True)
        value = jnp.square(model(x)).mean()
        return value, nnx.state(model, nnx.BatchStat)

    return loss, (params, X)


def equinox_loss() -> tuple[Callable[..., Any], Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    model = {
        "attend": eqx.nn.MultiheadAttention(2, 16, key=keys[0]),
        "norm": eqx.nn.LayerNorm(16),
        "mlp": eqx.nn.MLP(16, 16, 32, 2, activation=jax.nn.gelu, key=keys[1]),
    }
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays: Any, x: jax.Array) -> Any:
        own = eqx.combine(arrays, static)

        def one(x: jax.Array) -> jax.Array:
            y = jax.vmap(own["norm"])(x)
            return jax.vmap(own["mlp"])(x + own["attend"](y, y, y))

        return jnp.square(jax.vmap(one)(x)).mean(), None

    return loss, (arrays, TOKENS)


def of_haiku(x: jax.Array) -> jax.Array:
    y = hk.LayerNorm(-1, True, True)(x)
    y = x + hk.MultiHeadAttention(2, 8, w_init=hk.initializers.VarianceScaling(1.0))(y, y, y)
    y = hk.dropout(hk.next_rng_key(), 0.1, jax.nn.gelu(hk.Linear(32, name="up")(y)))
    y = hk.BatchNorm(True, True, 0.9)(hk.Linear(16, name="down")(y), is_training=True)
    return jnp.square(y - jnp.sin(x)).mean()


def haiku_loss() -> tuple[Callable[..., Any], Any]:
    net, x = hk.transform_with_state(of_haiku), normal(0, 4, 6, 16)
    params, state = jax.jit(net.init)(jax.random.key(1), x)
    return lambda params, x: net.apply(params, state, jax.random.key(2), x), (params, x)


MODELS: dict[str, Callable[[], tuple[Callable[..., Any], Any]]] = {
    "linen cnn": lambda: linen_loss(Cnn(), IMAGES, jnp.arange(4)),
    "linen transformer": lambda: linen_loss(Transformer(""), SENTENCES, SENTENCES),
    "linen scan of remat": lambda: linen_loss(Transformer("scan remat"), SENTENCES, SENTENCES),
    "nnx": nnx_loss,
    "equinox": equinox_loss,
    "haiku": haiku_loss,
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    loss, args = model_of(name)
    plain = Reference(jax.value_and_grad(loss, has_aux=True), *args)
    for policy, inside in MODES:
        within = jax.value_and_grad(polyamp.autocast(loss, policy), has_aux=True)
        plain.check(within if inside else polyamp.autocast(plain.fn, policy), policy, outside=not inside, factor=1.5)


@pytest.mark.parametrize(("pattern", "products"), [("up", 3), ("*attention", 18), ("*attention/linear", 3)])
def test_rules_by_the_paths_of_haiku(pattern: str, products: int) -> None:
    """haiku's own policies are for classes."""
    loss, args = model_of("haiku")
    mixed = polyamp.autocast(loss, polyamp.policy(BF16, rules={pattern: "full"}))
    assert dots(jax.grad(mixed, has_aux=True), *args).count({"float32"}) == products


def test_dtypes_that_a_layer_asks_for_are_kept() -> None:
    """flax's own dtype= stays in force inside an autocast to another format."""
    model = linen.Sequential([linen.Dense(8, dtype=jnp.float16), linen.Dense(8)])
    params = model.init(jax.random.key(0), X)
    assert dots(polyamp.autocast(lambda p: model.apply(p, X), BF16), params) == [{"float16"}, {"bfloat16"}]


NNX_STYLES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "nnx.jit": nnx.jit,
    "nnx.remat": nnx.remat,
}


@pytest.mark.parametrize("style", NNX_STYLES)
def test_nnx_modules_as_arguments_take_on_their_changes(style: str) -> None:
    plain_model, model = NnxBlock(nnx.Rngs(0)), NnxBlock(nnx.Rngs(0))
    call = lambda model, x: model(x)  # noqa: E731
    plain, mixed = (NNX_STYLES[style](fn) for fn in (call, polyamp.autocast(call, BF16)))
    for _ in range(2):
        ours, theirs = mixed(model, X), plain(plain_model, X)
        assert_close(ours, theirs, BF16)  # the same dropout too
    assert_close(nnx.state(model, nnx.BatchStat), nnx.state(plain_model, nnx.BatchStat), BF16)
    assert not np.array_equal(model.norm.mean[...], jnp.zeros(32))
    counts = [nnx.state(each, nnx.RngCount) for each in (model, plain_model)]
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *counts))
    assert max(int(leaf) for leaf in jax.tree.leaves(counts[0])) == 2


def test_nnx_autocast_of_the_module_itself_and_of_its_method() -> None:
    model = NnxBlock(nnx.Rngs(0))
    for call in (polyamp.autocast(model, BF16), polyamp.autocast(model.__call__, BF16)):
        before = np.array(model.norm.mean[...])
        assert call(X).dtype == jnp.float32
        assert not np.array_equal(before, model.norm.mean[...])


def test_nnx_random_numbers_and_variables_as_arguments() -> None:
    rngs, total, drop = nnx.Rngs(1), nnx.Variable(jnp.zeros(8)), nnx.Dropout(0.5)

    @polyamp.autocast(BF16)
    def fn(x: jax.Array, rngs: nnx.Rngs, *, total: nnx.Variable[jax.Array]) -> jax.Array:
        y = drop(x @ jnp.eye(8), rngs=rngs)
        total[...] += y.sum(0)
        return y

    outputs = [fn(X, rngs, total=total) for _ in range(2)]
    assert not np.array_equal(*outputs)
    np.testing.assert_allclose(total[...], sum(outputs).sum(0), rtol=1e-2)


def test_nnx_gradients_through_modules() -> None:
    model, plain_model = NnxBlock(nnx.Rngs(0)), NnxBlock(nnx.Rngs(0))
    loss = lambda model, x: jnp.square(model(x)).mean()  # noqa: E731
    value, grads = nnx.jit(nnx.value_and_grad(polyamp.autocast(loss, BF16)))(model, X)
    expected, plain_grads = nnx.jit(nnx.value_and_grad(loss))(plain_model, X)
    assert_close((value, grads), (expected, plain_grads), BF16)
    assert_close(nnx.state(model, nnx.BatchStat), nnx.state(plain_model, nnx.BatchStat), BF16)


@pytest.mark.parametrize("how", ["function", "model", "filter_jit", "filter_grad"])
def test_equinox_models_with_static_leaves(how: str) -> None:
    """Activation functions, Python numbers and flags among a model's leaves are not arrays, and stay as they are."""

    class Net(eqx.Module):
        linear: eqx.nn.Linear
        activation: Callable[..., Any]
        rate: float
        flag: bool

        def __call__(self, x: jax.Array) -> jax.Array:
            assert type(self.flag) is bool
            y = jax.vmap(self.linear)(x)
            return self.activation(y) * self.rate if self.flag else y

    model = Net(eqx.nn.Linear(8, 8, key=jax.random.key(0)), jnp.tanh, 0.5, True)
    call = polyamp.autocast(lambda model, x: model(x), BF16)
    ways: dict[str, Callable[[], Any]] = {
        "function": lambda: call(model, X),
        "model": lambda: polyamp.autocast(model, BF16)(X),
        "filter_jit": lambda: eqx.filter_jit(call)(model, X),
        "filter_grad": lambda: eqx.filter_grad(lambda model: call(model, X).sum())(model).linear.weight,
    }
    plain = eqx.filter_grad(lambda model: model(X).sum())(model).linear.weight if how == "filter_grad" else model(X)
    assert_close(ways[how](), plain, BF16)
    assert relative_error(ways[how](), plain) > 0
