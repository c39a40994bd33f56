"""Skipped steps with replicas, of Keras optimizers too; run by test_replicas.py in processes with two logical CPUs."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import polyamp
from polyamp import LossScale
from polyamp.backends.tensorflow import LossScaler
from support.replica_strategies import BAD, COUNT, FINITE, KIND, LOCAL, STRATEGY, copies, on_each, several
from support.unlike_ranks import check_that_ranks_choose_the_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*trains in float32:polyamp.PolyampWarning"),  # steps are what is tested here
]


class Loop:
    """A strategy, one variable, and a step that takes the gradients of each replica."""

    def __init__(self, make: Callable[[], Any], compiled: bool = True) -> None:
        with STRATEGY.scope():
            self.stepper = make()
            self.weight = self.stepper.variable()

        def step(grads: Any) -> None:
            STRATEGY.run(lambda grad: self.stepper(grad, self.weight), args=(grads,))

        self._step = tf.function(step, autograph=False) if compiled else step

    def step(self, grads: Any) -> None:
        on_each(self._step, grads)

    def copies(self) -> list[Any]:
        return copies(self.weight.value if isinstance(self.weight, keras.Variable) else self.weight)

    def scales(self) -> list[Any]:
        return copies(self.stepper.scale())


class Stepper:
    """`LossScaler` around an optimizer of ``tf.compat.v1.train``."""

    def __init__(self, **options: Any) -> None:
        self.inner = tf.compat.v1.train.MomentumOptimizer(1.0, 0.9)
        self.scaler = LossScaler(LossScale(init=8.0), **options)

    def variable(self) -> Any:
        return tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.SUM)

    def scale(self) -> Any:
        return self.scaler.stored[0]

    def last_step(self) -> polyamp.StepResult:
        return self.scaler.last_step

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


class Keras:
    """The wrapped Keras optimizer."""

    def __init__(self, **options: Any) -> None:
        plain = keras.optimizers.SGD(1.0, momentum=0.9)
        self.opt = polyamp.wrap_optimizer(plain, "mixed_float16", loss_scale=LossScale(init=8.0), **options)

    def variable(self) -> Any:
        weight = keras.Variable([1.0, 2.0])
        self.opt.build([weight])
        return weight

    def scale(self) -> Any:
        return self.opt.dynamic_scale.value

    def last_step(self) -> polyamp.StepResult:
        state = self.opt.scaler.host_state
        assert int(self.opt.iterations.numpy()) == state.steps - state.skipped
        return self.opt.last_step

    def __call__(self, grad: tf.Tensor, weight: Any) -> None:
        self.opt.apply_gradients([(grad, weight)])


MAKES = [Stepper, Wrapped, Keras]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("make", MAKES)
def test_an_overflow_anywhere_skips_the_step_everywhere_and_gradients_are_summed(make: Any, compiled: bool) -> None:
    loop = Loop(make, compiled)
    for skipped, bad in enumerate(BAD if COUNT == 2 else [next(iter(BAD))], start=1):
        loop.step(BAD[bad])
        assert (loop.copies(), loop.scales()) == ([[1.0, 2.0]] * LOCAL, [8.0 / 2**skipped] * LOCAL), bad
        assert loop.stepper.last_step().skipped_in_a_row == skipped
    (scale,) = set(loop.scales())
    loop.step([[scale, 0.0], [0.0, scale]])
    assert loop.copies() == [[0.0, 1.0] if COUNT == 2 else [0.0, 2.0]] * LOCAL
    assert loop.scales() == [scale] * LOCAL
    assert loop.stepper.last_step().applied


@pytest.mark.skipif(KIND != "two workers", reason="replicas of one process choose once")
def test_workers_with_unlike_devices_choose_the_same_policy() -> None:
    with STRATEGY.scope():
        check_that_ranks_choose_the_same("tensorflow", STRATEGY.cluster_resolver.task_id)


@several
@pytest.mark.parametrize("make", [Stepper, Keras])
def test_the_norm_is_that_of_the_sum(make: Any) -> None:
    loop = Loop(lambda: make(max_grad_norm=2.5))
    loop.step([[16.0, 16.0], [8.0, 16.0]])  # a sum of [24, 32], which is [3, 4] unscaled
    assert loop.copies() == [[-0.5, 0.0]] * LOCAL


def test_the_state_is_saved_and_continues_in_every_replica(tmp_path: Any) -> None:
    first, second = (Loop(Stepper) for _ in range(2))
    first.step(BAD["inf in the first"])
    path = tf.train.Checkpoint(scaler=first.stepper.scaler).save(tmp_path / "saved")
    tf.train.Checkpoint(scaler=second.stepper.scaler).restore(path)
    assert [copies(scalar) for scalar in second.stepper.scaler.stored] == [
        copies(scalar) for scalar in first.stepper.scaler.stored
    ]
    assert copies(second.stepper.scaler.stored[0]) == [4.0] * LOCAL


@pytest.mark.parametrize("make", [Stepper, Wrapped, Keras])
def test_a_step_outside_of_the_replicas_is_refused(make: Any) -> None:
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
