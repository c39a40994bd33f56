"""What TensorFlow removed of mixed precision: loss scales, their optimizer, and the places of their names."""

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
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp.backends.tensorflow.autocast.context import autocast_everywhere, is_everywhere
from polyamp.backends.tensorflow.compat import experimental
from polyamp.backends.tensorflow.compat.names import install
from polyamp.errors import PolyampDeprecationWarning
from polyamp.scripts.session import Session, running

v1 = tf.compat.v1
NATIVE = v1.mixed_precision  # TensorFlow's own classes
X = np.random.default_rng(0).standard_normal((8, 8)).astype("float32")

old_interface = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampWarning")


@pytest.fixture(autouse=True)
def _float32_after() -> Iterator[None]:
    yield
    autocast_everywhere(None)


# Loss scales.


@old_interface
@given(
    finite=st.lists(st.booleans(), max_size=30),
    initial=st.integers(0, 8),
    period=st.integers(1, 4),
    multiplier=st.sampled_from([2.0, 3.0, 4.0]),
)
def test_a_dynamic_scale_moves_as_tensorflows(finite: list[bool], initial: int, period: int, multiplier: float) -> None:
    def trace(kind: type[Any]) -> list[tuple[float, bool]]:
        scale = kind(2.0**initial, period, multiplier)
        found = []
        for is_finite in finite:
            _, should_apply = scale.update([tf.constant(1.0 if is_finite else float("nan")), None])
            found.append((float(scale()), bool(should_apply)))
        return found

    ours, theirs = trace(experimental.DynamicLossScale), trace(NATIVE.DynamicLossScale)
    assert [apply for _, apply in ours] == [apply for _, apply in theirs]
    np.testing.assert_allclose([one for one, _ in ours], [one for one, _ in theirs], rtol=1e-6)


@old_interface
def test_a_dynamic_scale_in_a_session() -> None:
    with tf.Graph().as_default():
        grad = v1.placeholder(tf.float32)
        scale = experimental.DynamicLossScale(initial_loss_scale=8.0, increment_period=1)
        update, should_apply = scale.update([grad])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            applied = [bool(session.run([update, should_apply], {grad: value})[1]) for value in (1.0, np.inf, np.inf)]
            assert session.run(scale()) == 4.0
    assert applied == [True, False, False]


@old_interface
def test_configs_are_those_of_tensorflow() -> None:
    for ours, theirs in (
        (experimental.DynamicLossScale(4.0, 5, 3.0), NATIVE.DynamicLossScale(4.0, 5, 3.0)),
        (experimental.FixedLossScale(12), NATIVE.FixedLossScale(12)),
    ):
        assert ours.get_config() == theirs.get_config()
        again = type(ours).from_config(theirs.get_config())
        assert (again.get_config(), float(again())) == (ours.get_config(), float(theirs()))
        assert isinstance(again, experimental.LossScale)


