"""Time one operation in our autocast regions and in torch.autocast's.

``python benchmarks/torch_autocast.py [--device cuda]`` writes ``results/torch_autocast_<device>.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from interleave import Timing, interleave
from keeping import keep_timings, publish
from torch.nn import functional

import polyamp
from polyamp.backends.torch import autocast

DTYPE = torch.bfloat16
DEFAULT = polyamp.policy("mixed_bfloat16")
CALLS = 200  # in one region; all times are for so many
RULES = polyamp.policy("mixed_bfloat16", rules={"softmax": "full"})


def operations(size: int, device: str) -> dict[str, Callable[[], Any]]:
    x = torch.randn(size, size, device=device)
    low, target = x.to(DTYPE), torch.zeros(size, size, device=device, dtype=DTYPE)
    weight = torch.randn(size, size, device=device, requires_grad=True)
    return {
        "listed: mm of 16-bit inputs": lambda: torch.mm(low, low),
        "listed: mm of float32 inputs": lambda: torch.mm(x, x),
        "listed: linear, cached weight": lambda: functional.linear(low, weight),
        "unlisted: add": lambda: torch.add(low, low),
        "in place: add_ to an activation": lambda: target.add_(low),
        "promoting: cat": lambda: torch.cat([low, low]),
        "softmax, which the rules override": lambda: torch.softmax(low, -1),
    }


def within(context: AbstractContextManager[Any], run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call that runs ``run`` ``CALLS`` times in a region."""

    def timed() -> None:
        with context:
            for _ in range(CALLS):
                run()

    return timed


def contexts(device: str) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    return {
        "torch.autocast": lambda: torch.autocast(device, DTYPE),
        "polyamp, default policy": lambda: autocast(DEFAULT),
        "polyamp, a rule for softmax": lambda: autocast(RULES),
    }


def measure(device: str, rounds: int, *, native_alone: bool = False) -> list[Timing]:
    """Time ``CALLS`` calls.

    Our kernels are registered for the whole process, so native regions without them are measured before our first one.
    """
    settle: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    regions = contexts(device)
    if native_alone:
        regions = {"torch.autocast without polyamp": regions["torch.autocast"]}
    timings = []
    for size in (4, 256):
        for question, run in operations(size, device).items():
            variants = {name: within(context(), run) for name, context in regions.items()}
            timings += interleave(f"{question}, {size}x{size}", variants, rounds, 1, settle)
    return timings


def against_native_alone(alone: list[Timing], together: list[Timing]) -> list[Timing]:
    """Compare all times, round by round, with those of native autocast before polyamp registered anything."""
    yardstick = {timing.question: timing.microseconds for timing in alone}
    compared = [
        Timing(
            one.question, one.variant, one.microseconds, [a / b for a, b in zip(one.microseconds, base, strict=True)]
        )
        for one in together
        for base in [yardstick[one.question]]
    ]
    return [*alone, *compared]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    alone = measure(options.device, options.rounds, native_alone=True)
    name, versions = f"torch_autocast_{options.device}", {"torch": torch.__version__, "polyamp": polyamp.__version__}
    keep_timings(name, alone, versions)
    together = measure(options.device, options.rounds)
    publish(name, against_native_alone(alone, together), versions)


if __name__ == "__main__":
    main()
