"""``tf.keras.mixed_precision`` and its ``experimental``, as they were before Keras 3."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import polyamp
from polyamp.backends.keras.compat import experimental
from polyamp.backends.keras.compat.loss_scale_optimizer import LossScaleOptimizer
from polyamp.backends.keras.compat.names import install
from polyamp.errors import PolyampDeprecationWarning
from polyamp.scripts.session import Session, running

BACKEND = keras.backend.backend()
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="records gradients with TensorFlow")
old_interface = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")
# Keras 3.15 calls __array__ as NumPy 1 did.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.standard_normal((64, size)).astype("float32") for size in (16, 8))


@pytest.fixture(autouse=True)
def _policy_after() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")


def model_of() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,))
    outputs = keras.layers.Dense(8, dtype="float32")(keras.layers.Dense(32, activation="tanh")(inputs))
    return keras.Model(inputs, outputs)


def fitted(model: keras.Model, optimizer: Any = None) -> list[float]:
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0).history["loss"]


# Policies.


@old_interface
@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        ("auto", polyamp.LossScale.like("tensorflow")),
        pytest.param("dynamic", polyamp.LossScale.like("tensorflow"), marks=pytest.mark.long),
        (1024, polyamp.LossScale.fixed(1024)),
        pytest.param(polyamp.LossScale(init=8.0), polyamp.LossScale(init=8.0), marks=pytest.mark.long),
        (None, None),
    ],
)
def test_compile_wraps_by_the_policys_loss_scale(loss_scale: Any, expected: Any) -> None:
    full = fitted(model_of())
    experimental.set_policy(experimental.Policy("mixed_float16", loss_scale))
    model = model_of()
    assert model.layers[1].compute_dtype == "float16"
    half = fitted(model)
    if expected is None:
        assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    else:
        assert model.optimizer.scaler.settings == expected.in_float32()
        assert polyamp.health(model).steps == 4
    assert half != full
    np.testing.assert_allclose(half, full, rtol=5e-3)


@old_interface
def test_only_mixed_float16_scales_by_itself() -> None:
    assert experimental.Policy("mixed_bfloat16").loss_scale is None
    assert experimental.Policy("float32").loss_scale is None
    experimental.set_policy("mixed_bfloat16")
    assert experimental.global_policy().name == "mixed_bfloat16"
    assert isinstance(experimental.global_policy(), experimental.Policy)
    assert experimental.get_layer_policy(keras.layers.Dense(1)) is experimental.global_policy()
    experimental.set_policy(None)
    assert experimental.global_policy().name == "float32"


@old_interface
@pytest.mark.parametrize(
    "use",
    [
        lambda: experimental.Policy("mixed_float16", "static"),
        lambda: experimental.Policy("mixed_float16", -1),
        lambda: experimental.get_layer_policy("dense"),
        lambda: experimental.LossScaleOptimizer(keras.optimizers.SGD(), None),
        lambda: experimental.LossScaleOptimizer("sgd", "dynamic"),
        lambda: LossScaleOptimizer(keras.optimizers.SGD(), "dynamic"),
        lambda: LossScaleOptimizer(keras.optimizers.SGD(), dynamic=False),
        lambda: LossScaleOptimizer(keras.optimizers.SGD(), dynamic=False, initial_scale=1, dynamic_growth_steps=2),
        lambda: LossScaleOptimizer(LossScaleOptimizer(keras.optimizers.SGD())),
    ],
)
def test_bad_arguments_are_refused(use: Callable[[], Any]) -> None:
    with pytest.raises(polyamp.PolyampError):
        use()


# Optimizers.


@old_interface
def test_the_arguments_and_attributes_of_tensorflow_2() -> None:
    opt = LossScaleOptimizer(keras.optimizers.SGD(clipnorm=2.0), initial_scale=4, dynamic_growth_steps=3)
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == (True, 4, 3)
    assert (float(opt.loss_scale), int(opt.dynamic_counter), opt.clipnorm) == (4.0, 0, 2.0)
    opt.clipnorm = 3.0
    assert opt.inner_optimizer.clipnorm == 3.0
    default = LossScaleOptimizer(keras.optimizers.SGD())
    assert (float(default.loss_scale), default.dynamic_growth_steps) == (2.0**15, 2000)
    fixed = LossScaleOptimizer(keras.optimizers.SGD(), dynamic=False, initial_scale=10)
    assert (fixed.dynamic, fixed.dynamic_counter, fixed.dynamic_growth_steps) == (False, None, None)
    keras_3 = LossScaleOptimizer(keras.optimizers.SGD(), 2.0**10, 50)  # its order of arguments
    assert (float(keras_3.loss_scale), keras_3.dynamic_growth_steps) == (2.0**10, 50)


@old_interface
def test_the_scale_of_the_experimental_class_is_called() -> None:
    opt = experimental.LossScaleOptimizer(keras.optimizers.SGD(), loss_scale="dynamic")
    assert isinstance(opt, LossScaleOptimizer)
    assert float(opt.loss_scale()) == float(opt.loss_scale) == opt.loss_scale.numpy() == 2.0**15
    assert float(ops.convert_to_tensor(2.0) * ops.convert_to_tensor(opt.loss_scale())) == 2.0**16


@old_interface
@on_tensorflow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["experimental", "dynamic", "fixed"])
def test_a_custom_loop_trains_as_float32_and_skips(kind: str, compiled: bool) -> None:
    import tensorflow as tf

    wraps = {
        "experimental": lambda opt: experimental.LossScaleOptimizer(opt, loss_scale="dynamic"),
        "dynamic": LossScaleOptimizer,
        "fixed": lambda opt: LossScaleOptimizer(opt, dynamic=False, initial_scale=2.0**10),
        "none": lambda opt: opt,
    }

    def losses(kind: str) -> tuple[list[float], Any, bool]:
        model, opt = model_of(), wraps[kind](keras.optimizers.Adam(0.01))

        def step(x: Any) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - Y))
                scaled = opt.get_scaled_loss(loss) if kind != "none" else loss
            grads = tape.gradient(scaled, model.trainable_variables)
            if kind != "none":
                grads = opt.get_unscaled_gradients(grads)
            grads, _ = tf.clip_by_global_norm(grads, 0.5)
            opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss

        run = tf.function(step) if compiled else step
        found = [float(run(tf.constant(X))) for _ in range(6)]
        before = [variable.numpy() for variable in model.trainable_variables]
        run(tf.fill(X.shape, np.float32(np.inf)))
        return found, opt, all(map(np.array_equal, before, model.trainable_variables))

    full, _, was_skipped = losses("none")
    assert not was_skipped
    experimental.set_policy("mixed_float16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", polyamp.PolyampWarning)  # the loss that is not finite
        half, opt, was_skipped = losses(kind)
    assert was_skipped
    assert (float(opt.loss_scale), int(opt.iterations)) == (2.0**10 if kind == "fixed" else 2.0**14, 6)
    assert half != full
    np.testing.assert_allclose(half, full, rtol=5e-3)


@old_interface
@on_tensorflow
def test_gradients_of_a_loss_that_was_never_scaled_are_applied_as_they_are() -> None:
    weight, opt = keras.Variable([1.0]), LossScaleOptimizer(keras.optimizers.SGD(0.5))
    with pytest.warns(polyamp.PolyampWarning, match="loss that was not scaled"):
        opt.apply_gradients([(ops.array([1.0]), weight)])
    assert weight.numpy() == [0.5]
    opt.apply_gradients([(ops.array([float("inf")]), weight)])
    assert (weight.numpy(), float(opt.loss_scale)) == ([0.5], 2.0**14)
    opt.get_scaled_loss(ops.array(1.0))
    opt.apply_gradients([(ops.array([2.0**14]), weight)])  # now they count as scaled
    assert weight.numpy() == [0.0]


@old_interface
@on_tensorflow
def test_minimize() -> None:
    import tensorflow as tf

    weight, opt = keras.Variable(3.0), LossScaleOptimizer(keras.optimizers.SGD(0.25))
    opt.minimize(lambda: weight * weight, lambda: [weight])
    with tf.GradientTape() as tape:
        loss = weight * weight
    opt.minimize(loss, [weight], tape=tape)
    assert float(weight) == 0.75
    with pytest.raises(polyamp.InvalidValueError, match="tape is missing"):
        opt.minimize(loss, [weight])
    with pytest.raises(polyamp.UnsupportedError, match="summed elsewhere"):
        opt.apply_gradients([(tf.constant(1.0), weight)], experimental_aggregate_gradients=False)


@old_interface
@pytest.mark.parametrize(
    "wrap", [LossScaleOptimizer, lambda opt: experimental.LossScaleOptimizer(opt, 64)], ids=["2.4", "2.1"]
)
def test_a_saved_model_continues(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    experimental.set_policy("mixed_float16")
    model = model_of()
    fitted(model, wrap(keras.optimizers.Adam(0.01)))
    model.save(tmp_path / "one.keras")
    again = keras.models.load_model(tmp_path / "one.keras")
    assert type(again.optimizer) is type(model.optimizer)
    assert again.optimizer.scaler.settings == model.optimizer.scaler.settings
    assert polyamp.save_loss_scale(again) == polyamp.save_loss_scale(model)
    assert (again.dtype_policy, again.dtype_policy.loss_scale) == (model.dtype_policy, model.dtype_policy.loss_scale)
    np.testing.assert_array_equal(again.train_on_batch(X, Y), model.train_on_batch(X, Y))


@old_interface
def test_the_config_of_tensorflow_2() -> None:
    inner = keras.saving.serialize_keras_object(keras.optimizers.SGD(0.5))
    dynamic = {"inner_optimizer": inner, "dynamic": True, "initial_scale": 4.0, "dynamic_growth_steps": 3}
    opt = LossScaleOptimizer.from_config(dynamic)
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == (True, 4.0, 3)
    fixed = {"inner_optimizer": inner, "dynamic": False, "initial_scale": 4.0, "dynamic_growth_steps": None}
    assert not LossScaleOptimizer.from_config(fixed).dynamic


# Names.


def test_names_are_put_in_place_and_taken_out() -> None:
    before = keras.mixed_precision.LossScaleOptimizer
    places = ["keras.mixed_precision"]
    if BACKEND == "tensorflow":
        places += ["tensorflow.keras.mixed_precision", "keras._tf_keras.keras.mixed_precision"]
    uninstall = install()
    for place in places:
        assert importlib.import_module(f"{place}.experimental") is experimental
        module = importlib.import_module(place)
        assert (module.experimental, module.LossScaleOptimizer) == (experimental, LossScaleOptimizer)
    uninstall()
    assert keras.mixed_precision.LossScaleOptimizer is before
    for place in places:
        assert not hasattr(sys.modules[place], "experimental")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{place}.experimental")


@on_tensorflow
def test_attributes_of_tensorflow() -> None:
    import tensorflow as tf

    uninstall = install()
    try:
        assert tf.keras.mixed_precision.experimental.set_policy is experimental.set_policy
        assert tf.keras.mixed_precision.LossScaleOptimizer is LossScaleOptimizer
    finally:
        uninstall()
    assert not hasattr(tf.keras.mixed_precision, "experimental")


@old_interface
def test_compile_gives_old_steps_their_methods() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    uninstall = install()
    model = model_of()
    model.compile("sgd", "mse")
    uninstall()
    assert type(model.optimizer) is LossScaleOptimizer
    model.compile("sgd", "mse")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer


@pytest.mark.parametrize(
    ("use", "line"),
    [
        (lambda: experimental.Policy("float32"), r"polyamp.convert\(model, name\)"),
        (lambda: experimental.set_policy(keras.DTypePolicy("float32")), r"polyamp.convert\(model, policy\)"),
        (lambda: experimental.LossScaleOptimizer(keras.optimizers.SGD(), 8), "polyamp.wrap_optimizer"),
        (lambda: LossScaleOptimizer(keras.optimizers.SGD()), "polyamp.wrap_optimizer"),
    ],
)
def test_each_warns_once_at_the_users_line_and_shows_what_to_write(use: Callable[[], Any], line: str) -> None:
    with pytest.warns(PolyampDeprecationWarning, match=f"Write instead: .*{line}") as caught:
        use()
    assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use()


def test_under_a_policy_of_the_command_line_they_are_refused() -> None:
    with running(Session(polyamp.policy("mixed_float16"))), warnings.catch_warnings():
        warnings.simplefilter("ignore", PolyampDeprecationWarning)
        for use in (
            lambda: experimental.set_policy("mixed_float16"),
            lambda: experimental.Policy("mixed_float16"),
            lambda: LossScaleOptimizer(keras.optimizers.SGD()),
        ):
            with pytest.raises(polyamp.UsageError, match="mixed precision of its own"):
                use()
    assert keras.config.dtype_policy().name == "float32"


@old_interface
def test_in_a_run_without_a_policy_health_is_reported() -> None:
    with running(Session()) as session:
        opt = LossScaleOptimizer(keras.optimizers.SGD())
        assert session.holders == [opt]
        assert [found.interface for found in session.interfaces] == ["tf.keras.mixed_precision.LossScaleOptimizer"]
