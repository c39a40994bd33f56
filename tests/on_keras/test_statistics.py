"""A skipped step changes no bit of the averages that layers keep over batches."""

import json
import os
import subprocess
import sys
from pathlib import Path
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
    model.optimizer.scaler.load_loss_scale(polyamp.LossScale().to_state_dict(largest))
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


# Programs that begin where nothing of the adapter is loaded, each in a fork of one process that has imported Keras.
FRESH = """
import json, os, sys, traceback, warnings
import keras, numpy as np
of_keras = set(sys.modules)
import polyamp
assert "polyamp.backends.keras" not in sys.modules
for name, program in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        try:
            exec(program)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(name)
"""
COMPILED = """
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization()])
model.compile(polyamp.wrap_optimizer(keras.optimizers.SGD(0.05), "mixed_float16"), "mse")
"""  # Python looks ``compile`` up before it evaluates the argument that loads the adapter
PROGRAMS = {
    "statistics are kept": f"""{COMPILED}
warnings.simplefilter("ignore")
model.train_on_batch(np.full((16, 6), np.inf), np.zeros((16, 8)))
assert not model.optimizer.last_step
assert np.isfinite(np.concatenate(model.get_weights(), axis=None)).all()
""",
    "float32 is reported": f"""{COMPILED}
with warnings.catch_warnings(record=True) as shown:
    model.fit(np.ones((4, 6)), np.zeros((4, 8)), verbose=0)
assert ["trains in float32" in str(one.message) for one in shown].count(True) == 1
""",
    "Keras' error about a file names what to import": """
try:
    keras.models.load_model(sys.argv[2])
except TypeError as error:
    assert "'polyamp.backends.keras'" in str(error)
else:
    assert "polyamp.backends.keras" in sys.modules
""",
    "no framework is imported but by Keras": """
layers = [keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)]
model = polyamp.convert(keras.Sequential(layers), "mixed_float16")
model.compile(polyamp.wrap_optimizer(keras.optimizers.Adam(), "mixed_float16", max_grad_norm=1.0), "mse")
model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), verbose=0)
assert not {"jax", "tensorflow", "torch"} & (set(sys.modules) - of_keras)
assert ("tensorflow" in sys.modules) == (keras.backend.backend() == "tensorflow")
""",
}


def test_programs_in_which_nothing_of_the_adapter_is_loaded_yet(tmp_path: Path) -> None:
    made().save(tmp_path / "model.keras")
    command = [sys.executable, "-c", FRESH, json.dumps(PROGRAMS), str(tmp_path / "model.keras")]
    done = subprocess.run(command, env={**os.environ, "KERAS_BACKEND": ON}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
