"""One operation on one of TensorFlow's devices, for ``polyamp doctor --test``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_OPERATIONS: dict[str, Callable[..., tf.Tensor]] = {
    "matmul": tf.matmul,
    "conv": lambda images, kernel: tf.nn.conv2d(images, kernel, 1, "VALID"),
    "sum": lambda values: tf.reduce_sum(values, -1),
}


def trial(operation: str, arrays: tuple[Any, ...], format_name: str, device: str) -> tuple[Any, Any]:
    """Run an operation; return its result, and a function that runs it a given number of times and then waits."""
    function = _OPERATIONS[operation]
    with tf.device(device):
        inputs = [tf.cast(array, format_name) for array in arrays]

    def run(times: int) -> list[tf.Tensor]:
        with tf.device(device):
            results = [function(*inputs) for _ in range(times)]
        tf.test.experimental.sync_devices()
        return results

    return run(1)[0].numpy(), run
