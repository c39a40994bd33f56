"""value_and_grad and scale_loss: 16-bit products inside, scaled gradients out, and losses that are refused."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
import polyamp.backends.jax as amp
from polyamp import current_policy, scale_loss, value_and_grad

pytestmark = pytest.mark.filterwarnings("ignore:autocast to .* changed nothing")  # these losses are of no products

SCALE = 2.0**8
POLICY = polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale(init=SCALE))
TX = polyamp.wrap_optimizer(optax.sgd(0.1), POLICY)
PARAMS = {"w": jnp.arange(4.0), "n": jnp.arange(2), "act": jax.nn.relu, "rate": 0.5, "none": None}
STATE = TX.init(PARAMS)


def mean_product(params: Any, x: Any) -> jax.Array:
    return (params["act"](params["w"]) * x).astype(jnp.float32).mean()


@pytest.mark.parametrize("compiled", [False, True])
def test_loss_is_unscaled_and_gradients_are_scaled(compiled: bool) -> None:
    def run(w: Any, x: Any) -> Any:
        return value_and_grad(mean_product, POLICY)(STATE, PARAMS | {"w": w}, x)

    loss, grads = (
        jax.jit(lambda w, x: jax.tree.leaves(run(w, x))) if compiled else lambda w, x: jax.tree.leaves(run(w, x))
    )(jnp.arange(4.0), jnp.full(4, 2.0))
    assert (loss.dtype, float(loss)) == (jnp.float32, 3.0)
    assert (grads.dtype, grads.tolist()) == (jnp.float32, [0.0, *[SCALE / 2] * 3])


def test_gradients_are_none_where_there_is_nothing_to_differentiate() -> None:
    _, grads = value_and_grad(mean_product, POLICY)(STATE, PARAMS, 1.0)
    assert {key for key, grad in grads.items() if grad is None} == {"n", "act", "rate", "none"}


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16", "p=f32,c=f16,o=f16"])
def test_function_and_aux_are_as_written(policy: str) -> None:
    seen = []

    def fun(params: Any, x: Any, *, key: Any, scale: Any) -> Any:
        seen.extend([params["w"].dtype, x["x"].dtype, scale.dtype, x["n"].dtype, key.dtype])
        return params["w"].sum().astype(jnp.float32), {"scores": x["x"] * scale, "n": x["n"], "name": "aux"}

    batch = {"x": jnp.ones(2), "n": jnp.arange(2), "label": "text"}
    key = jax.random.key(0)
    (loss, aux), grads = value_and_grad(fun, policy, has_aux=True)(STATE, PARAMS, batch, key=key, scale=np.float32(2))
    assert seen == [*[jnp.float32] * 3, jnp.int32, key.dtype]
    assert (loss.dtype, grads["w"].dtype) == (jnp.float32, jnp.float32)
    assert (aux["scores"].dtype, aux["n"].dtype, aux["name"]) == (jnp.float32, jnp.int32, "aux")


@pytest.mark.parametrize("stored", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_gradients_come_in_the_parameters_own_dtype(stored: Any) -> None:
    params = PARAMS | {"w": jnp.ones(4, stored)}
    assert value_and_grad(mean_product, POLICY)(STATE, params, 1.0)[1]["w"].dtype == stored


def test_policy_that_is_not_given_is_the_current_one_at_each_call() -> None:
    seen = []

    def fun(params: Any) -> jax.Array:
        seen.append(current_policy().compute)
        return params["v"] @ params["w"]

    differentiated = value_and_grad(fun)
    params = {name: jnp.array([1.001, 0.0]) for name in "vw"}
    with pytest.warns(polyamp.PolyampWarning, match="without a policy takes the current one, float32"):
        losses = [differentiated(STATE, params)[0]]
    with polyamp.policy("mixed_bfloat16"):
        losses.append(differentiated(STATE, params)[0])
    assert seen == ["float32", "bfloat16"]
    assert [float(loss) for loss in losses] == [pytest.approx(1.001**2), 1.0]


def test_it_composes_with_vmap() -> None:
    per_example = jax.vmap(value_and_grad(mean_product, POLICY), in_axes=(None, None, 0), out_axes=0)
    loss, grads = per_example(STATE, {"w": jnp.arange(4.0), "act": jax.nn.relu}, jnp.ones((3, 4)))
    assert (loss.shape, grads["w"].shape) == ((3,), (3, 4))


def test_scale_loss_works_in_float32_inside_grad() -> None:
    def scaled(w: Any) -> jax.Array:
        return scale_loss((w * w).mean(), STATE)

    assert scale_loss(jnp.float16(300.0), STATE).tolist() == 300 * SCALE  # 76800, too large for float16
    assert jax.jit(jax.grad(scaled))(jnp.ones(1)).tolist() == [2 * SCALE]


def loss_returning(value: Any) -> Any:
    return lambda params: jax.tree.map(lambda leaf: leaf + 0 * params["w"].sum().astype(leaf.dtype), value)


BAD_LOSSES = {
    "integer": (jnp.int32(1), polyamp.errors.InvalidTypeError),
    "complex": (jnp.complex64(1), polyamp.errors.InvalidTypeError),
    "vector": (jnp.ones(3), polyamp.errors.InvalidValueError),
    "pair": ((jnp.float32(1), jnp.float32(2)), polyamp.errors.InvalidTypeError),
    "none": (None, polyamp.errors.InvalidTypeError),
}
NON_FINITE = {"inf": jnp.float32(jnp.inf), "-inf": jnp.float32(-jnp.inf), "nan": jnp.float16(jnp.nan)}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_bad_losses_are_refused(name: str) -> None:
    value, error = BAD_LOSSES[name]
    with pytest.raises(error, match="loss"):
        value_and_grad(loss_returning(value), POLICY)(STATE, PARAMS)
    with pytest.raises(error, match="loss"):
        scale_loss(value, STATE)


@pytest.mark.parametrize("name", NON_FINITE)
def test_a_loss_that_is_not_finite_skips_the_step_with_one_warning(name: str) -> None:
    """It does so even if the gradients are finite, as those of a loss plus inf are."""
    params = {"w": PARAMS["w"]}
    state = TX.init(params)
    with pytest.warns(polyamp.PolyampWarning, match="not finite before scaling: a smaller scale cannot help"):
        loss, grads = value_and_grad(loss_returning(NON_FINITE[name]), POLICY)(state, params)
    new, state = amp.apply_gradients(TX, grads, state, params)
    assert not np.isfinite(loss)
    assert not state.last_step
    assert new["w"].tolist() == params["w"].tolist()
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        value_and_grad(loss_returning(NON_FINITE[name]), POLICY)(state, params)
    assert not again


@pytest.mark.parametrize("name", NON_FINITE)
def test_a_scaled_loss_that_is_not_finite_has_gradients_that_are_not(name: str) -> None:
    loss = NON_FINITE[name]
    assert not np.isfinite(jax.grad(lambda w: scale_loss(w + loss, STATE))(jnp.float32(1)))


@pytest.mark.parametrize("name", NON_FINITE)
def test_a_loss_that_is_not_finite_raises_where_that_is_asked_for(name: str) -> None:
    state = polyamp.wrap_optimizer(optax.sgd(0.1), POLICY, loss_scale=polyamp.LossScale(nonfinite_loss="raise")).init(
        PARAMS
    )
    with pytest.raises(polyamp.errors.NonFiniteLossError, match=r"polyamp\.diagnose"):
        value_and_grad(loss_returning(NON_FINITE[name]), POLICY)(state, PARAMS)


def test_non_finite_loss_inside_jit_skips_the_step_and_shows_itself() -> None:
    @jax.jit
    def step(w: Any, opt_state: Any) -> Any:
        loss, grads = value_and_grad(lambda p: jnp.log(p).mean(), POLICY)(opt_state, w)
        return loss, TX.update(grads, opt_state, w)[1]

    loss, state = step(jnp.zeros(2), TX.init(jnp.zeros(2)))
    assert not np.isfinite(loss)
    assert not state.last_step


def test_aux_that_is_missing_is_told() -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="does not return \\(loss, aux\\)"):
        value_and_grad(mean_product, POLICY, has_aux=True)(STATE, PARAMS, 1.0)


@pytest.mark.parametrize("state", [optax.sgd(0.1, momentum=0.9).init(PARAMS["w"]), (STATE, STATE)], ids=["none", "two"])
def test_state_without_one_loss_scale_is_refused(state: Any) -> None:
    with pytest.raises(polyamp.errors.UsageError, match="wrap the outermost optimizer"):
        value_and_grad(mean_product, POLICY)(state, PARAMS, 1.0)


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ((PARAMS, STATE, 1.0), "swap the arguments"),
        ((STATE._asdict(), PARAMS, 1.0), "restore the checkpoint with a target"),
    ],
    ids=["swapped", "a dict from orbax"],
)
def test_what_was_meant_is_told(arguments: Any, fix: str) -> None:
    with pytest.raises(polyamp.errors.UsageError, match=fix):
        value_and_grad(mean_product, POLICY)(*arguments)


def test_float64_is_left_to_arrays() -> None:
    with pytest.raises(polyamp.errors.UnsupportedError, match='use policy\\("float32"\\)'):
        value_and_grad(mean_product, "float64")(STATE, PARAMS, 1.0)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", POLICY])
def test_a_float64_loss_stays_float64(policy: Any) -> None:
    with jax.enable_x64(True):
        weights = jnp.array([1 + 2.0**-40], jnp.float64)
        loss, grads = value_and_grad(lambda w: (w * w).sum(), policy)(STATE, weights)
        assert loss == (1 + 2.0**-40) ** 2
        assert scale_loss(loss, STATE) == loss * SCALE
        assert (loss.dtype, grads.dtype) == (np.float64, np.float64)


GROWING = polyamp.wrap_optimizer(optax.sgd(1.0), POLICY, loss_scale=polyamp.LossScale(init=8.0, interval=1))


def test_gradients_are_divided_by_the_loss_scale_they_were_made_at_in_a_compiled_step_too() -> None:
    """The second ones are used after an update that changed the scale; the third ones with another optimizer's."""

    def steps(state: Any, other: Any, params: Any) -> Any:
        differentiated = value_and_grad(lambda *each: sum(own.sum() for own in each), POLICY, argnums=(0, 1))
        _, (first, third) = differentiated(state, params, params)
        _, (second, _) = differentiated(state, params, params)
        one, after = GROWING.update(first, state, params)
        two, _ = GROWING.update(second, after, params)
        kept, _ = GROWING.update(first * (after.loss_scale / state.loss_scale), after, params)
        return one, two, TX.update(third, other, params)[0] * 10, kept

    params = jnp.ones(2)
    for updates in jax.jit(steps)(GROWING.init(params), TX.init(params), params):
        np.testing.assert_allclose(updates, [-1, -1], rtol=1e-6)


