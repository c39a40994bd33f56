"""The largest batch that fits in some memory, against the memory that XLA gives a whole compiled training step."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import polyamp
from polyamp.errors import InvalidValueError, UnsupportedError

pytestmark = pytest.mark.slow
WORDS, LENGTH, LIMIT = 200, 16, 2**25


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width, stride in [(16, 1), (32, 2)]:
            x = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (3, 3), strides=stride, use_bias=False)(x)))
        return nn.Dense(10)(x.mean((1, 2)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Embed(WORDS, 32)(x)
        h += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(h))
        h += nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(h))))
        return nn.Dense(WORDS)(h)


class Lstm(nn.Module):
    """A language model whose batch is axis 1."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.RNN(nn.OptimizedLSTMCell(32), time_major=True)(nn.Embed(WORDS, 32)(x))
        return nn.Dense(WORDS)(h)


def batch_for(model: nn.Module, examples: int) -> tuple[Any, Any]:
    """The shapes of a batch: no number is needed."""
    if isinstance(model, Cnn):
        return jax.ShapeDtypeStruct((examples, 16, 16, 3), "float32"), jax.ShapeDtypeStruct((examples,), "int32")
    words = jax.ShapeDtypeStruct((LENGTH, examples) if isinstance(model, Lstm) else (examples, LENGTH), "int32")
    return words, words


def memory_of_step(loss: Any, params: Any, batch: tuple[Any, Any]) -> int:
    """The bytes that XLA gives a step with AdamW."""
    tx = optax.adamw(1e-3)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, jax.eval_shape(tx.init, params), batch).compile()
    found: Any = compiled.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(held + found.temp_size_in_bytes)


@pytest.mark.parametrize("model", [Cnn(), Transformer(), Lstm()], ids=lambda model: type(model).__name__)
def test_the_largest_batch_takes_that_memory_in_a_compiled_step(model: nn.Module) -> None:
    params = jax.eval_shape(model.init, jax.random.key(0), batch_for(model, 1)[0])

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    plan = polyamp.explain(loss, params, *batch_for(model, 6), policy="mixed_bfloat16", examples=6)
    assert plan.batch["examples"] == 6
    assert plan.batch["bytes_saved_each"] < 0.75 * plan.batch["bytes_saved_each_float32"]
    largest = plan.largest_batch(LIMIT)
    for examples, way in zip(largest, (loss, polyamp.autocast(loss, "mixed_bfloat16")), strict=True):
        assert LIMIT / 1.15 <= memory_of_step(way, params, batch_for(model, examples)) <= LIMIT * 1.15


def test_nothing_is_compiled_unless_the_number_of_examples_is_given() -> None:
    w, x = jnp.ones((8, 16)), jnp.ones((4, 8))
    plan = polyamp.explain(lambda w, x: jax.nn.relu(x @ w), w, x, policy="mixed_bfloat16")
    assert plan.batch == {}
    with pytest.raises(UnsupportedError, match="examples=N"):
        plan.largest_batch(2**20)
    plan = polyamp.explain(lambda w, x: jax.nn.relu(x @ w), w, x, policy="mixed_bfloat16", examples=4)
    assert plan.largest_batch(2**20, optimizer_bytes=0).policy > 4
    with pytest.raises(InvalidValueError, match=r"shapes \(4, 8\)"):
        polyamp.explain(lambda w, x: x @ w, w, x, policy="mixed_bfloat16", examples=16)


def test_a_function_that_fixes_its_batch_is_explained_without_the_largest() -> None:
    w, x = jnp.ones((8, 8)), jnp.ones((3, 8))
    plan = polyamp.explain(lambda w, x: x @ w + jnp.ones((3, 8)), w, x, policy="mixed_bfloat16", examples=3)
    assert plan.bytes_saved is not None
    assert plan.batch == {}
