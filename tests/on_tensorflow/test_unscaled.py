"""``compute_gradients`` of a wrapped ``tf.compat.v1.train`` optimizer returns gradients that code may clip."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp import LossScale
from polyamp.backends.tensorflow import LossScaledOptimizer

v1 = tf.compat.v1
START = np.array([1.0, -2.0], np.float32)


def by_norm(pairs: Any) -> Any:
    grads, variables = zip(*pairs, strict=True)
    return zip(tf.clip_by_global_norm(list(grads), 1.0)[0], variables, strict=True)


def by_value(pairs: Any) -> Any:
    return [(tf.clip_by_value(grad, -1.0, 1.0), variable) for grad, variable in pairs]


def not_at_all(pairs: Any) -> Any:
    return pairs


CHANGES = [by_norm, by_value, not_at_all]
MODES = ["session", "function", "eager", "jit"]


class Run:
    """One optimizer in one way to run it; each step takes a gradient."""

    def __init__(self, make: Callable[[], Any], change: Callable[[Any], Any], mode: str) -> None:
        self.change, self.mode = change, mode
        if mode != "session":
            self.opt = make()
            self.weight = tf.Variable(START)
            options = {} if mode == "function" else {"jit_compile": True}
            self.run = self._step if mode == "eager" else tf.function(self._step, **options)
            return
        with tf.Graph().as_default() as self.graph:
            opt = make()
            self.factor = v1.placeholder(tf.float32, [2])
            self.weight = v1.get_variable("weight", initializer=tf.constant(START))
            loss = tf.reduce_sum(self.weight * self.factor)
            self.train = opt.apply_gradients(change(opt.compute_gradients(loss, [self.weight])))
            self.session = v1.Session()
            self.session.run(v1.global_variables_initializer())

    def _step(self, factor: Any) -> None:
        pairs = self.opt.compute_gradients(lambda: tf.reduce_sum(self.weight * factor), [self.weight])
        self.opt.apply_gradients(self.change(pairs))

    def step(self, *factor: float) -> list[float]:
        if self.mode == "session":
            self.session.run(self.train, {self.factor: factor})
            return self.session.run(self.weight).tolist()
        self.run(tf.constant(factor))
        return self.weight.numpy().tolist()


def sgd() -> Any:
    return v1.train.GradientDescentOptimizer(0.5)


def momentum() -> Any:
    return v1.train.MomentumOptimizer(0.5, 0.9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_steps_are_those_of_the_plain_optimizer(change: Any, mode: str) -> None:
    plain, wrapped = (Run(make, change, mode) for make in (sgd, lambda: polyamp.wrap_optimizer(sgd(), "mixed_float16")))
    for factor in ([3.0, 4.0], [0.25, -8.0]):
        assert wrapped.step(*factor) == pytest.approx(plain.step(*factor), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "mode", "bad"),
    [(by_norm, mode, np.inf) for mode in MODES] + [(by_value, mode, np.nan) for mode in MODES],
)
@pytest.mark.filterwarnings("ignore:the loss was not finite")
def test_an_overflow_skips_the_step_whatever_it_was_clipped_to(change: Any, mode: str, bad: float) -> None:
    run = Run(lambda: polyamp.wrap_optimizer(momentum(), "mixed_float16"), change, mode)
    before = run.step(1.0, 1.0)
    assert run.step(bad, 1.0) == before
    plain = Run(momentum, change, mode)
    plain.step(1.0, 1.0)
    assert run.step(0.5, 0.5) == pytest.approx(plain.step(0.5, 0.5), rel=1e-6)


def test_towers_are_averaged_and_skipped_together() -> None:
    opt = LossScaledOptimizer(sgd(), LossScale(init=8.0))
    weight = tf.Variable(START)

    @tf.function
    def step(one: Any, other: Any) -> None:
        towers = [
            opt.compute_gradients(lambda factor=factor: tf.reduce_sum(weight * factor), [weight])
            for factor in (one, other)
        ]
        opt.apply_gradients([(tf.clip_by_value((a[0] + b[0]) / 2, -1e3, 1e3), weight) for (a,), (b,) in [towers]])

    step(tf.constant([2.0, 2.0]), tf.constant([4.0, 0.0]))
    assert weight.numpy().tolist() == [-0.5, -2.5]
    step(tf.constant([2.0, 2.0]), tf.constant([np.inf, 0.0]))
    assert (weight.numpy().tolist(), opt.last_step.applied) == ([-0.5, -2.5], False)


@pytest.mark.filterwarnings("ignore:the loss was not finite")
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_of_several_calls_each_belongs_to_its_variables(mode: str) -> None:
    opt, parts = LossScaledOptimizer(sgd(), LossScale(init=8.0)), [tf.Variable(START) for _ in range(3)]

    def step(factors: Any) -> None:
        made = [
            by_value(opt.compute_gradients(lambda one=one, factor=factor: tf.reduce_sum(one * factor), [one]))
            for one, factor in zip(parts, tf.unstack(factors), strict=True)
        ]
        for index in (1, 2, 0):
            opt.apply_gradients(made[index])

    (step if mode == "eager" else tf.function(step))(tf.constant([[1.0, 1.0], [np.inf, 1.0], [0.0, 1.0]]))
    assert [part.numpy().tolist() for part in parts] == [[0.5, -2.5], [1.0, -2.0], [1.0, -2.5]]


def test_gradients_that_were_unscaled_in_another_place_are_refused_once() -> None:
    opt, weight = LossScaledOptimizer(sgd(), LossScale(init=8.0)), tf.Variable(START)

    @tf.function
    def apply(grad: tf.Tensor) -> None:
        opt.apply_gradients([(grad, weight)])

    ((grad, _),) = opt.compute_gradients(lambda: tf.reduce_sum(weight), [weight])
    with pytest.raises(polyamp.errors.UsageError, match="compute_gradients was called elsewhere"):
        apply(grad)
    apply(tf.constant([8.0, 8.0]))
    assert weight.numpy().tolist() == [0.5, -2.5]


def test_gradients_of_a_function_are_applied_in_its_conditionals() -> None:
    opt, weight = LossScaledOptimizer(sgd(), LossScale(init=8.0)), tf.Variable(START)

    @tf.function(autograph=False)
    def step(wanted: tf.Tensor) -> None:
        pairs = opt.compute_gradients(lambda: tf.reduce_sum(weight), [weight])

        def apply() -> tf.Tensor:
            opt.apply_gradients(pairs)
            return tf.constant(0)

        tf.cond(wanted, apply, lambda: tf.constant(0))

    for wanted in (True, False, True):
        step(tf.constant(wanted))
    assert weight.numpy().tolist() == [0.0, -3.0]


def test_a_rewritten_step_clips_unscaled_gradients() -> None:
    opt, weight = LossScaledOptimizer(sgd(), LossScale(init=2.0**10)), tf.Variable(tf.ones((4, 2)))

    def step(x: Any) -> None:
        pairs = opt.compute_gradients(lambda: tf.reduce_sum(x @ weight), [weight])
        opt.apply_gradients(by_norm(pairs))

    fast = polyamp.rewrite(step, policy="mixed_float16", backend="tensorflow")
    fast(tf.ones((3, 4)))
    assert weight.numpy() == pytest.approx(np.full((4, 2), 1 - 0.5 / 8**0.5), rel=1e-6)
    fast(tf.fill((3, 4), 3e4))  # the sum of three overflows float16
    assert not opt.last_step.applied
