"""The classifier of ``polyamp demo`` in plain JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import polyamp
from polyamp.demo import Array, Task, Trace
from polyamp.refusals import missing
from polyamp.result import StepResult

try:
    import optax
except ModuleNotFoundError as error:
    raise missing("optax", extra="jax") from error

Params = dict[str, jax.Array]


def train_digits(task: Task) -> Trace:
    """Train ``task`` in one compiled step with donated arguments. The host waits for the numbers of each step."""
    tx = polyamp.wrap_optimizer(optax.sgd(task.learning_rate, momentum=0.9), task.policy)
    params = task.policy.cast_to_param({name: jnp.asarray(weight) for name, weight in task.weights.items()})
    parameter_bytes = sum(param.nbytes for param in params.values())
    opt_state = tx.init(params)
    images, labels = jnp.asarray(task.train_images), jnp.asarray(task.train_labels)

    def step(params: Params, opt_state: Any, batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = polyamp.value_and_grad(_loss, task.policy)(opt_state, params, images[batch], labels[batch])
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1))

    def train_on(batch: Array) -> tuple[float, StepResult]:
        nonlocal params, opt_state
        params, opt_state, loss = compiled(params, opt_state, batch)
        return float(loss), opt_state.last_step

    return replace(
        task.run(train_on),
        accuracy=_accuracy(task, params),
        parameter_bytes=parameter_bytes,
        activation_bytes=_activation_bytes(task, params),
    )


def _layers(params: Params, images: jax.Array) -> list[jax.Array]:
    """Return the output of every layer; the class scores come last."""
    outputs = [images]
    for name in ("conv1", "conv2"):
        outputs.append(_convolve(outputs[-1], params[f"{name}_kernel"]) + params[f"{name}_bias"])
        outputs.append(jax.nn.relu(outputs[-1]))
        outputs.append(_max_pool(outputs[-1]))
    flat = outputs[-1].reshape(len(images), -1)
    return [*outputs[1:], flat @ params["dense_kernel"] + params["dense_bias"]]


def _convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    outputs: jax.Array = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)
    return outputs


def _max_pool(images: jax.Array) -> jax.Array:
    lowest = np.array(-np.inf, images.dtype)
    outputs: jax.Array = lax.reduce_window(images, lowest, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return outputs


def _loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(_layers(params, images)[-1], labels)
    return losses.mean()


def _accuracy(task: Task, params: Params) -> float:
    predicted = jax.jit(polyamp.autocast(_layers, task.policy))(params, jnp.asarray(task.test_images))[-1].argmax(
        axis=-1
    )
    return float(np.mean(np.asarray(predicted) == task.test_labels))


def _activation_bytes(task: Task, params: Params) -> int:
    batch = jnp.asarray(task.train_images[task.batches[0]])
    outputs = jax.eval_shape(_layers, *task.policy.cast_to_compute((params, batch)))
    return sum(output.size * output.dtype.itemsize for output in outputs)
