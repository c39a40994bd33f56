"""``fit`` of a model with the wrapped optimizer over replicas, in processes of on_tensorflow/test_replicas.py."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import polyamp
from polyamp import LossScale
from support.replica_strategies import COUNT, KIND, LOCAL, STRATEGY, several

# Steps are what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*trains in float32:polyamp.PolyampWarning")


def test_master_weights_over_replicas_are_refused() -> None:
    with STRATEGY.scope(), pytest.raises(polyamp.errors.UnsupportedError, match="do not work with replicas"):
        polyamp.wrap_optimizer(keras.optimizers.SGD(), "O2").build([keras.Variable([1.0], dtype="float16")])


in_one_process = pytest.mark.skipif(COUNT != LOCAL, reason="fit of Keras 3.15 fails over several processes")


@several
@in_one_process
def test_fit_is_that_of_the_plain_optimizer() -> None:
    options: dict[str, Any] = {"momentum": 0.9, "global_clipnorm": 1.0, "use_ema": True}
    x = np.random.default_rng(0).standard_normal((16, 2)).astype("float32")
    losses = []
    for wrap in (lambda plain: plain, lambda plain: polyamp.wrap_optimizer(plain, "mixed_float16")):
        keras.utils.set_random_seed(0)
        with STRATEGY.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])
            model.compile(wrap(keras.optimizers.SGD(0.1, **options)), "mse", jit_compile=False)
        history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, shuffle=False).history
        losses.append(history["loss"])
    assert losses[0] == losses[1]


@in_one_process
def test_fit_in_float16_recovers_from_a_scale_that_is_much_too_large() -> None:
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((128, 2)).astype("float32")
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        polyamp.convert(model, "mixed_float16")
        opt = polyamp.wrap_optimizer(
            keras.optimizers.Adam(0.1), "mixed_float16", loss_scale=LossScale(init=2.0**30, max=2.0**30)
        )
        model.compile(opt, "mse", jit_compile=False)
    losses = model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    assert 0 < polyamp.save_loss_scale(opt)["skipped"] < 30
    assert all(np.isfinite(weights).all() for weights in model.get_weights())


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
