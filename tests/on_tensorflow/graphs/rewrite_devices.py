"""`polyamp.rewrite` of steps with replicas; test_replicas.py runs this file in a process with two CPUs."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp import LossScale
from polyamp.backends.tensorflow import rewrite
from support.replica_strategies import COUNT, STRATEGY
from support.tensorflow_cases import LOW, PRODUCTS, nodes_that_run, normal, planned

STEPS, INITIAL = 10, 2.0**10
TOLERANCE = {"mixed_float16": 1e-3, "mixed_bfloat16": 1e-2}
W1, W2 = normal(8, 16, seed=1), normal(16, 4, seed=2)


class ByHand:
    """Gradient descent that sums gradients over replicas."""

    def __init__(self, variables: list[tf.Variable]) -> None:
        self.variables = variables

    def scale(self, loss: Any) -> Any:
        return loss

    def apply(self, grads: list[Any]) -> None:
        replicas = tf.distribute.get_replica_context()
        for grad, variable in zip(replicas.all_reduce(tf.distribute.ReduceOp.SUM, grads), self.variables, strict=True):
            variable.assign_sub(0.1 * grad)


class Wrapped(ByHand):
    """The wrapped Keras optimizer."""

    def __init__(self, variables: list[tf.Variable]) -> None:
        super().__init__(variables)
        settings = LossScale(init=INITIAL)
        self.optimizer = polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), "mixed_float16", loss_scale=settings)
        self.optimizer.build(variables)

    @property
    def loss_scale(self) -> float:
        return float(self.optimizer.loss_scale)

    def scale(self, loss: Any) -> Any:
        return self.optimizer.scale_loss(loss)

    def apply(self, grads: list[Any]) -> None:
        self.optimizer.apply(grads, self.variables)


class Training:
    """Two weights on every replica, and a step that takes an input for each replica."""

    def __init__(self, make: Any, policy: str | None) -> None:
        with STRATEGY.scope():
            kind = {"aggregation": tf.VariableAggregation.SUM}
            self.weights = [tf.Variable(value, **kind) for value in (W1, W2)]
            self.updater = make(self.weights)
        self.step: Any = tf.function(self._step) if policy is None else rewrite(self._step, policy=policy)

    def _step(self, x: Any, spoil: Any) -> Any:
        losses = STRATEGY.run(self._on_replica, (x, spoil))
        return STRATEGY.reduce(tf.distribute.ReduceOp.SUM, losses, None)

    def _on_replica(self, x: Any, spoil: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.nn.relu(x @ self.weights[0]) @ self.weights[1]
            loss = tf.reduce_mean(tf.square(y - tf.reduce_sum(x, 1, keepdims=True))) / COUNT
            scaled = self.updater.scale(loss) * spoil
        self.updater.apply(tape.gradient(scaled, self.weights))
        return loss

    def run(self, seed: int = 0, spoil: tuple[float, float] = (1.0, 1.0)) -> float:
        return float(self.step(on_each(normal(8, 8, seed=seed)), on_each(tf.constant(spoil))))

    def copies(self) -> list[list[Any]]:
        """Return the weights on each device."""
        return [[one.numpy() for one in weight.values] for weight in self.weights]


@functools.cache
def trained() -> Training:
    """Return a step that ran once, for tests that do not care what it trained."""
    made = Training(Wrapped, "mixed_float16")
    made.run()
    return made


def on_each(value: tf.Tensor) -> Any:
    """Return the halves of a value, one for each replica."""
    parts = tf.split(value, COUNT)
    return STRATEGY.experimental_distribute_values_from_function(
        lambda context: tf.squeeze(parts[context.replica_id_in_sync_group])
    )


@pytest.mark.parametrize(("make", "policy"), [(ByHand, "mixed_bfloat16"), (Wrapped, "mixed_float16")])
def test_losses_are_those_of_float32(make: Any, policy: str) -> None:
    ours, plain = Training(make, policy), Training(make, None)
    losses, expected = ([one.run(seed) for seed in range(STEPS)] for one in (ours, plain))
    assert losses != expected
    assert expected[-1] < expected[0]
    assert np.max(np.abs(np.subtract(losses, expected))) < TOLERANCE[policy]
    for copies in ours.copies():
        assert np.array_equal(*copies)
        assert copies[0].dtype == np.float32


def test_products_are_lowered_on_both_devices() -> None:
    policy = "mixed_float16"
    ours, plain = trained(), Training(Wrapped, None)
    arguments = on_each(normal(8, 8)), on_each(tf.constant((1.0, 1.0)))
    found = [node for node in nodes_that_run(ours.step, *arguments) if node.op in PRODUCTS]
    expected = [node for node in nodes_that_run(plain.step, *arguments) if node.op in PRODUCTS]
    assert {node.attr["T"].type for node in found} == {LOW[policy].as_datatype_enum}
    assert sorted(node.device for node in found) == sorted(node.device for node in expected)
    assert {node.device[-5:] for node in found} == {"CPU:0", "CPU:1"}
    assert planned(ours.step.plan) == {LOW[policy].name: len(expected)}


def test_casts_stay_on_their_devices() -> None:
    nodes = nodes_that_run(trained().step, on_each(normal(8, 8)), on_each(tf.constant((1.0, 1.0))))
    devices = {node.name: node.device for node in nodes}
    casts = [node for node in nodes if node.op == "Cast" and "polyamp_cast" in node.name]
    assert casts
    for cast in casts:
        maker = cast.input[0].split(":")[0]
        assert cast.device == devices.get(maker, "")


@pytest.mark.parametrize("spoil", [(np.inf, 1.0), (1.0, np.inf), (np.nan, np.inf)], ids=["first", "second", "both"])
def test_an_overflow_on_one_replica_skips_the_step_on_both(spoil: tuple[float, float]) -> None:
    training = trained()
    before, scale = training.copies(), training.updater.loss_scale
    training.run(1, spoil)
    for copies, earlier in zip(training.copies(), before, strict=True):
        assert np.array_equal(copies, earlier)
    assert training.updater.loss_scale == scale / 2
    training.run(2)
    for copies, earlier in zip(training.copies(), before, strict=True):
        assert np.array_equal(*copies)
        assert not np.array_equal(copies, earlier)
        assert np.all(np.isfinite(copies))
