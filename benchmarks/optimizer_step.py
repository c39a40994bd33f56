"""How near is an optimizer step to the speed at which the GPU copies memory? Ours beside PyTorch's, fused and foreach.

Of each set of parameters, optimizer and storage: the time of a step with loss scaling, with and without clipping, and
the bytes that any implementation must move for it. Without scaling and clipping native kernels move no byte too many:
there polyamp runs the native optimizer, and the table shows what that costs.

    python benchmarks/optimizer_step.py [--set "ResNet-50"] [--small] [--plot docs/optimizer_step.png]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from interleave import Timing, calls_in, compared, console, interleave, keep
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor
from torch_device import (
    CHECK_ONLY,
    DEVICE,
    Built,
    Launches,
    Row,
    built,
    copy_bandwidth,
    launches,
    memory_permitting,
    settle,
)
from torch_models import PARAMETER_SETS, Shape, numbers, small_shapes

import polyamp
from polyamp import LossScale

BASE = "native fused"
LARGE = 2**31  # bytes: many times any cache
SCALE = LossScale(init=1.0, interval=2**30)  # native scalers unscale in place: of 1.0 the gradients stay what they are
MAX_NORM = 1.0
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params, **way: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, **way),
    "SGD": lambda params, **way: torch.optim.SGD(params, lr=1e-4, momentum=0.9, **way),
}
STORAGES: dict[str, tuple[torch.dtype, Any]] = {
    "float32": (torch.float32, None),
    "float16, masters": (torch.float16, True),
    "bfloat16, masters": (torch.bfloat16, True),
    "bfloat16, remainder": (torch.bfloat16, "remainder"),
    "bfloat16, stochastic": (torch.bfloat16, "stochastic"),
}


class Case(NamedTuple):
    """What a step has to do."""

    set: str
    optimizer: str
    storage: str
    scaled: bool
    clipped: bool

    @property
    def floor(self) -> int:
        """Bytes for each number that must be read or written: gradients once for the statistics, and all of a step."""
        low = 4 if self.storage == "float32" else 2
        more = {"masters": 4, "remainder": 2}.get(self.storage.partition(", ")[2], 0)
        moments = 4 if self.optimizer == "SGD" else 8
        # with masters the old 16-bit value is only written
        reads = low + moments + (more if more == 4 else low + more)
        return reads + low + more + moments + (low if self.scaled or self.clipped else 0)


def cases(name: str) -> Iterator[Case]:
    for optimizer in OPTIMIZERS:
        for clipped in (True, False):
            yield Case(name, optimizer, "float32", True, clipped)
    yield Case(name, "AdamW", "float32", False, False)
    for storage in list(STORAGES)[1:]:
        for clipped in (True, False):
            yield Case(name, "AdamW", storage, True, clipped)
    yield Case(name, "SGD", "float16, masters", True, True)


class Step:
    """Parameters with gradients that stay, and a step on them.

    ``prepare`` scales a loss, which belongs to the forward pass; ``step`` is all that comes after the backward pass.
    """

    def __init__(self, case: Case, shapes: list[Shape]) -> None:
        self.case, (dtype, self.kind) = case, STORAGES[case.storage]
        self.params = [_normal(shape, 0.02).to(dtype).requires_grad_() for shape in shapes]
        for param in self.params:
            param.grad = _normal(param.shape, 1e-3).to(dtype)
        self.loss = torch.ones((), device=DEVICE)
        self.max_norm = MAX_NORM if case.clipped else None

    def prepare(self) -> Any:
        """Scale the loss."""

    def step(self) -> Any:
        """Take a step."""

    def __call__(self) -> None:
        self.prepare()
        self.step()


class Ours(Step):
    def __init__(self, case: Case, shapes: list[Shape]) -> None:
        super().__init__(case, shapes)
        inner = OPTIMIZERS[case.optimizer](self.params, fused=True)
        scale = SCALE if case.scaled else LossScale.none()
        fused = True if case.scaled and DEVICE == "cpu" else None
        self.wrapped = polyamp.wrap_optimizer(
            inner, loss_scale=scale, max_grad_norm=self.max_norm, master_weights=self.kind, fused_step=fused
        )
        self.prepare = lambda: self.wrapped.scale(self.loss)  # type: ignore[method-assign]
        self.step = self.wrapped.step  # type: ignore[method-assign]


class Native(Step):
    """As PyTorch's documentation has it; of 16-bit parameters with float32 copies that the optimizer trains."""

    def __init__(self, case: Case, shapes: list[Shape], **way: bool) -> None:
        super().__init__(case, shapes)
        self.trained: list[Tensor] = self.params
        if self.params[0].dtype != torch.float32:
            self.trained = [param.detach().float().requires_grad_() for param in self.params]
            for master in self.trained:
                master.grad = torch.empty_like(master)
        self.optimizer = OPTIMIZERS[case.optimizer](self.trained, **way)
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=1.0, growth_interval=2**30, enabled=case.scaled)
        self.prepare = lambda: self.scaler.scale(self.loss)  # type: ignore[method-assign]

    @torch.no_grad()
    def step(self) -> None:
        if self.trained is not self.params:
            torch._foreach_copy_([master.grad for master in self.trained], [param.grad for param in self.params])
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.trained, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.trained is not self.params:
            torch._foreach_copy_(self.params, self.trained)


