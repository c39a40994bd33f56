"""Skipped steps over replicas, run by test_tensorflow_replicas.py in a process of its own, with two logical CPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp import LossScale
from polyamp.backends.tensorflow import LossScaler

CPUS = ["CPU:0", "CPU:1"]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * len(CPUS)
)


def without_merging() -> tf.distribute.Strategy:
    """As strategies are under XLA on GPUs; this is how TensorFlow's own tests make one elsewhere."""
    strategy = tf.distribute.MirroredStrategy(CPUS)
    strategy.extended._use_merge_call = lambda: False
    with strategy.scope():
        assert tf.__internal__.distribute.strategy_supports_no_merge_call()
    return strategy


STRATEGIES: dict[str, Callable[[], tf.distribute.Strategy]] = {
    "mirrored": lambda: tf.distribute.MirroredStrategy(CPUS),
    "without merging": without_merging,
    "mirrored, one replica": lambda: tf.distribute.MirroredStrategy(CPUS[:1]),
    "one worker": tf.distribute.MultiWorkerMirroredStrategy,
    "one device": lambda: tf.distribute.OneDeviceStrategy(CPUS[0]),
}


@functools.cache  # in one process strategies with collective operations disturb each other
def strategy_of(kind: str) -> tf.distribute.Strategy:
    return STRATEGIES[kind]()


OF_ALL = pytest.mark.parametrize("kind", STRATEGIES)
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])

FINITE = [[1.0, 1.0], [1.0, 1.0]]
BAD = {
    "inf in the first": [[np.inf, 1.0], [1.0, 1.0]],
    "inf in the second": [[1.0, 1.0], [np.inf, 1.0]],
    "NaN in the second": [[1.0, 1.0], [1.0, np.nan]],
    "both, of opposite sign": [[np.inf, 1.0], [-np.inf, 1.0]],
}


class Loop:
    """A strategy, one variable and a step for gradients of each replica."""

    def __init__(self, strategy: tf.distribute.Strategy, make: Callable[[], Any], compiled: bool = True) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weight = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.SUM)
            self.stepper = make()

        def step(grads: Any) -> None:
            strategy.run(lambda grad: self.stepper(grad, self.weight), args=(grads,))

        self._step = tf.function(step, autograph=False) if compiled else step

    def step(self, grads: Any) -> None:
        def of(context: Any) -> tf.Tensor:
            return tf.constant(grads[context.replica_id_in_sync_group])

        self._step(self.strategy.experimental_distribute_values_from_function(of))

    def copies(self, variable: Any = None) -> list[Any]:
        values = self.strategy.experimental_local_results(self.weight if variable is None else variable)
        return [value.numpy().tolist() for value in values]

    @property
    def count(self) -> int:
        return int(self.strategy.num_replicas_in_sync)


class Stepper:
    """`LossScaler` around an optimizer of ``tf.compat.v1.train``."""

    def __init__(self, **options: Any) -> None:
        self.inner = tf.compat.v1.train.MomentumOptimizer(1.0, 0.9)
        self.scaler = LossScaler(LossScale(init=8.0), **options)

    def __call__(self, grad: tf.Tensor, weight: tf.Variable) -> None:
        self.scaler.step(self.inner, [(grad, weight)])


class Wrapped(Stepper):
    """The wrapped optimizer itself."""

    def __init__(self, **options: Any) -> None:
        self.opt = polyamp.wrap_optimizer(
            tf.compat.v1.train.MomentumOptimizer(1.0, 0.9), "mixed_float16", loss_scale=LossScale(init=8.0), **options
        )
        self.scaler = self.opt.scaler

    def __call__(self, grad: tf.Tensor, weight: tf.Variable) -> None:
        self.opt.apply_gradients([(grad, weight)])


class Own(Stepper):
    """An optimizer of somebody's own, that knows nothing of replicas."""

    def __call__(self, grad: tf.Tensor, weight: tf.Variable) -> None:
        self.scaler.step(self, [(grad, weight)])

    def apply_gradients(self, pairs: list[tuple[tf.Tensor, tf.Variable]]) -> None:
        for grad, variable in pairs:
            variable.assign_sub(grad)


MAKES = pytest.mark.parametrize("make", [Stepper, Wrapped, Own])