@old_interface
@pytest.mark.parametrize(
    "make",
    [
        lambda: experimental.FixedLossScale(0.5),
        lambda: experimental.FixedLossScale("8"),
        lambda: experimental.DynamicLossScale(-1.0),
        lambda: experimental.DynamicLossScale(increment_period=0),
        lambda: experimental.DynamicLossScale(multiplier=1.0),
        lambda: experimental.MixedPrecisionLossScaleOptimizer(sgd(), None),
        lambda: experimental.MixedPrecisionLossScaleOptimizer(3, "dynamic"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        make()


# The optimizer.


def sgd() -> Any:
    return v1.train.GradientDescentOptimizer(0.1)


def trained(wrap: Callable[[Any], Any], bad_steps: tuple[int, ...] = (3, 4)) -> tuple[list[float], list[float], Any]:
    """Train in float16 code with a few overflowing batches; return the losses, the scales, and the optimizer."""
    weight = tf.Variable(np.eye(8, dtype="float32"))
    opt = wrap(v1.train.MomentumOptimizer(0.1, 0.9))
    losses, scales = [], []
    for step in range(12):
        x = tf.cast(tf.constant(X) * (1e30 if step in bad_steps else 1.0), tf.float16)

        def loss(x: Any = x) -> tf.Tensor:
            return tf.reduce_mean(tf.square(tf.cast(x @ tf.cast(weight, tf.float16), tf.float32) - 1.0))

        losses.append(float(loss()))
        opt.minimize(loss, var_list=[weight])
        scales.append(float(opt._loss_scale() if hasattr(opt, "_loss_scale") else opt.loss_scale))
    return losses, scales, opt


@old_interface
def test_losses_and_scales_are_those_of_tensorflows_optimizer() -> None:
    settings = {"initial_loss_scale": 2.0**10, "increment_period": 3, "multiplier": 2.0}
    scale = experimental.DynamicLossScale(**settings)
    ours, scales, opt = trained(lambda inner: experimental.MixedPrecisionLossScaleOptimizer(inner, scale))
    native = NATIVE.DynamicLossScale(**settings)
    theirs, their_scales, _ = trained(lambda inner: NATIVE.MixedPrecisionLossScaleOptimizer(inner, native))
    np.testing.assert_array_equal(ours, theirs)
    assert scales == their_scales
    assert len(set(scales)) > 2
    assert float(scale()) == opt.loss_scale == scales[-1]  # the object that was passed reads this optimizer's scale


@old_interface
def test_a_checkpoint_continues(tmp_path: Path) -> None:
    _, scales, opt = trained(lambda inner: experimental.MixedPrecisionLossScaleOptimizer(inner, "dynamic"))
    path = tf.train.Checkpoint(opt=opt).save(tmp_path / "one")
    again = experimental.MixedPrecisionLossScaleOptimizer(v1.train.MomentumOptimizer(0.1, 0.9), "dynamic")
    tf.train.Checkpoint(opt=again).restore(path)
    assert polyamp.save_loss_scale(again) == polyamp.save_loss_scale(opt)
    assert again.loss_scale == scales[-1] != 2.0**15


# Names.

PUBLIC = (
    "tf.train.experimental.enable_mixed_precision_graph_rewrite",
    "tf.train.experimental.disable_mixed_precision_graph_rewrite",
    "tf.train.experimental.MixedPrecisionLossScaleOptimizer",
    "tf.train.experimental.FixedLossScale",
    "tf.mixed_precision.experimental.LossScale",
    "tf.mixed_precision.experimental.DynamicLossScale",
    "v1.train.experimental.enable_mixed_precision_graph_rewrite",
    "v1.mixed_precision.enable_mixed_precision_graph_rewrite",
    "v1.mixed_precision.experimental.FixedLossScale",
)


def known() -> dict[str, Any]:
    """Return what each public name is now; None if it is missing."""
    found = {}
    for name in PUBLIC:
        root, *path = name.split(".")
        value = {"tf": tf, "v1": v1}[root]
        for part in path:
            value = getattr(value, part, None)
        found[name] = value
    return found


def test_names_are_put_in_place_and_taken_out() -> None:
    before, modules = known(), {name for name in sys.modules if "mixed_precision" in name}
    uninstall = install()
    for name, value in known().items():
        assert value is getattr(experimental, name.rpartition(".")[2]), name
    uninstall()
    assert known() == before
    left = {name for name in sys.modules if "mixed_precision" in name} - modules
    assert not [name for name in left if name.startswith("tensorflow.mixed_precision")]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tensorflow.mixed_precision")


def test_names_can_be_imported() -> None:
    uninstall = install()
    try:
        for place in ("tensorflow.train", "tensorflow.compat.v1.train", "tensorflow.mixed_precision"):
            module = importlib.import_module(f"{place}.experimental")
            assert module.FixedLossScale is experimental.FixedLossScale
    finally:
        uninstall()


@pytest.mark.parametrize(
    ("use", "line"),
    [
        (lambda: experimental.enable_mixed_precision_graph_rewrite(sgd()), "polyamp.wrap_optimizer"),
        (lambda: experimental.DynamicLossScale(), r"polyamp.LossScale\(init=32768.0"),
        (lambda: experimental.FixedLossScale(8), r"polyamp.LossScale.fixed\(8\)"),
        (lambda: experimental.MixedPrecisionLossScaleOptimizer(sgd(), 8), "polyamp.wrap_optimizer"),
    ],
)
def test_each_warns_once_at_the_users_line_and_shows_what_to_write(use: Callable[[], Any], line: str) -> None:
    with pytest.warns(PolyampDeprecationWarning, match=f"Write instead: .*{line}") as caught:
        use()
    assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use()


# The snippets of users, verbatim but for their data.


@old_interface
def test_the_snippet_with_a_session() -> None:
    def losses(is_mixed: bool) -> list[float]:
        with tf.Graph().as_default():
            tf1 = v1
            x = tf1.placeholder(tf.float32, (8, 8))
            hidden = tf.nn.relu(x @ tf1.get_variable("a", initializer=np.eye(8, dtype="float32") / 3))
            loss = tf1.reduce_mean(tf1.square(hidden @ tf1.get_variable("b", initializer=X) - x))
            opt = tf1.train.AdamOptimizer(0.01)
            if is_mixed:
                opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)
            train_op = opt.minimize(loss)
            with tf1.Session() as session:
                session.run(tf1.global_variables_initializer())
                return [float(session.run([loss, train_op], {x: X})[0]) for _ in range(12)]

    full = losses(False)
    uninstall = install()
    try:
        half = losses(True)
    finally:
        uninstall()
    assert half != full
    assert half[-1] < 0.8 * half[0]
    np.testing.assert_allclose(half, full, rtol=2e-3)


@old_interface
def test_the_snippet_with_keras() -> None:
    def losses(is_mixed: bool) -> list[float]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(8)])
        opt = tf.keras.optimizers.Adam(0.01)
        if is_mixed:
            opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)
        model.compile(loss="mse", optimizer=opt)
        return model.fit(X, X, epochs=6, verbose=0).history["loss"]

    full = losses(False)
    uninstall = install()
    try:
        half = losses(True)
    finally:
        uninstall()
    assert half != full
    np.testing.assert_allclose(half, full, rtol=2e-3)


def test_under_a_policy_of_the_command_line_they_are_refused_before_anything_changes() -> None:
    with running(Session(polyamp.policy("mixed_float16"))), warnings.catch_warnings():
        warnings.simplefilter("ignore", PolyampDeprecationWarning)
        for use in (
            lambda: experimental.enable_mixed_precision_graph_rewrite(sgd()),
            lambda: experimental.MixedPrecisionLossScaleOptimizer(sgd(), 8),
        ):
            with pytest.raises(polyamp.UsageError, match="mixed precision of its own"):
                use()
    assert not is_everywhere()


@old_interface
def test_in_a_run_without_a_policy_health_is_reported() -> None:
    with running(Session()) as session:
        opt = experimental.enable_mixed_precision_graph_rewrite(sgd(), 16)
        with tf.Graph().as_default():
            experimental.MixedPrecisionLossScaleOptimizer(sgd(), 16)
        assert session.holders == [opt]
        assert [found.interface for found in session.interfaces] == [
            "tf.train.experimental.enable_mixed_precision_graph_rewrite",
            "tf.train.experimental.MixedPrecisionLossScaleOptimizer",
        ]
        assert "graph of a Session" in session.notes[0]