VARIANTS: dict[str, Callable[[Case, list[Shape]], Step]] = {
    BASE: lambda case, shapes: Native(case, shapes, fused=True),
    "native foreach": lambda case, shapes: Native(case, shapes, foreach=True),
    "polyamp": Ours,
}


def _normal(shape: Shape, spread: float) -> Tensor:
    return torch.randn(shape, device=DEVICE) * spread


def rows(case: Case, shapes: list[Shape], rounds: int, bandwidth: float) -> list[Row]:
    """A row for each variant of one case."""
    torch.manual_seed(0)
    made = {
        name: built(lambda make=make: make(case, shapes), lambda step: [step() for _ in range(3)])
        for name, make in VARIANTS.items()
    }
    steps = {name: one.made for name, one in made.items()}
    calls = calls_in(0.05, steps[BASE], settle)
    question = f"{case.set}, {case.optimizer}, {case.storage}" + (", clipped" if case.clipped else "")
    taken = interleave(question, steps, rounds, calls, settle)
    timings = compared(question, {timing.variant: timing.microseconds for timing in taken}, BASE)
    return [row(case, numbers(shapes), timing, made[timing.variant], bandwidth) for timing in timings]


def row(case: Case, count: int, timing: Timing, step: Built, bandwidth: float) -> Row:
    summary = timing.summary()
    seen = launches(step.made.prepare, step.made.step)
    least = count * case.floor / bandwidth * 1e6  # microseconds
    return {
        **case._asdict(),
        "numbers": count,
        "variant": timing.variant,
        "ms": round(summary["microseconds"] / 1e3, 4),
        "ratio": summary["ratio"],
        "ratio_10_to_90_percent": summary["ratio_10_to_90_percent"],
        "floor_bytes_per_number": case.floor,
        "share_of_copy_bandwidth": round(least / summary["microseconds"], 3),
        "peak_bytes": step.peak_bytes,
        **on_device(seen, least),
    }


def on_device(seen: Launches | None, least: float) -> Row:
    """What the profiler saw of one step: kernels, and the share of bandwidth while they ran."""
    if seen is None:
        return {"kernels": None, "copies": None, "kernel_ms": None, "kernels_share_of_copy_bandwidth": None}
    return {
        "kernels": seen.kernels,
        "copies": seen.copies,
        "kernel_ms": round(seen.microseconds / 1e3, 4),
        "kernels_share_of_copy_bandwidth": round(least / seen.microseconds, 3),
    }


