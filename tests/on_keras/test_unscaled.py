"""``get_scaled_loss`` and ``get_unscaled_gradients``, known from Keras 2 guides: nothing is divided twice."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import polyamp
from polyamp import LossScale
from polyamp.backends.keras import LossScaledOptimizer
from support.harness_keras import to_numpy

pytestmark = pytest.mark.backends

Change = Callable[[Any], Any]
CHANGES: dict[str, Change] = {
    "as it is": lambda grad: grad,
    "clipped": lambda grad: ops.clip(grad, -100.0, 100.0),
    "times one": lambda grad: grad * 1.0,
}


def optimizer(**options: Any) -> tuple[keras.Variable, LossScaledOptimizer]:
    weight, opt = keras.Variable([0.0]), LossScaledOptimizer(keras.optimizers.SGD(1.0), LossScale(init=8.0), **options)
    opt.build([weight])
    return weight, opt


def apply_compiled(opt: LossScaledOptimizer, weight: keras.Variable, grad: Any, how: Callable[[Any], Any]) -> None:
    """Run one step in a compiled function; ``how`` returns the gradients to apply from the scaled ones."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        step = tf.function(lambda grad: opt.apply_gradients([(how(grad), weight)]), autograph=False)
        step(grad)
    elif keras.backend.backend() == "jax":
        import jax

        @jax.jit
        def stateless(state: Any, params: Any, grad: Any) -> Any:
            with keras.StatelessScope(state_mapping=zip(opt.variables, state, strict=True)):
                chosen = how(grad)
            return opt.stateless_apply(state, [chosen], params)

        (new,), state = stateless([v.value for v in opt.variables], [weight.value], grad)
        for variable, value in zip([weight, *opt.variables], [new, *state], strict=True):
            variable.assign(value)
    else:
        opt.apply_gradients([(how(grad), weight)])  # torch compiles nothing here


def apply_eagerly(opt: LossScaledOptimizer, weight: keras.Variable, grad: Any, how: Callable[[Any], Any]) -> None:
    opt.apply_gradients([(how(grad), weight)])


APPLY = pytest.mark.parametrize("apply", [apply_eagerly, apply_compiled])


def test_the_loss_is_scaled_also_where_it_is_a_function() -> None:
    _, opt = optimizer()
    assert float(opt.get_scaled_loss(ops.array(2.0))) == 16.0
    assert float(opt.get_scaled_loss(lambda: ops.array(2.0))()) == 16.0


@APPLY
@pytest.mark.parametrize("change", CHANGES)
def test_what_it_gave_is_not_divided_again(apply: Any, change: str) -> None:
    weight, opt = optimizer()
    for step in (1, 2, 3):
        apply(opt, weight, ops.array([16.0]), lambda grad: CHANGES[change](opt.get_unscaled_gradients([grad])[0]))
        assert to_numpy(weight).tolist() == [-2.0 * step]
    apply(opt, weight, ops.array([16.0]), lambda grad: grad)  # the old way and the plain one, side by side
    assert to_numpy(weight).tolist() == [-8.0]


@APPLY
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_overflow_skips_the_step_also_where_clipping_hides_it(apply: Any, change: str, value: float) -> None:
    weight, opt = optimizer()
    apply(opt, weight, ops.array([value]), lambda grad: CHANGES[change](opt.get_unscaled_gradients([grad])[0]))
    assert (to_numpy(weight).tolist(), opt.last_step.applied, opt.loss_scale) == ([0.0], False, 4.0)
    apply(opt, weight, ops.array([8.0]), lambda grad: CHANGES[change](opt.get_unscaled_gradients([grad])[0]))
    assert to_numpy(weight).tolist() == [-2.0]


@APPLY
def test_a_look_at_gradients_leaves_the_scaled_ones_scaled(apply: Any) -> None:
    weight, opt = optimizer()

    def look(grad: Any) -> Any:
        opt.get_unscaled_gradients([grad])
        return grad

    for _ in range(2):
        apply(opt, weight, ops.array([16.0]), look)
    assert to_numpy(weight).tolist() == [-4.0]


def test_of_several_calls_each_is_claimed_by_its_own_results() -> None:
    parts = [keras.Variable([0.0, 0.0]) for _ in range(3)]
    opt = LossScaledOptimizer(keras.optimizers.SGD(1.0), 8.0)
    opt.build(parts)
    scaled = [ops.array([8.0, value]) for value in (8.0, np.inf, 16.0)]
    plain = [opt.get_unscaled_gradients([grad])[0] for grad in scaled]
    for index in (1, 2, 0):
        opt.apply([plain[index]], [parts[index]])
    assert [to_numpy(part).tolist() for part in parts] == [[-1.0, -1.0], [0.0, 0.0], [-1.0, -2.0]]