@OF_ALL
@COMPILED
@MAKES
def test_steps_are_applied_and_gradients_summed(kind: str, compiled: bool, make: type[Stepper]) -> None:
    loop = Loop(strategy_of(kind), make, compiled)
    loop.step([[8.0, 0.0], [0.0, 8.0]])
    expected = [0.0, 1.0] if loop.count == 2 else [0.0, 2.0]
    assert loop.copies() == [expected] * loop.count
    assert loop.stepper.scaler.loss_scale == 8.0


@pytest.mark.parametrize("kind", ["mirrored", "without merging"])
@COMPILED
@MAKES
@pytest.mark.parametrize("bad", BAD)
def test_an_overflow_anywhere_skips_the_step_everywhere(
    kind: str, compiled: bool, make: type[Stepper], bad: str
) -> None:
    loop = Loop(strategy_of(kind), make, compiled)
    loop.step(BAD[bad])
    assert loop.copies() == [[1.0, 2.0]] * 2
    assert loop.copies(loop.stepper.scaler.scalars[0]) == [4.0] * 2
    assert loop.copies(loop.stepper.scaler.scalars[3]) == [1] * 2
    loop.step([[4.0, 0.0], [0.0, 4.0]])
    assert loop.copies() == [[0.0, 1.0]] * 2
    assert loop.stepper.scaler.last_step.applied


@OF_ALL
def test_an_overflow_in_the_first_replica_skips_the_step_under_every_strategy(kind: str) -> None:
    loop = Loop(strategy_of(kind), Stepper)
    loop.step(BAD["inf in the first"])
    assert loop.copies() == [[1.0, 2.0]] * loop.count
    assert loop.stepper.scaler.loss_scale == 4.0


@pytest.mark.parametrize("kind", ["mirrored", "without merging"])
def test_the_norm_is_that_of_the_sum(kind: str) -> None:
    loop = Loop(strategy_of(kind), lambda: Stepper(max_grad_norm=2.5))
    loop.step([[16.0, 16.0], [8.0, 16.0]])  # a sum of [24, 32], which is [3, 4] unscaled
    assert loop.copies() == [[-0.5, 0.0]] * 2


def test_the_state_is_saved_and_continues_in_every_replica(tmp_path: Any) -> None:
    first, second = (Loop(strategy_of("mirrored"), Stepper) for _ in range(2))
    first.step(BAD["inf in the second"])
    path = tf.train.Checkpoint(scaler=first.stepper.scaler).save(tmp_path / "saved")
    tf.train.Checkpoint(scaler=second.stepper.scaler).restore(path)
    assert [second.copies(scalar) for scalar in second.stepper.scaler.scalars] == [
        first.copies(scalar) for scalar in first.stepper.scaler.scalars
    ]
    assert second.copies(second.stepper.scaler.scalars[0]) == [4.0] * 2


@MAKES
def test_a_step_outside_of_the_replicas_is_refused(make: type[Stepper]) -> None:
    loop = Loop(strategy_of("mirrored"), make)
    with loop.strategy.scope(), pytest.raises(polyamp.UsageError, match=r"strategy\.run"):
        loop.stepper(tf.constant([1.0, 1.0]), loop.weight)
    assert loop.copies() == [[1.0, 2.0]] * 2


def test_master_weights_over_replicas_are_refused() -> None:
    loop = Loop(strategy_of("mirrored"), Stepper)
    with loop.strategy.scope():
        loop.weight = tf.Variable([1.0, 2.0], dtype=tf.float16)
    with pytest.raises(polyamp.UnsupportedError, match="master weights are not kept over replicas"):
        loop.step(FINITE)


def test_steps_in_replicas_are_marked_in_the_graph() -> None:
    loop = Loop(strategy_of("mirrored"), Stepper)
    spec = tf.constant([1.0, 1.0])
    values = loop.strategy.experimental_distribute_values_from_function(lambda context: spec)
    graph = loop._step.get_concrete_function(values).graph
    names = [node.name for node in graph.as_graph_def().node]
    marks = {"polyamp_update/polyamp_finite", "replica_1/polyamp_update/polyamp_finite"}
    assert {name for name in names if "polyamp_update" not in name} == {"grads", "grads_1"}
    assert {name for name in names if name.endswith("polyamp_finite")} == marks
