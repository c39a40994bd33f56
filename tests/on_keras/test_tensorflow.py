"""The wrapped Keras optimizer on TensorFlow only: graphs, XLA, sparse rows, checkpoints, replicas."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import polyamp
from polyamp import LossScale
from polyamp.backends.keras import LossScaledOptimizer

if keras.backend.backend() != "tensorflow":
    pytest.skip("for Keras on TensorFlow: --keras-backend=tensorflow", allow_module_level=True)

import tensorflow as tf

from polyamp.backends.tensorflow import LossScaler

# Steps are what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*trains in float32:polyamp.PolyampWarning")


def train_step(opt: LossScaledOptimizer, weight: keras.Variable, jit_compile: bool = False) -> Any:
    @tf.function(jit_compile=jit_compile)
    def step(factor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * factor)
            scaled = opt.scale_loss(loss)
        opt.apply_gradients([(tape.gradient(scaled, weight.value), weight)])
        return loss

    return step


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("make", [lambda: keras.optimizers.SGD(0.5, momentum=0.9), lambda: keras.optimizers.Adam(0.5)])
def test_a_compiled_step_skips_without_a_trace(make: Any, jit_compile: bool) -> None:
    weight, opt = keras.Variable([1.0, 2.0]), LossScaledOptimizer(make(), LossScale(init=8.0), max_grad_norm=1.0)
    opt.build([weight])
    step = train_step(opt, weight, jit_compile)
    step(tf.constant(3.0))
    before = [variable.numpy().tobytes() for variable in (weight, *opt.inner_optimizer.variables)]
    with nullcontext() if jit_compile else pytest.warns(polyamp.PolyampWarning, match="the loss was not finite"):
        step(tf.constant(np.inf))
    assert [variable.numpy().tobytes() for variable in (weight, *opt.inner_optimizer.variables)] == before
    assert (opt.last_step.applied, opt.loss_scale) == (False, 4.0)
    step(tf.constant(3.0))
    assert (opt.last_step.applied, int(opt.iterations)) == (True, 2)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_says_once_that_the_loss_is_not_finite_and_the_rest_when_somebody_looks(jit_compile: bool) -> None:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    opt = polyamp.wrap_optimizer(keras.optimizers.SGD(), "mixed_float16", loss_scale=LossScale(max_skips=3))
    model.compile(opt, "mse", jit_compile=jit_compile)
    with pytest.warns(polyamp.PolyampWarning, match="the loss was not finite") as shown:
        model.fit(np.full((12, 2), np.inf, "float32"), np.zeros((12, 1)), batch_size=4, verbose=0)
    assert ["not finite" in str(one.message) for one in shown].count(True) == 1
    with pytest.raises(polyamp.errors.LossScaleError, match="3 steps in a row"):
        _ = opt.last_step
    assert opt.loss_scale == 2.0**13


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_sparse_rows_are_unscaled_tested_and_clipped(mode: str) -> None:
    table = keras.Variable(np.ones((5, 2), "float32"))
    opt = LossScaledOptimizer(keras.optimizers.SGD(1.0), LossScale(init=8.0), max_grad_norm=1.0)
    opt.build([table])

    def step(values: tf.Tensor) -> None:
        opt.apply([tf.IndexedSlices(values, tf.constant([1, 3]), tf.constant([5, 2]))])

    run = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla", autograph=False)
    run(tf.constant([[np.nan, 0.0], [0.0, 0.0]]))
    assert np.array_equal(table.numpy(), np.ones((5, 2)))
    run(tf.constant([[12.0, 0.0], [0.0, 16.0]]))  # of the loss times 4: a norm of 5
    np.testing.assert_allclose(table.numpy()[[1, 3]], [[0.4, 1.0], [1.0, 0.2]], rtol=1e-6)
    assert np.array_equal(table.numpy()[[0, 2, 4]], np.ones((3, 2)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_checkpoint_keeps_every_field_slot_and_master(dtype: str, tmp_path: Path) -> None:
    def start() -> tuple[keras.Variable, LossScaledOptimizer, tf.train.Checkpoint]:
        weight = keras.Variable([1.0, 2.0], dtype=dtype)
        opt = LossScaledOptimizer(keras.optimizers.Adam(0.01), LossScale(init=8.0, interval=2, hysteresis=2))
        opt.build([weight])
        return weight, opt, tf.train.Checkpoint(weight=weight, opt=opt)

    weight, opt, checkpoint = start()
    for value in (1.0, np.inf, 1.0, 1.0, np.inf):
        opt.apply_gradients([(tf.constant([value, 1.0], dtype), weight)])
    path = checkpoint.save(tmp_path / "saved")
    again, restored, other = start()
    other.restore(path).assert_consumed()
    assert polyamp.save_loss_scale(restored) == polyamp.save_loss_scale(opt)
    pairs = zip((again, *restored.variables), (weight, *opt.variables), strict=True)
    assert all(one.numpy().tobytes() == two.numpy().tobytes() for one, two in pairs)


def test_the_update_is_marked_in_a_graph_and_variables_keep_their_names() -> None:
    weight, opts = keras.Variable([1.0, 2.0], name="weight"), []
    for _ in range(2):
        opts.append(LossScaledOptimizer(keras.optimizers.Adam(0.5, name="adam"), 8.0, name="ours", max_grad_norm=1.0))
    opts[0].apply([tf.ones(2)], [weight])  # eager, and so without a mark
    graph = train_step(opts[1], weight).get_concrete_function(tf.TensorSpec(())).graph
    nodes = [node.name for node in graph.as_graph_def().node]
    decisions = [name for name in nodes if name.endswith("polyamp_finite")]
    assert decisions == ["polyamp_update/polyamp_finite"]
    unmarked = [name for name in nodes if not name.startswith("polyamp_update/")]
    assert not [name for name in unmarked if any(word in name for word in ("IsFinite", "truediv", "Assign", "cond"))]
    assert "mul_1" in unmarked  # it scales the loss, and is not part of the update
    assert not [variable for variable in opts[1].variables if "polyamp" in variable.value.name]
    assert {variable.path for variable in opts[1].variables} == {variable.path for variable in opts[0].variables}


def test_float16_layers_and_an_optimizer_that_was_wrapped_without_a_policy_are_reported() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    polyamp.convert(model, "mixed_float16")
    model.compile(polyamp.wrap_optimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with pytest.warns(polyamp.PolyampWarning, match="wrapped without a policy"):
        model.train_on_batch(np.ones((4, 4), "float32"), np.ones((4, 2), "float32"))


class OwnStep(keras.Model):
    """A model as in Keras' guides, which is compiled without a loss."""

    scales = True

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.mean_squared_error(y, self(x, training=True)))
            scaled = self.optimizer.scale_loss(loss) if self.scales else loss
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def own_step(scales: bool, hot: float = 1.0) -> tuple[OwnStep, Any, Any]:
    inputs = keras.Input((6,))
    hidden = layers.Dense(16, "relu", name="hot")
    model = OwnStep(inputs, layers.Dense(2, name="head")(hidden(inputs)))
    model.scales = scales
    hidden.kernel.assign(hidden.kernel * hot)
    polyamp.convert(model, "mixed_float16")
    opt = polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), "mixed_float16", loss_scale=LossScale(init=2.0**8))
    model.compile(opt)
    return model, np.ones((4, 6), "float32"), np.ones((4, 2), "float32")


