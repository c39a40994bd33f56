"""Training steps for the TensorFlow benchmarks: four small models of Keras layers, and two of its applications."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import layers


class Task(NamedTuple):
    """A training step, not compiled, with a batch."""

    step: Callable[..., Any]
    batch: tuple[Any, ...]


def mlp() -> keras.Model:
    hidden = [layers.Dense(1024, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(10, dtype="float32")])


def cnn() -> keras.Model:
    blocks = [layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(4)]
    head = [layers.GlobalAveragePooling2D(), layers.Dense(10, dtype="float32")]
    return keras.Sequential([keras.Input((32, 32, 64)), *blocks, *head])


def attention() -> keras.Model:
    inputs = keras.Input((128, 256))
    x = layers.LayerNormalization()(inputs)
    x = inputs + layers.MultiHeadAttention(8, 32)(x, x)
    hidden = layers.Dense(1024, activation="gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(256)(hidden)
    return keras.Model(inputs, layers.Dense(10, dtype="float32")(layers.GlobalAveragePooling1D()(x)))


def lstm() -> keras.Model:
    hidden = [layers.LSTM(128, return_sequences=True), layers.LSTM(128)]
    return keras.Sequential([keras.Input((32, 64)), *hidden, layers.Dense(10, dtype="float32")])


def application(name: str) -> Callable[[], keras.Model]:
    def model() -> keras.Model:
        make = getattr(keras.applications, name)
        return make(weights=None, input_shape=(96, 96, 3), classes=10, classifier_activation=None)

    return model


MODELS: dict[str, tuple[Callable[[], keras.Model], tuple[int, ...]]] = {
    "MLP 4x1024": (mlp, (256, 1024)),
    "CNN": (cnn, (16, 32, 32, 64)),
    "attention": (attention, (16, 128, 256)),
    "LSTM": (lstm, (64, 32, 64)),
    "ResNet50": (application("ResNet50"), (8, 96, 96, 3)),
    "EfficientNetB0": (application("EfficientNetB0"), (8, 96, 96, 3)),
}


def task(name: str, dtype_policy: str = "float32") -> Task:
    """Return a step of SGD with momentum on a fixed batch; the weights are the same in every dtype policy."""
    make, shape = MODELS[name]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype_policy)
    model = make()
    keras.config.set_dtype_policy("float32")
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, tf.cast(model(x, training=True), tf.float32))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    generator = tf.random.Generator.from_seed(1)
    return Task(step, (generator.normal(shape), generator.uniform((shape[0],), 0, 10, tf.int32)))