def test_scaled_gradients_beside_unscaled_ones_are_refused() -> None:
    parts = [keras.Variable([0.0]), keras.Variable([0.0])]
    opt = LossScaledOptimizer(keras.optimizers.SGD(1.0), 8.0)
    scaled = [ops.array([8.0]), ops.array([8.0])]
    plain = opt.get_unscaled_gradients(scaled)
    with pytest.raises(polyamp.errors.UsageError, match="some of the gradients are scaled"):
        opt.apply([plain[0], scaled[1]], parts)
    assert [to_numpy(part).tolist() for part in parts] == [[0.0], [0.0]]


BAD: list[Any] = [3, None, [[1.0]], [{}], [2.0], ops.ones((1,)), [ops.ones((1,), "int32")]]


@pytest.mark.parametrize("grads", BAD, ids=range(len(BAD)))
def test_what_are_no_gradients_is_refused(grads: Any) -> None:
    weight, opt = optimizer()
    for use in (opt.get_unscaled_gradients, opt.apply, opt.apply_gradients):
        with pytest.raises(polyamp.errors.InvalidTypeError, match="a list of gradients"):
            use(grads)
    with pytest.raises(polyamp.errors.InvalidValueError, match="one gradient for each variable"):
        opt.apply([ops.ones((1,))] * 2)
    assert (to_numpy(weight).tolist(), opt.loss_scale) == ([0.0], 8.0)


def test_values_of_float8_layers_are_refused() -> None:
    weight, opt = optimizer()
    weight.overwrite_with_gradient = True
    with pytest.raises(polyamp.errors.UnsupportedError, match="float8"):
        opt.apply(opt.get_unscaled_gradients([ops.array([8.0])]))


def test_results_are_float32_and_none_stays() -> None:
    opt = LossScaledOptimizer(keras.optimizers.SGD(), LossScale.fixed(2.0**16))
    none, grad = opt.get_unscaled_gradients([None, ops.array([2.0**-14], "float16")])
    assert (none, to_numpy(grad).tolist()) == (None, [2.0**-30])


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="one place: nothing is compiled")
def test_gradients_that_were_unscaled_in_another_place_are_refused_once() -> None:
    weight, opt = optimizer()
    grad = opt.get_unscaled_gradients([ops.array([8.0])])[0]
    with pytest.raises(polyamp.errors.UsageError, match="called elsewhere"):
        apply_compiled(opt, weight, grad, lambda grad: grad)
    apply_compiled(opt, weight, ops.array([8.0]), lambda grad: grad)
    assert to_numpy(weight).tolist() == [-1.0]


# Losses that nobody scaled, in eager code.


def trained_by_fit() -> tuple[keras.Variable, LossScaledOptimizer]:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(LossScaledOptimizer(keras.optimizers.SGD(1.0), LossScale(init=8.0, interval=1)), "mse")
    model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=2, verbose=0)
    return model.trainable_variables[0], model.optimizer


def unscaled_step(opt: LossScaledOptimizer, weight: keras.Variable) -> None:
    opt.apply([ops.ones(weight.shape)], [weight])


def scaled_step(opt: LossScaledOptimizer, weight: keras.Variable) -> None:
    opt.apply([ops.ones(weight.shape) * opt.scale_loss(ops.ones(()))], [weight])


@pytest.fixture
def _told_again() -> None:
    polyamp.errors.forget_warnings()


@pytest.mark.usefixtures("_told_again")
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("begin", [optimizer, trained_by_fit])
def test_a_loss_that_nobody_scaled_is_told_whatever_was_scaled_before(begin: Any, steps: int) -> None:
    weight, opt = begin()
    for _ in range(steps):
        scaled_step(opt, weight)
    with pytest.warns(polyamp.PolyampWarning, match="no loss was scaled"):
        unscaled_step(opt, weight)


@pytest.mark.usefixtures("_told_again")
def test_one_loss_serves_several_groups_and_several_losses_wait() -> None:
    parts = [keras.Variable([0.0]), keras.Variable([0.0])]
    opt = LossScaledOptimizer(keras.optimizers.SGD(1.0), LossScale(init=8.0))
    opt.build(parts)
    for _ in range(3):
        grads = [ops.ones((1,)) * opt.scale_loss(ops.ones(())) for _ in parts]
        for grad in grads:
            for part in parts:
                opt.apply([grad], [part])
    assert [to_numpy(part).tolist() for part in parts] == [[-6.0], [-6.0]]


@pytest.mark.usefixtures("_told_again")
def test_an_optimizer_whose_scale_was_read_by_hand_may_have_scaled_any_loss() -> None:
    weight, opt = optimizer()
    scaled_step(opt, weight)
    opt.scaler.note_by_hand()
    unscaled_step(opt, weight)
