"""The training steps that `monitoring.py` measures: an MLP of 3 x 512, batches of 128, AdamW or Adam, loss scaling.

In float32, the quickest on a processor, so that an addition to the step weighs most. And the wrapped optimizer's step
alone, of three small parameters, where the addition is nearly all of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import polyamp

WIDTH, LAYERS, BATCH = 512, 3, 128
SMALL = (16, 16)
RATE = 1e-5
SETTINGS = polyamp.LossScale(init=1.0, interval=2**30)  # unscaling in place must not change the gradients


class Steps(NamedTuple):
    """The steps of one framework.

    Attributes:
        step: forward pass, backward pass and update.
        update: the wrapped optimizer's step alone, of three small parameters, on gradients that do not change.
        holder: returns the object that holds the loss scale now.
        settle: waits until everything is done.
        on_gpu: whether it runs on a GPU.
    """

    step: Callable[[], Any]
    update: Callable[[], Any]
    holder: Callable[[], Any]
    settle: Callable[[], Any]
    on_gpu: bool

    def microseconds(self, run: Callable[[], Any], calls: int, after: Callable[[Any], Any] | None = None) -> float:
        """Return the microseconds of one call, together with ``after(holder)`` if there is one.

        Without a GPU it is the processor time of all threads: other programs on the machine do not count.
        """
        now = time.perf_counter if self.on_gpu else time.process_time
        start = now()
        for _ in range(calls):
            run()
            if after is not None:
                after(self.holder())
        self.settle()
        return (now() - start) / calls * 1e6


def batch() -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return numbers.normal(size=(BATCH, WIDTH)).astype("float32"), numbers.normal(size=(BATCH, WIDTH)).astype("float32")


def torch_steps() -> Steps:
    import torch

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*parts).to(device)
    small = [torch.ones(SMALL, device=device, requires_grad=True) for _ in range(LAYERS)]
    x, y = (torch.from_numpy(array).to(device) for array in batch())
    opt, alone = (
        polyamp.wrap_optimizer(torch.optim.AdamW(params, lr=RATE), "float32", loss_scale=SETTINGS)
        for params in (list(model.parameters()), small)
    )
    for param in small:
        param.grad = torch.full_like(param, 1e-3)
    one = torch.ones((), device=device)

    def step() -> None:
        opt.backward((model(x) - y).square().mean())
        opt.step()
        opt.zero_grad()

    def update() -> None:
        alone.scale(one)
        alone.step()

    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Steps(step, update, lambda: opt, settle, device == "cuda")


def jax_steps() -> Steps:
    import jax
    import jax.numpy as jnp
    import optax

    from polyamp.backends.jax import apply_gradients

    x, y = map(jnp.asarray, batch())
    tx = polyamp.wrap_optimizer(optax.adamw(RATE), "float32", loss_scale=SETTINGS)

    def fresh(shape: tuple[int, int]) -> list[Any]:
        keys = jax.random.split(jax.random.key(0), LAYERS)
        return [jax.random.normal(key, shape) * shape[0] ** -0.5 for key in keys]

    def loss_fn(params: Any) -> Any:
        hidden = x
        for weight in params:
            hidden = jax.nn.relu(hidden @ weight)
        return jnp.square(hidden - y).mean()

    def train(params: Any, opt_state: Any) -> Any:
        _, grads = polyamp.value_and_grad(loss_fn, "float32")(opt_state, params)
        return apply_gradients(tx, grads, opt_state, params)

    grads = [jnp.full(SMALL, 1e-3) for _ in range(LAYERS)]
    steps = [train, lambda params, opt_state: apply_gradients(tx, grads, opt_state, params)]
    compiled = [jax.jit(step, donate_argnums=(0, 1)) for step in steps]
    held = [(params := fresh(shape), tx.init(params)) for shape in ((WIDTH, WIDTH), SMALL)]

    def run(index: int) -> None:
        held[index] = compiled[index](*held[index])

    on_gpu = jax.default_backend() != "cpu"
    return Steps(lambda: run(0), lambda: run(1), lambda: held[0][1], lambda: jax.block_until_ready(held), on_gpu)


def tensorflow_steps() -> Steps:
    import tensorflow as tf

    from polyamp.backends.tensorflow import LossScaler

    tf.random.set_seed(0)
    x, y = map(tf.constant, batch())
    weights = [tf.Variable(tf.random.normal((WIDTH, WIDTH)) * WIDTH**-0.5) for _ in range(LAYERS)]
    scaler, alone = LossScaler(SETTINGS), LossScaler(SETTINGS)
    adam, other = (tf.compat.v1.train.AdamOptimizer(RATE) for _ in range(2))
    small = [tf.Variable(tf.ones(SMALL)) for _ in weights]
    grads = [tf.fill(SMALL, 1e-3) for _ in weights]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights:
                hidden = tf.nn.relu(hidden @ weight)
            scaled = scaler.scale(tf.reduce_mean(tf.square(hidden - y)))
        return scaler.step(adam, zip(tape.gradient(scaled, weights), weights, strict=True)).scale

    @tf.function
    def update() -> Any:
        return alone.step(other, zip(grads, small, strict=True)).scale

    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    return Steps(step, update, lambda: scaler, lambda: scaler.loss_scale, on_gpu)


def keras_steps() -> Steps:
    """Return the steps of Keras on TensorFlow."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *dense])
    model.compile(polyamp.wrap_optimizer(keras.optimizers.AdamW(RATE), "float32", loss_scale=SETTINGS), "mse")
    x, y = batch()
    variables = [keras.Variable(np.ones(SMALL, "float32")) for _ in range(LAYERS)]
    alone = polyamp.wrap_optimizer(keras.optimizers.AdamW(RATE), "float32", loss_scale=SETTINGS)
    grads = [keras.ops.full(variable.shape, 1e-3) for variable in variables]
    alone.apply(grads, variables)  # which makes its variables
    update = tf.function(lambda: alone.apply(grads, variables), autograph=False)
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    return Steps(lambda: model.train_on_batch(x, y), update, lambda: model, lambda: alone.loss_scale, on_gpu)


STEPS: dict[str, Callable[[], Steps]] = {
    "torch": torch_steps,
    "jax": jax_steps,
    "tensorflow": tensorflow_steps,
    "keras": keras_steps,
}
