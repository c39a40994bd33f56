"""What does an overridden operation cost? torch.autocast, our compiled kernels and our kernels in Python, in turns.

``python benchmarks/torch_autocast_extension.py [--device cuda]``, after ``python -m polyamp.backends.torch.build``,
writes ``results/torch_autocast_extension.json`` (on a GPU ``..._cuda.json``). Kernels are registered for a whole
process, so each variant has its own process, and native autocast one without our kernels. If a rule needs a cast, the
native variant makes the same cast by hand.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from interleave import Timing, compared, turns
from keeping import publish
from torch.nn import functional

import polyamp
from polyamp.backends.torch import autocast

CALLS = 500
LOW = torch.bfloat16
VARIANTS = {"torch.autocast": "off", "polyamp, compiled": "require", "polyamp, in Python": "off"}  # POLYAMP_EXTENSION

DEFAULT = polyamp.policy("mixed_bfloat16")
RULES = polyamp.policy("mixed_bfloat16", rules={"softmax": "full", "layer_norm": "lower"})
PRODUCTS = polyamp.policy("mixed_bfloat16", rules={"matmul": "full"})
HALF = polyamp.policy("mixed_float16")


class Question(NamedTuple):
    """One operation, as called in torch.autocast and in our autocast region."""

    native: Callable[[], Any]
    ours: Callable[[], Any]
    policy: polyamp.Policy


def questions(size: int, device: str) -> dict[str, Question]:
    x = torch.randn(size, size, device=device)
    low, half, written, weight = x.to(LOW), x.half(), x.to(LOW), torch.zeros_like(x)
    norm = torch.nn.LayerNorm(size, device=device)
    affine, cast = (norm.weight, norm.bias), (norm.weight.to(LOW), norm.bias.to(LOW))

    def both(run: Callable[[], Any], policy: polyamp.Policy) -> Question:
        return Question(run, run, policy)

    asked = {
        "overridden, nothing to cast: softmax of float32": both(lambda: torch.softmax(x, -1), RULES),
        "overridden, a cast: softmax in float32": Question(
            lambda: torch.softmax(low.float(), -1), lambda: torch.softmax(low, -1), RULES
        ),
        "overridden, weights cast before: layer_norm in 16 bits": Question(
            lambda: functional.layer_norm(low, (size,), *cast),
            lambda: functional.layer_norm(low, (size,), *affine),
            RULES,
        ),
        "overridden for another policy: mm of 16 bits": both(lambda: torch.mm(low, low), DEFAULT),
        "overridden for another policy: mm of float32": both(lambda: torch.mm(x, x), DEFAULT),
        "in place: add_ to an activation": both(lambda: written.add_(low), DEFAULT),
        "in place: add_ of a number": both(lambda: written.add_(1), DEFAULT),
        "in place: add_ to a weight": both(lambda: weight.add_(x), DEFAULT),
        "not overridden: add": both(lambda: torch.add(low, low), DEFAULT),
    }
    if device == "cpu":  # on CUDA float16 follows the list that native autocast has there
        asked["float16 on the CPU: exp in float32"] = Question(
            lambda: torch.exp(half.float()), lambda: torch.exp(half), HALF
        )
    return {f"{name}, {size}x{size}": question for name, question in asked.items()}


def regions_of(variant: str, device: str) -> Callable[[polyamp.Policy], AbstractContextManager[Any]]:
    if variant == "torch.autocast":
        return lambda policy: torch.autocast(device, torch.float16 if policy is HALF else LOW)
    with autocast(PRODUCTS), autocast(RULES), autocast(HALF):
        return autocast


def work(connection: Connection, variant: str, device: str) -> None:
    """Serve the parent process: time what it asks for, until it closes the pipe."""
    torch.set_num_threads(1)
    settle: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    region = regions_of(variant, device)
    asked = questions(4, device) | questions(256, device)
    connection.send(list(asked))
    while name := connection.recv():
        question = asked[name]
        run = question.native if variant == "torch.autocast" else question.ours
        with region(question.policy):
            run()
            settle()
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            settle()
            connection.send((time.perf_counter() - start) / CALLS * 1e6)


@contextmanager
def worker(variant: str, device: str) -> Iterator[Connection]:
    os.environ["POLYAMP_EXTENSION"] = VARIANTS[variant]
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, variant, device))
    process.start()
    try:
        yield ours
    finally:
        ours.send("")
        process.join()


def measure(workers: dict[str, Connection], rounds: int) -> list[Timing]:
    *_, names = [connection.recv() for connection in workers.values()]
    timings = []
    for name in names:
        taken: dict[str, list[float]] = {variant: [] for variant in workers}
        for variant in turns(workers, rounds, name):
            workers[variant].send(name)
            taken[variant].append(workers[variant].recv())
        timings += compared(name, taken)
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    first, second, third = (worker(variant, options.device) for variant in VARIANTS)
    with first as native, second as compiled, third as in_python:
        timings = measure(dict(zip(VARIANTS, (native, compiled, in_python), strict=True)), options.rounds)
    name = "torch_autocast_extension" + ("" if options.device == "cpu" else f"_{options.device}")
    publish(name, timings, {"torch": torch.__version__, "polyamp": polyamp.__version__})


if __name__ == "__main__":
    main()
