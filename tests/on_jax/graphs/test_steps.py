"""Plans and lint of whole training steps: as documented, and with the loss unscaled."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import polyamp
import polyamp.backends.jax as amp
from support.jax_scenarios import quickly_compiled as quickly_compiled

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


def jitted_and_called(step: Any) -> Any:
    """Return a jitted function that was traced before, so that ``jax.jit`` would use that trace again."""
    compiled = jax.jit(step)
    compiled(*arguments())
    return compiled


def with_a_jit_inside(step: Any) -> Any:
    inner = jitted_and_called(step)
    return lambda *args: inner(*args)


def looped(step: Any) -> Any:
    def steps(params: Any, opt_state: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, carry: step(*carry, x)[:2], (params, opt_state))

    return steps


def branched(step: Any) -> Any:
    return lambda p, s, x: jax.lax.cond(x.sum() > 0, lambda: step(p, s, x)[:2], lambda: (p, s))


jitted = jax.jit
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
        ("update", unscaled, looped),
        ("update", unscaled, branched),
        ("apply_gradients", unscaled, jitted),
        ("update", in_float32, jitted),
    ],
)
def test_a_step_that_does_not_scale_is_found(by: str, differentiate: Any, form: Any) -> None:
    step = step_of(differentiate, by=by)
    (finding,) = polyamp.lint(form(step) if form is not jitted_and_called else step, *arguments(), policy=POLICY).errors
    assert finding.code == "unscaled-loss"
    assert finding.where.startswith("test_steps.py:")


@jax.custom_vjp
def clip_cotangent(x: Any) -> Any:
    return x


clip_cotangent.defvjp(lambda x: (x, None), lambda _, cotangent: (jnp.clip(cotangent, -1e-3, 1e-3),))


def with_a_clipped_cotangent(params: Any, opt_state: Any, x: Any) -> Any:
    return polyamp.value_and_grad(lambda p, x: loss_fn(jax.tree.map(clip_cotangent, p), x), POLICY)(
        opt_state, params, x
    )


def moved_to_the_new_scale(params: Any, opt_state: Any, x: Any) -> Any:
    _, grads = scaled(params, opt_state, x)
    _, new = TX.update(grads, opt_state, params)
    return TX.update(jax.tree.map(lambda g: g * new.loss_scale / opt_state.loss_scale, grads), new, params)


def joint(params: Any, states: Any, x: Any) -> Any:
    """Step one of two optimizers with scaled gradients of another jitted function."""
    _, grads = jax.jit(scaled)(params, states[0], x)
    return TX.update(grads, states[1], params)


def of_a_plain_optimizer_too(params: Any, opt_state: Any, x: Any) -> Any:
    """Step a wrapped optimizer, and one that does not scale with gradients of a plain loss."""
    own = step_of(in_float32, PLAIN)(params, PLAIN.init(params), x)
    return own, step_of(scaled)(params, opt_state, x)


@jax.custom_vjp
def without_idle(x: Any, idle: Any) -> Any:
    return x


without_idle.defvjp(lambda x, idle: (x, None), lambda _, cotangent: (cotangent, jnp.zeros(3)))


def with_zeros(params: Any, opt_state: Any, x: Any) -> Any:
    """Differentiate a loss whose own backward rule makes zeros for a parameter."""
    return polyamp.value_and_grad(lambda p, x: without_idle(loss_fn(p, x), p["idle"]), POLICY)(opt_state, params, x)


def in_a_branch(params: Any, opt_state: Any, x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, step_of(scaled), lambda *given: (*given[:2], jnp.float32(0)), params, opt_state, x)


def average(grads: Any) -> Any:
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * 3 / 8).reshape(-1).reshape(g.shape), grads)


def accumulated(params: Any, opt_state: Any, x: Any) -> Any:
    def one(total: Any, x: Any) -> Any:
        loss, grads = scaled(params, opt_state, x)
        return jax.tree.map(jnp.add, total, grads), loss

    total, losses = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x.reshape(4, 8, 8))
    return losses.mean(), jax.tree.map(lambda g: g / 4, total)


PLAIN = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_bfloat16")
INSIDE = polyamp.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), POLICY)
RIGHT = {
    "averaged": (step_of(scaled, change=average), TX),
    "accumulated": (step_of(accumulated), TX),
    "clipped inside": (step_of(scaled, INSIDE), INSIDE),
    "two steps": (lambda p, s, x: step_of(scaled)(*step_of(scaled)(p, s, x)[:2], x), TX),
    "moved to the new scale": (moved_to_the_new_scale, TX),
    "without gradients of its own": (lambda p, s, x: TX.update(PARAMS, s, p), TX),
    "with a custom_vjp": (step_of(with_a_clipped_cotangent), TX),
    "with zeros": (step_of(with_zeros), TX),
    "of two states": (lambda p, s, x: joint(p, (s, s), x), TX),
    "beside a plain one": (of_a_plain_optimizer_too, TX),
    "in a branch": (in_a_branch, TX),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_steps_are_found_right(name: str) -> None:
    step, tx = RIGHT[name]
    assert "unscaled-loss" not in codes(step, *arguments(tx))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_without_scaling_an_unscaled_step_is_right(policy: str) -> None:
    tx = polyamp.wrap_optimizer(optax.adam(1e-3), policy)
    step = step_of(lambda p, s, x: jax.value_and_grad(polyamp.autocast(loss_fn, policy))(p, x), tx)
    assert "unscaled-loss" not in codes(step, *arguments(tx), policy=policy if policy != "float32" else "bf16")


NAMES = {"body": "own", "head": "own", "idle": "other"}
PARTS = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), TX),
    "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("own", TX)),
    "after it": optax.chain(TX, optax.add_decayed_weights(-0.1)),
    "chain in chain": optax.chain(optax.chain(TX), optax.trace(0.5)),
    "chain in masked": optax.masked(optax.chain(optax.clip(1.0), TX), {"body": True, "head": True, "idle": False}),
    "multi_transform": optax.multi_transform({"own": TX, "other": optax.sgd(0.1)}, NAMES),
    "masked": optax.masked(TX, {"body": True, "head": True, "idle": False}),
    "apply_if_finite": optax.apply_if_finite(TX, 3),
    "conditionally_transform": optax.conditionally_transform(TX, lambda step: step > 1),
    "MultiSteps": optax.MultiSteps(TX, 2),
    "inject_hyperparams": optax.inject_hyperparams(lambda rate: polyamp.wrap_optimizer(optax.sgd(rate), POLICY))(0.1),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_a_wrapped_optimizer_that_is_a_part_of_another_is_refused(name: str, compiled: bool) -> None:
    opt_state = PARTS[name].init(PARAMS)
    with pytest.raises(polyamp.errors.UsageError, match="only a part of an optax optimizer"):
        (jax.jit(scaled) if compiled else scaled)(PARAMS, opt_state, X)
    with pytest.raises(polyamp.errors.UsageError, match="only a part of an optax optimizer"):
        polyamp.scale_loss(jnp.float32(1), {"params": PARAMS, "opt_state": opt_state})
    with pytest.raises(polyamp.errors.UsageError, match="only a part of an optax optimizer"):
        polyamp.lint(step_of(scaled, PARTS[name]), PARAMS, opt_state, X, policy=POLICY)


@pytest.mark.parametrize("name", ["apply_if_finite", "conditionally_transform", "MultiSteps"])
def test_an_update_by_hand_inside_a_conditional_of_optax_is_refused(name: str) -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), PARAMS)
    with pytest.raises(polyamp.errors.UsageError, match=f"(?s)only a part of an optax optimizer.*{name}"):
        PARTS[name].update(params, PARTS[name].init(params), params)


RIGHT_HOLDERS = {
    "alone": optax.chain(TX).init(PARAMS),
    "inside": INSIDE.init(PARAMS),
    "beside another": (optax.adam(1e-3).init(PARAMS), TX.init(PARAMS)),
    "beside another by name": {"ema": optax.ema(0.9).init(PARAMS), "own": TX.init(PARAMS)},
}


@pytest.mark.parametrize("name", RIGHT_HOLDERS)
def test_what_stands_inside_or_beside_is_not(name: str) -> None:
    scaled(PARAMS, RIGHT_HOLDERS[name], X)


def test_a_step_with_a_state_of_optax_beside_is_recorded() -> None:
    average = optax.ema(0.9)

    def step(params: Any, opt_state: Any, averages: Any, x: Any) -> Any:
        params, opt_state, loss = step_of(scaled)(params, opt_state, x)
        return params, opt_state, average.update(params, averages)[1], loss

    report = polyamp.probe(step, PARAMS, TX.init(PARAMS), average.init(PARAMS), X, policy=POLICY)
    assert report.window == polyamp.probe(step_of(scaled), *arguments(), policy=POLICY).window


@pytest.mark.parametrize("name", PARTS)
def test_an_optimizer_that_holds_a_wrapped_one_is_wrapped(name: str) -> None:
    found = polyamp.lint(loss_fn, PARAMS, X, policy=POLICY, optimizer=PARTS[name])
    assert "optimizer-not-wrapped" not in [finding.code for finding in found]
    plain = polyamp.lint(loss_fn, PARAMS, X, policy=POLICY, optimizer=optax.chain(optax.clip(1.0), optax.adam(1.0)))
    assert "optimizer-not-wrapped" in [finding.code for finding in plain]
