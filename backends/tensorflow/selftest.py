"""One operation on one of TensorFlow's devices, for ``polyamp doctor --test``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def _layer_norm(values: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(values, -1, keepdims=True)
    return tf.nn.batch_normalization(values, mean, variance, None, None, 1e-5)


def _attention(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    scores = tf.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    return tf.einsum("hqk,khd->qhd", tf.nn.softmax(scores), value)


_OPERATIONS: dict[str, Callable[..., tf.Tensor]] = {
    "matmul": tf.matmul,
    "conv": lambda images, kernel: tf.nn.conv2d(images, kernel, 1, "VALID"),
    "layer_norm": _layer_norm,
    "softmax": tf.nn.softmax,
    "attention": _attention,
    "sum": lambda values: tf.reduce_sum(values, -1),
}


def trial(
    operation: str, arrays: tuple[np.ndarray[Any, Any], ...], format_name: str, device: str
) -> tuple[np.ndarray[Any, Any], Callable[[int], object]]:
    """Run an operation; return its result, and a function that runs it so many times and waits for the device."""
    function = _OPERATIONS[operation]
    with tf.device(device):
        inputs = [tf.cast(array, format_name) for array in arrays]

    def run(times: int) -> list[tf.Tensor]:
        with tf.device(device):
            results = [function(*inputs) for _ in range(times)]
        tf.test.experimental.sync_devices()
        return results

    return run(1)[0].numpy(), run
