"""The classifier of ``polyamp demo`` in Keras, on Keras' current backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

import polyamp
from polyamp.demo import Array, Task, Trace
from polyamp.result import StepResult


def train(task: Task) -> Trace:
    """Train ``task`` in Keras' own compiled train step. The host waits for the numbers of each step."""
    model = _model(task)
    plain = keras.optimizers.SGD(task.learning_rate, momentum=0.9)
    optimizer = polyamp.wrap_optimizer(plain, task.policy)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=keras.backend.backend() == "jax")  # XLA compiles slowly

    def train_on(batch: Array) -> tuple[float, StepResult]:
        value = float(model.train_on_batch(task.train_images[batch], task.train_labels[batch]))
        return value, optimizer.last_step

    return replace(
        task.run(train_on),
        accuracy=_accuracy(model, task),
        parameter_bytes=sum(_bytes(weight) for weight in model.trainable_weights),
        activation_bytes=_activation_bytes(model, task),
    )


def _model(task: Task) -> keras.Model:
    """Build two convolutions and a dense layer as in `polyamp.demo.Task`; NHWC images in, 10 logits out."""
    inputs = keras.Input((8, 8, 1))
    hidden: Any = inputs
    layout = {"data_format": "channels_last"}
    for number, channels in ((1, 16), (2, 32)):
        hidden = keras.layers.Conv2D(channels, 3, padding="same", name=f"conv{number}", **layout)(hidden)
        hidden = keras.layers.ReLU(name=f"relu{number}")(hidden)
        hidden = keras.layers.MaxPooling2D(2, name=f"pool{number}", **layout)(hidden)
    outputs = keras.layers.Dense(10, name="dense")(keras.layers.Flatten()(hidden))
    model = keras.Model(inputs, outputs)
    for name in ("conv1", "conv2", "dense"):
        model.get_layer(name).set_weights([task.weights[f"{name}_kernel"], task.weights[f"{name}_bias"]])
    # Logits in the compute format and their cross-entropy in float32, as in the other frameworks.
    return polyamp.convert(model, polyamp.policy(task.policy, rules={"dense": "lower"}))


def _accuracy(model: keras.Model, task: Task) -> float:
    guesses = ops.argmax(model(ops.convert_to_tensor(task.test_images)), axis=-1)
    return float(ops.mean(ops.cast(guesses == ops.convert_to_tensor(task.test_labels, guesses.dtype), "float32")))


def _activation_bytes(model: keras.Model, task: Task) -> int:
    """Return the size of the layers' outputs for one batch, in the formats that they have."""
    uncounted = keras.layers.InputLayer | keras.layers.Flatten
    counted = [layer.output for layer in model.layers if not isinstance(layer, uncounted)]
    images = ops.convert_to_tensor(task.train_images[task.batches[0]])
    return sum(_bytes(output) for output in keras.Model(model.inputs, counted)(images))


def _bytes(tensor: Any) -> int:
    bits = polyamp.formats.FORMATS[keras.backend.standardize_dtype(tensor.dtype)].bits
    return int(np.prod(tensor.shape)) * bits // 8
