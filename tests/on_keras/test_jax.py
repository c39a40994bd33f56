"""The wrapped Keras optimizer on JAX only: stateless steps, inside ``jit``."""

import keras
import numpy as np
import pytest
from keras import ops

from polyamp import LossScale
from polyamp.backends.keras import LossScaledOptimizer

if keras.backend.backend() != "jax":
    pytest.skip("for Keras on JAX: --keras-backend=jax", allow_module_level=True)

import jax

pytestmark = pytest.mark.backends


def compiled(opt: LossScaledOptimizer):
    """Return a step in ``jit``, from values to values, and the list of its traces."""
    traces = []

    @jax.jit
    def step(state, grads, params):
        traces.append(1)
        return opt.stateless_apply(state, grads, params)

    return step, traces


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("make", [lambda: keras.optimizers.SGD(0.5, momentum=0.9), lambda: keras.optimizers.Adam(0.5)])
def test_a_skipped_step_in_jit_changes_only_the_loss_scale(make, dtype: str) -> None:
    weight, opt = keras.Variable([1.0, 2.0], dtype=dtype), LossScaledOptimizer(make(), LossScale(init=8.0))
    opt.build([weight])
    step, traces = compiled(opt)
    state, params = [variable.value for variable in opt.variables], [weight.value]
    params, state = step(state, [ops.array([1.0, 2.0], dtype)], params)
    after, kept = step(state, [ops.array([np.inf, 2.0], dtype)], params)
    changed = [v.name for v, old, new in zip(opt.variables, state, kept, strict=True) if not np.array_equal(old, new)]
    assert changed == ["dynamic_scale", "step_counter", "counters", "overflow_scale"]
    assert np.array_equal(after[0], params[0])
    assert not np.array_equal(params[0], weight.value)
    assert len(traces) == 1
    assert [value.dtype for value in kept] == [variable.value.dtype for variable in opt.variables]


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"use_ema": True}, {"clipnorm": 0.1}])
def test_stateless_and_stateful_steps_agree(options) -> None:
    grads = [[ops.array([3.0, np.inf if step == 2 else 1.0])] for step in range(5)]
    stateful, stateless = (keras.Variable([1.0, 2.0]) for _ in range(2))
    config = LossScale(init=2.0, interval=2)
    opts = [LossScaledOptimizer(keras.optimizers.SGD(0.5, **options), config) for _ in range(2)]
    for opt, weight in zip(opts, (stateful, stateless), strict=True):
        opt.build([weight])
    state, params = [variable.value for variable in opts[1].variables], [stateless.value]
    for grad in grads:
        opts[0].apply(grad)
        params, state = opts[1].stateless_apply(state, grad, params)
    assert np.array_equal(params[0], stateful.value)
    assert all(np.array_equal(value, v.value) for value, v in zip(state, opts[0].variables, strict=True))
    assert np.array_equal(stateless.value, [1.0, 2.0])


def test_a_traced_loss_is_scaled_and_not_looked_at() -> None:
    opt = LossScaledOptimizer(keras.optimizers.SGD(), LossScale(init=8.0))
    assert float(jax.jit(opt.scale_loss)(np.float32(2.0))) == 16.0
    assert float(jax.jit(opt.scale_loss)(np.float32(np.inf))) == np.inf
