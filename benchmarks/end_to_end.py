"""What does a whole training step take, in float32 and in 16 bits, with polyamp and with PyTorch's own parts?

Models at the shapes of published tables: forward, backward and optimizer step, eager and compiled. Float32 is measured
with TF32 off (IEEE) and with TF32 on, for products and convolutions alike. Native is autocast, with GradScaler in
float16, around a fused optimizer and PyTorch's clipping; what the mixed variants leave in float32 may use TF32.

    python benchmarks/end_to_end.py --model resnet50 --within 540 [--ways eager] [--small] [--plot docs/end_to_end.png]
    python benchmarks/end_to_end.py --model gpt2 --losses 200

The second trains every variant for so many steps on equal batches, and compares the losses instead of the times.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from budget import Budget, Estimate
from gpu_meters import host_syncs, matmul_peaks, operations, skips_between, use_tf32
from interleave import Timing, calls_in, compared, console, turns
from keeping import Keeper, chosen, missing_table, published_table
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn
from torch_device import CHECK_ONLY, DEVICE, Built, Row, built, free_memory, settle
from torch_tasks import TASKS, Task

import polyamp
from polyamp.backends.torch.building import extension

WAYS = ("eager", "compiled")
SECONDS = {"eager": 15.0, "compiled": 45.0}  # that building and timing a variant is thought to take, until one did
BATCHES = 8  # that the losses are trained on, in turns
LAST = 10  # steps whose mean loss is reported


class Loop:
    """A training step in float32: a region around the forward pass, and what steps the optimizer."""

    def __init__(self, task: Task, small: bool, way: str, tf32: bool = True, dropout: bool = True) -> None:
        use_tf32(tf32)
        torch.manual_seed(0)
        self.task, self.tf32, self.batch = task, tf32, task.batch(small, 0)
        self.model = task.model(small, dropout).to(DEVICE).train()
        self.params = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = task.optimizer(self.params)
        if way == "compiled":
            compile_parts(self.model, task.parts())

    def region(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def __call__(self) -> Tensor:
        use_tf32(self.tf32)
        with self.region():
            loss = self.model(**self.batch)
        self.update(loss)
        self.optimizer.zero_grad()  # now, so that a variant holds no gradients while others run
        return loss.detach()

    def update(self, loss: Tensor) -> None:
        loss.backward()
        if self.task.max_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.task.max_norm)
        self.optimizer.step()

    def loss_scale(self) -> float | None:
        """Read the loss scale, which waits for the GPU; None where there is none."""
        return None


class Native(Loop):
    """Autocast and, for float16, GradScaler."""

    def __init__(self, *made: Any, low: str, **more: Any) -> None:
        super().__init__(*made, **more)
        self.low = getattr(torch, low)
        self.scaler = torch.amp.GradScaler(DEVICE, enabled=low == "float16")

    def region(self) -> AbstractContextManager[Any]:
        return torch.autocast(DEVICE, self.low)

    def update(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        if self.task.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.params, self.task.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def loss_scale(self) -> float | None:
        return self.scaler.get_scale() if self.scaler.is_enabled() else None


class Ours(Loop):
    """`polyamp.autocast` and `polyamp.wrap_optimizer`."""

    def __init__(self, *made: Any, low: str, **more: Any) -> None:
        super().__init__(*made, **more)
        self.policy = polyamp.policy(f"mixed_{low}")
        self.wrapped = polyamp.wrap_optimizer(self.optimizer, self.policy, max_grad_norm=self.task.max_norm)
        self.optimizer, self.scaled = self.wrapped, low == "float16"

    def region(self) -> AbstractContextManager[Any]:
        return polyamp.autocast(self.policy)

    def update(self, loss: Tensor) -> None:
        self.wrapped.backward(loss)
        self.wrapped.step()

    def loss_scale(self) -> float | None:
        return float(self.wrapped.loss_scale) if self.scaled else None


def compile_parts(model: nn.Module, parts: tuple[type[nn.Module], ...]) -> None:
    for module in model.modules() if parts else (model,):
        if not parts or isinstance(module, parts):
            module.compile()


VARIANTS: dict[str, tuple[type[Loop], dict[str, Any]]] = {
    "float32": (Loop, {"tf32": False}),
    "TF32": (Loop, {}),
    "native bfloat16": (Native, {"low": "bfloat16"}),
    "polyamp bfloat16": (Ours, {"low": "bfloat16"}),
    "native float16": (Native, {"low": "float16"}),
    "polyamp float16": (Ours, {"low": "float16"}),
}
BUILD_ORDER = (*list(VARIANTS)[1:], "float32")  # where time runs out, it does for IEEE float32


def peak_of(variant: str) -> str:
    """The format whose peak a variant is compared with."""
    return variant.rpartition(" ")[2]


def base_of(variant: str) -> str:
    """The variant that one is compared with: native in its format, and TF32 for float32."""
    return f"native {peak_of(variant)}" if " " in variant else "TF32"


class Measured(NamedTuple):
    """A loop that has been built and warmed up, and what was measured of it on the way."""

    loop: Loop
    peak_bytes: int | None
    host_syncs: int | None
    first_steps: int  # until the loss scale had settled
    seconds: float


class Case:
    """A model in one way: its variants, built one after another and timed in turns."""

    def __init__(self, name: str, way: str, small: bool, budget: Budget, keeper: Keeper) -> None:
        self.name, self.task, self.way, self.small = name, TASKS[name], way, small
        self.budget, self.keeper = budget, keeper
        self.seconds = 0.01 if small else 0.4  # of a variant in a round
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64  # all variants share the model's code: each compiles it anew
        torch.backends.cudnn.benchmark = self.task.fixed_shapes
        free_memory()

    def place(self, variant: str | None = None) -> Row:
        return {"model": self.name, "way": self.way, "variant": variant}

    def make(self, variant: str, **more: Any) -> Loop:
        kind, options = VARIANTS[variant]
        return kind(self.task, self.small, self.way, **options, **more)

    def each(self, guess: float, reserve: float, work: Callable[[str], Any]) -> dict[str, Any]:
        """Do ``work`` for every variant that there is time for; ``reserve`` is needed after it for each."""
        done: dict[str, Any] = {}
        estimate = Estimate(guess)
        for variant in BUILD_ORDER:
            needed = estimate.seconds + reserve * (len(done) + 1)
            if not self.budget.fits(needed):
                self.keeper.leave_out(self.place(variant), self.budget.why_not(needed))
                continue
            start = time.perf_counter()
            result = self.keeper.attempt(self.place(variant), lambda variant=variant: work(variant))
            estimate.learn(time.perf_counter() - start)
            if result is not None:
                done[variant] = result
            free_memory()
        return {variant: done[variant] for variant in VARIANTS if variant in done}

    def times(self, rounds: int, peaks: dict[str, float]) -> None:
        """Build, time and keep a row for each variant."""
        counted = self.keeper.attempt(self.place(), self.operations)
        made = self.each(SECONDS[self.way], rounds * self.seconds, self.build)
        if made:
            self.keeper.attempt(self.place(), lambda: self.keeper.add(self.rows(made, rounds, counted, peaks)))

    def operations(self) -> int:
        """Count what a step computes, from the float32 model, so that it is the same for all."""
        return step_operations(self.name, self.small)

    def build(self, variant: str) -> Measured:
        start = time.perf_counter()
        steps: list[int] = []
        one: Built = built(lambda: self.make(variant), lambda loop: steps.append(settled(loop)))
        syncs = host_syncs(one.made)
        return Measured(one.made, one.peak_bytes, syncs, steps[0], time.perf_counter() - start)

    def rows(
        self, made: dict[str, Measured], rounds: int, counted: int | None, peaks: dict[str, float]
    ) -> Iterator[Row]:
        """Time the variants in turns, each for about as long a while."""
        loops = {variant: one.loop for variant, one in made.items()}
        calls = {variant: calls_in(self.seconds, loop, settle) for variant, loop in loops.items()}
        before = {variant: loop.loss_scale() for variant, loop in loops.items()}
        taken = self.in_turns(loops, calls, rounds)
        for timing in self.compared(taken):
            variant, one = timing.variant, made[timing.variant]
            steps = calls[variant] * len(timing.microseconds)
            skips = skips_between(before[variant], one.loop.loss_scale())
            yield self.place(variant) | {
                **summarised(timing, taken),
                "rounds": len(timing.microseconds),
                "samples_per_second": round(self.task.samples(self.small) / median(timing) * 1e6, 1),
                "share_of_peak": share(counted, median(timing), peaks[peak_of(variant)]),
                "operations": counted,
                "peak_bytes": one.peak_bytes,
                "host_syncs": one.host_syncs,
                "skip_rate": round(skips / steps, 4),
                "first_steps": one.first_steps,
                "build_seconds": round(one.seconds, 1),
            }

    def in_turns(self, loops: dict[str, Loop], calls: dict[str, int], rounds: int) -> dict[str, list[float]]:
        """Microseconds of a step in every round; at least two rounds, and no more than there is time for."""
        taken: dict[str, list[float]] = {variant: [] for variant in loops}
        for turn, variant in enumerate(turns(loops, rounds, f"{self.name}, {self.way}")):
            if turn >= 2 * len(loops) and not turn % len(loops) and not self.budget.fits(one_round(taken, calls)):
                break
            start = time.perf_counter()
            for _ in range(calls[variant]):
                loops[variant]()
            settle()
            taken[variant].append((time.perf_counter() - start) / calls[variant] * 1e6)
        return taken

    def compared(self, taken: dict[str, list[float]]) -> Iterator[Timing]:
        """Every variant, compared round by round with what it is to be compared with, or where that is not, itself."""
        for variant, times in taken.items():
            base = base_of(variant) if base_of(variant) in taken else variant
            yield compared(self.name, {variant: times, base: taken[base]}, base)[0]

    def losses(self, steps: int) -> None:
        """Train every variant for so many steps on equal batches, without dropout, and keep a row for each."""
        batches = [self.task.batch(self.small, seed) for seed in range(1, BATCHES + 1)]

        def train(variant: str) -> bool:
            row = trained(self.make(variant, dropout=False), batches, steps)
            self.keeper.add([self.place(variant) | row])
            return True

        self.each(SECONDS[self.way] + 0.3 * steps, 0.0, train)


@cache
def step_operations(name: str, small: bool) -> int:
    return operations(Loop(TASKS[name], small, "eager"))


def settled(loop: Loop, most: int = 24) -> int:
    """Step until four steps in a row were applied: a new loss scale is often too large. Returns how many it took."""
    applied = 0
    for step in range(1, most + 1):
        before = loop.loss_scale()
        loop()
        applied = 0 if skips_between(before, loop.loss_scale()) else applied + 1
        if applied == 4:
            return step
    return most


def trained(loop: Loop, batches: list[Any], steps: int) -> Row:
    """The loss at the first and over the last steps, and how many steps were skipped."""
    losses, skipped, start = [], 0, time.perf_counter()
    for step in range(steps):
        loop.batch, before = batches[step % len(batches)], loop.loss_scale()
        losses.append(loop())
        skipped += bool(skips_between(before, loop.loss_scale()))
    values = torch.stack(losses).double().tolist()
    return {
        "steps": steps,
        "first_loss": round(values[0], 5),
        "last_loss": round(statistics.mean(values[-LAST:]), 5),
        "skip_rate": round(skipped / steps, 4),
        "seconds": round(time.perf_counter() - start, 1),
    }


def one_round(taken: dict[str, list[float]], calls: dict[str, int]) -> float:
    """Seconds of the longest round so far, or somewhat more."""
    return sum(max(times) * calls[variant] for variant, times in taken.items()) / 1e6


def median(timing: Timing) -> float:
    return statistics.median(timing.microseconds)


def share(counted: int | None, microseconds: float, peak: float) -> float | None:
    return None if counted is None else float(f"{counted / (microseconds / 1e6) / peak:.3g}")


def summarised(timing: Timing, taken: dict[str, list[float]]) -> Row:
    summary = timing.summary()
    times = {
        f"times_{base.lower()}": round(statistics.median(taken[base]) / median(timing), 3) if base in taken else None
        for base in ("float32", "TF32")
    }
    return {
        "ms": round(median(timing) / 1e3, 3),
        "compared_with": base_of(timing.variant),
        "ratio": summary["ratio"],
        "ratio_10_to_90_percent": summary["ratio_10_to_90_percent"],
        **times,
    }


def table(found: list[Row]) -> Table:
    headings = ("model", "way", "variant", "ms", "a second", "/ base", "10-90 %", "x f32", "x TF32", "GB", "syncs")
    caption = "base: native in the same format; TF32 for float32. peak: the share of the fastest product's rate."
    shown = Table(*headings, "peak", "skips", box=SIMPLE_HEAD, caption=caption, padding=(0, 1, 0, 0))
    shown.title = f"training steps on {DEVICE}, PyTorch {torch.__version__}"
    for row in found:
        shown.add_row(*cells(row), end_section=row["variant"].startswith("polyamp"))
    return shown


def cells(row: Row) -> list[str]:
    low, high = row["ratio_10_to_90_percent"]
    return [
        *(row["model"], row["way"], row["variant"], f"{row['ms']:.2f}", f"{row['samples_per_second']:.0f}"),
        *(f"{row['ratio']:.3f}", f"{low:.3f}-{high:.3f}"),
        *(shown(row[f"times_{base}"], "{:.2f}") for base in ("float32", "tf32")),
        shown(row["peak_bytes"] and row["peak_bytes"] / 1e9, "{:.2f}"),
        shown(row["host_syncs"], "{}"),
        shown(row["share_of_peak"], "{:.1%}"),
        f"{row['skip_rate']:.1%}",
    ]


def shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def losses_table(found: list[Row]) -> Table:
    """The losses, and how far each is from IEEE float32's in the same way."""
    headings = ("model", "way", "variant", "steps", "first loss", "last loss", "- float32", "skips")
    exact = {(row["model"], row["way"]): row["last_loss"] for row in found if row["variant"] == "float32"}
    made = Table(*headings, box=SIMPLE_HEAD, title=f"equal steps on {DEVICE}; the last is the mean of {LAST} steps")
    for row in found:
        base = exact.get((row["model"], row["way"]))
        apart = shown(None if base is None else row["last_loss"] - base, "{:+.4f}")
        values = (str(row["steps"]), f"{row['first_loss']:.4f}", f"{row['last_loss']:.4f}", apart)
        made.add_row(row["model"], row["way"], row["variant"], *values, f"{row['skip_rate']:.1%}")
    return made


