"""Time whole training steps, in float32 and in 16 bits, with polyamp and with PyTorch's own parts.

Models at the shapes of published tables: forward, backward and optimizer step, eager and compiled. Float32 is measured
with TF32 off (IEEE) and with TF32 on, for products and convolutions alike. Native is autocast, with GradScaler in
float16, around a fused optimizer and PyTorch's clipping; mixed variants may use TF32 for their float32 work.

    python benchmarks/end_to_end.py --model resnet50 --within 540 [--ways eager] [--small]
    python benchmarks/end_to_end.py --model gpt2 --losses 200

The second command trains every variant for 200 steps on equal batches, and compares the losses instead of the times.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import torch
import typer
from interleave import Budget, console
from keeping import Keeper
from torch import Tensor, nn
from torch_device import (
    CHECK_ONLY,
    DEVICE,
    Row,
    built,
    free_memory,
    host_syncs,
    matmul_peaks,
    operations,
    settle,
    use_tf32,
)
from torch_tasks import TASKS, Task
from whole_steps import BATCHES, Case, chosen, format_of, losses_table, rates, settled, table, trained

import polyamp
from polyamp.backends.torch import extension

WAYS = ("eager", "compiled")
SECONDS = {"eager": 15.0, "compiled": 45.0}  # expected to build a variant, until one was built
EACH = 0.4  # seconds for a variant in each round


class Loop:
    """A training step in float32; subclasses change the region around the forward pass and the optimizer step."""

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
        self.optimizer.zero_grad()  # now, so that a variant keeps no gradients while others run
        return loss.detach()

    def update(self, loss: Tensor) -> None:
        loss.backward()
        if self.task.max_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.task.max_norm)
        self.optimizer.step()

    def loss_scale(self) -> float | None:
        """Read the loss scale, which waits for the GPU; None if there is none."""
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
BUILD_ORDER = (*list(VARIANTS)[1:], "float32")  # IEEE float32 is the slowest: it is last, and left out if time runs out


class Measured(NamedTuple):
    """A loop that has been built and warmed up, with the measurements of that."""

    loop: Loop
    meters: Row


def make(name: str, way: str, small: bool, variant: str, **more: Any) -> Loop:
    kind, options = VARIANTS[variant]
    return kind(TASKS[name], small, way, **options, **more)


def build(name: str, way: str, small: bool, variant: str) -> Measured:
    """Build and warm up a variant while no other exists."""
    start, steps = time.perf_counter(), []
    one = built(lambda: make(name, way, small, variant), lambda loop: steps.append(settled(loop)))
    meters = {"peak_bytes": one.peak_bytes, "host_syncs": host_syncs(one.made), "first_steps": steps[0]}
    return Measured(one.made, meters | {"build_seconds": round(time.perf_counter() - start, 1)})


@cache
def step_operations(name: str, small: bool) -> int:
    """Count the operations of a step in the float32 model, so that the count is the same for all variants."""
    return operations(make(name, "eager", small, "TF32"))


def prepare(task: Task) -> None:
    """Start a case with nothing compiled before it."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # all variants share the model's code, and each compiles it again
    torch.backends.cudnn.benchmark = task.fixed_shapes
    free_memory()


def times(case: Case, small: bool, rounds: int, peaks: dict[str, float]) -> None:
    """Build every variant, time them in turns, and keep a row for each."""
    seconds = 0.01 if small else EACH
    counted = case.attempt(lambda: step_operations(case.model, small))
    free_memory()
    made = case.each(
        BUILD_ORDER,
        SECONDS[case.way],
        rounds * seconds,
        lambda variant: build(case.model, case.way, small, variant),
    )
    loops = {variant: made[variant].loop for variant in VARIANTS if variant in made}
    samples = TASKS[case.model].samples(small)

    def rows() -> Iterator[Row]:
        for row in case.timed(loops, rounds, seconds):
            variant = row["variant"]
            yield row | made[variant].meters | rates(row, samples, counted, peaks[format_of(variant)])

    if loops:
        case.attempt(lambda: case.keeper.add(rows()))


def losses(case: Case, small: bool, steps: int) -> None:
    """Train every variant for ``steps`` steps on equal batches, without dropout, and keep a row for each."""
    batches = [TASKS[case.model].batch(small, seed) for seed in range(1, BATCHES + 1)]

    def train(variant: str) -> bool:
        row = trained(make(case.model, case.way, small, variant, dropout=False), batches, steps)
        case.keeper.add([case.place(variant) | row])
        return True

    case.each(BUILD_ORDER, SECONDS[case.way] + 0.3 * steps, 0.0, train)


def versions() -> dict[str, str]:
    found = {"polyamp": polyamp.__version__, "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    names = [name for name in ("transformers", "torchvision") if find_spec(name)]
    return found | {name: importlib.metadata.version(name) for name in names}


def cases(models: list[str], ways: list[str], keeper: Keeper, budget: Budget) -> Iterator[Case]:
    """Return every model in each of its ways."""
    for name in models:
        for way in ways:
            task = TASKS[name]
            if reason := task.missing or (task.eager_only if way == "compiled" else None):
                keeper.leave_out({"model": name, "way": way, "variant": None}, reason)
                continue
            prepare(task)
            yield Case(name, way, keeper, budget, settle, free_memory)


def main(
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}, or how their names begin; may be repeated.")
    ] = None,
    ways: Annotated[str, typer.Option(help="eager, compiled or both, with a comma.")] = ",".join(WAYS),
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of steps.")] = 9,
    steps: Annotated[int, typer.Option("--losses", min=0, help="Train so many steps; compare losses, not times.")] = 0,
    within: Annotated[float | None, typer.Option(help="Seconds: what does not fit is left out.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny models: a check that this runs.")] = False,
) -> None:
    """Measure, print, and keep the numbers in results/end_to_end[_losses]_<device>.json."""
    if DEVICE == "cpu" and not small:
        raise typer.BadParameter("without a GPU only --small runs")
    named = f"end_to_end{'_losses' if steps else ''}_{'small' if small else DEVICE}"
    keeper = Keeper(named, versions(), check_only=small and CHECK_ONLY, extension=str(extension.status()))
    models = chosen(model, TASKS)
    found = cases(models, chosen(ways.split(","), WAYS), keeper, Budget(within))
    if steps:
        for case in found:
            losses(case, small, steps)
        console().print(losses_table(keeper.rows, f"equal steps on {DEVICE}"))
    else:
        peaks = matmul_peaks(8192 if DEVICE == "cuda" else 128)
        keeper.more["peak_operations_per_second"] = {name: float(f"{peak:.4g}") for name, peak in peaks.items()}
        for case in found:
            times(case, small, 2 if small else rounds, peaks)
        console().print(table(keeper.rows, f"training steps on {DEVICE}, PyTorch {torch.__version__}"))
    if keeper.left_out:
        console().print(keeper.missing_table())
    keeper.end()


if __name__ == "__main__":
    typer.run(main)