# Which arguments are differentiated.


def two_factors(a: Any, x: Any, b: Any = None) -> jax.Array:
    return jnp.square(x @ a["w"] @ b["w"]).mean()


def factors() -> tuple[Any, Any, Any]:
    return {"w": jnp.ones((4, 3)), "name": "a"}, jnp.full((2, 4), 0.5), {"w": jnp.full((3, 1), 2.0)}


@pytest.mark.parametrize(
    ("argnums", "compiled"), [*((nums, False) for nums in (0, -1, (0,), (2, 0), [0, 2], (0, 1, 2))), ((0, 2), True)]
)
def test_argnums_are_those_of_jax(argnums: Any, compiled: bool) -> None:
    a, x, b = factors()
    plain_args = ({"w": a["w"]}, x, b)
    loss, grads = jax.value_and_grad(two_factors, tuple(argnums) if isinstance(argnums, list) else argnums)(*plain_args)
    run = amp.value_and_grad(two_factors, POLICY, argnums=argnums)
    found_loss, found = (
        jax.jit(lambda w, x, b: run(STATE, {"w": w}, x, b))(a["w"], x, b) if compiled else run(STATE, *plain_args)
    )
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-3)
    assert jax.tree.structure(found) == jax.tree.structure(grads)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(one / SCALE, other, rtol=1e-2)


