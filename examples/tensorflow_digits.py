"""Handwritten digits in TensorFlow without Keras: one step, three precision policies. `polyamp demo` shows it too."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import polyamp

STEPS, BATCH, TRAIN, RATE = 300, 64, 1437, 0.05


def make_weights() -> dict[str, tf.Variable]:
    rng = np.random.default_rng(0)  # the same weights in every framework: (height, width, inputs, outputs)
    weights = {}
    for name, shape in {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense": (2, 2, 32, 10)}.items():
        weights[name] = tf.Variable(rng.normal(0, np.sqrt(2 / np.prod(shape[:3])), shape).astype("float32"))
        weights[f"{name}_bias"] = tf.Variable(tf.zeros(shape[-1]))
    return weights


def layers(weights, x) -> list[tf.Tensor]:
    """Return the output of every layer; the scores of the classes are the last."""
    outputs = []
    for name in ("conv1", "conv2"):
        added = tf.nn.bias_add(tf.nn.conv2d(x, weights[name], 1, "SAME"), weights[f"{name}_bias"])
        shown = tf.nn.relu(added)
        x = tf.nn.max_pool2d(shown, 2, 2, "SAME")
        outputs += [added, shown, x]
    scores = tf.reshape(x, (-1, 128)) @ tf.reshape(weights["dense"], (128, 10))
    return [*outputs, tf.nn.bias_add(scores, weights["dense_bias"])]


def train(policy, steps=STEPS, report=lambda loss, step: None) -> dict[str, float]:
    """Train, and call `report` with the loss and the `StepResult` of every step."""
    digits = load_digits()
    images, labels = digits.images[..., np.newaxis].astype("float32") / 16, digits.target
    weights = make_weights()
    sgd = tf.compat.v1.train.MomentumOptimizer(RATE, 0.9)
    opt = polyamp.wrap_optimizer(sgd, policy, max_grad_norm=1.0)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, layers(weights, x)[-1])
            loss = tf.reduce_mean(losses)
            scaled = opt.scale_loss(loss)
        variables = list(weights.values())
        opt.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return loss

    step = polyamp.rewrite(train_step, policy=policy)  # the whole step: forward, backward, update
    for batch in np.random.default_rng(1).integers(TRAIN, size=(steps, BATCH)):
        loss = step(tf.constant(images[batch]), tf.constant(labels[batch]))
        report(float(loss), opt.last_step)
    scores = polyamp.rewrite(lambda x: layers(weights, x)[-1], policy=policy)(tf.constant(images[TRAIN:]))
    outputs = layers(*policy.cast_to_compute((weights, tf.constant(images[batch]))))
    return {
        "accuracy": float((scores.numpy().argmax(1) == labels[TRAIN:]).mean()),
        "parameter_bytes": sum(weight.shape.num_elements() * weight.dtype.size for weight in weights.values()),
        "activation_bytes": sum(output.shape.num_elements() * output.dtype.size for output in outputs),
    }


if __name__ == "__main__":
    print(f"{'policy':<16}{'accuracy':>10}{'loss':>10}{'scale':>10}{'skipped':>9}")
    steps = []
    for name in ("float32", "mixed_bfloat16", "mixed_float16"):
        steps.clear()
        accuracy = train(polyamp.policy(name), report=lambda *step: steps.append(step))["accuracy"]
        (loss, last), skipped = steps[-1], sum(not step for _, step in steps)
        print(f"{name:<16}{accuracy:>10.2%}{loss:>10.4f}{last.scale:>10g}{skipped:>9}")
