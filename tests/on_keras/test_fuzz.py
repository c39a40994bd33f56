"""Random runs of a wrapped optimizer against the plain one with true gradients, on the backend that Keras runs on."""

import gc
import weakref
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from keras import ops

import polyamp
from polyamp import LossScale
from support.harness import same_bits
from support.harness_keras import to_numpy

pytestmark = pytest.mark.backends

OPTIONS = [
    {"clipnorm": 1.0},
    {"global_clipnorm": 1.0},
    {"clipvalue": 0.25},
    {"weight_decay": 0.1},
    {"use_ema": True, "ema_momentum": 0.5},
    {"gradient_accumulation_steps": 2},
]
SGD, MOMENTUM, ADAM = keras.optimizers.SGD, partial(keras.optimizers.SGD, momentum=0.5), keras.optimizers.Adam
INNER = [partial(kind, 0.5, **options) for kind in (SGD, MOMENTUM, ADAM) for options in ({}, *OPTIONS)]
NUMBERS = st.sampled_from([0.0, 0.5, -1.0, 3.0, 2.0**-12, np.inf, np.nan])
EVENTS = st.tuples(st.sampled_from(["step", "twice", "reload", "read"]), NUMBERS, NUMBERS)


class Run:
    """One wrapped optimizer and its plain twin, each with its own variables."""

    def __init__(self, inner: Any, scale: LossScale) -> None:
        self.inner, self.scale = inner, scale
        self.scaled, self.plain = ([keras.Variable([1.0]), keras.Variable([-2.0])] for _ in range(2))
        self.opt, self.twin = self.wrapped(), inner()
        self.twin.build(self.plain)

    def wrapped(self) -> Any:
        opt = polyamp.wrap_optimizer(self.inner(), "mixed_float16", loss_scale=self.scale)
        opt.build(self.scaled)
        return opt

    def grads(self, numbers: Any) -> list[Any]:
        """Return gradients of one scaled loss."""
        scale = float(to_numpy(self.opt.scale_loss(ops.ones(()))))
        return [ops.array([np.float32(one * scale)]) for one in numbers]

    def follow(self, numbers: Any) -> None:
        if np.isfinite(numbers).all() or not self.scale.check:
            self.twin.apply([ops.array([one], "float32") for one in numbers], self.plain)

    def step(self, *numbers: float) -> None:
        self.opt.apply(self.grads(numbers), self.scaled)
        self.follow(numbers)

    def twice(self, *numbers: float) -> None:
        """Make the gradients of two losses, then two steps: the scale may change in between."""
        both = [self.grads(numbers), self.grads(numbers)]
        for grads in both:
            self.opt.apply(grads, self.scaled)
            self.follow(numbers)

    def reload(self, *_: Any) -> None:
        again = self.wrapped()
        for new, old in zip(again.variables, self.opt.variables, strict=True):
            new.assign(old.value)
        self.opt = again

    def read(self, *_: Any) -> None:
        assert self.opt.loss_scale == polyamp.health(self.opt).scale
        polyamp.load_loss_scale(self.opt, polyamp.save_loss_scale(self.opt))

    def check(self) -> None:
        pairs = zip(
            [*self.scaled, *self.opt.inner_optimizer.variables], [*self.plain, *self.twin.variables], strict=True
        )
        for index, (one, other) in enumerate(pairs):
            assert same_bits({"": to_numpy(one)}, {"": to_numpy(other)}), index


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    inner=st.sampled_from(INNER),
    interval=st.sampled_from([1, 2, 2000, None]),
    events=st.lists(EVENTS, min_size=1, max_size=8),
)
@example(inner=INNER[0], interval=1, events=[("twice", 0.5, -1.0)])
@pytest.mark.filterwarnings("ignore::polyamp.PolyampWarning")
def test_runs_are_those_of_the_plain_optimizer(inner: Any, interval: int | None, events: list[Any]) -> None:
    scaled = LossScale(init=2.0**10, interval=interval or 1, max=2.0**20)
    run = Run(inner, LossScale.none() if interval is None else scaled)
    for name, *numbers in events:
        getattr(run, name)(*numbers)
        run.check()


def read_by_hand(run: Run) -> None:
    """Read the scale where that may become part of a loss: always on torch, in a tape or a pure function elsewhere."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape():
            assert run.opt.dynamic_scale is not None
    else:
        with keras.StatelessScope():
            assert run.opt.dynamic_scale is not None


def test_a_step_is_refused_only_where_its_scale_is_not_known() -> None:
    run = Run(INNER[0], LossScale(init=8.0, interval=1))
    read_by_hand(run)
    run.twice(0.5, -1.0)  # both losses were scaled after that
    run.check()
    both = [run.grads((0.5, -1.0)) for _ in range(2)]
    run.opt.apply(both[0], run.scaled)
    run.follow((0.5, -1.0))
    read_by_hand(run)
    with pytest.raises(polyamp.errors.UsageError, match="is not known: it changed"):
        run.opt.apply(both[1], run.scaled)
    run.check()
    run.step(0.5, -1.0)
    run.check()


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="functions that are compiled with side effects")
@pytest.mark.parametrize("steps", [True, False])
def test_of_a_compiled_function_only_gradients_that_it_returns_are_unknown(steps: bool) -> None:
    import tensorflow as tf

    run = Run(INNER[0], LossScale(init=8.0, interval=1))

    @tf.function(autograph=False)
    def compiled() -> Any:
        grads = [tf.reshape(run.opt.scale_loss(tf.constant(one)), [1]) for one in (0.5, -1.0)]
        if steps:
            run.opt.apply(grads, run.scaled)
        return grads

    compiled()
    if steps:
        run.follow((0.5, -1.0))
        run.twice(0.5, -1.0)
    else:
        with pytest.raises(polyamp.errors.UsageError, match="is not known: it changed"):
            run.twice(0.5, -1.0)
    run.check()


@pytest.mark.parametrize("before", [1, 2])
def test_gradients_of_a_joint_loss_that_another_optimizer_scaled_are_refused(before: int) -> None:
    first, second = (Run(INNER[0], LossScale(init=8.0, interval=1)) for _ in range(2))
    for run in (first, second)[:before]:
        run.step(0.5, -1.0)
    joint = first.grads((0.5, -1.0))  # times 16; the scale of the second is 8, or was before its last step
    first.opt.apply(joint, first.scaled)
    with pytest.raises(polyamp.errors.UsageError, match="scaled by another optimizer"):
        second.opt.apply(joint, second.scaled)
    second.check()
    second.step(0.5, -1.0)
    second.check()


def test_of_a_deleted_optimizer_nothing_is_left() -> None:
    run = Run(INNER[0], LossScale(init=2.0**10))
    run.step(0.5, -1.0)
    left = [weakref.ref(one) for one in (run.opt, run.opt.scaler, run.opt.scaler.losses, *run.opt.variables)]
    del run
    gc.collect()
    assert not [one() for one in left if one() is not None]
