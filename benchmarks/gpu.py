"""Run all that needs a GPU, in five commands of a few minutes: build, test, measure. docs/gpu.md explains the results.

    python benchmarks/gpu.py --within 550            # the first set, most valuable parts first
    python benchmarks/gpu.py second --within 550
    python benchmarks/gpu.py third --within 550
    python benchmarks/gpu.py compiled --within 550   # BERT-large and ResNet-50 by torch.compile
    python benchmarks/gpu.py tables --within 550     # the other models of the founding speed table
    python benchmarks/gpu.py step jax                # some parts, without a time limit
    python benchmarks/gpu.py --plan                  # list the parts and their shares of the time
    python benchmarks/gpu.py all --rehearse          # everything in a tiny form on a CPU

polyamp need not be installed, and no package is fetched. It needs a CUDA build of PyTorch, rich, typer, and for the
tests pytest and hypothesis; parts of JAX need jax, optax and flax. Results are kept in ``benchmarks/results``, or in
the folder that ``POLYAMP_RESULTS`` names: one file for each benchmark, and ``gpu.json`` and ``gpu.log`` of all parts.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from interleave import console
from keeping import RESULTS, machine
from parts import Outcome, Part, Runner, registered
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

# a test that hangs prints where, before it is stopped
PYTEST = ("-m", "pytest", "--gpu", "-p", "no:cacheprovider", "-q", "--tb=short", "-o", "faulthandler_timeout=90")
TORCH = (*PYTEST, "--suite=torch", "-m", "gpu")
KERNELS = tuple(f"tests/on_torch/kernels/test_{name}.py" for name in ("kernels", "step_cuda"))
JAX_TESTS = ("test_conformance", "steps/test_step", "steps/test_optax", "steps/test_gradients", "autocast/test_values")
JAX = tuple(f"tests/on_jax/{name}.py" for name in JAX_TESTS)
# by default float32 products use TF32; a precision that is asked for would keep polyamp from lowering products
FULL_FLOAT32 = (("NVIDIA_TF32_OVERRIDE", "0"), ("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false"))
COLLECT = ("--collect-only", "-q")
MODEL = ("benchmarks/end_to_end.py", "--model")
SELFTEST = ("-m", "polyamp", "doctor", "--test", "--again")

PARTS = [
    Part("selftest", "first", 40, (*SELFTEST, "torch"), small=()),
    Part("build", "first", 40, ("-m", "polyamp.backends.torch.build"), small=(), firm=True),
    Part("kernels", "first", 60, (*TORCH, *KERNELS), small=COLLECT, firm=True),
    Part(
        "step",
        "first",
        130,
        ("benchmarks/optimizer_step.py", "--cases", "main"),
        ("optimizer_step_cuda.json",),
        within=True,
    ),
    Part("resnet50", "first", 100, (*MODEL, "resnet50"), ("end_to_end_cuda.json",), within=True),
    Part("bert-large-128", "first", 100, (*MODEL, "bert-large-128"), ("end_to_end_cuda.json",), within=True),
    Part("jax", "first", 50, ("benchmarks/jax_skip.py",), ("jax_skip_gpu.json",), within=True),
    Part(
        "torch-tests",
        "second",
        90,
        (*TORCH, *(f"--ignore={path}" for path in KERNELS)),
        small=COLLECT,
    ),
    Part("selftest-jax", "second", 40, (*SELFTEST, "jax"), small=()),
    Part("jax-tests", "second", 90, (*PYTEST, "--suite=jax", *JAX), small=COLLECT, variables=FULL_FLOAT32),
    Part(
        "step-rest",
        "second",
        100,
        ("benchmarks/optimizer_step.py", "--cases", "rest"),
        ("optimizer_step_cuda.json",),
        within=True,
    ),
    Part("overhead", "second", 40, ("benchmarks/step_overhead.py", "torch"), ("step_overhead_torch.json",)),
    Part(
        "autocast",
        "second",
        25,
        ("benchmarks/torch_autocast.py", "--device", "cuda"),
        ("torch_autocast_cuda.json",),
        small=("--device", "cpu", "--rounds", "2"),
    ),
    Part(
        "jax-autocast",
        "second",
        110,
        ("benchmarks/jax_autocast.py", "--model", "transformer", "--scale", "8", "--compiles", "1"),
        ("jax_autocast_gpu.json",),
        small=("--scale", "1", "--quick", "--format", "float16"),
    ),
    Part(
        "rewrite",
        "second",
        110,
        ("benchmarks/torch_rewrite.py", "--model", "block", "--model", "cnn", "--scale", "8"),
        ("torch_rewrite_cuda.json",),
        small=("--scale", "1", "--quick", "--format", "bfloat16"),
    ),
    Part("gpt2", "third", 100, (*MODEL, "gpt2"), ("end_to_end_cuda.json",), within=True),
    Part("bert-large-512", "third", 90, (*MODEL, "bert-large-512"), ("end_to_end_cuda.json",), within=True),
    Part("mask-rcnn", "third", 60, (*MODEL, "mask-rcnn"), ("end_to_end_cuda.json",), within=True),
    Part(
        "losses",
        "third",
        100,
        (*MODEL, "resnet50", "--model", "bert-large-128", "--losses", "200"),
        ("end_to_end_losses_cuda.json",),
        small=("--small", "--losses", "4"),
        within=True,
    ),
    Part(
        "compiled",
        "compiled",
        500,
        (*MODEL, "bert-large-128", "--model", "resnet50", "--ways", "compiled"),
        ("end_to_end_cuda.json",),
        within=True,
    ),
    Part("jasper", "tables", 130, (*MODEL, "jasper"), ("end_to_end_cuda.json",), within=True),
    Part("transformer", "tables", 130, (*MODEL, "transformer"), ("end_to_end_cuda.json",), within=True),
    Part("gnmt", "tables", 140, (*MODEL, "gnmt"), ("end_to_end_cuda.json",), within=True),
    Part("bert-large-squad", "tables", 140, (*MODEL, "bert-large-squad"), ("end_to_end_cuda.json",), within=True),
]
SETS = tuple(dict.fromkeys(part.set for part in PARTS))
NAMES = tuple(part.name for part in PARTS)

SHARED = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # by default the first process of JAX takes most of the GPU's memory
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "PYTHONUTF8": "1",
    "PYTHONUNBUFFERED": "1",  # the log has the output of a program that was killed
    "PYTHONFAULTHANDLER": "1",
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
PACKAGES = ("torch", "triton", "jax", "jaxlib", "jax-cuda13-plugin", "optax", "flax", "numpy", "transformers", "pytest")


def chosen(words: list[str]) -> list[Part]:
    """Return the parts with these sets or names, each once, in the order of the table."""
    if unknown := set(words) - {*SETS, *NAMES, "all"}:
        raise typer.BadParameter(f"no {', '.join(sorted(unknown))}; there are {', '.join((*SETS, 'all', *NAMES))}")
    return [part for part in PARTS if {part.name, part.set, "all"} & set(words)]


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def plan(parts: list[Part]) -> Table:
    """Return a table of what would run, with the shares of its set's time."""
    table = Table("part", "set", "share", "keeps", "command", box=SIMPLE_HEAD)
    for part in parts:
        share = part.seconds / sum(one.seconds for one in PARTS if one.set == part.set)
        command = escape(" ".join(part.command)) + (" --within ..." if part.within else "")
        table.add_row(part.name, part.set, f"{share:.0%}", "\n".join(part.keeps), command)
    return table


