"""The big LSTM in JAX, which stalls in float16 without a loss scale: `models.big_lstm` explains why.

The words are those of Python's manual. The parameters are a dictionary, as users of plain JAX write it.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import polyamp
from models import big_lstm as task
from polyamp.backends.jax import apply_gradients

Params = dict[str, jax.Array]


def layer_of(params: Params, name: str, x: jax.Array) -> jax.Array:
    """Return the projected states of one layer of LSTM cells, at every time; x has the time first."""
    weight, bias = params[f"{name}.gates.weight"], params[f"{name}.gates.bias"]
    projection = params[f"{name}.projection.weight"]

    def next_state(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple:
        hidden, cell = state
        taken, kept, shown, new = jnp.split(jnp.concatenate([x, hidden], 1) @ weight.T + bias, 4, 1)
        cell = jax.nn.sigmoid(kept) * cell + jax.nn.sigmoid(taken) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(shown) * jnp.tanh(cell) @ projection.T
        return (hidden, cell), hidden

    zeros = jnp.zeros((x.shape[1], projection.shape[0])), jnp.zeros((x.shape[1], projection.shape[1]))
    return jax.lax.scan(next_state, zeros, x)[1]


def sum_of_losses(params: Params, words: jax.Array) -> jax.Array:
    x = params["embedding.weight"][words[:, :-1].T]
    for layer in range(sum(name.endswith("gates.weight") for name in params)):
        with jax.named_scope(f"layers.{layer}"):
            x = layer_of(params, f"layers.{layer}", x)
    with jax.named_scope("head"):
        scores = x @ params["head.weight"].T + params["head.bias"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, words[:, 1:].T).sum()


def optimizer_of(policy: polyamp.Policy) -> optax.GradientTransformationExtraArgs:
    return polyamp.wrap_optimizer(optax.adam(task.LEARNING_RATE, eps=task.EPSILON), policy)


@partial(jax.jit, static_argnames="policy")
def update(policy: polyamp.Policy, params: Params, opt_state: optax.OptState, micro_batches: jax.Array) -> tuple:
    """Return parameters and optimizer state after one update, and the loss of a word before it."""

    def loss_of(params: Params, words: jax.Array) -> jax.Array:
        return sum_of_losses(params, words) / task.TOKENS

    def add(sums: tuple, words: jax.Array) -> tuple:
        loss_and_grads = polyamp.value_and_grad(loss_of, policy)(opt_state, params, words)
        return jax.tree.map(jnp.add, sums, loss_and_grads), None  # gradients are float32, like the parameters

    zeros = (0.0, jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(add, zeros, micro_batches)
    params, opt_state = apply_gradients(optimizer_of(policy), grads, opt_state, params)
    return params, opt_state, loss


@partial(jax.jit, static_argnames="policy")
def test_loss(policy: polyamp.Policy, params: Params, words: jax.Array) -> jax.Array:
    return polyamp.autocast(sum_of_losses, policy)(params, words) / words[:, 1:].size


def updates(params: Params, policy: polyamp.Policy, seed: int, steps: int) -> Iterator[tuple[Params, float]]:
    """Yield the parameters after each update, and the loss of a word before it."""
    opt_state = optimizer_of(policy).init(params)
    for micro_batches in task.batches(seed, steps):
        params, opt_state, loss = update(policy, params, opt_state, micro_batches)
        yield params, float(loss)


def curve(policy: polyamp.Policy, seed: int, steps: int = task.STEPS) -> Iterator[float]:
    """Yield the training loss of each update, in nats per word."""
    for _, loss in updates(initial(seed), policy, seed, steps):
        yield loss


def initial(seed: int) -> Params:
    return jax.tree.map(jnp.asarray, task.weights(task.SMALL, seed))


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Return the loss on test words, in nats per word, after training."""
    *_, (params, _) = updates(initial(seed), policy, seed, task.STEPS)
    return {"loss": float(test_loss(policy, params, np.asarray(task.test_words())))}
