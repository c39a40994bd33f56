"""Time whole training steps in JAX, in float32 and in 16 bits: by hand, by jmp's recipe and by polyamp.

GPT-2 of 124 M and ViT-B/16 in flax, with AdamW and clipping, compiled, and their state donated. Float32 is measured at
the precision ``highest`` (IEEE) and ``tensorfloat32``. By hand is flax's ``dtype=``, with its `DynamicScale` in
float16.

    python benchmarks/jax_end_to_end.py --model gpt2 --within 540 [--small] [--plot jax_end_to_end.png]
    python benchmarks/jax_end_to_end.py --model gpt2 --losses 200

The second command trains every variant for 200 steps on equal batches, and compares the losses instead of the times.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import statistics
import time
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import typer
from budget import Budget
from interleave import console
from jax_published import TASKS, State, Way, missing, ways
from keeping import Keeper, Row
from whole_steps import BATCHES, Case, chosen, draw, format_of, losses_table, rates, settled, table, trained

import polyamp

ON_CPU = jax.default_backend() == "cpu"
CHECK_ONLY = "small sizes on a CPU: a check that this program runs, not a result"
SECONDS = 40.0  # expected to compile a variant, until one was compiled
EACH = 0.4  # seconds for a variant in each round
PEAKS = {
    "float32": (jnp.float32, "highest"),
    "TF32": (jnp.float32, "tensorfloat32"),
    "bfloat16": (jnp.bfloat16, None),
    "float16": (jnp.float16, None),
}


class Loop:
    """A compiled training step, its state and its batch."""

    def __init__(self, way: Way, params: Any, batch: Any) -> None:
        self.way, self.batch = way, batch
        self.state: State = way.start(jax.tree.map(jnp.copy, params))
        with precision(way.precision):
            self.lowered = jax.jit(way.step, donate_argnums=0).lower(self.state, batch)
        self.compiled = self.lowered.compile()

    def __call__(self) -> jax.Array:
        self.state, loss = self.compiled(self.state, self.batch)
        return loss

    def loss_scale(self) -> float | None:
        found = self.way.loss_scale(self.state)
        return None if found is None else float(found)

    def memory(self) -> Row:
        """Return the bytes that the compiled step needs in addition to its arguments, and in all; None if unknown."""
        known = self.compiled.memory_analysis()
        if known is None:
            return {"temp_bytes": None, "peak_bytes": None}
        total = known.argument_size_in_bytes + known.output_size_in_bytes - known.alias_size_in_bytes
        return {"temp_bytes": known.temp_size_in_bytes, "peak_bytes": total + known.temp_size_in_bytes}


class Measured(NamedTuple):
    """A loop that has been compiled and warmed up, with the measurements of that."""

    loop: Loop
    meters: Row


def precision(name: str | None) -> Any:
    """Return a context with this precision of float32 products in traced programs; None is JAX's default."""
    return jax.default_matmul_precision(name) if name else contextlib.nullcontext()


@cache
def params_of(name: str, small: bool) -> Any:
    """Return the first parameters, the same for every variant."""
    return TASKS[name].params(small)


def make(name: str, small: bool, variant: str) -> Loop:
    task = TASKS[name]
    return Loop(ways(task, small)[variant](), params_of(name, small), task.batch(small, 0))


def build(name: str, small: bool, variant: str) -> Measured:
    start = time.perf_counter()
    loop = make(name, small, variant)
    compiled = time.perf_counter() - start
    meters = loop.memory() | {"first_steps": settled(loop), "build_seconds": round(compiled, 1)}
    return Measured(loop, meters)


@cache
def step_operations(name: str, small: bool) -> float | None:
    """Return XLA's count of operations in the float32 step before optimization: the same for all variants."""
    way = ways(TASKS[name], small)["float32"]()
    arguments = (way.start(params_of(name, small)), TASKS[name].batch(small, 0))
    known = jax.jit(way.step).lower(*arguments).cost_analysis()
    return None if known is None else known["flops"]


def matmul_peaks(size: int) -> dict[str, float]:
    """Return the measured operations per second of one large product in each format (not the promised ones)."""
    return {name: _matmul_rate(size, dtype, how) for name, (dtype, how) in PEAKS.items()}


