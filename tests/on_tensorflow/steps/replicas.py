"""Skipped steps with replicas; test_replicas.py runs this file in separate processes with two logical CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import polyamp
from polyamp import LossScale
from polyamp.backends.tensorflow import LossScaler
from support.replica_strategies import BAD, COUNT, FINITE, LOCAL, STRATEGY, copies, on_each, several

COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])


class Loop:
    """A strategy, one variable, and a step that takes the gradients of each replica."""

    def __init__(self, make: Callable[[], Any], compiled: bool = True) -> None:
        with STRATEGY.scope():
            self.weight = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.SUM)
            self.stepper = make()

        def step(grads: Any) -> None:
            STRATEGY.run(lambda grad: self.stepper(grad, self.weight), args=(grads,))

        self._step = tf.function(step, autograph=False) if compiled else step

    def step(self, grads: Any) -> None:
        on_each(self._step, grads)

    def copies(self) -> list[Any]:
        return copies(self.weight)


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
    """A user's own optimizer, without any support for replicas."""

    def __call__(self, grad: tf.Tensor, weight: tf.Variable) -> None:
        self.scaler.step(self, [(grad, weight)])

    def apply_gradients(self, pairs: list[tuple[tf.Tensor, tf.Variable]]) -> None:
        for grad, variable in pairs:
            variable.assign_sub(grad)


MAKES = pytest.mark.parametrize("make", [Stepper, Wrapped, Own])


@COMPILED
@MAKES
def test_steps_are_applied_and_gradients_summed(compiled: bool, make: type[Stepper]) -> None:
    loop = Loop(make, compiled)
    loop.step([[8.0, 0.0], [0.0, 8.0]])
    expected = [0.0, 1.0] if COUNT == 2 else [0.0, 2.0]
    assert loop.copies() == [expected] * LOCAL
    assert loop.stepper.scaler.loss_scale == 8.0


@several
@COMPILED
@MAKES
@pytest.mark.parametrize("bad", BAD)
def test_an_overflow_anywhere_skips_the_step_everywhere(compiled: bool, make: type[Stepper], bad: str) -> None:
    loop = Loop(make, compiled)
    loop.step(BAD[bad])
    assert loop.copies() == [[1.0, 2.0]] * LOCAL
    assert copies(loop.stepper.scaler.scalars[0]) == [4.0] * LOCAL
    assert copies(loop.stepper.scaler.scalars[3]) == [1] * LOCAL
    loop.step([[4.0, 0.0], [0.0, 4.0]])
    assert loop.copies() == [[0.0, 1.0]] * LOCAL
    assert loop.stepper.scaler.last_step.applied


def test_an_overflow_in_the_first_replica_skips_the_step_under_every_strategy() -> None:
    loop = Loop(Stepper)
    loop.step(BAD["inf in the first"])
    assert loop.copies() == [[1.0, 2.0]] * LOCAL
    assert loop.stepper.scaler.loss_scale == 4.0


@several
def test_the_norm_is_that_of_the_sum() -> None:
    loop = Loop(lambda: Stepper(max_grad_norm=2.5))
    loop.step([[16.0, 16.0], [8.0, 16.0]])  # a sum of [24, 32], which is [3, 4] unscaled
    assert loop.copies() == [[-0.5, 0.0]] * LOCAL


def test_the_state_is_saved_and_continues_in_every_replica(tmp_path: Any) -> None:
    first, second = (Loop(Stepper) for _ in range(2))
    first.step(BAD["inf in the first"])
    path = tf.train.Checkpoint(scaler=first.stepper.scaler).save(tmp_path / "saved")
    tf.train.Checkpoint(scaler=second.stepper.scaler).restore(path)
    assert [copies(scalar) for scalar in second.stepper.scaler.scalars] == [
        copies(scalar) for scalar in first.stepper.scaler.scalars
    ]
    assert copies(second.stepper.scaler.scalars[0]) == [4.0] * LOCAL


@MAKES
def test_a_step_outside_of_the_replicas_is_refused(make: type[Stepper]) -> None:
    loop = Loop(make)
    with STRATEGY.scope(), pytest.raises(polyamp.errors.UsageError, match=r"strategy\.run"):
        loop.stepper(tf.constant([1.0, 1.0]), loop.weight)
    assert loop.copies() == [[1.0, 2.0]] * LOCAL


def test_master_weights_over_replicas_are_refused() -> None:
    loop = Loop(Stepper)
    with STRATEGY.scope():
        loop.weight = tf.Variable([1.0, 2.0], dtype=tf.float16)
    with pytest.raises(polyamp.errors.UnsupportedError, match="master weights do not work with replicas"):
        loop.step(FINITE)


@pytest.mark.skipif(LOCAL == 1, reason="for several replicas in one process")
def test_steps_in_replicas_are_marked_in_the_graph() -> None:
    loop = Loop(Stepper)
    spec = tf.constant([1.0, 1.0])
    values = STRATEGY.experimental_distribute_values_from_function(lambda context: spec)
    graph = loop._step.get_concrete_function(values).graph
    names = [node.name for node in graph.as_graph_def().node]
    marks = {"polyamp_update/polyamp_finite", "replica_1/polyamp_update/polyamp_finite"}
    assert {name for name in names if "polyamp_update" not in name} == {"grads", "grads_1"}
    assert {name for name in names if name.endswith("polyamp_finite")} == marks
