"""A word LSTM in JAX. It stalls in float16 without a loss scale: docs/tutorials/float16_stall.md."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
import word_lstm as task

import polyamp


def linear(name: str, params: dict, x: jax.Array) -> jax.Array:
    with jax.named_scope(name):
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def model(params: dict, words: jax.Array) -> jax.Array:
    def next_state(state: tuple, word: jax.Array) -> tuple:
        hidden, cell = state
        taken, kept, shown, new = jnp.split(linear("gates", params, jnp.concatenate([word, hidden], 1)), 4, 1)
        cell = jax.nn.sigmoid(kept) * cell + jax.nn.sigmoid(taken) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(shown) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((len(words), task.HIDDEN))
    _, states = jax.lax.scan(next_state, (zeros, zeros), params["embedding.weight"][words.T])
    return linear("head", params, states.swapaxes(0, 1))


def loss_of(params: dict, words: jax.Array) -> jax.Array:
    scores = model(params, words[:, :-1])
    with jax.named_scope("loss"):
        return optax.softmax_cross_entropy_with_integer_labels(scores, words[:, 1:]).sum() / task.TOKENS


def updates(policy: polyamp.Policy, params: dict, batches: object) -> Iterator[tuple[float, bool]]:
    tx = polyamp.wrap_optimizer(optax.adam(task.LEARNING_RATE), policy)
    opt_state = tx.init(params)
    zeros = (0.0, jax.tree.map(jnp.zeros_like, params))

    @jax.jit
    def step(opt_state, params, micro_batches):
        def add(sums, words):
            loss_and_grads = polyamp.value_and_grad(loss_of, policy)(opt_state, params, words)
            return jax.tree.map(jnp.add, sums, loss_and_grads), None  # gradients are float32, like the parameters

        (loss, grads), _ = jax.lax.scan(add, zeros, micro_batches)
        changes, opt_state = tx.update(grads, opt_state, params)
        return opt_state, optax.apply_updates(params, changes), loss

    for micro_batches in batches:
        opt_state, params, loss = step(opt_state, params, micro_batches)
        yield float(loss), bool(opt_state.last_step)


def one_step() -> dict:
    params, batches = task.make_task(steps=1)
    return {
        "step": loss_of,
        "args": (jax.tree.map(jnp.asarray, params), jnp.asarray(batches[0, 0])),
        "rows": task.TOKENS,
    }


if __name__ == "__main__":
    task.main(updates)
