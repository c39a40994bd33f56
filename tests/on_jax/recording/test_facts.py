"""The facts about a function that the JAX adapter reports to `polyamp.lint`."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import polyamp
from polyamp.backends.jax import adapter
from polyamp.diagnosis.lint import Facts
from support.jax_scenarios import normal

FLOAT16 = polyamp.policy("mixed_float16")
PARAMS = {"w": normal(0, 6, 10), "half": jnp.ones(10, jnp.float16)}
X, LABELS = normal(1, 4, 3, 6), jnp.zeros((4, 3), jnp.int32)


def facts(target: Any, *args: Any, optimizer: Any = None, policy: Any = FLOAT16) -> Facts:
    return adapter.facts(target, args, {}, policy, optimizer)


def logits(params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("head"):
        return x @ params["w"]


def cross_entropy(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), labels)


def masked(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    mask = (labels == 0).astype(jnp.float32)
    return (cross_entropy(params, x, labels) * mask).sum() / mask.sum()


def chosen(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(params, x)), labels[..., None], -1).mean()


LOSSES = {
    "mean": (lambda *args: cross_entropy(*args).mean(), 12),
    "sum": (lambda *args: cross_entropy(*args).sum(), 1),
    "mean of sums": (lambda *args: cross_entropy(*args).sum(1).mean(), 4),
    "mean of means": (lambda *args: cross_entropy(*args).mean(1).mean(), 12),
    "masked": (masked, 12),
    "log_softmax": (chosen, 12),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_cross_entropy_has_classes_and_rows(name: str) -> None:
    loss, rows = LOSSES[name]
    (found,) = facts(loss, PARAMS, X, LABELS).losses
    assert (found.classes, found.rows) == (10, rows)


def test_a_step_has_the_losses_and_products_of_its_forward_pass() -> None:
    tx = optax.adam(1e-3)

    @jax.jit
    def step(params: Any, opt_state: Any, x: jax.Array, labels: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(LOSSES["mean"][0])(params, x, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"w": PARAMS["w"]}
    found = facts(step, params, tx.init(params), X, LABELS)
    assert [(one.classes, one.rows) for one in found.losses] == [(10, 12)]
    assert [product.sizes for product in found.products] == [(12, 6, 10)]


def test_an_attention_softmax_is_no_loss() -> None:
    assert facts(lambda w, x: jax.nn.softmax(x @ w).sum(), PARAMS["w"], X).losses == ()


def test_products_have_sizes_places_and_formats() -> None:
    (product,) = facts(logits, PARAMS, X).products
    assert product.where.startswith("head")
    assert (product.name, product.format, product.sizes) == ("matmul", "float16", (12, 6, 10))
    batched = facts(lambda a, b: jnp.einsum("bik,bkj->bij", a, b), jnp.ones((5, 3, 4)), jnp.ones((5, 4, 7)))
    assert batched.products[0].sizes == (3, 4, 7)
    conv = nn.Conv(12, (3, 3))
    image = jnp.ones((2, 8, 8, 5))
    weights = conv.init(jax.random.key(0), image)
    assert facts(conv.apply, weights, image).products[0].sizes == (5, 12)


def test_a_users_casts_are_found_and_no_others() -> None:
    def casting(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            h = x.astype(jnp.bfloat16) @ params["w"].astype("bfloat16")
        return jnp.asarray(h, jnp.float32).mean() + jax.lax.convert_element_type(x, jnp.float16).astype(jnp.int32).sum()

    found = facts(casting, {"w": PARAMS["w"]}, X).casts
    assert [(cast.native, cast.format) for cast in found] == [
        ("astype", "bfloat16"),
        ("astype", "bfloat16"),
        ("jnp.asarray", "float32"),
        ("lax.convert_element_type", "float16"),
        ("astype", "int32"),
    ]
    assert found[0].where.startswith("first ")
    assert f"{Path(__file__).name}:" in found[0].where

    @jax.jit
    def autocasted(params: Any, x: jax.Array) -> jax.Array:
        return polyamp.autocast(logits, FLOAT16)(params, x).mean()

    assert facts(autocasted, {"w": PARAMS["w"]}, X).casts == ()
    assert facts(lambda x: (x + jnp.ones(3)).mean(), jnp.ones(3, jnp.float16)).casts == ()


def test_parameters_in_16_bits_and_their_masters() -> None:
    wrapped = polyamp.wrap_optimizer(optax.adam(1e-3, mu_dtype=jnp.bfloat16), FLOAT16)
    without = polyamp.wrap_optimizer(optax.sgd(0.1), FLOAT16, master_weights=False)
    assert facts(logits, PARAMS, X).low_parameters == ("half",)
    assert not facts(logits, PARAMS, X).has_masters
    assert facts(logits, PARAMS, X, optimizer=wrapped).has_masters
    assert not facts(logits, PARAMS, X, optimizer=without).has_masters
    assert facts(logits, PARAMS, X, optimizer=wrapped.init(PARAMS)).has_masters
    assert facts(PARAMS).low_parameters == ("half",)
    state = {"params": PARAMS, "opt": wrapped.init(PARAMS)}
    assert facts(lambda state, x: logits(state["params"], x), state, X).low_parameters == ("params/half",)


def test_parameters_that_the_format_cannot_hold() -> None:
    params = {"std": jnp.full(4, 1e5), "w": jnp.ones((4, 4)), "count": jnp.array(10**6)}
    assert facts(lambda p, x: x @ p["w"] * p["std"], params, jnp.full((2, 4), 1e6)).beyond == ("std",)
    assert (
        facts(
            lambda p, x: x @ p["w"] * p["std"], params, jnp.ones((2, 4)), policy=polyamp.policy("mixed_bfloat16")
        ).beyond
        == ()
    )


def test_what_scales_the_loss_is_known() -> None:
    plain, wrapped = optax.sgd(0.1), polyamp.wrap_optimizer(optax.sgd(0.1), FLOAT16)
    state = wrapped.init(PARAMS)
    assert facts(logits, PARAMS, X, optimizer=DynamicScale()).optimizer == "native scaler"
    assert facts(logits, PARAMS, X, optimizer=wrapped).optimizer == "wrapped"
    assert facts(logits, PARAMS, X, optimizer=plain.init(PARAMS)).optimizer == "plain"
    assert facts(lambda p, s, x: logits(p, x), PARAMS, state, X).optimizer == "wrapped"


def test_what_cannot_be_traced_still_has_its_parameters() -> None:
    def branching(params: Any, x: jax.Array) -> Any:
        return x if x.sum() > 0 else params

    found = facts(branching, PARAMS, X)
    assert (found.products, found.low_parameters) == ((), ("half",))
