"""What does it cost to be able to skip a step? Adam on 8.4 million float32 parameters, compiled, donated and not.

Every variant gets the same scaled gradients, tests them, unscales them, updates or skips, and advances its scale; the
yardstick is plain Adam, which does none of that. The temporary memory is what XLA plans for one step.

    python benchmarks/jax_skip.py [rounds]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale
from interleave import RESULTS, Timing, interleave, publish
from rich.console import Console
from rich.table import Table

import polyamp
from polyamp.backends.jax import apply_gradients

SHAPES = [(1024, 1024)] * 8
SCALE = 2.0**10
POLICY = polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale(init=SCALE))
ADAM = optax.adam(1e-3)

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""``step(params, state, grads) -> (params, state)``; in this order, donated buffers are reused one for one."""


def arrays(value: float) -> list[jax.Array]:
    return [jnp.full(shape, value) for shape in SHAPES]


def plain(params: Any, state: Any, grads: Any) -> Any:
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def ours(skip: str, *, fused: bool) -> tuple[Step, Any]:
    tx = polyamp.wrap_optimizer(ADAM, POLICY, skip=skip)

    def step(params: Any, state: Any, grads: Any) -> Any:
        if fused:
            return apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, tx.init(arrays(1.0))


def jmp_recipe(params: Any, state: Any, grads: Any) -> Any:
    """As jmp's README has it: update always, then select. Its scale cannot be lowered ahead of time as a pytree."""
    value, counter, inner = state
    scale = jmp.DynamicLossScale(value, counter)
    grads = scale.unscale(grads)
    finite = jmp.all_finite(grads)
    new, new_inner = plain(params, inner, grads)
    params, inner = jmp.select_tree(finite, (new, new_inner), (params, inner))
    scale = scale.adjust(finite)
    return params, (scale.loss_scale, scale.counter, inner)


@jax.custom_vjp
def with_gradients(params: Any, grads: Any) -> jax.Array:
    """A loss whose gradients are given: ``DynamicScale`` takes none that are there already."""
    return jnp.float32(0)


with_gradients.defvjp(lambda params, grads: (jnp.float32(0), grads), lambda grads, _: (grads, None))


def flax_recipe(params: Any, state: Any, grads: Any) -> Any:
    """As flax's ImageNet example has it: update always, then ``jnp.where``."""
    scale, inner = state
    scale, finite, _, grads = scale.value_and_grad(with_gradients)(params, grads)
    new, new_inner = plain(params, inner, grads)
    params, inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (new, new_inner), (params, inner))
    return params, (scale, inner)


def variants() -> dict[str, tuple[Step, Any]]:
    inner = ADAM.init(arrays(1.0))
    return {
        "plain adam": (plain, inner),
        "cond, apply_gradients": ours("cond", fused=True),
        "cond, update": ours("cond", fused=False),
        "select, apply_gradients": ours("select", fused=True),
        "jmp": (jmp_recipe, (jnp.float32(SCALE), jnp.int32(0), inner)),
        "flax DynamicScale": (flax_recipe, (DynamicScale(scale=jnp.float32(SCALE)), inner)),
    }


def measured(donated: bool, rounds: int) -> tuple[list[Timing], dict[str, int]]:
    """Timings of all variants, and the temporary bytes that each needs."""
    grads, latest, temporary = arrays(SCALE * 1e-3), [], {}

    def runner(name: str, step: Step, state: Any) -> Callable[[], None]:
        held = [arrays(1.0), jax.tree.map(jnp.copy, state)]
        latest.append(held)
        jitted = jax.jit(step, donate_argnums=(0, 1) if donated else ())
        compiled = jitted.lower(*held, grads).compile()
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes

        def run() -> None:
            held[:] = compiled(*held, grads)

        return run

    runs = {name: runner(name, *variant) for name, variant in variants().items()}
    question = f"adam, {'donated' if donated else 'not donated'}"
    return interleave(question, runs, rounds, 2, lambda: jax.block_until_ready(latest)), temporary


def publish_memory(name: str, temporary: dict[str, dict[str, int]]) -> None:
    """Print the temporary memory, and add it to the results."""
    table = Table("temporary megabytes", *temporary)
    for variant in next(iter(temporary.values())):
        table.add_row(variant, *(f"{column[variant] / 1e6:.1f}" for column in temporary.values()))
    Console().print(table)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temporary_bytes": temporary}, indent=2) + "\n")


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    answers = {donated: measured(donated, count) for donated in (True, False)}
    result = f"jax_skip_{jax.default_backend()}"
    installed = {package.__name__: package.__version__ for package in (polyamp, jax, optax, flax)}
    installed["device"] = jax.devices()[0].device_kind
    publish(result, [timing for timings, _ in answers.values() for timing in timings], installed)
    publish_memory(result, {"donated" if donated else "not donated": kept for donated, (_, kept) in answers.items()})
