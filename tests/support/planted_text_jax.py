"""A small language model in flax that a policy can damage; see ``planted_text.py``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen

import polyamp
from models.data import UNKNOWN
from support.planted_text import HIDDEN, RATE, TEST, VOCABULARY, WIDTH, rows_of, windows


class Norm(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-12)


class LogProbabilities(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.log(jax.nn.softmax(x) + 1e-12)


class LanguageModel(linen.Module):
    """A network as that of Bengio and others (2003)."""

    @linen.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        known = linen.Embed(VOCABULARY, WIDTH, embedding_init=linen.initializers.normal(1.0))(words)
        known = Norm(name="norm")(jnp.where((words == UNKNOWN)[..., None], 0, known))
        x = linen.relu(linen.Dense(HIDDEN)(known.reshape(len(words), -1)))
        return LogProbabilities(name="probabilities")(linen.Dense(VOCABULARY)(x))


def loss_of(params: Any, chosen: jax.Array) -> jax.Array:
    scores = LanguageModel().apply({"params": params}, chosen[:, :-1])
    return -jnp.take_along_axis(scores, chosen[:, -1:], -1).mean()


def predict(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    text = windows()
    params = LanguageModel().init(jax.random.key(seed), text[:1, :-1])["params"]
    return {"loss": float(_compiled(policy)(params, text[rows_of(seed)], text[:TEST]))}


@functools.cache
def _compiled(policy: polyamp.Policy) -> Any:
    """Return a whole training with its evaluation, compiled once for all seeds."""
    tx = polyamp.wrap_optimizer(optax.sgd(RATE, momentum=0.9), policy)

    def step(carry: Any, chosen: jax.Array) -> Any:
        params, state = carry
        _, grads = polyamp.value_and_grad(loss_of, policy)(state, params, chosen)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(params: Any, chosen: jax.Array, test: jax.Array) -> jax.Array:
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), chosen)
        return polyamp.autocast(loss_of, policy)(params, test)

    return jax.jit(run)
