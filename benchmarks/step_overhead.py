"""What does loss scaling add to an optimizer step? Many small parameters, so that overhead is nearly all of the time.

Every variant gets the same gradients and does all of a step: scale the loss, unscale, test, update, advance the
scale. The first variant of each question is the yardstick: the plain step, or in JAX scaling written by hand.

    python benchmarks/step_overhead.py [torch|jax|keras ...] [--small]
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from interleave import Timing, interleave
from keeping import keep_timings, publish

import polyamp

SHAPE = (16, 16)
SETTINGS = polyamp.LossScale(init=1.0)  # otherwise unscaling in place would shrink the gradients to zero
COUNTS = (100, 1000)
SMALL = "--small" in sys.argv  # a check that this program runs, not a result
ROUNDS, CALLS = (2, 200) if SMALL else (40, 4000)


def torch_steps(count: int) -> list[Timing]:
    import torch

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [timing for device in devices for timing in torch_steps_on(device, count)]


def torch_steps_on(device: str, count: int) -> list[Timing]:
    import torch

    from polyamp.backends.torch import GradScaler

    torch.set_num_threads(1)

    def params() -> list[torch.Tensor]:
        made = [torch.randn(SHAPE, device=device).requires_grad_() for _ in range(count)]
        for param in made:
            param.grad = torch.randn(SHAPE, device=device) * 1e-3
        return made

    def with_scaler(optimizer: torch.optim.Optimizer, kind: type[torch.amp.GradScaler]) -> Callable[[], Any]:
        scaler = kind(device, init_scale=1.0)

        def step() -> None:
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update()

        return step

    def ours(optimizer: torch.optim.Optimizer, policy: str, settings: polyamp.LossScale) -> Callable[[], Any]:
        wrapped = polyamp.wrap_optimizer(optimizer, policy, loss_scale=settings)
        first = optimizer.param_groups[0]["params"][0]

        def step() -> None:
            wrapped.scale(loss)
            first.grad.add_(0)  # else these would be the gradients of the last step, which is refused
            wrapped.step(scaled=True)

        return step

    loss = torch.tensor(1.0, device=device)
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    timings: list[Timing] = []
    kinds = {
        "SGD": lambda: torch.optim.SGD(params(), lr=1e-4),
        "SGD fused": lambda: torch.optim.SGD(params(), lr=1e-4, fused=True),
        "AdamW": lambda: torch.optim.AdamW(params(), lr=1e-4, foreach=True),
        "AdamW fused": lambda: torch.optim.AdamW(params(), lr=1e-4, fused=True),
    }
    for kind, make in kinds.items():
        variants = {
            "plain": make().step,
            "torch.amp.GradScaler": with_scaler(make(), torch.amp.GradScaler),
            "polyamp.backends.torch.GradScaler": with_scaler(make(), GradScaler),
            "polyamp": ours(make(), "mixed_float16", SETTINGS),
            "polyamp, bfloat16": ours(make(), "mixed_bfloat16", polyamp.LossScale.skip_nonfinite()),
            "polyamp, bfloat16, nothing checked": ours(make(), "mixed_bfloat16", polyamp.LossScale.none()),
        }
        timings += interleave(f"torch {device} {kind}, {count} parameters", variants, ROUNDS, CALLS // count, settle)
    return timings


def installed(package: str) -> Any:
    """Return a package to compare with, or None if it is not installed."""
    return importlib.import_module(package) if importlib.util.find_spec(package) else None


def jax_steps(count: int) -> list[Timing]:
    import jax
    import jax.numpy as jnp
    import optax

    from polyamp.backends.jax import apply_gradients

    grads = [jnp.full(SHAPE, 1e-3) for _ in range(count)]
    tx = optax.sgd(1e-4)
    wrapped = polyamp.wrap_optimizer(tx, "mixed_float16", loss_scale=SETTINGS)
    latest: list[Any] = []

    def fresh() -> list[jax.Array]:
        return [jnp.ones(SHAPE) for _ in range(count)]

    def runner(step: Callable[..., Any], state: Any) -> Callable[[], None]:
        compiled, held = jax.jit(step, donate_argnums=(0, 1)), [fresh(), state]

        def run() -> None:
            held[:] = compiled(held[0], held[1], grads)

        latest.append(held)
        return run

    def applied(optimizer: Any) -> Callable[..., Any]:
        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return step

    variants = {
        "by hand": runner(jax_by_hand(tx), (jnp.float32(1), jnp.int32(0), tx.init(fresh()))),
        "plain": runner(applied(tx), tx.init(fresh())),
        "polyamp update": runner(applied(wrapped), wrapped.init(fresh())),
        "polyamp apply_gradients": runner(
            lambda params, state, grads: apply_gradients(wrapped, grads, state, params), wrapped.init(fresh())
        ),
    }
    if count <= 100 and (
        jmp := installed("jmp")
    ):  # XLA takes minutes to compile the recipe for more: 117 s for 400 parameters where ours takes 2 s
        variants["jmp"] = runner(jax_with_jmp(tx), (jmp.DynamicLossScale(jnp.float32(1)), tx.init(fresh())))
    question = f"jax {jax.default_backend()} jit sgd, {count} parameters"
    return interleave(question, variants, ROUNDS, CALLS // count, lambda: jax.block_until_ready(latest))


def jax_by_hand(tx: Any) -> Callable[..., Any]:
    """Step with the tightest loss scaling by hand: one conditional around update and apply."""
    import jax
    import jax.numpy as jnp
    import optax

    def step(params: Any, state: Any, grads: Any) -> Any:
        scale, good, inner = state
        finite = jnp.array(True)
        for grad in grads:
            finite &= jnp.isfinite(grad).all()

        def update(operand: Any) -> Any:
            params, inner = operand
            updates, inner = tx.update([grad / scale for grad in grads], inner, params)
            return optax.apply_updates(params, updates), inner

        params, inner = jax.lax.cond(finite, update, lambda operand: operand, (params, inner))
        grow = finite & (good + 1 >= 2000)
        grown, reduced = jnp.minimum(scale * 2, 2.0**24), jnp.maximum(scale / 2, 2.0**-14)
        scale = jnp.where(finite, jnp.where(grow, grown, scale), reduced)
        return params, (scale, jnp.where(finite & ~grow, good + 1, 0), inner)

    return step


def jax_with_jmp(tx: Any) -> Callable[..., Any]:
    """Step with the recipe of jmp's README: update always, then select."""
    import jmp
    import optax

    def step(params: Any, state: Any, grads: Any) -> Any:
        scale, inner = state
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_inner = tx.update(grads, inner, params)
        new_params, new_inner = jmp.select_tree(
            finite, (optax.apply_updates(params, updates), new_inner), (params, inner)
        )
        return new_params, (scale.adjust(finite), new_inner)

    return step


