"""What `polyamp run --policy` does in JAX: gradients under autocast, derivatives inside them in float32, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from jax.scipy.optimize import minimize

import polyamp
from polyamp.backends.jax.compat import jmp
from polyamp.backends.jax.compat.whole_script import GRADIENTS, OTHER_DERIVATIVES, begin
from polyamp.demo import digits_task
from polyamp.errors import PolyampWarning, UsageError
from polyamp.scripts.session import Session, running

PLAIN = {name: getattr(jax, name) for name in (*GRADIENTS, *OTHER_DERIVATIVES, "jvp", "vjp", "linearize")}
W = jax.random.normal(jax.random.key(0), (4, 4))
X = jax.random.normal(jax.random.key(1), (2, 4))


def dots(function: Any, *args: Any) -> list[str]:
    """Return the dtypes of the products in a program, in their order."""
    return re.findall(r":(\w+)\[[^\]]*\] = dot_general", str(jax.make_jaxpr(function)(*args)))


def loss(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).sum()


@pytest.fixture
def session() -> Iterator[Session]:
    with running(Session(polyamp.policy("mixed_bfloat16"))) as session:
        begin(session)
        yield session
    assert {name: getattr(jax, name) for name in PLAIN} == PLAIN


WAYS: dict[str, Any] = {
    "grad": lambda: jax.grad(loss),
    "value_and_grad": lambda: jax.value_and_grad(loss),
    "jit": lambda: jax.jit(jax.grad(loss)),
    "of jit": lambda: jax.grad(jax.jit(loss)),
    "vmap": lambda: jax.vmap(jax.grad(loss), (None, 0)),
    "checkpoint": lambda: lambda w, x: jax.checkpoint(lambda w: jax.grad(loss)(w, x))(w),
    "aux": lambda: jax.grad(lambda w, x: (loss(w, x), {"name": "aux"}), has_aux=True),
    "keyword": lambda: lambda w, x: jax.grad(fun=loss, argnums=0)(w, x=x),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_gradient_is_lowered_once(way: Any, session: Session) -> None:
    own = way()
    seen = dots(lambda *args: jax.tree.leaves(own(*args))[0], W, X)
    assert seen == ["bf16", "bf16"]
    assert [plan.totals["by_format"]["bfloat16"] for plan in session.plans] == [2]


def test_a_gradient_in_a_scan_is_lowered_once(session: Session) -> None:
    step = lambda w, _: (w - 0.1 * jax.grad(loss)(w, X), None)  # noqa: E731
    assert dots(lambda w: jax.lax.scan(step, w, None, length=3), W) == ["bf16", "bf16"]


def test_the_gradient_is_that_of_autocast(session: Session) -> None:
    expected = PLAIN["value_and_grad"](polyamp.autocast(loss, "mixed_bfloat16"), (0, 1))(W, X)
    for own, other in zip(
        jax.tree.leaves(jax.value_and_grad(loss, argnums=(0, 1))(W, X)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(own, other)


def residual(w: Any, x: Any) -> Any:
    """Return a loss of derivatives only, as for a differential equation."""
    first = jax.vmap(jax.grad(loss, 1), (None, 0))(w, x)
    second = jax.vmap(jax.hessian(loss, 1), (None, 0))(w, x)
    along = jax.jvp(lambda x: loss(w, x), (x,), (x,))[1] + jax.linearize(lambda x: loss(w, x), x)[1](x)
    back = jax.vjp(lambda x: loss(w, x), x)[1](1.0)[0]
    return (first**2).mean() + (second**2).mean() + along + back.sum() + jax.jacrev(loss, 1)(w, x).sum()


EXPECTED = jax.grad(residual)(W, X)


def test_derivatives_inside_a_gradient_stay_in_float32(session: Session) -> None:
    assert set(dots(jax.grad(residual), W, X)) == {"f32"}
    np.testing.assert_allclose(jax.grad(residual)(W, X), EXPECTED, rtol=2e-5)
    both = dots(jax.grad(lambda w, x: residual(w, x) + loss(w, x)), W, X)
    assert both.count("bf16") == 2  # of the part without derivatives


@pytest.mark.parametrize("name", [*OTHER_DERIVATIVES, "vjp"])
def test_derivatives_of_other_kinds_are_as_without_a_policy(name: str, session: Session) -> None:
    own = (lambda w, x: jax.vjp(loss, w, x)[1](1.0)) if name == "vjp" else getattr(jax, name)(loss)
    assert set(dots(own, W, X)) == {"f32"}
    assert not session.plans


def test_second_derivatives_stay_in_float32(session: Session) -> None:
    own, plain = (grad(lambda a, grad=grad: (grad(loss)(a * W, X) ** 2).sum()) for grad in (jax.grad, PLAIN["grad"]))
    assert set(dots(own, 1.0)) == {"f32"}
    np.testing.assert_allclose(own(1.0), plain(1.0), rtol=1e-5)


SECOND: dict[str, Any] = {
    "jacfwd of grad": lambda w: jax.jacfwd(jax.grad(loss))(w, X),
    "jacrev of grad": lambda w: jax.jacrev(jax.grad(loss))(w, X),
    "hessian vector product": lambda w: jax.jvp(lambda w: jax.grad(loss)(w, X), (w,), (w,))[1],
    "reverse over reverse": lambda w: jax.vjp(lambda w: jax.grad(loss)(w, X), w)[1](w)[0],
    "linearize": lambda w: jax.linearize(lambda w: jax.grad(loss)(w, X), w)[1](w),
    "minimize": lambda w: minimize(lambda w: loss(w.reshape(4, 4), X), w.ravel(), method="BFGS").x,
}


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
def test_gradients_inside_other_derivatives_stay_in_float32(second: Any, session: Session) -> None:
    assert set(dots(second, W)) == {"f32"}
    assert not session.plans


@pytest.mark.skipif(not hasattr(jax, "make_user_context"), reason="JAX before 0.10 mixes such traces")
@pytest.mark.parametrize("first", ["alone", "within"])
def test_a_compiled_gradient_is_traced_apart_inside_another(first: str, session: Session) -> None:
    inner = jax.jit(lambda w: jax.grad(loss)(w, X))
    outer = jax.grad(lambda w: (inner(w) ** 2).sum())
    found = {"alone": lambda: set(dots(inner, W)), "within": lambda: set(dots(outer, W))}
    order = (first, "within" if first == "alone" else "alone")
    assert {name: found[name]() for name in order} == {"alone": {"bf16"}, "within": {"f32"}}


def test_float64_stays(session: Session) -> None:
    with jax.enable_x64(True):
        own, x = np.float64(W), np.float64(X)
        with pytest.warns(PolyampWarning, match="changed nothing"):
            seen = dots(jax.grad(loss), own, x)
    assert set(seen) == {"f64"}


def linen_model() -> Any:
    model = nn.Dense(4)
    params = model.init(jax.random.key(0), X)
    return params, jax.grad(lambda p, x: jnp.square(model.apply(p, x)).sum())


def haiku_model() -> Any:
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(4)(x)))
    return model.init(jax.random.key(0), X), jax.grad(lambda p, x: jnp.square(model.apply(p, x)).sum())


def nnx_model() -> Any:
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.grad(lambda model, x: jnp.square(model(x)).sum())


def equinox_model() -> Any:
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    return model, eqx.filter_grad(lambda model, x: jnp.square(jax.vmap(model)(x)).sum())


def optax_model() -> Any:
    def grad(w: Any, x: Any) -> Any:
        tx = optax.lbfgs()
        return optax.value_and_grad_from_state(loss)(w, x, state=tx.init(w))

    return W, grad


@pytest.mark.parametrize("make", [linen_model, haiku_model, nnx_model, equinox_model, optax_model])
def test_what_builds_on_jaxs_gradients_is_lowered(make: Any, session: Session) -> None:
    model, grad = make()
    grad(model, X)
    assert len(session.plans) == 1
    assert session.plans[0].totals["by_format"]["bfloat16"] >= 1


def test_an_nnx_module_keeps_its_changes(session: Session) -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.linear, self.norm = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.norm(self.linear(x))

    model = Model()
    nnx.jit(nnx.value_and_grad(lambda model, x: model(x).sum()))(model, X)
    assert np.abs(model.norm.mean[...]).max() > 0
    assert model.norm.mean[...].dtype == jnp.float32


def test_an_installed_package_differentiates_as_without_a_policy(session: Session) -> None:
    from scipy import _lib  # any installed package

    source = "import jax\ndef gradient(fun):\n    return jax.grad(fun)\n"
    space: dict[str, Any] = {}
    exec(compile(source, f"{_lib.__path__[0]}/sampler.py", "exec"), space)
    assert set(dots(space["gradient"](loss), W, X)) == {"f32"}
    assert any(note.startswith("scipy differentiates") for note in session.notes)


def test_polyamps_own_gradients_are_found(session: Session) -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16")
    with pytest.raises(UsageError, match=r"found:\s+polyamp\.value_and_grad"):
        polyamp.value_and_grad(loss, "mixed_float16")(tx.init(W), W, X)


OWN: dict[str, Any] = {
    "products": lambda: jax.grad(lambda w: (w.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).sum())(W),
    "DynamicScale": lambda: DynamicScale().value_and_grad(lambda w: loss(w, X))(W),
    "jmp.Policy": lambda: jmp.get_policy("c=f16"),
    "jmp.DynamicLossScale": lambda: jmp.DynamicLossScale(2.0),
}


@pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")
@pytest.mark.parametrize("name", OWN)
def test_mixed_precision_of_the_script_is_refused(name: str, session: Session) -> None:
    with pytest.raises(UsageError, match="mixed precision of its own"):
        OWN[name]()
    with pytest.raises(UsageError):  # nothing trains after a refusal that the script caught
        jax.grad(loss)(W, X)


def test_a_layer_with_a_dtype_is_refused(session: Session) -> None:
    model = nn.Dense(4, dtype=jnp.bfloat16)
    params = model.init(jax.random.key(0), X)
    with pytest.raises(UsageError, match="matmul in bfloat16"):
        jax.jit(jax.grad(lambda p: model.apply(p, X).sum()))(params)


@pytest.mark.parametrize("name", ["mixed_float16", "bfloat16", "O2"])
def test_a_policy_that_needs_state_is_refused_before_anything_runs(name: str) -> None:
    ran = []
    with running(Session(polyamp.policy(name))) as session:
        begin(session)
        with pytest.raises(UsageError, match="JAX script"):
            jax.grad(lambda w: ran.append(w) or loss(w, X))
    assert not ran


def test_a_branch_on_a_traced_value_is_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="cannot run under autocast"):
        jax.grad(lambda w: loss(w, X) if w[0, 0] > 0 else 0.0)(W)


@pytest.mark.parametrize("policy", [None, polyamp.policy("float32")])
def test_without_a_policy_nothing_changes(policy: Any) -> None:
    with running(Session(policy)) as session:
        begin(session)
        assert {name: getattr(jax, name) for name in PLAIN} == PLAIN


def test_functions_kept_from_a_run_are_plain_after_it() -> None:
    with running(Session(polyamp.policy("mixed_bfloat16"))) as session:
        begin(session)
        kept, made = jax.grad, jax.grad(loss)
    assert set(dots(kept(loss), W, X)) == set(dots(made, W, X)) == {"f32"}


def test_a_script_trains_digits(session: Session) -> None:
    task = digits_task(steps=60)
    params = {"a": jnp.asarray(task.weights["dense_kernel"][:64]), "b": jnp.zeros(10)}
    tx = optax.adam(1e-2)

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        logits = x.reshape(len(x), -1) @ params["a"] + params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def trained(grad: Any) -> list[float]:
        @jax.jit
        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            loss, grads = grad(loss_fn)(params, x, y)
            updates, state = tx.update(grads, state)
            return optax.apply_updates(params, updates), state, loss

        held, losses = (params, tx.init(params)), []
        for chosen in task.batches:
            *held, loss = step(*held, task.train_images[chosen], task.train_labels[chosen])
            losses.append(float(loss))
        return losses

    lowered = lambda fun: PLAIN["value_and_grad"](polyamp.autocast(fun, "mixed_bfloat16"))  # noqa: E731
    own, plain = trained(jax.value_and_grad), trained(PLAIN["value_and_grad"])
    assert own == trained(lowered)
    assert own != plain
    np.testing.assert_allclose(own, plain, rtol=0.02)
