"""Programs with one planted fault each, in all frameworks, and the findings of `polyamp.lint`."""

from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch
import torch.nn.functional as F
from flax.training.dynamic_scale import DynamicScale
from torch import nn

import polyamp
from polyamp.backends.tensorflow import LossScaler

F16 = polyamp.policy("mixed_float16")
RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(shape).astype(np.float32) for shape in ((16, 8), (8, 24)))
LABELS = np.arange(16) % 24
MILLION = 2**20  # rows of a loss
v1 = tf.compat.v1


def linear(columns: int = 24) -> nn.Module:
    return nn.Linear(8, columns)


def t(fn: Callable[..., Any]) -> Callable[[], Any]:
    """Return a planted program of PyTorch, given a function of its weight and its input."""
    weight = torch.tensor(W, requires_grad=True)
    return lambda: (lambda x: fn(weight, x), torch.tensor(X))


def j(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: (fn, *(args or (W, X)))


def f(fn: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: (lambda x: fn(tf.constant(W), x), tf.constant(X))


def in_scope(scope: Any, cast: Callable[[Any], Any], w: Any, x: Any) -> Any:
    with scope("mine"):
        low = cast(x)
    return (low @ cast(w)).sum() if scope is jax.named_scope else tf.reduce_sum(low @ cast(w))


class Casting(nn.Module):
    """Casts in its own code; what follows another tensor's dtype is the policy's choice."""

    def __init__(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.to = linear(), to

    def forward(self, x: Any) -> Any:
        low = self.inner(x)
        return (self.to(low) * 2).float().mean() + x.to(low.dtype).mean()


def torch_step() -> Any:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.tensor(X)), torch.tensor(LABELS)).backward()
        optimizer.step()

    return (step,)


def jax_loss(reduce: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda w, x: reduce(optax.softmax_cross_entropy_with_integer_labels(x @ w, LABELS))


WEIGHT, SCALER, LAYER = tf.Variable(W), LossScaler(F16), keras.layers.Dense(8, dtype="mixed_float16")
HALF = tf.Variable(tf.ones((8, 8), tf.float16), name="half_weight")


def tf_step(x: Any) -> Any:
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS, x @ WEIGHT)
        loss = tf.reduce_mean(losses)
    return tape.gradient(loss, WEIGHT)


# The program and its arguments; the codes that lint finds, and a part of the report.
PROGRAMS: dict[str, tuple[Callable[[], Any], list[str], str]] = {
    "torch, nothing": (t(lambda w, x: (x @ w).mean()), [], "nothing found"),
    "jax, nothing": (j(lambda w, x: (x @ w).mean()), [], "nothing found"),
    "tensorflow, nothing": (f(lambda w, x: tf.reduce_mean(x @ w)), [], "nothing found"),
    # Casts.
    "torch, to": (lambda: (Casting(torch.Tensor.bfloat16), torch.tensor(X)), ["foreign-cast"], "bfloat16 to bfloat16"),
    "torch, half": (lambda: (Casting(torch.Tensor.half), torch.tensor(X)), ["manual-cast"], "test_lint.py:"),
    "jax, to": (j(lambda *a: in_scope(jax.named_scope, lambda y: y.astype("bfloat16"), *a)), ["foreign-cast"], "mine "),
    "jax, half": (j(lambda *a: in_scope(jax.named_scope, jnp.float16, *a)), ["manual-cast"], "mine test_lint.py:"),
    "tensorflow, to": (
        f(lambda *a: in_scope(tf.name_scope, lambda y: tf.cast(y, tf.bfloat16), *a)),
        ["foreign-cast"],
        "mine/Cast test_lint.py:",
    ),
    "tensorflow, a layer's": (f(lambda w, x: LAYER(x)), [], ""),
    "jax, autocast's": (j(polyamp.autocast(lambda w, x: (x @ w).mean(), F16)), [], ""),
    # Sizes.
    "torch, linear": (lambda: (linear(20), torch.tensor(X)), ["unaligned"], "sizes of 20:"),
    "torch, rows": (lambda: (linear(), torch.tensor(X[:10])), ["unaligned"], "sizes of 10:"),
    "torch, rows of two axes": (lambda: (linear(), torch.tensor(X[:12].reshape(4, 3, 8))), ["unaligned"], "of 12:"),
    "torch, itself": (t(lambda w, x: torch.bmm(x[None, :8], x[None, :8]) @ w[None]), [], ""),
    "torch, conv": (lambda: (nn.Conv2d(4, 10, 3, groups=2), torch.ones(2, 4, 9, 9)), ["unaligned"], "of 10:"),
    "torch, conv_transpose": (lambda: (nn.ConvTranspose2d(10, 8, 3), torch.ones(2, 10, 9, 9)), ["unaligned"], "of 10:"),
    "torch, einsum": (t(lambda w, x: torch.einsum("bi,ij->bj", x[:10], w)), ["unaligned"], "sizes of 10:"),
    "torch, addmm": (t(lambda w, x: torch.addmm(w[0, :20], x, w[:, :20])), ["unaligned"], "sizes of 20:"),
    "torch, attention": (
        t(lambda w, x: F.scaled_dot_product_attention(*[x.reshape(1, 2, 8, 8)] * 2, x[:10].reshape(1, 2, 8, 5))),
        [],
        "",
    ),
    "torch, recorded": (
        lambda: (lambda x: linear(20)(x) * x.sum().item(), torch.tensor(X)),
        ["unaligned"],
        "sizes of 20:",
    ),
    "jax, dot": (j(lambda w, x: x @ w[:, :20]), ["unaligned"], "sizes of 20:"),
    "jax, batched": (j(lambda w, x: jnp.einsum("bik,bkj->bij", x[:, None, :], w[None] * x[:, :, None])), [], ""),
    "jax, conv": (
        lambda: (flax.linen.Conv(20, (3, 3)).apply, jax.eval_shape(conv_params), jnp.ones((2, 8, 8, 8))),
        ["unaligned"],
        "sizes of 20:",
    ),
    "tensorflow, matmul": (f(lambda w, x: tf.matmul(x, w[:, :20])), ["unaligned"], "sizes of 20:"),
    "tensorflow, einsum": (
        f(lambda w, x: tf.einsum("bqd,dhk->bqhk", x[None], tf.reshape(w[:, :20], (8, 2, 10)))),
        ["unaligned"],
        "sizes of 20:",
    ),
    "tensorflow, conv": (
        f(lambda w, x: tf.nn.conv2d(x[None, :, :, None], tf.ones((3, 3, 1, 20)), 1, "SAME")),
        ["unaligned"],
        "sizes of 20:",
    ),
    # Losses: 24 classes, of which each keeps what rounds to zero.
    "torch, cross_entropy": (
        t(lambda w, x: F.cross_entropy((x @ w).T[None], torch.tensor(LABELS)[None])),
        ["stuck-loss"],
        "24 classes, averaged over 1048576 rows",
    ),
    "torch, log_softmax": (t(lambda w, x: (x @ w).log_softmax(-1).mean()), ["stuck-loss"], "24 classes"),
    "torch, step": (torch_step, ["optimizer-not-wrapped", "stuck-loss"], "24 classes"),
    "jax, cross_entropy": (j(jax_loss(jnp.mean)), ["stuck-loss"], "24 classes"),
    "jax, log_softmax": (j(lambda w, x: jax.nn.log_softmax(x @ w).mean()), ["stuck-loss"], "24 classes"),
    "jax, softmax": (j(lambda w, x: (jax.nn.softmax(x @ w) @ w.T).mean()), [], ""),
    "tensorflow, step": (lambda: (tf_step, tf.constant(X)), ["stuck-loss"], "24 classes"),
    # Parameters.
    "torch, half parameters": (lambda: (linear().half(),), ["no-masters"], "weight, bias"),
    "jax, half parameters": (j(lambda p, x: x @ p["w"], {"w": jnp.ones((8, 8), "float16")}, X), ["no-masters"], "w"),
    "jax, in a state": (lambda: ({"params": {"w": jnp.ones(8, "bfloat16")}},), ["no-masters"], "params/w"),
    "jax, large parameters": (
        j(lambda p, x: (x @ p["w"]) * p["std"], {"w": W, "std": np.full(24, 1e5, np.float32)}, X),
        ["beyond-format"],
        "std",
    ),
    "tensorflow, half parameters": (
        lambda: (lambda x: tf.cast(x, tf.float16) @ HALF, tf.constant(X)),
        ["no-masters", "manual-cast"],
        "half_weight",
    ),
}
STUCK = polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale.fixed(2.0**-2))


