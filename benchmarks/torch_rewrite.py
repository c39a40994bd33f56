"""What does a rewritten graph cost and save under inductor, compared with autocast? Three models, two formats.

For each way to train: the time of a forward and backward pass, of the first call (capture, compile), the bytes kept for
the backward pass in eager mode, and the error of the gradients against float64.

    python benchmarks/torch_rewrite.py [--quick]
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from interleave import Timing, calls_in, compared, console, interleave
from keeping import keep, machine
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

import polyamp

LOSS_SCALES = {"bfloat16": 1.0, "float16": 1024.0}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BASE = "autocast"
Row = dict[str, Any]


class Block(nn.Module):
    """A block on tokens [batch, length, width]: causal attention and a wide layer, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def mlp(scale: int) -> tuple[nn.Module, Tensor]:
    widths = [64, *[512 * scale] * 4, 10]
    layers = [part for one, other in pairwise(widths) for part in (nn.Linear(one, other), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(128 * scale, 64)


def block(scale: int) -> tuple[nn.Module, Tensor]:
    return Block(128 * scale), torch.randn(4 * scale, 64, 128 * scale)


def cnn(scale: int) -> tuple[nn.Module, Tensor]:
    widths = [3, *(width * scale for width in (32, 32, 64))]
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Conv2d(one, other, 3, padding=1, bias=False), nn.BatchNorm2d(other), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)]
    return nn.Sequential(*layers, *head), torch.randn(4 * scale, 3, 32, 32)


MODELS: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {"mlp": mlp, "block": block, "cnn": cnn}


class Way:
    """A way to train: a call, and the autocast around it. Each has its own model with the same weights."""

    def __init__(self, name: str, model: nn.Module, x: Tensor, low: str) -> None:
        self.model, self.x, self.scale = copy.deepcopy(model), x, LOSS_SCALES[low]
        self.region: Callable[[], AbstractContextManager[Any]] = nullcontext
        made = {
            "float32": self._compiled,
            "autocast": lambda: self._autocast(getattr(torch, low)),
            "rewrite": lambda: self._rewritten(low),
        }
        torch._dynamo.reset()
        start = time.perf_counter()
        self.fn = made[name]()
        self.run()
        self.first_call_s = time.perf_counter() - start

    def run(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with self.region():
            loss = self.fn(self.x).float().square().mean()
        (loss * self.scale).backward()

    def gradients(self) -> Tensor:
        self.run()
        return torch.cat([param.grad.double().flatten() for param in self.model.parameters()]) / self.scale

    def _compiled(self) -> Any:
        return torch.compile(self.model)

    def _autocast(self, dtype: torch.dtype) -> Any:
        self.region = lambda: torch.autocast(DEVICE, dtype)
        return torch.compile(self.model)

    def _rewritten(self, low: str) -> Any:
        return torch.compile(polyamp.rewrite(self.model, self.x, policy=f"mixed_{low}"))


WAYS = ("autocast", "float32", "rewrite")


def rows(name: str, low: str, scale: int, rounds: int) -> list[Row]:
    """Return a row for each way to train one model in one format."""
    torch.manual_seed(0)
    model, x = (part.to(DEVICE) for part in MODELS[name](scale))
    ways = {way: Way(way, model, x, low) for way in WAYS}
    exact = exact_gradients(model, x)
    settle = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    calls = calls_in(0.1, ways["rewrite"].run, settle)
    taken = interleave(f"{name} {low}", {way: made.run for way, made in ways.items()}, rounds, calls, settle)
    timings = compared(name, {timing.variant: timing.microseconds for timing in taken}, BASE)
    totals = polyamp.explain(model, x, policy=f"mixed_{low}").totals
    saved = {"rewrite": totals["bytes_saved"], "float32": totals["bytes_saved_float32"]}
    saved["autocast"] = autocast_saved(model, x, low)
    return [
        {"model": name, "format": low, "way": timing.variant, **step(timing)}
        | {"first_call_s": round(ways[timing.variant].first_call_s, 2), "saved_bytes": saved[timing.variant]}
        | {"gradient_error": float(f"{error(ways[timing.variant].gradients(), exact):.3g}")}
        for timing in timings
    ]


def step(timing: Timing) -> Row:
    summary = timing.summary()
    spread = summary["ratio_10_to_90_percent"]
    return {
        "step_ms": round(summary["microseconds"] / 1e3, 3),
        "ratio": summary["ratio"],
        "ratio_10_to_90_percent": spread,
    }


def exact_gradients(model: nn.Module, x: Tensor) -> Tensor:
    double = copy.deepcopy(model).double()
    double(x.double()).square().mean().backward()
    return torch.cat([param.grad.flatten() for param in double.parameters()])


def autocast_saved(model: nn.Module, x: Tensor, low: str) -> int:
    """Return the bytes that eager autocast keeps, each storage once."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast(DEVICE, getattr(torch, low)),
    ):
        result = copy.deepcopy(model)(x)
    del result
    return sum(size for size, _ in kept.values())


def error(ours: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference, divided by the norm."""
    return float((ours - exact).norm() / exact.norm())


def table(found: Iterable[Row]) -> Table:
    headings = ("model", "format", "way", "step ms", "/ autocast", "10-90 %", "first call s", "saved MB", "error")
    shown = Table(*headings, title=f"{where()}, inductor", box=SIMPLE_HEAD)
    for row in found:
        low, high = row["ratio_10_to_90_percent"]
        cells = (f"{row['step_ms']:.2f}", f"{row['ratio']:.2f}", f"{low:.2f}-{high:.2f}", f"{row['first_call_s']:.1f}")
        last = row["way"] == WAYS[-1]
        saved, off = f"{row['saved_bytes'] / 1e6:.2f}", f"{row['gradient_error']:.0e}"
        shown.add_row(row["model"], row["format"], row["way"], *cells, saved, off, end_section=last)
    return shown


def where() -> str:
    """Return the machine and the version of PyTorch."""
    known = machine()
    processor = f"{known['processor']} ({torch.get_num_threads()} threads)"
    return f"{known['gpu'] if DEVICE == 'cuda' else processor}, PyTorch {torch.__version__}"


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; may be repeated.")] = None,
    low: Annotated[list[str] | None, typer.Option("--format", help="bfloat16 or float16; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of steps.")] = 15,
    scale: Annotated[int, typer.Option(min=1, help="Multiplies widths and batches, for a GPU.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds; no results are kept.")] = False,
) -> None:
    """Measure, print, and keep the numbers in results/torch_rewrite_<device>.json."""
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    torch.compiler.config.force_disable_caches = True  # every first call must compile
    torch.compile(lambda x: x + 1)(torch.ones(2, device=DEVICE))  # and none must load inductor
    versions = {"polyamp": polyamp.__version__, "torch": torch.__version__}
    about = {"scale": scale, "threads": torch.get_num_threads()}
    found: list[Row] = []
    for name in model or MODELS:
        for each in low or LOSS_SCALES:
            found += rows(name, each, scale, 2 if quick else rounds)
            if not quick:
                keep(f"torch_rewrite_{DEVICE}", versions, {**about, "rows": found})
    console().print(table(found))


if __name__ == "__main__":
    typer.run(main)
