"""Plans and lint of whole training steps: as documented, with the loss unscaled, and with gradients clipped scaled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import polyamp
import polyamp.backends.jax as amp

pytestmark = pytest.mark.slow

POLICY = polyamp.policy("mixed_float16")
TX = polyamp.wrap_optimizer(optax.adam(1e-3), POLICY, max_grad_norm=1.0)
PARAMS = {"body": jax.random.normal(jax.random.key(0), (8, 16)) / 3, "head": jnp.ones((16, 4)), "idle": jnp.ones(3)}
X = jax.random.normal(jax.random.key(1), (32, 8))


def loss_fn(params: Any, x: Any) -> Any:
    with jax.named_scope("body"):
        h = jnp.tanh(x @ params["body"])
    with jax.named_scope("head"):
        return jnp.square(h @ params["head"]).mean()


def scaled(params: Any, opt_state: Any, x: Any) -> Any:
    return polyamp.value_and_grad(loss_fn, POLICY)(opt_state, params, x)


def scaled_by_hand(params: Any, opt_state: Any, x: Any) -> Any:
    model = polyamp.autocast(loss_fn, POLICY)
    return jax.value_and_grad(lambda p: polyamp.scale_loss(model(p, x), opt_state))(params)


def times_scale(params: Any, opt_state: Any, x: Any) -> Any:
    model = polyamp.autocast(loss_fn, POLICY)
    return jax.value_and_grad(lambda p: model(p, x) * optax.tree.get(opt_state, "loss_scale"))(params)


def unscaled(params: Any, opt_state: Any, x: Any) -> Any:
    return jax.value_and_grad(polyamp.autocast(loss_fn, POLICY))(params, x)


def in_float32(params: Any, opt_state: Any, x: Any) -> Any:
    return jax.value_and_grad(loss_fn)(params, x)


def step_of(differentiate: Any, tx: Any = TX, change: Any = lambda grads: grads, by: str = "update") -> Any:
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = differentiate(params, opt_state, x)
        grads = change(grads)
        if by == "apply_gradients":
            params, opt_state = amp.apply_gradients(tx, grads, opt_state, params)
            return params, opt_state, loss
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def arguments(tx: Any = TX) -> Any:
    return PARAMS, tx.init(PARAMS), X


def codes(step: Any, *args: Any, policy: Any = POLICY) -> list[str]:
    return [finding.code for finding in polyamp.lint(step, *args, policy=policy) if finding.severity != "note"]


def jitted(step: Any) -> Any:
    return jax.jit(step)


def jitted_and_called(step: Any) -> Any:
    """Return a jitted function that was traced before, so that ``jax.jit`` would use that trace again."""
    compiled = jax.jit(step)
    compiled(*arguments())
    return compiled


def with_a_jit_inside(step: Any) -> Any:
    inner = jitted_and_called(step)
    return lambda *args: inner(*args)


FORMS = [lambda step: step, jitted, jitted_and_called, with_a_jit_inside]


steps = pytest.mark.parametrize(
    ("differentiate", "form"), [*((scaled, form) for form in FORMS), (scaled_by_hand, jitted), (times_scale, jitted)]
)


@steps
def test_the_documented_step_is_explained_as_it_runs_and_lint_finds_nothing(differentiate: Any, form: Any) -> None:
    plan = polyamp.explain(form(step_of(differentiate)), *arguments(), policy=POLICY)
    products = [op for op in plan.operations if op.name == "matmul"]
    assert [(op.format, op.reason, op.where.partition(" ")[0]) for op in products[:2]] == [
        ("float16", "table", "body"),
        ("float16", "table", "head"),
    ]
    assert {op.format for op in products} == {"float16"}
    assert len(products) == 2 + 3  # forward; backward without the gradient of the data
    assert [op.format for op in plan.operations if op.name == "square"][:1] == ["float32"]
    assert plan.policy == "mixed_float16"
    assert plan.totals["casts"] >= 4
    assert plan.totals["bytes_saved"] < plan.totals["bytes_saved_float32"]
    assert plan.unused_rules == ()
    for by in ("update", "apply_gradients"):
        assert codes(form(step_of(differentiate, by=by)), *arguments()) == []


def test_a_plan_of_an_autocasted_function_is_that_of_the_function() -> None:
    plan = polyamp.explain(polyamp.autocast(loss_fn, POLICY), PARAMS, X, policy=POLICY)
    plain = polyamp.explain(loss_fn, PARAMS, X, policy=POLICY)
    assert plan.operations == plain.operations
    assert plan.totals == plain.totals


def test_a_rule_that_the_step_uses_is_not_unused_and_another_is() -> None:
    policy = polyamp.policy("mixed_float16", rules={"head/*": "full", "tail/*": "full"})

    def differentiate(params: Any, opt_state: Any, x: Any) -> Any:
        return polyamp.value_and_grad(loss_fn, policy)(opt_state, params, x)

    plan = polyamp.explain(step_of(differentiate), *arguments(), policy=policy)
    assert plan.unused_rules == ("tail/*",)
    formats = {(op.where.partition(" ")[0], op.format) for op in plan.operations if op.name == "matmul"}
    assert formats == {("body", "float16"), ("head", "float32")}


def test_a_step_in_a_loop_counts_its_turns() -> None:
    def steps(params: Any, opt_state: Any, xs: Any) -> Any:
        def one(carry: Any, x: Any) -> Any:
            params, opt_state, loss = step_of(scaled)(*carry, x)
            return (params, opt_state), loss

        return jax.lax.scan(one, (params, opt_state), xs)

    plan = polyamp.explain(steps, *arguments()[:2], jnp.stack([X] * 3), policy=POLICY)
    assert {op.times for op in plan.operations if op.name == "matmul"} == {3}
    assert codes(steps, *arguments()[:2], jnp.stack([X] * 3)) == []


@pytest.mark.parametrize(
    ("by", "differentiate", "form"),
    [
        *(("update", unscaled, form) for form in FORMS),
        ("apply_gradients", unscaled, jitted),
        ("update", in_float32, jitted),
    ],
)
def test_a_step_that_does_not_scale_is_found(by: str, differentiate: Any, form: Any) -> None:
    step = step_of(differentiate, by=by)
    (finding,) = polyamp.lint(form(step) if form is not jitted_and_called else step, *arguments(), policy=POLICY).errors
    assert finding.code == "unscaled-loss"
    assert finding.where.startswith("test_steps.py:")


def per_example(params: Any, opt_state: Any, x: Any) -> Any:
    loss, grads = jax.vmap(lambda x: scaled(params, opt_state, x[None]))(x)
    leaves, tree = jax.tree.flatten(grads)
    return loss.mean(), jax.tree.unflatten(tree, optax.per_example_global_norm_clip(leaves, 1.0)[0])


def clipped_by(change: Any) -> Any:
    """Return a step that changes each scaled gradient, given all of them."""
    return step_of(scaled, change=lambda grads: jax.tree.map(lambda g: change(g, grads), grads)), TX


def clipped_before(tx: Any) -> Any:
    return step_of(scaled, tx), tx


CLIPPED = {
    "clip": clipped_before(optax.chain(optax.clip(1.0), TX)),
    "clip_by_global_norm": clipped_before(optax.chain(optax.clip_by_global_norm(1.0), TX)),
    "clip_by_block_rms": clipped_before(optax.chain(optax.clip_by_block_rms(1.0), TX)),
    "adaptive_grad_clip": clipped_before(optax.chain(optax.adaptive_grad_clip(0.1), TX)),
    "named_chain": clipped_before(optax.named_chain(("clip", optax.clip(1.0)), ("own", TX))),
    "by hand": clipped_by(lambda g, grads: jnp.clip(g, -1, 1)),
    "by hand, by norm": clipped_by(lambda g, grads: g / jnp.maximum(1, optax.tree.norm(grads))),
    "normalised": clipped_by(lambda g, grads: g / optax.tree.norm(grads)),
    "per example": (step_of(per_example), TX),
}


@pytest.mark.filterwarnings("ignore:a transformation comes before")
@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_of_scaled_gradients_is_found(name: str) -> None:
    step, tx = CLIPPED[name]
    assert codes(jax.jit(step), *arguments(tx)) == ["clipped-scaled"]


def average(grads: Any) -> Any:
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * 3 / 8).reshape(-1).reshape(g.shape), grads)


def accumulated(params: Any, opt_state: Any, x: Any) -> Any:
    def one(total: Any, x: Any) -> Any:
        loss, grads = scaled(params, opt_state, x)
        return jax.tree.map(jnp.add, total, grads), loss

    total, losses = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x.reshape(4, 8, 8))
    return losses.mean(), jax.tree.map(lambda g: g / 4, total)


INSIDE = polyamp.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), POLICY)
RIGHT = {
    "averaged": (step_of(scaled, change=average), TX),
    "accumulated": (step_of(accumulated), TX),
    "clipped inside": (step_of(scaled, INSIDE), INSIDE),
    "two steps": (lambda p, s, x: step_of(scaled)(*step_of(scaled)(p, s, x)[:2], x), TX),
    "without gradients of its own": (lambda p, s, x: TX.update(PARAMS, s, p), TX),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_steps_are_found_right(name: str) -> None:
    step, tx = RIGHT[name]
    found = codes(step, *arguments(tx))
    assert not {"unscaled-loss", "clipped-scaled"} & set(found)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_without_scaling_an_unscaled_step_is_right(policy: str) -> None:
    tx = polyamp.wrap_optimizer(optax.adam(1e-3), policy)
    step = step_of(lambda p, s, x: jax.value_and_grad(polyamp.autocast(loss_fn, policy))(p, x), tx)
    assert "unscaled-loss" not in codes(step, *arguments(tx), policy=policy if policy != "float32" else "bf16")


CHAINS = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), TX),
    "chain of three": optax.chain(optax.zero_nans(), optax.trace(0.9), TX),
    "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("own", TX)),
    "in masked": optax.masked(optax.chain(optax.clip(1.0), TX), {"body": True, "head": True, "idle": False}),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_what_stands_before_the_wrapped_optimizer_is_reported_once(name: str, compiled: bool) -> None:
    opt_state = CHAINS[name].init(PARAMS)
    run = jax.jit(scaled) if compiled else scaled
    with pytest.warns(polyamp.PolyampWarning, match="comes before the wrapped optimizer in optax.chain") as found:
        run(PARAMS, opt_state, X)
    assert len(found) == 1
    polyamp.scale_loss(jnp.float32(1), opt_state)  # does not warn again


RIGHT_HOLDERS = {
    "after": optax.chain(TX, optax.scale(0.5)).init(PARAMS),
    "alone": optax.chain(TX).init(PARAMS),
    "inside": INSIDE.init(PARAMS),
    "named": optax.named_chain(("own", TX), ("scale", optax.scale(0.5))).init(PARAMS),
    "beside another": (optax.adam(1e-3).init(PARAMS), TX.init(PARAMS)),
    "beside another by name": {"ema": optax.ema(0.9).init(PARAMS), "own": TX.init(PARAMS)},
}


@pytest.mark.parametrize("name", RIGHT_HOLDERS)
def test_what_stands_after_inside_or_beside_is_not(name: str) -> None:
    scaled(PARAMS, RIGHT_HOLDERS[name], X)


@pytest.mark.parametrize("name", CHAINS)
def test_an_optimizer_that_holds_a_wrapped_one_is_wrapped(name: str) -> None:
    found = polyamp.lint(loss_fn, PARAMS, X, policy=POLICY, optimizer=CHAINS[name])
    assert "optimizer-not-wrapped" not in [finding.code for finding in found]
    plain = polyamp.lint(loss_fn, PARAMS, X, policy=POLICY, optimizer=optax.chain(optax.clip(1.0), optax.adam(1.0)))
    assert "optimizer-not-wrapped" in [finding.code for finding in plain]