def conv_params() -> Any:
    return flax.linen.Conv(20, (3, 3)).init(jax.random.key(0), jnp.ones((2, 8, 8, 8)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_planted_fault_is_found_and_nothing_else(name: str) -> None:
    program, codes, text = PROGRAMS[name]
    report = polyamp.lint(*program(), policy=STUCK, rows=MILLION, backend=name.partition(",")[0])
    assert [one.code for one in report] == codes, report
    assert text in str(report)


def tf_scaled_step(x: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = SCALER.scale(tf.reduce_mean(x @ WEIGHT))
    return SCALER.step(v1.train.GradientDescentOptimizer(0.1), [(tape.gradient(loss, WEIGHT), WEIGHT)]).applied


def in_closure(make: Callable[[Any], Any]) -> Any:
    model = linear()
    held = make(torch.optim.SGD(model.parameters(), lr=0.1))
    return (lambda: (model(torch.tensor(X)).float().mean(), held),)


def jax_state(tx: Any) -> Any:
    return lambda w, state, x: x @ w, W, tx.init(W), X


TORCH, JAX = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), optax.sgd(0.1)
MODEL: Any = (lambda x: x @ torch.tensor(W), torch.tensor(X))
PURE: Any = (lambda w, x: x @ w, W, X)
TRACED: Any = (lambda x: x @ tf.constant(W), tf.constant(X))
# A call of lint, its optimizer, and whether the optimizer is reported.
OPTIMIZERS: list[tuple[str, Any, Any, bool]] = [
    ("torch", MODEL, None, False),
    ("torch", MODEL, TORCH, True),
    ("torch", MODEL, torch.amp.GradScaler("cpu"), False),
    ("torch", MODEL, (TORCH, torch.amp.GradScaler("cpu", enabled=False)), True),
    ("torch", MODEL, (TORCH, torch.amp.GradScaler("cpu")), False),
    ("torch", in_closure(lambda optimizer: optimizer), None, True),
    ("torch", in_closure(lambda optimizer: torch.amp.GradScaler("cpu")), None, False),
    ("torch", in_closure(lambda optimizer: polyamp.wrap_optimizer(optimizer, F16)), None, False),
    ("jax", PURE, None, False),
    ("jax", PURE, JAX, True),
    ("jax", PURE, JAX.init(W), True),
    ("jax", PURE, DynamicScale(), False),
    ("jax", PURE, polyamp.wrap_optimizer(JAX, F16), False),
    ("jax", jax_state(polyamp.wrap_optimizer(JAX, F16)), None, False),
    ("tensorflow", TRACED, v1.train.GradientDescentOptimizer(0.1), True),
    ("tensorflow", TRACED, keras.optimizers.SGD(), True),
    ("tensorflow", TRACED, polyamp.wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), F16), False),
    ("tensorflow", TRACED, LossScaler(F16), False),
    ("tensorflow", TRACED, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), False),
    (
        "tensorflow",
        TRACED,
        v1.mixed_precision.MixedPrecisionLossScaleOptimizer(v1.train.GradientDescentOptimizer(0.1), "dynamic"),
        False,
    ),
    ("tensorflow", (tf_scaled_step, tf.constant(X)), v1.train.GradientDescentOptimizer(0.1), False),
]