def table(found: list[Row], bandwidth: float) -> Table:
    """A line for each case: the variants' times and kernels, and ours beside the fused native one."""
    times = [variant.removeprefix("native ") for variant in VARIANTS]
    headings = ("parameters", "optimizer", "storage", "does", *times, "/ fused", "10-90 %", "of copy", "kernels")
    title = f"milliseconds of a step on {DEVICE}, which copies at {bandwidth / 1e12:.3f} TB/s"
    shown = Table(*headings, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for at in range(0, len(found), len(VARIANTS)):
        variants = found[at : at + len(VARIANTS)]
        ours = variants[-1]
        does = "+".join(word for word, key in (("scale", "scaled"), ("clip", "clipped")) if ours[key]) or "plain"
        low, high = ours["ratio_10_to_90_percent"]
        numbers = (f"{ours['ratio']:.2f}", f"{low:.2f}-{high:.2f}", f"{ours['share_of_copy_bandwidth']:.0%}")
        kernels = "/".join("?" if one["kernels"] is None else f"{one['kernels']:.0f}" for one in variants)
        milliseconds = [f"{one['ms']:.3f}" for one in variants]
        shown.add_row(ours["set"], ours["optimizer"], ours["storage"], does, *milliseconds, *numbers, kernels)
    return shown


def draw(found: list[Row], file: Path) -> None:
    """AdamW with scaling and clipping: each set's time to that of native fused, and the share of copy bandwidth."""
    from matplotlib import pyplot

    storages = ("float32", "float16, masters")
    wanted = [one for one in found if one["optimizer"] == "AdamW" and one["clipped"] and one["storage"] in storages]
    value = {(one["set"], one["storage"], one["variant"]): one for one in wanted}
    places = list(dict.fromkeys((name, storage) for name, storage, _ in value))
    titles = {"time of a step, ratio to native fused": "ratio", "share of copy bandwidth": "share_of_copy_bandwidth"}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for axis, (title, key) in zip(axes, titles.items(), strict=True):
        for shift, variant in enumerate(VARIANTS):
            at = [index + 0.8 * ((shift + 0.5) / len(VARIANTS) - 0.5) for index in range(len(places))]
            heights = [value[name, storage, variant][key] for name, storage in places]
            axis.bar(at, heights, width=0.8 / len(VARIANTS), label=variant)
        axis.set_xticks(range(len(places)), [f"{name}\n{storage}" for name, storage in places], fontsize=7)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_title(title)
        axis.legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main(
    chosen: Annotated[list[str] | None, typer.Option("--set", help=f"Of {', '.join(PARAMETER_SETS)}.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of steps.")] = 15,
    small: Annotated[bool, typer.Option("--small", help="Tiny parameters: a check that this runs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the result.")] = None,
) -> None:
    """Measure, print, and keep the numbers in results/optimizer_step_<device>.json."""
    if DEVICE == "cpu" and not small:
        raise typer.BadParameter("there is no GPU: only --small runs here")
    sets = {"small": small_shapes} if small else {name: PARAMETER_SETS[name] for name in chosen or PARAMETER_SETS}
    bandwidth = copy_bandwidth(2**24 if small else LARGE)
    versions = {"polyamp": polyamp.__version__, "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    found: list[Row] = []
    left_out: list[Row] = []
    for name, shapes in sets.items():
        for case in cases(name):
            with memory_permitting(left_out, **case._asdict()):
                found += rows(case, shapes(), 2 if small else rounds, bandwidth)
        kept = {"check_only": small and CHECK_ONLY, "copy_bytes_per_second": round(bandwidth), "left_out": left_out}
        keep(f"optimizer_step_{'small' if small else DEVICE}", versions, {**kept, "rows": found})
    console().print(table(found, bandwidth))
    if plot is not None:
        draw(found, plot)


if __name__ == "__main__":
    typer.run(main)
