"""How near is an optimizer step to the speed at which the GPU copies memory? Ours and PyTorch's.

For each set of parameters, optimizer and storage: the time of a step with loss scaling, with and without clipping, and
the bytes that any implementation must move for it. Without scaling and clipping native kernels move no
unnecessary byte: there polyamp runs the native optimizer, and the table shows the cost of that.

Native is GradScaler and ``clip_grad_norm_`` around an optimizer that is fused, foreach, or a ``torch.compile`` of its
step; 16-bit parameters have float32 copies that it trains, composed of PyTorch's parts. A step of few numbers is bound
by the host, ours and theirs: its share of copy bandwidth is not that of its kernels. So the share of the kernels alone
is reported too, and the step is also captured in a CUDA graph and replayed.

Gradients are random and normal. Second moments of zero, as for words that a batch does not contain, take slower paths
of the square root and the divisions, in all implementations. With ``misaligned`` every gradient is a view 12 bytes into
a buffer, as DistributedDataParallel's ``gradient_as_bucket_view`` makes after a layer of odd size.

    python benchmarks/optimizer_step.py [--set "ResNet-50"] [--cases main] [--within 120] [--small]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import torch
import typer
from interleave import Budget, Timing, calls_in, compared, interleave
from keeping import Keeper
from rich.box import SIMPLE_HEAD
from rich.console import Console
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
    host_syncs,
    launches,
    noting_failures,
    replayed,
    settle,
)
from torch_models import PARAMETER_SETS, Shape, numbers, small_shapes

import polyamp
from polyamp import LossScale

BASE, COMPILED, OURS = "native fused", "native compiled", "polyamp"
LARGE = 2**31  # bytes: many times the size of any cache
SCALE = LossScale(init=1.0, interval=2**30)  # native scalers unscale in place: with 1.0 gradients do not change
MAX_NORM = 1.0
HOST_BOUND = 0.8  # if the device works for a smaller share of a step, the step is bound by the host
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params, **way: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, **way),
    "SGD": lambda params, **way: torch.optim.SGD(params, lr=1e-4, momentum=0.9, **way),
}
STORAGES: dict[str, tuple[torch.dtype, Any]] = {
    "float32": (torch.float32, None),
    "float16, masters": (torch.float16, True),
    "bfloat16, masters": (torch.bfloat16, True),
}


def bert_large_shapes() -> list[Shape]:
    """Return the shapes of BERT-large with its two heads, embedding shared: 398 parameters, 336 M numbers."""
    width, words = 1024, 30522
    dense: list[Shape] = [(width, width), (width,)]
    norm: list[Shape] = [(width,), (width,)]
    layer: list[Shape] = [*(4 * dense), *norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,), *norm]
    heads: list[Shape] = [*dense, *dense, *norm, (words,), (2, width), (2,)]
    return [(words, width), (512, width), (2, width), *norm, *(24 * layer), *heads]


SETS: dict[str, Callable[[], list[Shape]]] = {"BERT-large": bert_large_shapes, **PARAMETER_SETS}


class Case(NamedTuple):
    """A kind of step, and whether it is compared with ``torch.compile`` too."""

    set: str
    optimizer: str
    storage: str
    scaled: bool
    clipped: bool
    misaligned: bool = False
    against_compiled: bool = False

    @property
    def floor(self) -> int:
        """Bytes that must be read or written for each number: gradients once for the statistics, and all of a step."""
        low = 4 if self.storage == "float32" else 2
        moments = 4 if self.optimizer == "SGD" else 8
        master = 0 if self.storage == "float32" else 4  # the 16-bit value is only written
        reads = low + moments + (master or low)
        return reads + low + master + moments + (low if self.scaled or self.clipped else 0)

    @property
    def does(self) -> str:
        """The parts of the step in a word or two."""
        return "+".join(word for word, is_so in (("scale", self.scaled), ("clip", self.clipped)) if is_so) or "plain"

    def __str__(self) -> str:
        off = ", misaligned" if self.misaligned else ""
        return f"{self.set}, {self.optimizer}, {self.storage}, {self.does}{off}"


class Which(StrEnum):
    """A choice of cases."""

    main = "main"
    rest = "rest"
    all = "all"


SOME = ("Llama 1.1 B", "ResNet-50")  # only for these are all main cases measured


def main_cases(sets: Iterable[str]) -> Iterator[Case]:
    """Return the main cases, most important first: for every set, or only for some if they are slow or rare."""
    kinds = [
        Case("", "AdamW", "float32", True, True),
        Case("", "AdamW", "bfloat16, masters", True, True),
        Case("", "SGD", "float32", True, False),
        Case("", "AdamW", "float32", True, True, misaligned=True),
        Case("", "AdamW", "float32", True, True, against_compiled=True),
    ]
    for kind in kinds:
        yield from (kind._replace(set=name) for name in sets if name in SOME or not any(kind[-2:]))


def all_cases(sets: Iterable[str]) -> Iterator[Case]:
    """Return every combination that is measured."""
    for name in sets:
        for optimizer in OPTIMIZERS:
            for clipped in (True, False):
                yield Case(name, optimizer, "float32", True, clipped)
        yield Case(name, "AdamW", "float32", False, False)
        for storage in list(STORAGES)[1:]:
            for clipped in (True, False):
                yield Case(name, "AdamW", storage, True, clipped)
        yield Case(name, "SGD", "float16, masters", True, True)
        yield Case(name, "AdamW", "bfloat16, masters", True, True, misaligned=True)
        yield Case(name, "AdamW", "float32", True, True, against_compiled=True)


def cases(sets: Iterable[str], which: Which) -> list[Case]:
    """Return the main cases, the rest, or both in this order."""
    sets = list(sets)
    main = list(main_cases(sets))
    rest = [case for case in all_cases(sets) if case not in main]
    return {Which.main: main, Which.rest: rest, Which.all: main + rest}[which]


class Step:
    """Parameters with constant gradients, and a step on them.

    ``prepare`` scales a loss, as part of the forward pass; ``step`` does everything after the backward pass.
    """

    def __init__(self, case: Case, shapes: list[Shape]) -> None:
        self.case, (dtype, self.kind) = case, STORAGES[case.storage]
        self.params = [_normal(shape, 0.02).to(dtype).requires_grad_() for shape in shapes]
        for param in self.params:
            param.grad = _normal(param.shape, 1e-3).to(dtype)
            if case.misaligned:
                param.grad = _moved(param.grad)
        self.loss = torch.ones((), device=DEVICE)
        self.max_norm = MAX_NORM if case.clipped else None

    def prepare(self) -> Any:
        """Scale the loss."""

    def step(self) -> Any:
        """Take a step."""

    def __call__(self) -> None:
        self.prepare()
        self.step()

    def make_capturable(self) -> None:
        """Prepare for the capture of a CUDA graph."""


class Ours(Step):
    def __init__(self, case: Case, shapes: list[Shape]) -> None:
        super().__init__(case, shapes)
        inner = OPTIMIZERS[case.optimizer](self.params, fused=True)
        scale = SCALE if case.scaled else LossScale.none()
        fused = True if case.scaled and DEVICE == "cpu" else None
        self.wrapped = polyamp.wrap_optimizer(
            inner, loss_scale=scale, max_grad_norm=self.max_norm, master_weights=self.kind, fused_step=fused
        )

    def prepare(self) -> Any:
        self.wrapped.scale(self.loss)
        self.params[0].grad.add_(0)  # type: ignore[union-attr]  # else these are the last step's, which is refused

    def step(self) -> Any:
        return self.wrapped.step(scaled=True)


class Native(Step):
    """The step of PyTorch's documentation; the optimizer trains float32 copies of 16-bit parameters."""

    def __init__(self, case: Case, shapes: list[Shape], *, compiled: bool = False, **way: bool) -> None:
        super().__init__(case, shapes)
        self.trained: list[Tensor] = self.params
        if self.params[0].dtype != torch.float32:
            self.trained = [param.detach().float().requires_grad_() for param in self.params]
            for master in self.trained:
                master.grad = torch.empty_like(master)
        self.optimizer = OPTIMIZERS[case.optimizer](self.trained, **way)
        if compiled:
            self.optimizer.step = torch.compile(self.optimizer.step)  # type: ignore[method-assign]
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

    def make_capturable(self) -> None:
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True