def draw(found: list[Row], file: Path) -> None:
    """Every variant's time and peak memory, ratio to TF32 in the same way."""
    from matplotlib import pyplot

    value = {(row["model"], row["way"], row["variant"]): row for row in found}
    places = list(dict.fromkeys((model, way) for model, way, _ in value))
    names = [variant for variant in VARIANTS if variant != "TF32"]
    figure, axes = pyplot.subplots(2, 1, figsize=(11, 7), layout="constrained", sharex=True)
    for axis, key in zip(axes, ("ms", "peak_bytes"), strict=True):
        for index, variant in enumerate(names):
            at = [number + 0.8 * ((index + 0.5) / len(names) - 0.5) for number in range(len(places))]
            pairs = [
                (value.get((*place, variant), {}).get(key), value.get((*place, "TF32"), {}).get(key))
                for place in places
            ]
            axis.bar(
                at, [own / other if own and other else 0.0 for own, other in pairs], 0.8 / len(names), label=variant
            )
        axis.set_xticks(range(len(places)), ["\n".join(place) for place in places])
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_title({"ms": "time of a training step, ratio to TF32", "peak_bytes": "peak memory, ratio"}[key])
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def versions() -> dict[str, str]:
    found = {"polyamp": polyamp.__version__, "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("transformers", "torchvision"):
        if find_spec(name):
            found[name] = importlib.metadata.version(name)
    return found


def measure(
    keeper: Keeper, models: list[str], ways: list[str], small: bool, budget: Budget, steps: int, rounds: int
) -> None:
    """Every model in every way, as long as there is time."""
    peaks = {} if steps else matmul_peaks(8192 if DEVICE == "cuda" else 128)
    if peaks:
        keeper.more["peak_operations_per_second"] = {name: float(f"{peak:.4g}") for name, peak in peaks.items()}
    for name in models:
        for way in ways:
            if reason := TASKS[name].missing or (
                None if way in TASKS[name].ways else "its shapes change at every step"
            ):
                keeper.leave_out({"model": name, "way": way}, reason)
                continue
            case = Case(name, way, small, budget, keeper)
            case.losses(steps) if steps else case.times(rounds, peaks)


def main(
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}, or how they begin; repeatable.")
    ] = None,
    ways: Annotated[str, typer.Option(help="eager, compiled or both, with a comma.")] = ",".join(WAYS),
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of steps.")] = 9,
    losses: Annotated[int, typer.Option(min=0, help="Train so many steps and compare losses, not times.")] = 0,
    within: Annotated[float | None, typer.Option(help="Seconds: what does not fit is left out.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny models: a check that this runs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the times and the memory.")] = None,
) -> None:
    """Measure, print, and keep the numbers in results/end_to_end[_losses]_<device>.json."""
    if DEVICE == "cpu" and not small:
        raise typer.BadParameter("there is no GPU: only --small runs here")
    models, budget = chosen(model, TASKS), Budget(within)
    named = f"end_to_end{'_losses' if losses else ''}_{'small' if small else DEVICE}"
    keeper = Keeper(named, versions(), check_only=small and CHECK_ONLY, extension=str(extension.status()))
    measure(keeper, models, chosen(ways.split(","), WAYS), small, budget, losses, 2 if small else rounds)
    console().print(losses_table(keeper.rows) if losses else table(keeper.rows))
    if keeper.left_out:
        console().print(missing_table(keeper.left_out))
    if not losses:
        console().print(published_table(models))
    if plot is not None and not losses:
        draw(keeper.rows, plot)
    keeper.end()


if __name__ == "__main__":
    typer.run(main)
