"""A compiled Keras model recorded, linted and watched, on whichever backend Keras runs."""

from typing import Any

import keras
import numpy as np
import pytest

import polyamp
from polyamp.backends.keras import HealthCallback, adapter
from polyamp.diagnosis.health import Health
from polyamp.diagnosis.recording import PARAMETER, Recording
from support.harness_keras import to_numpy

F16 = polyamp.policy("mixed_float16")
BACKEND = keras.backend.backend()
layers = keras.layers
X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
Y = np.arange(6) % 3


def model_with(optimizer: Any = "adam", dtype: str | None = None, **options: Any) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8, activation="relu", dtype=dtype, name="first"),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=1),
            layers.Dense(3, kernel_regularizer="l2", dtype=dtype, name="head"),
            layers.Activation("linear", dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **options)
    return model


def wrapped(**settings: Any) -> Any:
    return polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), F16, loss_scale=polyamp.LossScale(**settings))


def recorded(model: Any, *args: Any, widened: bool = True, scale: float | None = None, policy: Any = F16) -> Recording:
    return adapter.record(model, args or (X, Y), {}, policy, widened=widened, scale=scale)


@pytest.mark.parametrize("widened", [True, False])
def test_a_model_is_recorded_and_stays_as_it_was(widened: bool) -> None:
    model = model_with(wrapped())
    model.optimizer.build(model.trainable_variables)
    state = [*model.variables, *model.optimizer.variables]
    before = [to_numpy(one) for one in state]
    recording = recorded(model, widened=widened)
    assert all(np.array_equal(to_numpy(one), old) for one, old in zip(state, before, strict=True))
    assert recording.framework == BACKEND
    parameters = {one.name: one.shape for one in recording.of_kind(PARAMETER)}
    assert parameters == {one.path: tuple(one.shape) for one in model.trainable_variables}
    assert sum(one.name == "matmul" for one in recording.observations) >= 3


def test_the_loss_is_that_of_fit() -> None:
    model = model_with("sgd")
    model.layers[2].rate = 0.0
    recording = recorded(model)
    expected = model.train_on_batch(X, Y)[0]
    assert recording.loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "given", "scale", "state"),
    [
        (keras.optimizers.SGD, None, 1.0, "plain"),
        (lambda: wrapped(init=2.0**10), None, 2.0**10, "wrapped"),
        (lambda: wrapped(init=2.0**10), 8.0, 8.0, "wrapped"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), None, 2.0**15, "native scaler"),
        (lambda: keras.optimizers.SGD(loss_scale_factor=4.0), None, 4.0, "native scaler"),
    ],
)
def test_scale_and_kind_are_the_optimizers(optimizer: Any, given: float | None, scale: float, state: str) -> None:
    model = model_with(optimizer(), dtype="mixed_float16")
    recording = recorded(model, scale=given)
    assert (recording.scale, recording.differentiates) == (scale, state != "plain")
    assert adapter.holder(model, (), {}, F16, None).kind == state
    assert [one.code for one in polyamp.lint(model)] == ["optimizer-not-wrapped"] * (state == "plain")


def test_layers_with_policies_run_as_they_say() -> None:
    model = model_with("sgd", dtype="mixed_float16")
    wide = recorded(model, X * 1e5, Y, policy=polyamp.policy("float32"))
    assert "float16" in {one.format for one in wide.observations if one.name == "matmul"}
    assert all(one.spread.is_finite for one in wide.observations)
    real = recorded(model, X * 1e5, Y, policy=polyamp.policy("float32"), widened=False)
    assert not all(one.spread.is_finite for one in real.observations)


def test_probe_and_diagnose_take_a_model() -> None:
    model = model_with(wrapped(init=2.0**40, max=2.0**60))
    assert polyamp.probe(model, X, Y).window is not None
    assert polyamp.diagnose(model, X, Y).kind == "scale"


def test_a_function_is_recorded_by_the_backend() -> None:
    if BACKEND == "jax":
        recording = recorded(lambda p, x: (x @ p["w"]).mean(), {"w": X.T}, X)
    else:
        weight = keras.Variable(X.T, name="w")
        data = keras.ops.convert_to_tensor(X)
        recording = recorded(lambda x: keras.ops.mean(keras.ops.matmul(x, weight)), data)
    assert sum(one.kind == PARAMETER for one in recording.observations) == 1


@pytest.mark.parametrize(
    ("make", "args", "what"),
    [
        (model_with, (), "not one batch"),
        (lambda: keras.Sequential([layers.Dense(2)]), (X, Y), "no variables yet"),
        (lambda: keras.Sequential([keras.Input((8,)), layers.Dense(2)]), (X, Y), "no loss"),
    ],
)
def test_models_that_cannot_be_recorded(make: Any, args: Any, what: str) -> None:
    with pytest.raises(polyamp.PolyampError, match=what):
        adapter.record(make(), args, {}, F16, widened=True)


def test_a_step_is_judged_by_its_plan() -> None:
    report = polyamp.lint(model_with("sgd"), X, Y, policy=F16, rows=2**24)
    assert [one.code for one in report] == ["optimizer-not-wrapped", "stuck-loss"]
    assert "3 classes" in str(report)


# The callback.


def test_health_goes_to_logs_and_to_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = model_with(wrapped(), dtype="mixed_float16"), list[Health]()
    own = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(polyamp.health(model)))
    with caplog.at_level("INFO", "polyamp"):
        history = model.fit(
            np.tile(X, (4, 1)), np.tile(Y, 4), 6, epochs=2, verbose=0, callbacks=[HealthCallback(3), own]
        )
        model.fit(X, Y, 3, verbose=0, callbacks=[HealthCallback(2)])
    assert history.history["loss_scale"] == [one.scale for one in seen]
    assert history.history["skipped"] == [one.skipped for one in seen]
    assert polyamp.health(model) == polyamp.health(model.optimizer)
    steps = [int(line.split()[1]) for name, _, line in caplog.record_tuples if name == "polyamp"]
    assert steps == [3, 4, 6, 8, 10]  # once at 10, although the epoch ends there


@pytest.mark.filterwarnings("ignore:the loss was not finite before scaling")
@pytest.mark.parametrize(
    ("x", "every"),
    [
        (np.tile(X * 1e6, (8, 1)), 2),
        (np.concatenate([X, X * 1e6] * 8), 8),
        (np.concatenate([X, X * 1e6] * 8), 1),
    ],
    ids=["in a row", "every other step", "at every step"],
)
def test_skips_are_judged_once_where_no_scale_helps(x: Any, every: int) -> None:
    model, callback = model_with(wrapped(init=2.0**8), dtype="mixed_float16"), HealthCallback(every, batch=(X * 1e6, Y))
    with pytest.warns(polyamp.PolyampWarning, match="this is why") as shown:
        model.fit(x, np.tile(Y, len(x) // 6), 6, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    assert sum("this is why" in str(one.message) for one in shown) == 1


def test_a_plain_optimizer_is_refused() -> None:
    with pytest.raises(polyamp.PolyampError, match="loss scale"):
        model_with("sgd").fit(X, Y, verbose=0, callbacks=[HealthCallback()])


@pytest.mark.parametrize("options", [{"every": 0}, {"every": "x"}, {"batch": 3}])
def test_bad_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(polyamp.PolyampError):
        HealthCallback(**options)
