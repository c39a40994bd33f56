"""What does it cost to be able to skip a step? Adam on float32 parameters, compiled, donated and not.

Every variant gets the same scaled gradients, tests them, unscales them, updates or skips, and advances its scale; the
yardstick is plain Adam, which does none of that. The temporary memory is what XLA plans for one step. On a GPU there
are 32 parameters of 4096x4096, a step of which reads and writes 15 GB: many times the size of caches, so that memory is
timed and not dispatch. ``--many`` takes 200 parameters of 64x64, as deep networks have them: there the time that XLA
takes to compile the step is of interest. Recipes of packages that are not installed are left out.

    python benchmarks/jax_skip.py [--many] [--rounds 30] [--within 60] [--small]
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import typer
from interleave import Budget, Timing, calls_in, interleave
from keeping import keep
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import polyamp
from polyamp.backends.jax import apply_gradients

BACKEND = jax.default_backend()
SHAPES = [(4096, 4096)] * 32 if BACKEND == "gpu" else [(1024, 1024)] * 8
SMALL = [(32, 32)] * 8
MANY = [(64, 64)] * 200
SCALE = 2.0**10
POLICY = polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale(init=SCALE))
ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)
CHECK_ONLY = "small sizes: a check that this program runs, not a result"
Shapes = list[tuple[int, int]]

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""``step(params, state, grads) -> (params, state)``; in this order, donated buffers are reused one for one."""


def installed(module: str) -> Any:
    """Return a module to compare with, or None if it is not installed."""
    found = importlib.util.find_spec(module.partition(".")[0])
    return importlib.import_module(module) if found else None


jmp, flax_scale = installed("jmp"), installed("flax.training.dynamic_scale")


def arrays(shapes: Shapes, value: float) -> list[jax.Array]:
    return [jnp.full(shape, value) for shape in shapes]


def plain(params: Any, state: Any, grads: Any, tx: Any = ADAM) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


Start = Callable[[Any], Any]
"""``start(params) -> state``."""


def ours(*, fused: bool, max_grad_norm: float | None = None) -> tuple[Step, Start]:
    tx = polyamp.wrap_optimizer(ADAM, POLICY, max_grad_norm=max_grad_norm)

    def step(params: Any, state: Any, grads: Any) -> Any:
        if fused:
            return apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, tx.init


def jmp_recipe(params: Any, state: Any, grads: Any) -> Any:
    """Step as in jmp's README: update always, then select. Its scale cannot be lowered ahead of time as a pytree."""
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
    """Return a loss with known gradients: ``DynamicScale`` does not take gradients."""
    return jnp.float32(0)


with_gradients.defvjp(lambda params, grads: (jnp.float32(0), grads), lambda grads, _: (grads, None))


def flax_recipe(params: Any, state: Any, grads: Any) -> Any:
    """Step as in flax's ImageNet example: update always, then ``jnp.where``."""
    scale, inner = state
    scale, finite, _, grads = scale.value_and_grad(with_gradients)(params, grads)
    new, new_inner = plain(params, inner, grads)
    params, inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (new, new_inner), (params, inner))
    return params, (scale, inner)


def variants() -> dict[str, tuple[Step, Start]]:
    made: dict[str, tuple[Step, Start]] = {
        "plain adam": (plain, ADAM.init),
        "cond, apply_gradients": ours(fused=True),
        "cond, update": ours(fused=False),
        "plain adam, clipped": (functools.partial(plain, tx=CLIPPED), CLIPPED.init),
        "cond, apply_gradients, clipped": ours(fused=True, max_grad_norm=1.0),
    }
    if jmp:
        made["jmp"] = (jmp_recipe, lambda params: (jnp.float32(SCALE), jnp.int32(0), ADAM.init(params)))
    if flax_scale:
        dynamic = flax_scale.DynamicScale
        made["flax DynamicScale"] = (flax_recipe, lambda params: (dynamic(scale=jnp.float32(SCALE)), ADAM.init(params)))
    return made


