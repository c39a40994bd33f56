"""The big LSTM in TensorFlow, which stalls in float16 without a loss scale. `models.big_lstm` explains why.

The words are those of Python's manual. The optimizer is Keras', and `polyamp.rewrite` changes the graph of the whole
forward and backward pass. It runs on Keras' TensorFlow backend.

>>> import polyamp
>>> losses = list(curve(polyamp.policy("float32"), seed=0, steps=2))
>>> losses[1] < losses[0] < 8
True
"""

import functools
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

import polyamp
from models import big_lstm as task

Params = dict[str, tf.Variable]


def layer_of(params: Params, name: str, x: tf.Tensor) -> tf.Tensor:
    """Return the projected states of one layer of LSTM cells, of shape (rows, time, projection), at every time."""
    weight, bias = params[f"{name}.gates.weight"], params[f"{name}.gates.bias"]
    projection = params[f"{name}.projection.weight"]
    cell, states = tf.zeros((len(x), projection.shape[1])), [tf.zeros((len(x), projection.shape[0]))]
    for value in tf.unstack(x, axis=1):
        gates = tf.matmul(tf.concat([value, states[-1]], 1), weight, transpose_b=True) + bias
        taken, kept, shown, new = tf.split(gates, 4, axis=1)
        cell = tf.sigmoid(kept) * cell + tf.sigmoid(taken) * tf.tanh(new)
        states.append(tf.matmul(tf.sigmoid(shown) * tf.tanh(cell), projection, transpose_b=True))
    return tf.stack(states[1:], axis=1)


def sum_of_losses(params: Params, words: tf.Tensor) -> tf.Tensor:
    x = tf.gather(params["embedding.weight"], words[:, :-1])
    for layer in range(sum(name.endswith("gates.weight") for name in params)):
        with tf.name_scope(f"layer{layer}"):
            x = layer_of(params, f"layers.{layer}", x)
    with tf.name_scope("head"):
        states = tf.reshape(x, (-1, x.shape[-1]))
        scores = tf.matmul(states, params["head.weight"], transpose_b=True) + params["head.bias"]
    targets = tf.reshape(words[:, 1:], [-1])
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, scores))


class Training:
    """Hold the weights, the optimizer and the steps of one policy; the steps are traced once for all seeds."""

    def __init__(self, policy: polyamp.Policy) -> None:
        weights = task.weights(task.SMALL, seed=0)
        self.params = {name: tf.Variable(value, name=name.replace(".", "_")) for name, value in weights.items()}
        self.sums = {name: tf.Variable(tf.zeros_like(value)) for name, value in self.params.items()}
        adam = keras.optimizers.Adam(task.LEARNING_RATE, epsilon=task.EPSILON)
        self.opt = polyamp.wrap_optimizer(adam, policy)
        self.opt.build([*self.params.values()])
        self.at_start = [variable.numpy() for variable in self.opt.variables]
        rewrite = functools.partial(polyamp.rewrite, policy=policy, backend="tensorflow")
        self.add, self.loss_of = rewrite(self._add), rewrite(functools.partial(sum_of_losses, self.params))

    def begin(self, seed: int) -> None:
        for name, value in task.weights(task.SMALL, seed).items():
            self.params[name].assign(value)
        for variable, value in zip(self.opt.variables, self.at_start, strict=True):
            variable.assign(value)

    def update(self, micro_batches: np.ndarray) -> float:
        """Make one update by the gradients of all micro-batches, and return the loss of a word before it."""
        loss = sum(float(self.add(tf.constant(words))) for words in micro_batches)
        self.opt.apply_gradients((self.sums[name], self.params[name]) for name in self.params)
        for value in self.sums.values():
            value.assign(tf.zeros_like(value))
        return loss

    def _add(self, words: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = sum_of_losses(self.params, words) / task.TOKENS
            scaled = self.opt.scale_loss(loss)
        for name, gradient in tape.gradient(scaled, self.params).items():
            self.sums[name].assign_add(gradient)  # float32, like the parameters
        return loss


training_under = functools.cache(Training)


def curve(policy: polyamp.Policy, seed: int, steps: int = task.STEPS) -> Iterator[float]:
    """Yield the training loss of each update, in nats per word."""
    training = training_under(policy)
    training.begin(seed)
    yield from map(training.update, task.batches(seed, steps))


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Return the loss on test words, in nats per word, after training."""
    for _ in curve(policy, seed):
        pass
    words = task.test_words()
    return {"loss": float(training_under(policy).loss_of(tf.constant(words))) / words[:, 1:].size}
