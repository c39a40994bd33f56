"""All that needs a GPU, in one command: build the extension, run the GPU tests, then the benchmarks with their charts.

    python benchmarks/gpu.py [build|tests|sanitizer|step|bert|resnet|overhead|probe|health|autocast ...]

Every part is a process of its own that is stopped after ten minutes; one that fails does not keep the others from
running. Results are kept in ``benchmarks/results`` and, where there is matplotlib, drawn into ``docs``.

It needs a CUDA build of PyTorch, pytest with what the tests import (hypothesis, ml_dtypes), and polyamp itself; without
a network that is ``pip install --no-deps --no-build-isolation -e .``.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parent.parent


def plot(name: str) -> tuple[str, ...]:
    return ("--plot", f"docs/{name}.png") if importlib.util.find_spec("matplotlib") else ()


TESTS = ("-m", "pytest", "--gpu", "-m", "gpu", "--suite=torch", "-p", "no:cacheprovider", "-q")
PARTS: dict[str, tuple[str, ...]] = {
    "build": ("-m", "polyamp.backends.torch.build"),
    "tests": (*TESTS, "-k", "not sanitizer"),
    "sanitizer": (*TESTS, "-k", "sanitizer", "tests/on_torch/kernels/test_step_cuda.py"),
    "step": ("benchmarks/optimizer_step.py", *plot("optimizer_step")),
    "bert": ("benchmarks/end_to_end.py", "--model", "bert", *plot("end_to_end")),
    "resnet": ("benchmarks/end_to_end.py", "--model", "resnet", *plot("end_to_end")),
    "overhead": ("benchmarks/step_overhead.py", "torch"),
    "probe": ("benchmarks/probe_cost.py", "--framework", "torch"),
    "health": ("benchmarks/monitoring.py", "run", "--framework", "torch"),
    "autocast": ("benchmarks/torch_autocast.py", "--device", "cuda"),
}


def run(name: str, limit: float) -> str:
    """Run one part, and say how it went."""
    print(f"\n==== {name}: python {' '.join(PARTS[name])}", flush=True)
    start = time.perf_counter()
    try:
        code = subprocess.run([sys.executable, *PARTS[name]], cwd=ROOT, timeout=limit, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"FAILED: stopped after {limit:.0f} s"
    return f"{'passed' if code == 0 else f'FAILED with status {code}'} in {time.perf_counter() - start:.0f} s"


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(PARTS)}; all by default.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds for each part.")] = 600.0,
) -> None:
    """Run the parts, in their order, and fail where one of them did."""
    chosen = parts or list(PARTS)
    if unknown := set(chosen) - PARTS.keys():
        raise typer.BadParameter(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    ended = {name: run(name, limit) for name in chosen}
    print("\n" + "\n".join(f"{name:10} {how}" for name, how in ended.items()))
    if any(how.startswith("FAILED") for how in ended.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