def keras_steps(count: int) -> list[Timing]:
    import keras
    import tensorflow as tf

    grads = [tf.fill(SHAPE, 1e-3) for _ in range(count)]

    def runner(wrap: Callable[[Any], Any]) -> Callable[[], Any]:
        variables = [keras.Variable(tf.ones(SHAPE)) for _ in range(count)]
        optimizer = wrap(keras.optimizers.SGD(1e-4))
        optimizer.build(variables)

        @tf.function
        def step() -> None:
            optimizer.scale_loss(tf.constant(1.0))
            optimizer.apply(grads, variables)

        return step

    variants = {
        "plain": runner(lambda optimizer: optimizer),
        "keras LossScaleOptimizer": runner(lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer, 1.0)),
        "polyamp": runner(lambda optimizer: polyamp.wrap_optimizer(optimizer, "mixed_float16", loss_scale=SETTINGS)),
    }
    return interleave(f"keras tensorflow SGD, {count} parameters", variants, ROUNDS, CALLS // count)


QUESTIONS = {"torch": torch_steps, "jax": jax_steps, "keras": keras_steps}

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--small"]
    chosen = words or list(QUESTIONS)
    result = "_".join(["step_overhead", *words, *(["small"] if SMALL else [])])
    versions = {name: polyamp.adapters.adapter_named(name).describe()["version"] for name in chosen}
    answers: list[Timing] = []
    for name in chosen:
        for count in COUNTS[:1] if SMALL else COUNTS:
            answers += QUESTIONS[name](count)
            keep_timings(result, answers, {"polyamp": polyamp.__version__, **versions})
    publish(result, answers, {"polyamp": polyamp.__version__, **versions})
