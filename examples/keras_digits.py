"""Handwritten digits in Keras: one model, three precision policies. `polyamp demo` runs it beside the others."""

import keras
import numpy as np
from sklearn.datasets import load_digits

import polyamp

STEPS, BATCH, TRAIN, RATE = 300, 64, 1437, 0.05


def make_model() -> keras.Model:
    layout = {"padding": "same", "data_format": "channels_last"}
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, **layout), keras.layers.ReLU(), keras.layers.MaxPooling2D(2, **layout),
        keras.layers.Conv2D(32, 3, **layout), keras.layers.ReLU(), keras.layers.MaxPooling2D(2, **layout),
        keras.layers.Flatten(), keras.layers.Dense(10),
    ])  # fmt: skip
    rng = np.random.default_rng(0)  # the same weights in every framework: (height, width, inputs, outputs)
    for place, shape in {0: (3, 3, 1, 16), 3: (3, 3, 16, 32), 7: (2, 2, 32, 10)}.items():
        weight, bias = model.layers[place].weights
        weight.assign(rng.normal(0, np.sqrt(2 / np.prod(shape[:3])), shape).astype("float32").reshape(weight.shape))
        bias.assign(np.zeros(bias.shape, "float32"))
    return model


def train(policy, steps=STEPS, report=lambda loss, step: None) -> dict[str, float]:
    """Train, and call `report` with the loss and the `StepResult` of every step. `model.fit` would do the same."""
    digits = load_digits()
    images, labels = digits.images[..., np.newaxis].astype("float32") / 16, digits.target
    model = polyamp.convert(make_model(), policy)
    model.compile(
        optimizer=polyamp.wrap_optimizer(keras.optimizers.SGD(RATE, momentum=0.9), policy, max_grad_norm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend() == "jax",  # elsewhere it takes longer to compile than to train
    )
    for batch in np.random.default_rng(1).integers(TRAIN, size=(steps, BATCH)):
        loss = float(model.train_on_batch(images[batch], labels[batch]))
        report(loss, model.optimizer.last_step)
    scores = keras.ops.convert_to_numpy(model(images[TRAIN:]))
    counted = [layer for layer in model.layers if not isinstance(layer, keras.layers.Flatten)]
    outputs = keras.Model(model.inputs[0], [layer.output for layer in counted])(images[batch])
    return {
        "accuracy": float((scores.argmax(1) == labels[TRAIN:]).mean()),
        "parameter_bytes": sum(map(bytes_of, model.trainable_weights)),
        "activation_bytes": sum(map(bytes_of, outputs)),
    }


def bytes_of(tensor) -> int:
    return int(np.prod(tensor.shape)) * (2 if "16" in keras.backend.standardize_dtype(tensor.dtype) else 4)


if __name__ == "__main__":
    print(f"{'policy':<16}{'accuracy':>10}{'loss':>10}{'scale':>10}{'skipped':>9}")
    steps = []
    for name in ("float32", "mixed_bfloat16", "mixed_float16"):
        steps.clear()
        accuracy = train(polyamp.policy(name), report=lambda *step: steps.append(step))["accuracy"]
        (loss, last), skipped = steps[-1], sum(not step for _, step in steps)
        print(f"{name:<16}{accuracy:>10.2%}{loss:>10.4f}{last.scale:>10g}{skipped:>9}")