class Compiled(NamedTuple):
    """What XLA made of a step."""

    seconds: float
    """The time that it took."""
    temporary_bytes: int


Found = tuple[list[Timing], dict[str, Compiled]]


def measured(shapes: Shapes, donated: bool, rounds: int) -> Found:
    """Return timings of all variants, and how each was compiled."""
    grads, latest, made = arrays(shapes, SCALE * 1e-3), [], {}

    def runner(name: str, step: Step, start: Start) -> Callable[[], None]:
        params = arrays(shapes, 1.0)
        held = [params, start(params)]
        latest.append(held)
        jitted = jax.jit(step, donate_argnums=(0, 1) if donated else ())
        lowered, begin = jitted.lower(*held, grads), time.perf_counter()
        compiled = lowered.compile()
        made[name] = Compiled(time.perf_counter() - begin, compiled.memory_analysis().temp_size_in_bytes)

        def run() -> None:
            held[:] = compiled(*held, grads)

        return run

    def settle() -> None:
        jax.block_until_ready(latest)

    runs = {name: runner(name, *variant) for name, variant in variants().items()}
    question = f"adam, {'donated' if donated else 'not donated'}"
    return interleave(question, runs, rounds, calls_in(0.05, next(iter(runs.values())), settle), settle), made


def table(answers: dict[str, Found], shapes: Shapes) -> Table:
    """Return a table with a line for each variant: times, temporary memory and compilation, donated and not."""
    of_each = ("/ plain", "10-90 %", "temporary MB", "compiled in s")
    headings = [heading for way in answers for heading in (f"ms, {way}", *of_each)]
    count = sum(height * width for height, width in shapes) / 1e6
    title = f"Adam on {count:.1f} M float32 numbers in {len(shapes)} parameters, {BACKEND}"
    shown = Table("variant", *headings, title=title, box=SIMPLE_HEAD)
    for place, timing in enumerate(next(iter(answers.values()))[0]):
        cells = []
        for timings, made in answers.values():
            found, (seconds, temporary) = timings[place].summary(), made[timing.variant]
            low, high = found["ratio_10_to_90_percent"]
            cells += [f"{found['microseconds'] / 1e3:.3f}", f"{found['ratio']:.3f}", f"{low:.3f}-{high:.3f}"]
            cells += [f"{temporary / 1e6:.1f}", f"{seconds:.1f}"]
        shown.add_row(timing.variant, *cells)
    return shown


def main(
    rounds: Annotated[int, typer.Option(min=2, help="How often each is timed.")] = 30,
    within: Annotated[float | None, typer.Option(help="Seconds after which nothing more is started.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny parameters: a check that this runs.")] = False,
    many: Annotated[bool, typer.Option("--many", help="200 parameters of 64x64.")] = False,
) -> None:
    """Measure, print a table, and keep the numbers in results/jax_skip[_many]_<backend>.json, donated first."""
    budget = Budget(within)
    shapes = MANY if many else SMALL if small else SHAPES
    packages = [package for package in (polyamp, jax, optax, jmp, installed("flax")) if package]
    versions = {package.__name__: getattr(package, "__version__", "") for package in packages}
    versions["device"] = jax.devices()[0].device_kind
    answers: dict[str, Found] = {}
    numbers: dict[str, Any] = {"check_only": small and CHECK_ONLY, "shapes": [list(shape) for shape in shapes]}
    for way in ("donated", "not donated"):
        if budget.left > 0:
            answers[way] = measured(shapes, way == "donated", 2 if small else rounds)
            numbers["timings"] = [timing.summary() for timings, _ in answers.values() for timing in timings]
            numbers["compiled"] = {
                way: {name: one._asdict() for name, one in made.items()} for way, (_, made) in answers.items()
            }
            keep(f"jax_skip_{'many_' * many}{'small' if small else BACKEND}", versions, numbers)
    Console(width=190).print(table(answers, shapes))


if __name__ == "__main__":
    typer.run(main)
