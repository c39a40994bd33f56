"""The words that the traps are written in: a thin table of functions for each framework.

Reductions use the last axis and keep it, or all axes if ``axis`` is None.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import tensorflow as tf
import torch
from torch.nn import functional

ELEMENTWISE = ("exp", "expm1", "log", "log1p", "sqrt", "abs", "sin", "tanh", "square")  # the same in all


def torch_loop(turns: int, body: Callable[[Any], Any], state: Any) -> Any:
    for _ in range(turns):
        state = body(state)
    return state


def torch_averaged(x: Any, size: int) -> Any:
    images = x.reshape(-1, size, size, x.shape[-1]).permute(0, 3, 1, 2)
    return functional.avg_pool2d(images, size).flatten(1)


def torch_blurred(x: Any, size: int, window: Any) -> Any:
    return functional.conv2d(x.reshape(-1, 1, size, size), torch.as_tensor(window)[None, None])


Torch = SimpleNamespace(
    **{word: getattr(torch, word) for word in ELEMENTWISE},
    rsqrt=torch.rsqrt,
    atanh=torch.atanh,
    sigmoid=torch.sigmoid,
    relu=torch.relu,
    softplus=functional.softplus,
    log_sigmoid=functional.logsigmoid,
    where=torch.where,
    clip=torch.clamp,
    array=torch.as_tensor,  # torch.tensor would warn about NumPy arrays that Dynamo traces
    matmul=lambda one, other: torch.matmul(one, torch.as_tensor(other)),
    at_least=lambda x, least: torch.clamp(x, min=least),
    sum=lambda x, axis=None: x.sum() if axis is None else x.sum(axis, keepdim=axis == -1),
    mean=lambda x, axis=None: x.mean() if axis is None else x.mean(axis, keepdim=True),
    variance=lambda x: x.var(-1, keepdim=True, unbiased=False),
    norm=lambda x: torch.linalg.norm(x, dim=-1, keepdim=True),
    max=lambda x: x.amax(-1, keepdim=True),
    cumsum=lambda x: x.cumsum(0),
    prod=lambda x: x.flatten().prod(),
    softmax=lambda x: torch.softmax(x, -1),
    log_softmax=lambda x: torch.log_softmax(x, -1),
    logsumexp=lambda x: torch.logsumexp(x, -1, keepdim=True),
    one_hot=lambda labels, size: functional.one_hot(labels, size).float(),
    take=lambda table, rows: functional.embedding(rows, table),
    floats=lambda integers: integers.float(),
    swapped=lambda x: x.transpose(-1, -2),
    flat=lambda x: x.reshape(-1),
    averaged=torch_averaged,
    blurred=torch_blurred,
    least=torch.minimum,
    solve=torch.linalg.solve,
    joined=lambda *parts: torch.cat(parts, -1),
    atan2=torch.atan2,
    loop=torch_loop,
)


def jax_averaged(x: Any, size: int) -> Any:
    window = (1, size, size, 1)
    images = x.reshape(-1, size, size, x.shape[-1])
    sums = jax.lax.reduce_window(images, 0.0, jax.lax.add, window, window, "VALID")
    return sums.reshape(-1, x.shape[-1]) / size**2


def jax_blurred(x: Any, size: int, window: Any) -> Any:
    return jax.lax.conv(x.reshape(-1, 1, size, size), jnp.asarray(window, x.dtype)[None, None], (1, 1), "VALID")


Jax = SimpleNamespace(
    **{word: getattr(jnp, word) for word in ELEMENTWISE},
    rsqrt=jax.lax.rsqrt,
    atanh=jnp.arctanh,
    sigmoid=jax.nn.sigmoid,
    relu=jax.nn.relu,
    softplus=jax.nn.softplus,
    log_sigmoid=jax.nn.log_sigmoid,
    where=jnp.where,
    clip=jnp.clip,
    array=jnp.asarray,
    matmul=jnp.matmul,
    at_least=jnp.maximum,
    sum=lambda x, axis=None: jnp.sum(x, axis, keepdims=axis == -1),
    mean=lambda x, axis=None: jnp.mean(x, axis, keepdims=axis is not None),
    variance=lambda x: jnp.var(x, -1, keepdims=True),
    norm=lambda x: jnp.linalg.norm(x, axis=-1, keepdims=True),
    max=lambda x: jnp.max(x, -1, keepdims=True),
    cumsum=lambda x: jnp.cumsum(x, 0),
    prod=jnp.prod,
    softmax=jax.nn.softmax,
    log_softmax=jax.nn.log_softmax,
    logsumexp=lambda x: jax.nn.logsumexp(x, -1, keepdims=True),
    one_hot=jax.nn.one_hot,
    take=lambda table, rows: table[rows],
    floats=lambda integers: integers.astype(jnp.float32),
    swapped=lambda x: jnp.swapaxes(x, -1, -2),
    flat=lambda x: x.reshape(-1),
    averaged=jax_averaged,
    blurred=jax_blurred,
    least=jnp.minimum,
    solve=jnp.linalg.solve,
    joined=lambda *parts: jnp.concatenate(parts, -1),
    atan2=jnp.arctan2,
    loop=lambda turns, body, state: jax.lax.fori_loop(0, turns, lambda _, state: body(state), state),
)


def tensorflow_averaged(x: Any, size: int) -> Any:
    images = tf.reshape(x, [-1, size, size, x.shape[-1]])
    return tf.reshape(tf.nn.avg_pool2d(images, size, size, "VALID"), [-1, x.shape[-1]])


def tensorflow_loop(turns: int, body: Callable[[Any], Any], state: Any) -> Any:
    return tf.while_loop(lambda turn, _: turn < turns, lambda turn, state: (turn + 1, body(state)), (0, state))[1]


def tensorflow_blurred(x: Any, size: int, window: Any) -> Any:
    return tf.nn.conv2d(tf.reshape(x, [-1, size, size, 1]), tf.constant(window)[..., None, None], 1, "VALID")


TensorFlow = SimpleNamespace(
    **{word: getattr(tf.math, word) for word in ELEMENTWISE},
    rsqrt=tf.math.rsqrt,
    atanh=tf.atanh,
    sigmoid=tf.sigmoid,
    relu=tf.nn.relu,
    softplus=tf.nn.softplus,
    log_sigmoid=tf.math.log_sigmoid,
    where=tf.where,
    clip=tf.clip_by_value,
    array=tf.constant,
    matmul=tf.matmul,
    at_least=tf.maximum,
    sum=lambda x, axis=None: tf.reduce_sum(x, axis, keepdims=axis == -1),
    mean=lambda x, axis=None: tf.reduce_mean(x, axis, keepdims=axis is not None),
    variance=lambda x: tf.math.reduce_variance(x, -1, keepdims=True),
    norm=lambda x: tf.norm(x, axis=-1, keepdims=True),
    max=lambda x: tf.reduce_max(x, -1, keepdims=True),
    cumsum=tf.cumsum,
    prod=tf.reduce_prod,
    softmax=tf.nn.softmax,
    log_softmax=tf.nn.log_softmax,
    logsumexp=lambda x: tf.reduce_logsumexp(x, -1, keepdims=True),
    one_hot=tf.one_hot,
    take=tf.gather,
    floats=lambda integers: tf.cast(integers, tf.float32),
    swapped=tf.linalg.matrix_transpose,
    flat=lambda x: tf.reshape(x, [-1]),
    averaged=tensorflow_averaged,
    blurred=tensorflow_blurred,
    least=tf.minimum,
    solve=tf.linalg.solve,
    joined=lambda *parts: tf.concat(parts, -1),
    atan2=tf.atan2,
    loop=tensorflow_loop,
)
