"""``keras.distribution`` on JAX with four devices, run by test_layouts.py in a process that has them."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import polyamp

X = np.random.default_rng(0).standard_normal((16, 8)).astype("float32")
Y = X[:, :4]
OVERFLOWING = np.where(np.arange(16)[:, None] == 13, np.float32(np.inf), X)  # in the part of one device


def data_parallel() -> Any:
    return keras.distribution.DataParallel(devices=keras.distribution.list_devices())


def model_parallel() -> Any:
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), keras.distribution.list_devices())
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*dense.*kernel"] = (None, "model")
    layouts[".*dense.*bias"] = ("model",)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


@pytest.fixture(autouse=True)
def _no_distribution_stays() -> Iterator[None]:
    yield
    keras.distribution.set_distribution(None)


def fitted(distribution: Any, stored: str, x: Any) -> tuple[Any, Any, list[float]]:
    """Return a model, its optimizer and its losses; a model stored in float16 is trained through master weights."""
    keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(0)
    policy = None if stored == "float32" else "float16"
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, dtype=policy), keras.layers.Dense(4, dtype=policy)]
    )
    if policy is None:
        polyamp.convert(model, "mixed_float16")
    scale = polyamp.LossScale(init=2.0**12)
    opt = polyamp.wrap_optimizer(
        keras.optimizers.Adam(0.01), "mixed_float16" if policy is None else "O2", loss_scale=scale
    )
    model.compile(opt, "mse")
    return model, opt, model.fit(x, Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_moments_and_masters_are_laid_out_like_their_variables(stored: str) -> None:
    model, opt, losses = fitted(model_parallel(), stored, X)
    split = [one for one in opt.variables if one.shape != () and one is not opt.scaler.stored.counters]
    of_each = 2 if stored == "float32" else 3
    assert len(split) == of_each * len(model.variables)
    for variable in (*model.variables, *split):
        assert variable.value.sharding.spec[-1] == "model", variable.path
    _, _, alone = fitted(None, stored, X)
    np.testing.assert_allclose(losses, alone, rtol=1e-3)


@pytest.mark.parametrize("make", [data_parallel, model_parallel])
def test_an_overflow_on_one_device_skips_the_step_on_all(make: Any) -> None:
    """The second of two batches overflows: the weights are those after the first."""
    model, opt, _ = fitted(make(), "float32", X)
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    before = [np.asarray(variable.value) for variable in (*model.variables, *opt.inner_optimizer.variables)]
    model.fit(OVERFLOWING[8:], Y[8:], batch_size=8, verbose=0)
    assert not opt.last_step
    assert opt.loss_scale == 2.0**11
    for variable, old in zip((*model.variables, *opt.inner_optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(variable.value, old, err_msg=variable.path)