def test_tools_follow_a_models_own_step() -> None:
    model, x, y = own_step(True)
    assert not polyamp.lint(model, x, y).errors
    assert {one.format for one in polyamp.explain(model, x, y).operations if one.name == "matmul"} > {"float16"}
    assert 2.0**8 in polyamp.probe(model, x, y).window  # type: ignore[operator]
    assert polyamp.diagnose(model, x, y).kind == "finite"
    verdict = polyamp.diagnose(*own_step(True, hot=1e6))
    assert (verdict.kind, verdict.is_cured, ["hot" in rule for rule in verdict.rules]) == ("forward", True, [True])


@pytest.mark.parametrize("how", ["fit", "eager", "function"])
def test_a_loss_that_nobody_scaled_is_found_and_said_once_also_where_the_scale_is_read(how: str) -> None:
    model, x, y = own_step(False)
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: print(model.optimizer.loss_scale))
    one_step = tf.function(model.train_step) if how == "function" else model.train_step

    def read_and_step() -> None:
        assert model.optimizer.loss_scale == float(model.optimizer.dynamic_scale)
        if how == "fit":
            model.fit(x, y, verbose=0, callbacks=[look])
        else:
            one_step((tf.constant(x), tf.constant(y)))

    with pytest.warns(polyamp.PolyampWarning, match="no loss was scaled") as shown:
        read_and_step()
    read_and_step()
    assert len(shown) == 1


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "function"])
@pytest.mark.filterwarnings("error:no loss was scaled")
def test_a_loss_that_is_multiplied_by_the_scale_is_scaled(wrap: Any) -> None:
    weight, opt = keras.Variable([1.0]), polyamp.wrap_optimizer(keras.optimizers.SGD(0.125), "mixed_float16")
    other, scaler = tf.Variable([1.0]), LossScaler("mixed_float16")

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight.value) * opt.dynamic_scale + tf.reduce_sum(other) * scaler.state.scale
        grads = tape.gradient(loss, [weight.value, other])
        opt.apply(grads[:1], [weight])
        scaler.step(tf.compat.v1.train.GradientDescentOptimizer(0.125), [(grads[1], other)])

    wrap(step)()
    assert [weight.numpy()[0], other.numpy()[0]] == [0.875, 0.875]


def grown(weight: Any) -> LossScaledOptimizer:
    opt = LossScaledOptimizer(keras.optimizers.SGD(0.125), LossScale(init=8.0, interval=1))
    opt.build([weight])
    return opt


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "function"])
def test_gradients_of_two_losses_are_right_though_the_scale_grows_in_between(wrap: Any) -> None:
    weight = keras.Variable([1.0, -1.0])
    opt = grown(weight)

    def step() -> None:
        with tf.GradientTape(persistent=True) as tape:
            losses = [opt.scale_loss(tf.reduce_sum(weight.value)) for _ in range(2)]
        for grad in [tape.gradient(loss, weight.value) for loss in losses]:
            opt.apply([grad], [weight])

    run = wrap(step)
    for turn in (1, 2):
        run()
        assert weight.numpy().tolist() == [1 - turn / 4, -1 - turn / 4]


def test_gradients_of_a_loss_that_another_optimizer_scaled_are_refused() -> None:
    weights = [keras.Variable([1.0]), keras.Variable([1.0])]
    first, second = map(grown, weights)

    def step(opt: LossScaledOptimizer, *others: LossScaledOptimizer) -> None:
        with tf.GradientTape(persistent=True) as tape:
            loss = opt.scale_loss(tf.reduce_sum(weights[0].value) + tf.reduce_sum(weights[1].value))
        for one in (opt, *others):
            weight = weights[(first, second).index(one)]
            one.apply([tape.gradient(loss, weight.value)], [weight])

    step(first)
    with pytest.raises(polyamp.errors.UsageError, match="scaled by another optimizer"):
        step(first, second)
    step(second)
    assert [one.numpy().tolist() for one in weights] == [[0.75], [0.875]]