VARIANTS: dict[str, Callable[[Case, list[Shape]], Step]] = {
    BASE: lambda case, shapes: Native(case, shapes, fused=True),
    "native foreach": lambda case, shapes: Native(case, shapes, foreach=True),
    COMPILED: lambda case, shapes: Native(case, shapes, foreach=True, compiled=True),
    OURS: Ours,
}
REPLAYED = (BASE, OURS)  # the others wait for the GPU, or make graphs themselves


def _normal(shape: Shape, spread: float) -> Tensor:
    return torch.randn(shape, device=DEVICE) * spread


def _moved(grad: Tensor) -> Tensor:
    """Return the same numbers, 12 bytes into a buffer."""
    off = 12 // grad.element_size()
    buffer = torch.empty(off + grad.numel(), dtype=grad.dtype, device=grad.device)
    return buffer[off:].view(grad.shape).copy_(grad)


def rows(case: Case, shapes: list[Shape], rounds: int, bandwidth: float, left_out: list[Row]) -> list[Row]:
    """Return a row for each variant of one case; variants that cannot be built are added to ``left_out``."""
    torch.manual_seed(0)
    made: dict[str, Built] = {}
    for name, make in VARIANTS.items():
        if name != COMPILED or case.against_compiled:
            with noting_failures(left_out, **case._asdict(), variant=name):
                made[name] = built(lambda make=make: make(case, shapes), lambda step: [step() for _ in range(3)])
    steps = {name: one.made for name, one in made.items()}
    taken = interleave(str(case), steps, rounds, calls_in(0.05, steps[BASE], settle), settle)
    timings = compared(str(case), {timing.variant: timing.microseconds for timing in taken}, BASE)
    found = [row(case, numbers(shapes), timing, made[timing.variant], bandwidth) for timing in timings]
    graphs: dict[str, Callable[[], None]] = {}
    for name in REPLAYED:
        with noting_failures(left_out, **case._asdict(), variant=f"{name}, replayed"):
            steps[name].make_capturable()
            if graph := replayed(steps[name]):
                graphs[name] = graph
    return with_replays(case, found, graphs, rounds, bandwidth)


