"""What does a whole training step take, in float32 and in 16 bits, with polyamp and with PyTorch's own parts?

BERT-large's shape with AdamW and clipping, and ResNet-50 with momentum; forward, backward and optimizer step, in eager
mode and compiled. Native is autocast, with GradScaler in float16, around a fused optimizer.

    python benchmarks/end_to_end.py [--model bert] [--small] [--plot docs/end_to_end.png]
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from interleave import RESULTS, Timing, calls_in, compared, console, interleave, keep, machine
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn
from torch_device import CHECK_ONLY, DEVICE, Built, Row, built, memory_permitting, settle
from torch_models import Bert, Classifier, resnet50

import polyamp

FORMATS = ("bfloat16", "float16")
Batch = tuple[Tensor, Tensor]


class Task(NamedTuple):
    """A model, its batch, its optimizer, and the modules that are compiled one by one, or the whole where none are."""

    model: Callable[[bool], nn.Module]
    batch: Callable[[bool], Batch]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    max_norm: float | None
    parts: tuple[type[nn.Module], ...]


def bert(small: bool) -> nn.Module:
    return Bert(2, 64, 4, 32, 101) if small else Bert()


def sentences(small: bool) -> Batch:
    size, words = ((2, 32), 101) if small else ((16, 512), 30522)
    return torch.randint(words, size, device=DEVICE), torch.randint(words, size, device=DEVICE)


def resnet(small: bool) -> nn.Module:
    network = resnet50(8, 10, (1, 1)) if small else resnet50()
    return Classifier(network).to(memory_format=torch.channels_last)


def images(small: bool) -> Batch:
    count, side, classes = (2, 64, 10) if small else (128, 224, 1000)
    made = torch.randn(count, 3, side, side, device=DEVICE).to(memory_format=torch.channels_last)
    return made, torch.randint(classes, (count,), device=DEVICE)


TASKS = {
    "bert": Task(
        bert,
        sentences,
        lambda params: torch.optim.AdamW(params, lr=1e-5, fused=True),
        1.0,
        (nn.TransformerEncoderLayer,),  # all of one shape: compiled once
    ),
    "resnet": Task(resnet, images, lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True), None, ()),
}


class Loop:
    """A training step: a region around the forward pass, and what steps the optimizer."""

    def __init__(self, task: Task, small: bool, compiled: bool) -> None:
        torch.manual_seed(0)
        self.task, self.batch = task, task.batch(small)
        self.model = task.model(small).to(DEVICE)
        self.params = list(self.model.parameters())
        self.optimizer = task.optimizer(self.params)
        if compiled:
            compile_parts(self.model, task.parts)

    def region(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with self.region():
            loss = self.model(*self.batch)
        self.update(loss)

    def update(self, loss: Tensor) -> None:
        loss.backward()
        if self.task.max_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.task.max_norm)
        self.optimizer.step()


class Native(Loop):
    """Autocast and, for float16, GradScaler."""

    def __init__(self, *made: Any, low: str) -> None:
        super().__init__(*made)
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


class Ours(Loop):
    """`polyamp.autocast` and `polyamp.wrap_optimizer`."""

    def __init__(self, *made: Any, low: str) -> None:
        super().__init__(*made)
        self.policy = polyamp.policy(f"mixed_{low}")
        fused = True if DEVICE == "cpu" else None
        self.wrapped = polyamp.wrap_optimizer(
            self.optimizer, self.policy, max_grad_norm=self.task.max_norm, fused_step=fused
        )
        self.optimizer = self.wrapped

    def region(self) -> AbstractContextManager[Any]:
        return polyamp.autocast(self.policy)

    def update(self, loss: Tensor) -> None:
        self.wrapped.backward(loss)
        self.wrapped.step()


def compile_parts(model: nn.Module, parts: tuple[type[nn.Module], ...]) -> None:
    for module in model.modules() if parts else (model,):
        if not parts or isinstance(module, parts):
            module.compile()


def variants(task: Task, small: bool, compiled: bool) -> dict[str, Callable[[], Loop]]:
    """Of each format native first, which is what the others of that format are compared with."""
    made: dict[str, Callable[[], Loop]] = {"float32": lambda: Loop(task, small, compiled)}
    for low in FORMATS:
        made[f"native {low}"] = lambda low=low: Native(task, small, compiled, low=low)
        made[f"polyamp {low}"] = lambda low=low: Ours(task, small, compiled, low=low)
    return made


def rows(name: str, compiled: bool, small: bool, rounds: int) -> list[Row]:
    """A row for each variant of one model."""
    torch._dynamo.reset()
    made = {
        variant: built(make, lambda loop: [loop() for _ in range(4)])
        for variant, make in variants(TASKS[name], small, compiled).items()
    }
    loops = {variant: one.made for variant, one in made.items()}
    calls = calls_in(0.5 if not small else 0.01, loops["native bfloat16"], settle)
    question = f"{name}, {'compiled' if compiled else 'eager'}"
    taken = interleave(question, loops, rounds, calls, settle)
    times = {timing.variant: timing.microseconds for timing in taken}
    timings = compared(question, {variant: times[variant] for variant in times if variant == "float32"})
    for low in FORMATS:
        pair = {variant: times[variant] for variant in times if variant.endswith(f" {low}")}
        timings += compared(question, pair, f"native {low}")
    yardstick = min(timing.summary()["microseconds"] for timing in timings if timing.variant == "float32")
    return [row(name, compiled, timing, made[timing.variant], yardstick) for timing in timings]


def row(name: str, compiled: bool, timing: Timing, loop: Built, float32: float) -> Row:
    summary = timing.summary()
    return {
        "model": name,
        "compiled": compiled,
        "variant": timing.variant,
        "ms": round(summary["microseconds"] / 1e3, 3),
        "ratio_to_native": summary["ratio"],
        "ratio_10_to_90_percent": summary["ratio_10_to_90_percent"],
        "times_float32": round(float32 / summary["microseconds"], 3),
        "peak_bytes": loop.peak_bytes,
    }


def table(found: list[Row]) -> Table:
    headings = ("model", "way", "variant", "ms", "/ native", "10-90 %", "x float32", "peak GB")
    shown = Table(*headings, title=f"training steps on {DEVICE}, PyTorch {torch.__version__}", box=SIMPLE_HEAD)
    for one in found:
        low, high = one["ratio_10_to_90_percent"]
        way = "compiled" if one["compiled"] else "eager"
        ratio = (f"{one['ratio_to_native']:.3f}", f"{low:.3f}-{high:.3f}", f"{one['times_float32']:.2f}")
        peak = "" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 1e9:.2f}"
        shown.add_row(one["model"], way, one["variant"], f"{one['ms']:.2f}", *ratio, peak)
    return shown


def draw(found: list[Row], file: Path) -> None:
    """Every variant's time and peak memory, ratio to float32 in the same way."""
    from matplotlib import pyplot

    value = {(one["model"], one["compiled"], one["variant"]): one for one in found}
    places = list(dict.fromkeys((model, compiled) for model, compiled, _ in value))
    names = list(dict.fromkeys(variant for _, _, variant in value if variant != "float32"))
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for axis, key in zip(axes, ("ms", "peak_bytes"), strict=True):
        for shift, variant in enumerate(names):
            at = [index + 0.8 * ((shift + 0.5) / len(names) - 0.5) for index in range(len(places))]
            pairs = [(value[*place, variant][key], value[*place, "float32"][key]) for place in places]
            heights = [own / other if other else 0.0 for own, other in pairs]
            axis.bar(at, heights, width=0.8 / len(names), label=variant)
        axis.set_xticks(range(len(places)), [f"{name}\n{'compiled' if how else 'eager'}" for name, how in places])
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_title({"ms": "time of a training step, ratio to float32", "peak_bytes": "peak memory, ratio"}[key])
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def others(named: str, versions: dict[str, str], found: list[Row]) -> list[Row]:
    """What was measured before of other models, by the same versions on the same machine."""
    path = RESULTS / f"{named}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    if (earlier.get("machine"), earlier.get("versions")) != (machine(), versions):
        return []
    models = {one["model"] for one in found}
    return [one for one in earlier["rows"] if one["model"] not in models]


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of steps.")] = 9,
    small: Annotated[bool, typer.Option("--small", help="Tiny models: a check that this runs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the result.")] = None,
) -> None:
    """Measure, print, and keep the numbers in results/end_to_end_<device>.json."""
    if DEVICE == "cpu" and not small:
        raise typer.BadParameter("there is no GPU: only --small runs here")
    named = f"end_to_end_{'small' if small else DEVICE}"
    versions = {"polyamp": polyamp.__version__, "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    found: list[Row] = []
    left_out: list[Row] = []
    for name in model or TASKS:
        for compiled in (False, True):
            with memory_permitting(left_out, model=name, compiled=compiled):
                found += rows(name, compiled, small, 2 if small else rounds)
        shown = others(named, versions, found) + found
        keep(named, versions, {"check_only": small and CHECK_ONLY, "left_out": left_out, "rows": shown})
    console().print(table(shown))
    if plot is not None:
        draw(shown, plot)


if __name__ == "__main__":
    typer.run(main)