def summary(outcomes: list[Outcome]) -> Table:
    """Return a table of what ran, failed or was left out."""
    table = Table("part", "how it went", "seconds", "of", "its last line", box=SIMPLE_HEAD)
    colour = {"passed": "green", "failed": "red", "stopped": "yellow"}
    for one in outcomes:
        last = [line for line in one.tail.splitlines() if re.search(r"\w", line)][-1:] or [""]
        status = f"[{colour.get(one.status, 'default')}]{one.status}[/]"
        table.add_row(one.part, status, f"{one.seconds:.0f}", f"{one.limit:.0f}", escape(last[0][:70]))
    return table


def environment(paths: str, results: Path, *, rehearse: bool) -> dict[str, str]:
    """Return the environment of every part."""
    own = {"PYTHONPATH": paths, "POLYAMP_RESULTS": str(results), **(NO_GPU if rehearse else {})}
    return {**SHARED, **os.environ, **own}


def stop_when_told() -> None:
    """End by an exception, which stops the running part; and let parts receive interrupts in the background too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PART|SET ...]", help=f"Of {', '.join((*SETS, 'all', *NAMES))}.")
    ] = None,
    within: Annotated[float | None, typer.Option(min=1, help="Seconds for all parts together.")] = None,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Tiny sizes on the CPU: a check that all runs.")] = False,
    only_plan: Annotated[bool, typer.Option("--plan", help="Print the parts, and run nothing.")] = False,
) -> None:
    """Run the parts, most valuable first, and fail if one of them failed; by default the first set."""
    started = time.time()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace", line_buffering=True)  # for the output of parts
    if only_plan:
        console().print(plan(chosen(words or ["all"])))
        return
    parts = chosen(words or ["first"])
    stop_when_told()
    with tempfile.TemporaryDirectory(prefix="polyamp-") as folder:
        results = Path(folder, "results") if rehearse and "POLYAMP_RESULTS" not in os.environ else RESULTS
        about: dict[str, Any] = {
            "check_only": rehearse,
            "machine": machine(),
            "versions": versions(),
            "within": within,
            "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started)),
        }
        paths = registered(Path(folder, "registered"))
        runner = Runner(results, environment(paths, results, rehearse=rehearse), within, about)
        try:
            outcomes = runner.run(parts, small=rehearse)
        finally:
            runner.keep()
            for half in results.glob("*.part"):
                half.unlink()
        console().print(summary(outcomes), f"on {machine()}, with {versions()}")
        kept = sorted(path.name for path in results.iterdir() if path.stat().st_mtime >= started)
        print(f"kept in {results}: {', '.join(kept)}")
    if any(one.status == "failed" for one in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