def with_replays(
    case: Case, found: list[Row], graphs: dict[str, Callable[[], None]], rounds: int, bandwidth: float
) -> list[Row]:
    """Return the rows with the times of their graphs, if they have any."""
    if not graphs:
        return [{**one, "replay_ms": None, "replay_share_of_copy_bandwidth": None} for one in found]
    timings = interleave(
        f"{case}, replayed", graphs, rounds, calls_in(0.05, next(iter(graphs.values())), settle), settle
    )
    took = {timing.variant: timing.summary()["microseconds"] for timing in timings}
    for one in found:
        microseconds = took.get(one["variant"])
        least = one["numbers"] * case.floor / bandwidth * 1e6
        one["replay_ms"] = microseconds and round(microseconds / 1e3, 4)
        one["replay_share_of_copy_bandwidth"] = microseconds and round(least / microseconds, 3)
    return found


def row(case: Case, count: int, timing: Timing, step: Built, bandwidth: float) -> Row:
    summary = timing.summary()
    seen = launches(step.made.prepare, step.made.step)
    least = count * case.floor / bandwidth * 1e6  # microseconds
    low, *_, high = statistics.quantiles(timing.microseconds, n=10, method="inclusive")
    return {
        **case._asdict(),
        "numbers": count,
        "variant": timing.variant,
        "ms": round(summary["microseconds"] / 1e3, 4),
        "ms_10_to_90_percent": [round(low / 1e3, 4), round(high / 1e3, 4)],
        "ratio": summary["ratio"],
        "ratio_10_to_90_percent": summary["ratio_10_to_90_percent"],
        "floor_bytes_per_number": case.floor,
        "share_of_copy_bandwidth": round(least / summary["microseconds"], 3),
        **on_device(seen, least, summary["microseconds"]),
        "peak_bytes": step.peak_bytes,
        "host_syncs": host_syncs(step.made),
    }


