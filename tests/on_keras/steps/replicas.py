"""The wrapped Keras optimizer over replicas, in processes of tests/on_tensorflow/steps/test_replicas.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp import LossScale
from support.replica_strategies import BAD, COUNT, KIND, LOCAL, STRATEGY, copies, on_each, several

# Keras 3.15 calls __array__ as NumPy 1 did.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*trains in float32:polyamp.PolyampWarning"),  # steps are what is tested here
]


class Loop:
    """One variable, a wrapped optimizer, and a step for gradients of each replica."""

    def __init__(self, compiled: bool = True, how: str = "apply", norm: float | None = None, **inner: Any) -> None:
        with STRATEGY.scope():
            self.weight = keras.Variable([1.0, 2.0])
            plain = keras.optimizers.SGD(1.0, momentum=0.9, **inner)
            config = LossScale(init=8.0)
            self.opt = polyamp.wrap_optimizer(plain, "mixed_float16", loss_scale=config, max_grad_norm=norm)
            self.opt.build([self.weight])

        def replica(grad: tf.Tensor) -> None:
            self.opt.apply_gradients([(self._given(grad, how), self.weight)])

        def step(grads: Any) -> None:
            STRATEGY.run(replica, args=(grads,))

        self._step = tf.function(step, autograph=False) if compiled else step

    def _given(self, grad: tf.Tensor, how: str) -> tf.Tensor:
        if how == "apply":
            return grad
        (plain,) = self.opt.get_unscaled_gradients([grad])
        # A sum over replicas between the two calls: TensorFlow leaves each replica's thread there, and returns to it.
        tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, plain)
        return plain if how == "get_unscaled_gradients" else tf.clip_by_value(plain, -100.0, 100.0)

    def step(self, grads: Any) -> None:
        on_each(self._step, grads)

    def weights(self) -> list[Any]:
        return copies(self.weight.value)

    def scales(self) -> list[Any]:
        return copies(self.opt.dynamic_scale.value)


@pytest.mark.parametrize(
    ("how", "compiled"), [("apply", True), ("apply", False), ("get_unscaled_gradients", True), ("clipped", False)]
)
def test_steps_are_applied_and_gradients_summed(how: str, compiled: bool) -> None:
    loop = Loop(compiled, how)
    loop.step([[8.0, 0.0], [0.0, 8.0]])
    assert loop.weights() == [[0.0, 1.0] if COUNT == 2 else [0.0, 2.0]] * LOCAL
    assert (loop.opt.loss_scale, int(loop.opt.iterations.numpy())) == (8.0, 1)


@several
@pytest.mark.parametrize(
    ("how", "bad", "compiled"),
    [
        *(("apply", bad, True) for bad in BAD),
        *(("clipped", bad, True) for bad in BAD),
        ("apply", "NaN in the second", False),
    ],
)
def test_an_overflow_anywhere_skips_the_step_everywhere(how: str, bad: str, compiled: bool) -> None:
    loop = Loop(compiled, how)
    loop.step(BAD[bad])
    assert (loop.weights(), loop.scales(), int(loop.opt.iterations.numpy())) == ([[1.0, 2.0]] * LOCAL, [4.0] * LOCAL, 0)
    loop.step([[4.0, 0.0], [0.0, 4.0]])
    assert (loop.weights(), loop.scales(), int(loop.opt.iterations.numpy())) == ([[0.0, 1.0]] * LOCAL, [4.0] * LOCAL, 1)
    assert loop.opt.last_step.applied


def test_an_overflow_in_the_first_replica_skips_the_step_under_every_strategy() -> None:
    loop = Loop()
    loop.step(BAD["inf in the first"])
    assert (loop.weights(), loop.scales()) == ([[1.0, 2.0]] * LOCAL, [4.0] * LOCAL)


@several
def test_the_norm_is_that_of_the_sum() -> None:
    loop = Loop(norm=2.5)
    loop.step([[16.0, 16.0], [8.0, 16.0]])  # a sum of [24, 32], which is [3, 4] unscaled
    assert loop.weights() == [[-0.5, 0.0]] * LOCAL


def test_two_hundred_overflows_leave_a_scale_that_can_divide() -> None:
    loop = Loop()
    for _ in range(200):
        loop.step(BAD["inf in the first"])
    assert loop.scales() == [2.0**-14] * LOCAL
    loop.step(np.full((2, 2), 2.0**-14, np.float32).tolist())
    assert loop.weights() == [[1.0 - COUNT, 2.0 - COUNT]] * LOCAL


def test_a_step_outside_of_the_replicas_is_refused() -> None:
    loop = Loop()
    with STRATEGY.scope(), pytest.raises(polyamp.errors.UsageError, match=r"strategy\.run"):
        loop.opt.apply([tf.constant([1.0, 1.0])])
    assert loop.weights() == [[1.0, 2.0]] * LOCAL


def test_master_weights_over_replicas_are_refused() -> None:
    with STRATEGY.scope(), pytest.raises(polyamp.errors.UnsupportedError, match="do not work with replicas"):
        polyamp.wrap_optimizer(keras.optimizers.SGD(), "O2").build([keras.Variable([1.0], dtype="float16")])


in_one_process = pytest.mark.skipif(COUNT != LOCAL, reason="fit of Keras 3.15 fails over several processes")


@several
@in_one_process
@pytest.mark.parametrize(
    "inner", [{}, {"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"use_ema": True}, {"weight_decay": 0.1}], ids=str
)
def test_fit_is_that_of_the_plain_optimizer(inner: dict[str, Any]) -> None:
    x = np.random.default_rng(0).standard_normal((16, 2)).astype("float32")
    losses = []
    for wrap in (lambda plain: plain, lambda plain: polyamp.wrap_optimizer(plain, "mixed_float16")):
        keras.utils.set_random_seed(0)
        with STRATEGY.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])
            model.compile(wrap(keras.optimizers.SGD(0.1, momentum=0.9, **inner)), "mse", jit_compile=False)
        history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, shuffle=False).history
        losses.append(history["loss"])
    assert losses[0] == losses[1]


@in_one_process
def test_fit_in_float16_recovers_from_a_scale_that_is_much_too_large() -> None:
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((32, 2)).astype("float32")
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        polyamp.convert(model, "mixed_float16")
        opt = polyamp.wrap_optimizer(
            keras.optimizers.Adam(0.1), "mixed_float16", loss_scale=LossScale(init=2.0**30, max=2.0**30)
        )
        model.compile(opt, "mse", jit_compile=False)
    losses = model.fit(x, x[:, :1], batch_size=8, epochs=10, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    assert 0 < polyamp.save_loss_scale(opt)["skipped"] < 30
    assert all(np.isfinite(weights).all() for weights in model.get_weights())


@pytest.mark.skipif(COUNT == LOCAL, reason="for several processes")
def test_fit_over_several_processes_fails_in_keras_itself() -> None:
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match="PerReplica"):
        model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)


class Interrupt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise InterruptedError


@pytest.mark.skipif(KIND != "mirrored", reason="one strategy is enough")
def test_an_interrupted_fit_continues_to_the_bit(tmp_path: Path) -> None:
    """The first epochs overflow, so that the scale and its counters are not those of a new optimizer."""
    x = np.random.default_rng(0).standard_normal((16, 2)).astype("float32")

    def trained(*callbacks: keras.callbacks.Callback) -> list[Any]:
        keras.utils.set_random_seed(0)
        with STRATEGY.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
            polyamp.convert(model, "mixed_float16")
            scale = LossScale(init=2.0**24, interval=3)
            opt = polyamp.wrap_optimizer(keras.optimizers.Adam(0.1), "mixed_float16", loss_scale=scale)
            model.compile(opt, "mse", jit_compile=False)
        model.fit(x, x[:, :1], batch_size=8, epochs=4, verbose=0, shuffle=False, callbacks=list(callbacks))
        assert polyamp.save_loss_scale(opt)["skipped"] > 0
        return [variable.numpy().tobytes() for variable in (*model.variables, *opt.variables)]

    whole = trained()
    with pytest.raises(InterruptedError):
        trained(keras.callbacks.BackupAndRestore(tmp_path / "backup"), Interrupt())
    assert trained(keras.callbacks.BackupAndRestore(tmp_path / "backup")) == whole
