"""Handwritten digits in JAX: one loop, three precision policies. `polyamp demo` runs it beside the others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import polyamp

STEPS, BATCH, TRAIN, RATE = 300, 64, 1437, 0.05


def make_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)  # the same weights in every framework: (height, width, inputs, outputs)
    params = {}
    for name, shape in {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense": (2, 2, 32, 10)}.items():
        params[name] = jnp.asarray(rng.normal(0, np.sqrt(2 / np.prod(shape[:3])), shape), "float32")
        params[f"{name}_bias"] = jnp.zeros(shape[-1])
    return params


def layers(params, x) -> list[jax.Array]:
    """Return the output of every layer; the scores of the classes are the last."""
    outputs = [x]
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        outputs += [x := x + params[f"{name}_bias"], x := jax.nn.relu(x)]
        rows, height, width, channels = x.shape
        outputs += [x := x.reshape(rows, height // 2, 2, width // 2, 2, channels).max((2, 4))]  # 2x2 max pool
    return [*outputs[1:], x.reshape(rows, -1) @ params["dense"].reshape(-1, 10) + params["dense_bias"]]


def train(policy, steps=STEPS, report=lambda loss, step: None) -> dict[str, float]:
    """Train, and call `report` with the loss and the `StepResult` of every step."""
    digits = load_digits()
    images, labels = jnp.asarray(digits.images[..., None] / 16, "float32"), jnp.asarray(digits.target)
    params = make_params()
    tx = polyamp.wrap_optimizer(optax.sgd(RATE, momentum=0.9), policy, max_grad_norm=1.0)
    opt_state = tx.init(params)

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(layers(params, x)[-1], y).mean()

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = polyamp.value_and_grad(loss_fn, policy)(opt_state, params, images[batch], labels[batch])
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in np.random.default_rng(1).integers(TRAIN, size=(steps, BATCH)):
        params, opt_state, loss = step(params, opt_state, batch)
        report(float(loss), opt_state.last_step)
    scores = jax.jit(polyamp.autocast(layers, policy))(params, images[TRAIN:])[-1]
    outputs = jax.eval_shape(layers, *policy.cast_to_compute((params, images[batch])))
    return {
        "accuracy": float((scores.argmax(1) == labels[TRAIN:]).mean()),
        "parameter_bytes": sum(param.nbytes for param in params.values()),
        "activation_bytes": sum(output.size * output.dtype.itemsize for output in outputs),
    }


if __name__ == "__main__":
    print(f"{'policy':<16}{'accuracy':>10}{'loss':>10}{'scale':>10}{'skipped':>9}")
    steps = []
    for name in ("float32", "mixed_bfloat16", "mixed_float16"):
        steps.clear()
        accuracy = train(polyamp.policy(name), report=lambda *step: steps.append(step))["accuracy"]
        (loss, last), skipped = steps[-1], sum(not step for _, step in steps)
        print(f"{name:<16}{accuracy:>10.2%}{loss:>10.4f}{last.scale:>10g}{skipped:>9}")
