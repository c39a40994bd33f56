"""Handwritten digits in Keras on TensorFlow, its default backend: one model, three precision policies."""

import keras
import numpy as np
from sklearn.datasets import load_digits

import polyamp

EPOCHS, BATCH, TRAIN = 10, 64, 1437


def make_model() -> keras.Model:
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D(2),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(), keras.layers.Dense(10),
    ])  # fmt: skip


def train(name: str) -> tuple[float, float, float, int]:
    policy = polyamp.policy(name)
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images, labels = digits.images[..., np.newaxis].astype("float32") / 16, digits.target
    model = polyamp.convert(make_model(), policy)
    model.compile(
        optimizer=polyamp.wrap_optimizer(keras.optimizers.AdamW(3e-3), policy, max_grad_norm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(images[:TRAIN], labels[:TRAIN], BATCH, EPOCHS, verbose=0)
    _, accuracy = model.evaluate(images[TRAIN:], labels[TRAIN:], verbose=0)
    skipped = polyamp.save_loss_scale(model.optimizer)["skipped"]
    return accuracy, history.history["loss"][-1], model.optimizer.loss_scale, skipped


if __name__ == "__main__":
    print(f"{'policy':<16}{'accuracy':>10}{'loss':>10}{'scale':>10}{'skipped':>9}")
    for name in ("float32", "mixed_bfloat16", "mixed_float16"):
        accuracy, loss, scale, skipped = train(name)
        print(f"{name:<16}{accuracy:>10.2%}{loss:>10.4f}{scale:>10g}{skipped:>9}")