def _matmul_rate(size: int, dtype: Any, how: str | None) -> float:
    one = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    with precision(how):
        product = jax.jit(lambda left, right: left @ right).lower(one, one).compile()
    taken = []
    for _ in range(13):
        start = time.perf_counter()
        jax.block_until_ready([product(one, one) for _ in range(5)])
        taken.append((time.perf_counter() - start) / 5)
    return 2 * size**3 / statistics.median(taken[3:])


def variants(case: Case) -> list[str]:
    """Return the variants that can run here; IEEE float32 is last, and left out if time runs out."""
    known = [
        "TF32",
        *(f"{way} {low}" for low in ("bfloat16", "float16") for way in ("flax", "jmp", "polyamp")),
        "float32",
    ]
    for variant in known:
        if reason := missing(variant):
            case.keeper.leave_out(case.place(variant), reason)
    return [variant for variant in known if not missing(variant)]


def times(case: Case, small: bool, rounds: int, peaks: dict[str, float]) -> None:
    """Compile every variant, time them in turns, and keep a row for each."""
    seconds = 0.01 if small else EACH
    counted = case.attempt(lambda: step_operations(case.model, small))
    made = case.each(variants(case), SECONDS, rounds * seconds, lambda variant: build(case.model, small, variant))
    loops = {variant: made[variant].loop for variant in ways(TASKS[case.model], small) if variant in made}
    samples = TASKS[case.model].samples(small)

    def rows() -> Iterator[Row]:
        for row in case.timed(loops, rounds, seconds):
            variant = row["variant"]
            yield row | made[variant].meters | rates(row, samples, counted, peaks[format_of(variant)])

    held.extend(loops.values())
    if loops:
        case.attempt(lambda: case.keeper.add(rows()))
    held.clear()


held: list[Loop] = []  # `settle` waits for these


def settle() -> None:
    jax.block_until_ready([loop.state for loop in held])


def losses(case: Case, small: bool, steps: int) -> None:
    """Train every variant for ``steps`` steps on equal batches, and keep a row for each."""
    batches = [TASKS[case.model].batch(small, seed) for seed in range(1, BATCHES + 1)]

    def train(variant: str) -> bool:
        row = trained(make(case.model, small, variant), batches, steps)
        case.keeper.add([case.place(variant) | row])
        return True

    case.each(variants(case), SECONDS + 0.3 * steps, 0.0, train)


def versions() -> dict[str, str]:
    found = {"polyamp": polyamp.__version__, "jax": jax.__version__}
    names = [name for name in ("flax", "optax", "jmp") if find_spec(name)]
    return found | {name: importlib.metadata.version(name) for name in names}


def main(
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}, or how their names begin; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of steps.")] = 9,
    steps: Annotated[int, typer.Option("--losses", min=0, help="Train so many steps; compare losses, not times.")] = 0,
    within: Annotated[float | None, typer.Option(help="Seconds: what does not fit is left out.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny models: a check that this runs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the times and the memory.")] = None,
) -> None:
    """Measure, print, and keep the numbers in results/jax_end_to_end[_losses]_<device>.json."""
    if ON_CPU and not small:
        raise typer.BadParameter("without a GPU only --small runs")
    device, budget = jax.default_backend(), Budget(within)
    named = f"jax_end_to_end{'_losses' if steps else ''}_{'small' if small else device}"
    keeper = Keeper(named, versions(), check_only=small and CHECK_ONLY)
    found = [Case(name, "compiled", keeper, budget, settle, gc.collect) for name in chosen(model, TASKS)]
    if steps:
        for case in found:
            losses(case, small, steps)
        console().print(losses_table(keeper.rows, f"equal steps on {device}"))
    else:
        peaks = matmul_peaks(128 if ON_CPU else 8192)
        keeper.more["peak_operations_per_second"] = {name: float(f"{peak:.4g}") for name, peak in peaks.items()}
        for case in found:
            times(case, small, 2 if small else rounds, peaks)
        console().print(table(keeper.rows, f"training steps on {device}, JAX {jax.__version__}"))
        if plot is not None:
            draw(keeper.rows, plot)
    if keeper.left_out:
        console().print(keeper.missing_table())
    keeper.end()


if __name__ == "__main__":
    typer.run(main)