def on_device(seen: Launches | None, least: float, microseconds: float) -> Row:
    """Return the profiler's view of one step: kernels, their share of bandwidth, and what bounds the step."""
    if seen is None or not seen.kernels:  # it sees no kernel if programs may not read the GPU's counters
        return dict.fromkeys(("kernels", "copies", "kernel_ms", "kernels_share_of_copy_bandwidth", "bound_by"))
    return {
        "kernels": seen.kernels,
        "copies": seen.copies,
        "kernel_ms": round(seen.microseconds / 1e3, 4),
        "kernels_share_of_copy_bandwidth": round(least / seen.microseconds, 3),
        "bound_by": "host" if seen.microseconds < HOST_BOUND * microseconds else "device",
    }


def table(found: list[Row], bandwidth: float) -> Table:
    """Return a table with a line for each variant of each case."""
    headings = ("a step of", "variant", "ms", "/ fused", "10-90 %", "of copy", "kernels'", "replayed", "ms", "GB")
    title = f"milliseconds of a step on {DEVICE}, which copies at {bandwidth / 1e12:.3f} TB/s; and shares of that"
    caption = "host: bound by the host's work; then the shares of the kernels and of the replay show how fast they are"
    shown = Table(*headings, "kernels", "waits", title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    before = None
    for one in found:
        case = Case(*(one[key] for key in Case._fields))
        low, high = one["ratio_10_to_90_percent"]
        shares = [_percent(one[f"{of}share_of_copy_bandwidth"]) for of in ("", "kernels_", "replay_")]
        if one["bound_by"] == "host":
            shares[0] += " host"
        peak = one["peak_bytes"] and f"{one['peak_bytes'] / 1e9:.2f}"
        rest = [one["replay_ms"], peak, one["kernels"], one["host_syncs"]]
        name = "" if case == before else str(case)
        ratio = (f"{one['ratio']:.2f}", f"{low:.2f}-{high:.2f}")
        shown.add_row(
            name, one["variant"], f"{one['ms']:.3f}", *ratio, *shares, *("" if x is None else str(x) for x in rest)
        )
        before = case
    return shown


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def main(
    chosen: Annotated[list[str] | None, typer.Option("--set", help=f"Of {', '.join(SETS)}.")] = None,
    which: Annotated[Which, typer.Option("--cases", help="The main cases, the rest, or all.")] = Which.all,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of steps.")] = 9,
    within: Annotated[float | None, typer.Option(help="Seconds after which no case is started.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny parameters: a check that this runs.")] = False,
) -> None:
    """Measure, print, and keep the numbers in results/optimizer_step_<device>.json, case by case."""
    budget = Budget(within)
    if DEVICE == "cpu" and not small:
        raise typer.BadParameter("without a GPU only --small runs")
    sets = {"small": small_shapes} if small else {name: SETS[name] for name in chosen or order()}
    bandwidth = copy_bandwidth(2**24 if small else LARGE)
    versions = {"polyamp": polyamp.__version__, "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    about = {"check_only": small and CHECK_ONLY, "copy_bytes_per_second": round(bandwidth)}
    named = f"optimizer_step_{'small' if small else DEVICE}"
    keeper = Keeper(named, versions, key=(*Case._fields, "variant"), **about)
    left_out: list[Row] = []
    for case in cases(sets, which):
        lost: list[Row] = []
        if budget.left <= 0:
            lost.append({**case._asdict(), "reason": f"the {within:.0f} s were over"})
        else:
            with noting_failures(lost, **case._asdict()):
                keeper.add(rows(case, sets[case.set](), 2 if small else rounds, bandwidth, lost))
        for one in lost:
            keeper.leave_out(one, one["reason"])
        left_out += lost
    Console(width=170).print(table(keeper.found, bandwidth))
    for one in left_out:
        print("left out:", ", ".join(f"{key} {value}" for key, value in one.items()))
    if failed(left_out):
        raise typer.Exit(1)


def order() -> list[str]:
    """Return the names of the sets, the most informative ones first."""
    first = [name for name in SOME if name in SETS]
    return [*first, *(name for name in SETS if name not in first)]


def failed(left_out: list[Row]) -> bool:
    """Return whether a case of ours failed for another reason than too little memory or time."""
    excused = ("OutOfMemoryError", "the ")
    return any(not one["reason"].startswith(excused) and one.get("variant", OURS).startswith(OURS) for one in left_out)


if __name__ == "__main__":
    typer.run(main)
