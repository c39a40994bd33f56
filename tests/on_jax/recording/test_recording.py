"""The recordings of one step by the JAX adapter."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import polyamp
from polyamp.backends.jax import adapter, apply_gradients
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Observation, Recording
from polyamp.diagnosis.spread import stride
from support.diagnosis_cases import count_values
from support.jax_scenarios import normal
from support.jax_scenarios import quickly_compiled as quickly_compiled

FLOAT16 = polyamp.policy("mixed_float16")
PARAMS = {"out": normal(1, 8, 4, scale=0.3), "hidden": {"w": normal(0, 6, 8, scale=0.3), "b": jnp.zeros(8)}}
X = normal(2, 5, 6)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    with jax.named_scope("out"):
        return -jax.nn.log_softmax(h @ params["out"]).mean()


def record(step: Callable[..., Any], *args: Any, policy: Any = FLOAT16, **options: Any) -> Recording:
    return adapter.record(step, args, {}, policy, **{"widened": True, **options})


def found(recording: Recording, place: str, kind: str = ACTIVATION) -> list[Observation]:
    return [one for one in recording.observations if (one.place, one.kind) == (place, kind)]


def only(recording: Recording, place: str, kind: str = ACTIVATION) -> Observation:
    (one,) = found(recording, place, kind)
    return one


def places(recording: Recording, *kinds: str) -> list[str]:
    return [one.place for one in recording.observations if not kinds or one.kind in kinds]


def assert_spread(one: Observation, values: Any) -> None:
    """Assert that a spread equals one counted on the host, up to the last bits of values computed in another order."""
    own, wanted = one.spread, count_values(np.asarray(values, np.float32).reshape(-1).tolist())
    assert (own.elements, own.seen, own.zeros, own.inf, own.nan) == (
        wanted.elements,
        wanted.elements,
        wanted.zeros,
        wanted.inf,
        wanted.nan,
    )
    assert own.largest == pytest.approx(wanted.largest, rel=1e-5)
    assert sum(map(abs, np.subtract(own.counts, wanted.counts))) <= 0.02 * wanted.elements
    assert math.fsum(own.mass) == pytest.approx(math.fsum(wanted.mass), rel=1e-4)


def wrapped_step(policy: Any = FLOAT16, **options: Any) -> tuple[Any, Any]:
    tx = polyamp.wrap_optimizer(optax.adam(1e-3), policy, **options)

    @jax.jit
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = polyamp.value_and_grad(loss_fn, policy)(opt_state, params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, tx.init(PARAMS)


def plain_step(loss: Any = loss_fn, tx: Any = None) -> tuple[Any, Any]:
    tx = optax.adam(1e-3) if tx is None else tx

    @jax.jit
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": value}

    return step, tx.init(PARAMS)


def test_a_loss_is_differentiated_and_each_tensor_is_counted() -> None:
    recording = record(loss_fn, PARAMS, X)
    product, grads = X @ PARAMS["hidden"]["w"], jax.grad(loss_fn)(PARAMS, X)
    assert (recording.framework, recording.policy, recording.scale) == ("jax", "mixed_float16", 1)
    assert recording.loss == pytest.approx(float(loss_fn(PARAMS, X)), rel=1e-6)
    assert not recording.differentiates
    assert_spread(only(recording, "hidden/matmul"), product)
    assert_spread(only(recording, "hidden/tanh"), jnp.tanh(product))
    assert places(recording, PARAMETER) == ["hidden/b", "hidden/w", "out"]
    gradients = list(recording.of_kind(PARAMETER))
    for one, grad in zip(gradients, jax.tree.leaves(grads), strict=True):
        assert_spread(one, grad)  # of float32, to its last bits
    assert [(one.op_class, one.format, one.where) for one in gradients] == [
        ("full", "float32", ""),
        ("lower", "float16", ""),
        ("lower", "float16", ""),
    ]


def test_the_order_is_that_of_computation_and_a_parameters_gradient_stands_once_and_last() -> None:
    recording = record(loss_fn, PARAMS, X)
    kinds = [one.kind for one in recording.observations]
    assert kinds == sorted(kinds, key=[ACTIVATION, GRADIENT, PARAMETER].index)
    assert places(recording, ACTIVATION)[:3] == ["hidden/matmul", "hidden/add", "hidden/tanh"]
    assert places(recording, GRADIENT).count("out/matmul") == 1  # the other one is the gradient of "out"
    assert "hidden/matmul" not in places(recording, GRADIENT)


def test_formats_are_the_policys_and_classes_its_rules() -> None:
    policy = polyamp.policy("mixed_bfloat16", rules={"hidden/matmul": "full"})
    recording = record(loss_fn, PARAMS, X, policy=policy)
    hidden, out = only(recording, "hidden/matmul"), only(recording, "out/matmul")
    assert (hidden.op_class, hidden.format) == ("full", "float32")
    assert (out.op_class, out.format, out.shape) == ("lower", "bfloat16", (5, 4))
    assert only(recording, "out/log_softmax/exp").op_class == "full"


def test_a_step_with_a_wrapped_optimizer_is_recorded_up_to_its_update() -> None:
    step, opt_state = wrapped_step()
    recording = record(step, PARAMS, opt_state, X)
    own = record(loss_fn, PARAMS, X)
    assert (recording.differentiates, recording.scale) == (True, 65536.0)
    assert recording.loss == pytest.approx(own.loss)
    assert [one.place for one in recording.observations] == [one.place for one in own.observations]
    for one, two in zip(recording.unscaled().observations, own.observations, strict=True):
        assert one[:-1] == two[:-1]
        assert one.spread.largest == pytest.approx(two.spread.largest, rel=1e-5)


def test_a_scale_that_is_given_takes_the_place_of_the_optimizers() -> None:
    step, opt_state = wrapped_step()
    recording = record(step, PARAMS, opt_state, X, scale=2.0**30, widened=False)
    assert recording.scale == 2.0**30
    assert any(one.spread.inf for one in recording.of_kind(PARAMETER))
    assert float(opt_state.loss_scale) == 65536


@pytest.mark.parametrize("tx", [optax.adam(1e-3), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))])
def test_a_step_with_a_plain_optimizer_has_its_gradients_matched_by_shape(tx: Any) -> None:
    step, opt_state = plain_step(polyamp.autocast(loss_fn, FLOAT16), tx)
    recording = record(step, PARAMS, opt_state, X)
    assert recording.differentiates
    assert recording.loss == pytest.approx(float(loss_fn(PARAMS, X)), rel=1e-3)  # in {"loss": ...}
    assert sorted(places(recording, PARAMETER)) == ["hidden/b", "hidden/w", "out"]
    assert [one.place for one in recording.of_kind(ACTIVATION, GRADIENT)] == [
        one.place for one in record(loss_fn, PARAMS, X).of_kind(ACTIVATION, GRADIENT) if one.shape or one.name != "mul"
    ]


def test_gradients_that_match_no_parameter_are_numbered() -> None:
    def step(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: (x @ (p["a"] + p["b"])).sum())(params)
        return jax.tree.map(lambda p, g: p - g, params, {"a": grads["b"], "b": grads["b"]})

    params = {"a": jnp.ones((6, 3)), "b": jnp.ones((6, 3))}
    assert places(record(step, params, X), PARAMETER) == ["a"]  # the first that has this shape

    def transposed(params: Any, x: jax.Array) -> Any:
        return jax.grad(lambda w: (x @ w.T).sum())(params["w"].T)

    assert places(record(transposed, {"w": normal(0, 6, 3)}, X), PARAMETER) == ["gradient 0"]


def test_microbatches_and_two_wrapped_losses_are_recorded() -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), FLOAT16)

    @jax.jit
    def step(params: Any, opt_state: Any, xs: jax.Array) -> Any:
        def add(total: Any, x: jax.Array) -> Any:
            loss, grads = polyamp.value_and_grad(loss_fn, FLOAT16)(opt_state, params, x)
            return jax.tree.map(jnp.add, total, grads), loss

        grads, losses = lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)
        return (*apply_gradients(tx, grads, opt_state, params), losses.mean())

    recording = record(step, PARAMS, tx.init(PARAMS), jnp.stack([X, X * 2, X]))
    assert places(recording, PARAMETER) == ["hidden/b", "hidden/w", "out"]
    assert only(recording, "hidden/tanh").spread.elements == 3 * 5 * 8
    assert recording.loss is not None


def test_aux_is_passed_over_and_other_functions_are_recorded_forward() -> None:
    with_aux = record(lambda p, x: (loss_fn(p, x), jnp.exp(x)), PARAMS, X)
    assert places(with_aux) == places(record(loss_fn, PARAMS, X))
    assert "exp" not in places(with_aux, ACTIVATION)
    forward = record(lambda p, x: jax.nn.softmax(x @ p["hidden"]["w"]), PARAMS, X)
    assert {one.kind for one in forward.observations} == {ACTIVATION}
    assert only(forward, "matmul").format == "float16"
    assert forward.loss is None


def scanned(params: Any, x: jax.Array) -> jax.Array:
    def turn(h: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("cell"):
            h = jnp.tanh(h @ params["w"] + row)
        return h, h

    _, rows = lax.scan(turn, jnp.zeros(6), x)
    return jnp.square(rows).sum()


def states(params: Any, x: jax.Array) -> list[np.ndarray]:
    h, found = np.zeros(6, np.float32), []
    for row in np.asarray(x):
        h = np.tanh(h @ np.asarray(params["w"]) + row)
        found.append(h)
    return found


def test_a_scans_body_is_one_observation_over_all_turns() -> None:
    params = {"w": normal(0, 6, 6, scale=0.4)}
    recording = record(scanned, params, X)
    cell = only(recording, "cell/tanh")
    assert cell.shape == (6,)
    assert_spread(cell, np.stack(states(params, X)))
    assert only(recording, "cell/matmul").format == "float16"
    assert places(recording, PARAMETER) == ["w"]
    (gradient,) = recording.of_kind(PARAMETER)
    assert_spread(gradient, jax.grad(scanned)(params, X)["w"])


def test_a_while_loop_and_the_branch_that_was_taken_are_recorded() -> None:
    def forward(x: jax.Array, up: jax.Array) -> jax.Array:
        x = lax.while_loop(lambda y: y.max() < 100, lambda y: y * 2, x)
        return lax.cond(up, lambda y: jnp.exp(-y), lambda y: jnp.log(y), x)

    recording = record(forward, jnp.array([1.0, 3.0]), jnp.bool_(True))
    assert places(recording) == ["mul", "exp"]
    product = only(recording, "mul").spread
    assert (product.elements, product.seen, product.largest) == (12, 2, 192.0)  # all turns, and a sample of the last
    other = record(forward, jnp.array([1.0, 3.0]), jnp.bool_(False))
    assert places(other) == ["mul", "log"]


def test_what_a_checkpoint_computes_again_stands_once() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.square(jax.checkpoint(lambda w: jnp.sin(jnp.tanh(x @ w)))(params["w"])).mean()

    recording = record(loss, {"w": normal(0, 6, 3)}, X)
    assert places(recording, ACTIVATION).count("tanh") == 1
    assert "mul" in places(recording, GRADIENT)
    assert places(recording, PARAMETER) == ["w"]


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x


clipped.defvjp(lambda x: (x, x), lambda x, g: (g * jnp.cos(x),))


def test_what_the_backward_pass_computes_without_the_scale_is_no_gradient() -> None:
    recording = record(lambda p, x: clipped(x @ p["w"]).sum(), {"w": normal(0, 6, 3)}, X, scale=2.0**10)
    assert places(recording, GRADIENT) != []
    assert "cos" in places(recording, ACTIVATION)
    assert only(recording, "cos").spread.largest <= 1


def test_a_float32_result_that_is_rounded_to_16_bits_is_a_tensor_of_its_own() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            h = jnp.exp(x @ params["w"])
        with jax.named_scope("second"):
            return jnp.square(h @ params["w"].T).mean()

    params = {"w": normal(0, 6, 3)}
    recording = record(loss, params, X)
    assert [one.format for one in found(recording, "first/exp")] == ["float32", "float16"]
    large = {"w": jnp.full((6, 3), 4.0)}
    wide, narrow = found(record(loss, large, jnp.ones((5, 6)), widened=False), "first/exp")
    assert (wide.spread.inf, narrow.spread.inf) == (0, 15)
    assert "float16" in {one.format for one in found(recording, "second/mul", GRADIENT)}


def test_scopes_that_nested_transformations_repeat_stand_once() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return jax.nn.gelu(x @ params["w"]).mean()

    assert not [place for place in places(record(loss, {"w": normal(0, 6, 3)}, X)) if "layer/layer" in place]


def test_user_casts_scatters_and_bits_are_widened_too() -> None:
    def loss(table: jax.Array, rows: jax.Array) -> jax.Array:
        half = table.astype(jnp.float16)[rows] * jnp.float16(300)
        bits = lax.bitcast_convert_type(half, jnp.uint16) & 1
        return (half * half).astype(jnp.float32).sum() + bits.sum() * 0.0

    recording = record(loss, jnp.full((4, 3), 200.0), jnp.array([0, 0, 2]))
    assert {one.spread.inf for one in recording.observations} == {0}
    gradient = next(recording.of_kind(PARAMETER))
    assert gradient.format == "float16"
    assert gradient.spread.largest == 2 * 2 * 200.0 * 300.0**2
    assert any(
        one.spread.inf for one in record(loss, jnp.full((4, 3), 200.0), jnp.array([0]), widened=False).observations
    )


def test_an_unknown_primitive_runs_as_written() -> None:
    primitive = Primitive("squares")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * x, multiple_results=False))
    recording = record(lambda x: primitive.bind(x.astype(jnp.float16)) + jnp.float16(0), jnp.full(3, 400.0))
    own = only(recording, "squares")
    assert (own.op_class, own.format, own.spread.inf) == ("keep", "float16", 3)


def test_keys_integers_and_large_tensors() -> None:
    def loss(params: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return (jnp.where(kept, x, 0) * params).sum()

    x = normal(3, 400, 500)
    recording = record(loss, jnp.float32(2), jax.random.key(0), x)
    product = found(recording, "mul")[-1]  # those before it are of the random numbers
    assert product.spread.elements == 200_000
    assert product.spread.seen == -(-200_000 // stride(200_000)) < 200_000
    assert product.spread.largest == pytest.approx(2 * float(jnp.abs(x).max()), rel=0.2)
    assert all(one.format == "float32" for one in recording.observations)


def test_nan_and_inf_are_counted_among_all_elements() -> None:
    x = normal(3, 400, 500).at[399, 498].set(jnp.nan).at[399, 497].set(jnp.inf)
    one = only(record(lambda w, x: x * w, jnp.float32(1), x), "mul")
    assert (one.spread.inf, one.spread.nan) == (1, 1)
    assert one.spread.largest == float(jnp.abs(jnp.nan_to_num(x, posinf=0)).max())


def test_nothing_is_changed_and_donated_buffers_live_on() -> None:
    step, opt_state = wrapped_step()
    donating = jax.jit(lambda *args: step(*args), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, PARAMS)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves((params, opt_state))]
    record(donating, params, opt_state, X)
    after = [np.asarray(leaf) for leaf in jax.tree.leaves((params, opt_state))]
    assert all(map(np.array_equal, before, after))


def test_a_probe_compiles_two_programs_and_a_diagnosis_after_it_none(caplog: pytest.LogCaptureFixture) -> None:
    """The step in float32, and under the policy; scalars are made without XLA."""
    x, counts = X[:3], []
    for verb in (polyamp.probe, polyamp.diagnose, polyamp.probe):
        caplog.clear()
        with jax.log_compiles():
            verb(loss_fn, PARAMS, x, policy=FLOAT16)
        counts.append(sum(message.startswith("Finished XLA compilation") for message in caplog.messages))
    assert counts == [2, 0, 0]


def test_a_function_that_captures_an_array_sees_the_new_one() -> None:
    batch = {"x": X}

    def loss(w: jax.Array) -> jax.Array:
        return (batch["x"] @ w).sum()

    first = record(loss, normal(0, 6, 3))
    batch["x"] = X * 4
    assert only(record(loss, normal(0, 6, 3)), "matmul").spread == only(first, "matmul").spread.scaled(2)
