"""Is a training step, or entering a region, slower than at another commit? PyTorch on the CPU, many small parameters.

The other commit is checked out beside this tree, and a process of each runs the same program in turns. A step is
backward, clipping, update or skip, and clearing; ``native`` is `torch.amp.GradScaler` in both trees, as a control.

    python benchmarks/step_against.py REVISION [--small]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE = (16, 16)
COUNTS = (2, 100, 1000)
WAYS = ("native", "mixed_float16", "mixed_bfloat16", "float16")
SMALL = "--small" in sys.argv  # a check that this program runs, not a result
ROUNDS, SECONDS = (2, 0.01) if SMALL else (40, 0.05)
ROOT = Path(__file__).resolve().parents[1]


def step_of(way: str, count: int) -> Callable[[], Any]:
    """Return a training step of ``count`` parameters; under float16 they have float32 master weights."""
    import torch

    import polyamp

    params = [torch.nn.Parameter(torch.full(SHAPE, 0.01)) for _ in range(count)]
    if way == "float16":
        params = [torch.nn.Parameter(param.detach().half()) for param in params]
    optimizer = torch.optim.SGD(params, lr=1e-4)

    def loss() -> Any:
        return torch._foreach_norm(params, 2.0)[0].float() + sum(param.float().sum() for param in params)

    if way == "native":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def native() -> None:
            scaler.scale(loss()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return native
    settings = None if way == "mixed_bfloat16" else polyamp.LossScale(init=1024.0)
    opt = polyamp.wrap_optimizer(optimizer, way, loss_scale=settings, max_grad_norm=1.0)

    def ours() -> None:
        opt.backward(loss())
        opt.step()
        opt.zero_grad()

    return ours


def region_of(way: str) -> Callable[[], Any]:
    """Return 100 entries into a region."""
    import torch

    import polyamp

    def enter() -> None:
        for _ in range(100):
            with torch.autocast("cpu", torch.bfloat16) if way == "native" else polyamp.autocast(way):
                pass

    return enter


def work(way: str, count: int) -> None:
    """Run in a process of one tree: for each line with a number, make so many calls and print their seconds."""
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    call = step_of(way, count) if count else region_of(way)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            call()
        print(time.perf_counter() - start, flush=True)


class Worker:
    """A process of one tree."""

    def __init__(self, tree: Path, way: str, count: int) -> None:
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--work", way, str(count)]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        self.calls, pipe = 1, subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, cwd=tree, stdin=pipe, stdout=pipe, text=True)
        self._in: Any = self._process.stdin
        self._out: Any = self._process.stdout

    def __call__(self) -> float:
        self._in.write(f"{self.calls}\n")
        self._in.flush()
        return float(self._out.readline())

    def close(self) -> None:
        self._in.close()
        self._process.wait()


def compare(revision: str) -> None:
    from interleave import interleave
    from keeping import publish

    import polyamp

    answers = []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(other), revision], check=True)
        try:
            for count in (0, *(COUNTS[:1] if SMALL else COUNTS)):
                for way in WAYS:
                    what = f"{way}, a step of {count} parameters" if count else f"{way}, 100 entries into a region"
                    workers = {revision: Worker(other, way, count), "this tree": Worker(ROOT, way, count)}
                    calls = max(1, round(SECONDS / min(worker() for worker in [*workers.values()] * 3)))
                    for worker in workers.values():
                        worker.calls = calls
                    answers += interleave(f"{what}, {calls} calls", dict(workers), ROUNDS, 1)
                    for worker in workers.values():
                        worker.close()
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(other)], check=True)
    publish("step_against" + ("_small" if SMALL else ""), answers, {"polyamp": polyamp.__version__, "other": revision})


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    if "--work" in sys.argv:
        work(words[0], int(words[1]))
    elif len(words) == 1:
        compare(words[0])
    else:
        sys.exit("usage: python benchmarks/step_against.py REVISION [--small]")