@pytest.mark.parametrize("argnums", [3, -4, (0, 3), (0, 0), (0, -3)])
def test_positions_that_are_none_are_refused(argnums: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="argnums"):
        amp.value_and_grad(two_factors, POLICY, argnums=argnums)(STATE, *factors())


@pytest.mark.parametrize("has_aux", [3, (0, 1), None, "loss"])
def test_another_has_aux_is_refused_at_once(has_aux: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="has_aux"):
        amp.value_and_grad(two_factors, POLICY, has_aux)


@pytest.mark.parametrize("argnums", ["a", 1.0, None, (), ("a",), True])
def test_argnums_that_are_no_integers_are_refused(argnums: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="argnums"):
        amp.value_and_grad(two_factors, POLICY, argnums=argnums)


# Trees that do not fit together.

WRONG = {
    "none": None,
    "missing": {"w": jnp.ones(2)},
    "another name": {"w": jnp.ones(2), "c": jnp.ones(3)},
    "one more": {"w": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)},
    "a list": [jnp.ones(2), jnp.ones(3)],
    "an array": jnp.ones(2),
    "shapes": {"w": jnp.ones(1), "b": jnp.ones(3)},
    "strings": {"w": "text", "b": jnp.ones(3)},
    "descriptions": {"w": jax.ShapeDtypeStruct((2,), jnp.float32), "b": jnp.ones(3)},
    "keys": {"w": jax.random.key(0), "b": jnp.ones(3)},
}
RIGHT = {"w": jnp.ones(2), "b": jnp.ones(3)}
ADAM = polyamp.wrap_optimizer(optax.adam(0.1), POLICY)
ADAMS = ADAM.init(RIGHT)
VERBS = {
    "update": lambda tree: ADAM.update(tree, ADAMS, RIGHT),
    "update without parameters": lambda tree: ADAM.update(tree, ADAMS),
    "update from a state": lambda tree: ADAM.update(RIGHT, ADAMS._replace(inner_state=tree), RIGHT),
    "compiled": lambda tree: jax.jit(lambda grads: ADAM.update(tree, ADAMS, grads))(RIGHT),
    "apply_gradients": lambda tree: amp.apply_gradients(ADAM, tree, ADAMS, RIGHT),
    "apply_gradients of optax": lambda tree: amp.apply_gradients(optax.adam(1), tree, optax.adam(1).init(RIGHT), RIGHT),
    "apply_gradients by": lambda tree: amp.apply_gradients(tree, RIGHT, ADAMS, RIGHT),
    "apply_updates": lambda tree: amp.apply_updates(tree, RIGHT),
    "select": lambda tree: amp.select(True, RIGHT, tree),
    "select where": lambda tree: amp.select(tree, RIGHT, RIGHT),
    "scale_loss": lambda tree: polyamp.scale_loss(jnp.ones(()), tree),
    "scale": lambda tree: polyamp.scale_loss(jnp.ones(()), ADAMS._replace(loss_scale=tree)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_trees_that_do_not_fit_together_are_refused(verb: str) -> None:
    for name in WRONG.keys() - ({"shapes"} if verb == "update without parameters" else set()):
        with pytest.raises(polyamp.PolyampError) as caught:
            VERBS[verb](WRONG[name])
        assert "to do:" in str(caught.value), name
    assert ADAM.update(RIGHT, ADAMS, RIGHT)[1].last_step.applied


def test_a_float16_function_and_an_optimizer_that_was_wrapped_without_a_policy_are_reported() -> None:
    params = {"w": jnp.ones(4)}
    unscaled = polyamp.wrap_optimizer(optax.sgd(0.1)).init(params)
    chosen = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16", loss_scale=polyamp.LossScale.none()).init(params)
    differentiated = value_and_grad(lambda params: params["w"] @ params["w"], "mixed_float16")
    differentiated(chosen, params)  # the user's own choice
    with pytest.warns(polyamp.PolyampWarning, match="wrapped without a policy"):
        differentiated(unscaled, params)


def test_an_optimizer_that_was_wrapped_without_a_policy_is_reported_where_jax_differentiates() -> None:
    params = {"w": jnp.ones(4)}
    tx = polyamp.wrap_optimizer(optax.sgd(0.1))
    grads = jax.grad(lambda params: params["w"] @ params["w"])(params)
    with polyamp.policy("float32"):
        tx.update(grads, tx.init(params), params)  # somebody chose float32
    with pytest.warns(polyamp.PolyampWarning, match="wrapped without a policy"):
        jax.jit(tx.update)(grads, tx.init(params), params)


def test_without_scaling_a_non_finite_loss_is_not_looked_at() -> None:
    opt_state = polyamp.wrap_optimizer(optax.sgd(0.1), "float32").init(PARAMS)
    loss, _ = value_and_grad(loss_returning(NON_FINITE["inf"]), "float32")(opt_state, PARAMS)
    assert np.isinf(loss)