@pytest.mark.parametrize(("backend", "call", "optimizer", "plain"), OPTIMIZERS)
def test_an_optimizer_that_does_not_scale_is_found(backend: str, call: Any, optimizer: Any, plain: bool) -> None:
    report = polyamp.lint(*call, policy=F16, optimizer=optimizer, backend=backend)
    assert [one.code for one in report] == ["optimizer-not-wrapped"] * plain, report


def test_masters_of_the_optimizer_count() -> None:
    model = polyamp.convert(linear(), "O2")
    own = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "O2")
    params, tx = {"w": jnp.ones((8, 8), "float16")}, polyamp.wrap_optimizer(optax.adam(0.1), F16)
    legacy = polyamp.wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), F16)
    module = tf.Module()
    module.weight = HALF
    without = polyamp.wrap_optimizer(optax.sgd(0.1), F16, master_weights=False)
    found = [
        [one.code for one in polyamp.lint(target, policy=F16, optimizer=optimizer)]
        for target, optimizer in (
            *((model, one) for one in (own, None)),
            *((params, one) for one in (tx, tx.init(params), without)),
            *((module, one) for one in (legacy, None)),
        )
    ]
    assert found == [[], ["no-masters"], [], [], ["no-masters"], [], ["no-masters"]]


def test_a_training_step_is_looked_at_up_to_its_update_and_undone() -> None:
    (step,) = torch_step()
    model = step.__closure__[0].cell_contents
    before = [param.tolist() for param in model.parameters()]
    assert [one.code for one in polyamp.lint(step, policy=F16)] == ["optimizer-not-wrapped"]
    assert [param.tolist() for param in model.parameters()] == before
    assert {param.grad for param in model.parameters()} == {None}


def test_of_a_rewritten_function_its_plan_is_judged() -> None:
    model, x = linear(20), torch.tensor(X)
    fast = polyamp.rewrite(model, x, policy="mixed_bfloat16")
    assert "matmul in bfloat16" in str(polyamp.lint(fast, x, policy="mixed_bfloat16"))
    faster = polyamp.rewrite(lambda w, x: x @ w[:, :20], W, X, policy=F16, backend="jax")
    assert "matmul in float16" in str(polyamp.lint(faster, W, X, policy=F16))


def test_what_cannot_be_planned_is_refused_with_the_reason() -> None:
    with pytest.raises(polyamp.errors.UsageError, match="reads the value of a traced array"):
        polyamp.lint(lambda w, x: x if x.sum() > 0 else w, jnp.asarray(W), jnp.asarray(X), policy=F16)


def test_the_policy_is_the_optimizers_where_none_is_given() -> None:
    model = linear()
    wrapped = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "mixed_bfloat16")
    tx = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_bfloat16")
    legacy = polyamp.wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), "mixed_bfloat16")
    targets = ((model, wrapped), ({"w": W}, tx), ({"w": W}, tx.init({"w": W})), (tf.Module(), legacy))
    for target, optimizer in targets:
        assert polyamp.lint(target, optimizer=optimizer).policy == "mixed_bfloat16"
    assert polyamp.lint(model, optimizer=wrapped, policy=F16).policy == str(polyamp.policy(F16))
