"""Handwritten digits in JAX: one loop, three precision policies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import polyamp

STEPS, BATCH, TRAIN = 200, 64, 1437


def make_params() -> dict[str, jax.Array]:
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense": (128, 10)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    init = jax.nn.initializers.he_normal()
    return {name: init(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def model(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        n, height, width, channels = x.shape
        x = jax.nn.relu(x).reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))  # 2x2 max pool
    return x.reshape(len(x), -1) @ params["dense"]


def train(name: str) -> tuple[float, float, float, int]:
    policy = polyamp.policy(name)
    digits = load_digits()
    images, labels = jnp.asarray(digits.images[..., None] / 16, jnp.float32), jnp.asarray(digits.target)
    tx = polyamp.wrap_optimizer(optax.adamw(3e-3), policy, max_grad_norm=1.0)
    params = make_params()
    opt_state = tx.init(params)

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(params, x), y).mean()

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = polyamp.value_and_grad(loss_fn, policy)(opt_state, params, images[batch], labels[batch])
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in np.random.default_rng(0).integers(TRAIN, size=(STEPS, BATCH)):
        params, opt_state, loss = step(params, opt_state, batch)
    scores = jax.jit(polyamp.autocast(model, policy))(params, images[TRAIN:])
    accuracy = (scores.argmax(1) == labels[TRAIN:]).mean()
    return float(accuracy), float(loss), opt_state.last_step.scale, int(opt_state.skipped)


if __name__ == "__main__":
    print(f"{'policy':<16}{'accuracy':>10}{'loss':>10}{'scale':>10}{'skipped':>9}")
    for name in ("float32", "mixed_bfloat16", "mixed_float16"):
        accuracy, loss, scale, skipped = train(name)
        print(f"{name:<16}{accuracy:>10.2%}{loss:>10.4f}{scale:>10g}{skipped:>9}")
