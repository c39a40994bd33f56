"""A word LSTM in TensorFlow. It stalls in float16 without a loss scale: docs/tutorials/float16_stall.md."""

from collections.abc import Iterator

import keras
import tensorflow as tf
import word_lstm as task

import polyamp


def linear(name: str, params: dict, x: tf.Tensor) -> tf.Tensor:
    with tf.name_scope(name):
        return tf.matmul(x, params[f"{name}.weight"], transpose_b=True) + params[f"{name}.bias"]


def model(params: dict, words: tf.Tensor) -> tf.Tensor:
    cell = tf.zeros((task.ROWS, task.HIDDEN))
    states = [cell]
    for word in tf.unstack(tf.gather(params["embedding.weight"], words), axis=1):
        taken, kept, shown, new = tf.split(linear("gates", params, tf.concat([word, states[-1]], 1)), 4, 1)
        cell = tf.sigmoid(kept) * cell + tf.sigmoid(taken) * tf.tanh(new)
        states.append(tf.sigmoid(shown) * tf.tanh(cell))
    return linear("head", params, tf.reshape(tf.stack(states[1:], 1), (-1, task.HIDDEN)))


def loss_of(params: dict, words: tf.Tensor) -> tf.Tensor:
    scores, targets = model(params, words[:, :-1]), tf.reshape(words[:, 1:], [-1])
    with tf.name_scope("loss"):
        return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, scores)) / task.TOKENS


def variables(weights: dict) -> dict:
    return {name: tf.Variable(value, name=name) for name, value in weights.items()}


def updates(policy: polyamp.Policy, weights: dict, batches: object) -> Iterator[tuple[float, bool]]:
    params = variables(weights)
    sums = {name: tf.Variable(tf.zeros_like(value)) for name, value in params.items()}
    opt = polyamp.wrap_optimizer(keras.optimizers.Adam(task.LEARNING_RATE, epsilon=1e-8), policy)

    def add_gradients(words):
        with tf.GradientTape() as tape:
            loss = loss_of(params, words)
            scaled = opt.scale_loss(loss)
        for name, gradient in tape.gradient(scaled, params).items():
            sums[name].assign_add(gradient)  # float32, like the parameters
        return loss

    add_gradients = polyamp.rewrite(add_gradients, policy=policy)
    for micro_batches in batches:
        total = sum(float(add_gradients(tf.constant(words))) for words in micro_batches)
        opt.apply_gradients((sums[name], params[name]) for name in params)
        for value in sums.values():
            value.assign(tf.zeros_like(value))
        yield total, bool(opt.last_step)


def one_step() -> dict:
    weights, batches = task.make_task(steps=1)
    return {"step": loss_of, "args": (variables(weights), tf.constant(batches[0, 0])), "rows": task.TOKENS}


if __name__ == "__main__":
    task.main(updates)
