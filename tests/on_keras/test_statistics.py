"""A skipped step changes no bit of the averages that layers keep over batches."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import polyamp
from polyamp.backends.keras import keep_statistics

GOOD = np.random.default_rng(0).standard_normal((16, 6)).astype("float32")
BAD = GOOD.copy()
BAD[0] *= 1e6  # finite, and beyond float16 in the first layer
LABELS = np.zeros(16, "int32")
ON = keras.backend.backend()

pytestmark = [
    pytest.mark.backends,
    pytest.mark.filterwarnings("ignore:the loss was not finite before scaling"),
]

MODES: dict[str, dict[str, Any]] = {"compiled": {}, "eager": {"run_eagerly": True}}
if ON != "torch":
    MODES |= {"jit": {"jit_compile": True}, "several steps": {"steps_per_execution": 2}}


def made(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    parts = [layers.Dense(8), layers.BatchNormalization(name="norm"), layers.ReLU(), layers.Dropout(0.1)]
    model = keras.Sequential([keras.Input((6,)), *parts, layers.Dense(3)])
    polyamp.convert(model, "mixed_float16")
    opt = polyamp.wrap_optimizer(keras.optimizers.SGD(0.05), "mixed_float16")
    model.compile(opt, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def statistics(model: keras.Model) -> list[bytes]:
    norm = next(layer for layer in model._flatten_layers() if isinstance(layer, layers.BatchNormalization))
    return [np.array(ops.convert_to_numpy(one)).tobytes() for one in (norm.moving_mean, norm.moving_variance)]


@pytest.mark.parametrize("mode", MODES)
def test_train_on_batch_puts_them_back(mode: str) -> None:
    model = made(**MODES[mode])
    first = statistics(model)
    model.train_on_batch(GOOD, LABELS)
    before = statistics(model)
    assert before != first
    model.train_on_batch(BAD, LABELS)
    assert not model.optimizer.last_step.applied
    assert statistics(model) == before
    model.train_on_batch(GOOD, LABELS)
    assert model.optimizer.last_step.applied
    assert statistics(model) != before
    assert np.isfinite(model.evaluate(GOOD, LABELS, verbose=0))


@pytest.mark.parametrize("mode", ["compiled", list(MODES)[-1]])
def test_a_run_with_skipped_steps_is_the_run_without_them(mode: str) -> None:
    """Without dropout, since seeds advance in skipped steps too."""
    runs = []
    for batches in ([GOOD, BAD, BAD, GOOD], [GOOD, GOOD]):
        model = made(**MODES[mode])
        model.layers[3].rate = 0.0
        data = np.concatenate(batches)
        model.fit(data, np.zeros(len(data), "int32"), batch_size=16, shuffle=False, verbose=0)
        runs.append(statistics(model))
    assert runs[0] == runs[1]


def with_frozen_weights(model: keras.Model, path: Any) -> keras.Model:
    model.layers[0].trainable = False
    model.compile(model.optimizer, model.loss)
    return model


def loaded(model: keras.Model, path: Any) -> keras.Model:
    model.save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


def with_too_large_a_scale(model: keras.Model, path: Any) -> keras.Model:
    largest = polyamp.LossScale(init=2.0**24, max=2.0**24).initial_state()
    model.optimizer.scaler.load(polyamp.LossScale().to_state_dict(largest))
    return model


@pytest.mark.parametrize(
    ("change", "data"), [(with_frozen_weights, BAD), (loaded, BAD), (with_too_large_a_scale, GOOD * 10)]
)
def test_changed_models_are_served_too(change: Any, data: Any, tmp_path: Any) -> None:
    model = change(made(), tmp_path)
    before = statistics(model)
    model.train_on_batch(data, LABELS)
    assert not model.optimizer.last_step.applied
    assert statistics(model) == before


FRESH = """
import os, sys, warnings
import keras, numpy as np, polyamp
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization()])
assert "polyamp.backends.keras" not in sys.modules
"""
COMPILED = 'model.compile(polyamp.wrap_optimizer(keras.optimizers.SGD(0.05), "mixed_float16"), "mse")\n'
PROMISES = {
    "statistics are kept": """
warnings.simplefilter("ignore")
model.train_on_batch(np.full((16, 6), np.inf), np.zeros((16, 8)))
assert not model.optimizer.last_step
assert np.isfinite(np.concatenate(model.get_weights(), axis=None)).all()
""",
    "float32 is reported": """
with warnings.catch_warnings(record=True) as shown:
    model.fit(np.ones((4, 6)), np.zeros((4, 8)), verbose=0)
assert ["trains in float32" in str(one.message) for one in shown].count(True) == 1
""",
}
LOADED = """
try:
    keras.models.load_model(sys.argv[1])
except TypeError as error:
    assert "'polyamp.backends.keras'" in str(error)
else:
    assert "polyamp.backends.keras" in sys.modules
"""


def in_a_fresh_process(program: str, *arguments: Any) -> None:
    command = [sys.executable, "-c", FRESH + program, *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, "KERAS_BACKEND": ON}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("promise", PROMISES)
def test_the_line_that_compiles_may_be_the_first_one_of_the_adapter(promise: str) -> None:
    """Python looks ``compile`` up before it evaluates the argument that loads the adapter."""
    in_a_fresh_process(COMPILED + PROMISES[promise])


def test_keras_error_names_what_to_import_before_a_file_is_loaded(tmp_path: Any) -> None:
    made().save(tmp_path / "model.keras")
    in_a_fresh_process(LOADED, tmp_path / "model.keras")


@pytest.mark.skipif(ON == "jax", reason="pure functions select values instead")
def test_a_loop_of_ones_own_takes_one_line() -> None:
    model = made(run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    before = statistics(model)
    with keep_statistics(model, model.optimizer):
        model(BAD, training=True)
        model.optimizer.apply([ops.full(one.shape, np.inf) for one in model.trainable_variables])
    assert statistics(model) == before
    with keep_statistics(model):
        model(GOOD, training=True)
        model.optimizer.apply([ops.zeros(one.shape) for one in model.trainable_variables])
    assert statistics(model) != before


def test_an_error_out_of_a_step_puts_them_back() -> None:
    if ON == "jax":
        pytest.skip("compiled or not, a step of Keras on JAX is a pure function")
    model = made(run_eagerly=True)
    model.optimizer.scaler.settings = polyamp.LossScale(nonfinite_loss="raise").in_float32()
    before = statistics(model)
    with pytest.raises(polyamp.errors.NonFiniteLossError):
        model.train_on_batch(BAD, LABELS)
    assert statistics(model) == before
