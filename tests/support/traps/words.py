"""The words that the traps are written in: a thin table of functions for each framework.

Reductions use the last axis and keep it, or all axes if ``axis`` is None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch
from torch.nn import functional


class Torch:
    """The words in PyTorch."""

    exp, expm1, log, log1p, sqrt, rsqrt = torch.exp, torch.expm1, torch.log, torch.log1p, torch.sqrt, torch.rsqrt
    abs, sin, tanh, atanh, square = torch.abs, torch.sin, torch.tanh, torch.atanh, torch.square
    sigmoid, relu, softplus, log_sigmoid = torch.sigmoid, torch.relu, functional.softplus, functional.logsigmoid
    where, clip = torch.where, torch.clamp

    @staticmethod
    def array(array: np.ndarray) -> Any:
        return torch.as_tensor(array)  # torch.tensor would warn about NumPy arrays that Dynamo traces

    @staticmethod
    def matmul(one: Any, other: Any) -> Any:
        return torch.matmul(one, torch.as_tensor(other))

    @staticmethod
    def at_least(x: Any, least: float) -> Any:
        return torch.clamp(x, min=least)

    @staticmethod
    def sum(x: Any, axis: int | None = None) -> Any:
        return x.sum() if axis is None else x.sum(axis, keepdim=axis == -1)

    @staticmethod
    def mean(x: Any, axis: int | None = None) -> Any:
        return x.mean() if axis is None else x.mean(axis, keepdim=True)

    @staticmethod
    def variance(x: Any) -> Any:
        return x.var(-1, keepdim=True, unbiased=False)

    @staticmethod
    def norm(x: Any) -> Any:
        return torch.linalg.norm(x, dim=-1, keepdim=True)

    @staticmethod
    def max(x: Any) -> Any:
        return x.amax(-1, keepdim=True)

    @staticmethod
    def cumsum(x: Any) -> Any:
        return x.cumsum(0)

    @staticmethod
    def prod(x: Any) -> Any:
        return x.flatten().prod()

    @staticmethod
    def softmax(x: Any) -> Any:
        return torch.softmax(x, -1)

    @staticmethod
    def log_softmax(x: Any) -> Any:
        return torch.log_softmax(x, -1)

    @staticmethod
    def logsumexp(x: Any) -> Any:
        return torch.logsumexp(x, -1, keepdim=True)

    @staticmethod
    def one_hot(labels: Any, size: int) -> Any:
        return functional.one_hot(labels, size).float()

    @staticmethod
    def take(table: Any, rows: Any) -> Any:
        return functional.embedding(rows, table)

    @staticmethod
    def floats(integers: Any) -> Any:
        return integers.float()

    @staticmethod
    def swapped(x: Any) -> Any:
        return x.transpose(-1, -2)

    @staticmethod
    def flat(x: Any) -> Any:
        return x.reshape(-1)

    @staticmethod
    def averaged(x: Any, size: int) -> Any:
        images = x.reshape(-1, size, size, x.shape[-1]).permute(0, 3, 1, 2)
        return functional.avg_pool2d(images, size).flatten(1)

    @staticmethod
    def loop(turns: int, body: Callable[[Any], Any], state: Any) -> Any:
        for _ in range(turns):
            state = body(state)
        return state


class Jax:
    """The words in JAX."""

    exp, expm1, log, log1p, sqrt, rsqrt = jnp.exp, jnp.expm1, jnp.log, jnp.log1p, jnp.sqrt, jax.lax.rsqrt
    abs, sin, tanh, atanh, square = jnp.abs, jnp.sin, jnp.tanh, jnp.arctanh, jnp.square
    sigmoid, relu, softplus, log_sigmoid = jax.nn.sigmoid, jax.nn.relu, jax.nn.softplus, jax.nn.log_sigmoid
    where, clip, at_least, matmul, array = jnp.where, jnp.clip, jnp.maximum, jnp.matmul, jnp.asarray

    @staticmethod
    def sum(x: Any, axis: int | None = None) -> Any:
        return jnp.sum(x, axis, keepdims=axis == -1)

    @staticmethod
    def mean(x: Any, axis: int | None = None) -> Any:
        return jnp.mean(x, axis, keepdims=axis is not None)

    @staticmethod
    def variance(x: Any) -> Any:
        return jnp.var(x, -1, keepdims=True)

    @staticmethod
    def norm(x: Any) -> Any:
        return jnp.linalg.norm(x, axis=-1, keepdims=True)

    @staticmethod
    def max(x: Any) -> Any:
        return jnp.max(x, -1, keepdims=True)

    @staticmethod
    def cumsum(x: Any) -> Any:
        return jnp.cumsum(x, 0)

    @staticmethod
    def prod(x: Any) -> Any:
        return jnp.prod(x)

    @staticmethod
    def softmax(x: Any) -> Any:
        return jax.nn.softmax(x, -1)

    @staticmethod
    def log_softmax(x: Any) -> Any:
        return jax.nn.log_softmax(x, -1)

    @staticmethod
    def logsumexp(x: Any) -> Any:
        return jax.nn.logsumexp(x, -1, keepdims=True)

    @staticmethod
    def one_hot(labels: Any, size: int) -> Any:
        return jax.nn.one_hot(labels, size)

    @staticmethod
    def take(table: Any, rows: Any) -> Any:
        return table[rows]

    @staticmethod
    def floats(integers: Any) -> Any:
        return integers.astype(jnp.float32)

    @staticmethod
    def swapped(x: Any) -> Any:
        return jnp.swapaxes(x, -1, -2)

    @staticmethod
    def flat(x: Any) -> Any:
        return x.reshape(-1)

    @staticmethod
    def averaged(x: Any, size: int) -> Any:
        window = (1, size, size, 1)
        images = x.reshape(-1, size, size, x.shape[-1])
        sums = jax.lax.reduce_window(images, 0.0, jax.lax.add, window, window, "VALID")
        return sums.reshape(-1, x.shape[-1]) / size**2

    @staticmethod
    def loop(turns: int, body: Callable[[Any], Any], state: Any) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, state: body(state), state)


class TensorFlow:
    """The words in TensorFlow."""

    exp, expm1, log, log1p, sqrt, rsqrt = tf.exp, tf.math.expm1, tf.math.log, tf.math.log1p, tf.sqrt, tf.math.rsqrt
    abs, sin, tanh, atanh, square = tf.abs, tf.sin, tf.tanh, tf.atanh, tf.square
    sigmoid, relu, softplus, log_sigmoid = tf.sigmoid, tf.nn.relu, tf.nn.softplus, tf.math.log_sigmoid
    where, clip, at_least, matmul, array = tf.where, tf.clip_by_value, tf.maximum, tf.matmul, tf.constant
    softmax, log_softmax, cumsum, prod = tf.nn.softmax, tf.nn.log_softmax, tf.cumsum, tf.reduce_prod
    one_hot, take = tf.one_hot, tf.gather

    @staticmethod
    def sum(x: Any, axis: int | None = None) -> Any:
        return tf.reduce_sum(x, axis, keepdims=axis == -1)

    @staticmethod
    def mean(x: Any, axis: int | None = None) -> Any:
        return tf.reduce_mean(x, axis, keepdims=axis is not None)

    @staticmethod
    def variance(x: Any) -> Any:
        return tf.math.reduce_variance(x, -1, keepdims=True)

    @staticmethod
    def norm(x: Any) -> Any:
        return tf.norm(x, axis=-1, keepdims=True)

    @staticmethod
    def max(x: Any) -> Any:
        return tf.reduce_max(x, -1, keepdims=True)

    @staticmethod
    def logsumexp(x: Any) -> Any:
        return tf.reduce_logsumexp(x, -1, keepdims=True)

    @staticmethod
    def floats(integers: Any) -> Any:
        return tf.cast(integers, tf.float32)

    @staticmethod
    def swapped(x: Any) -> Any:
        return tf.linalg.matrix_transpose(x)

    @staticmethod
    def flat(x: Any) -> Any:
        return tf.reshape(x, [-1])

    @staticmethod
    def averaged(x: Any, size: int) -> Any:
        images = tf.reshape(x, [-1, size, size, x.shape[-1]])
        return tf.reshape(tf.nn.avg_pool2d(images, size, size, "VALID"), [-1, x.shape[-1]])

    @staticmethod
    def loop(turns: int, body: Callable[[Any], Any], state: Any) -> Any:
        return tf.while_loop(lambda turn, _: turn < turns, lambda turn, state: (turn + 1, body(state)), (0, state))[1]
