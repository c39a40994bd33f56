"""How accurate are small programs in 16 bits that float32 computes well? Small programs, in every framework and engine.

Result and gradient of each must be finite wherever float32 is, and differ from float32 only by a few roundings.
Prints the table, keeps it in results/traps_cpu.json, and writes docs/explain/traps.md from it.

    python benchmarks/traps.py [--engine "torch rewrite"] [--trap "focal loss"]
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.append(str(Path(__file__).parents[1] / "tests"))

import jax
import tensorflow
import torch
import typer
from interleave import console
from keeping import keep
from rich.box import SIMPLE_HEAD
from rich.progress import track
from rich.table import Table

import polyamp
from support.traps import TRAPS
from support.traps.engines import ENGINES, FORMATS
from support.traps.verdict import KEPT, verdict

Row = dict[str, Any]
PAGE = Path(__file__).parents[1] / "docs" / "explain" / "traps.md"
SHORT = {"float16": "f16", "bfloat16": "bf16"}


def rows(traps: Iterable[str], engines: Iterable[str]) -> list[Row]:
    """Return one row for each trap and engine, with the outcome in each format."""
    pairs = [(trap, engine) for engine in engines for trap in traps]
    found = []
    for trap, engine in track(pairs, description="traps", console=console()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a loss that is not finite, as some of these are
            said = {low: verdict(trap, ENGINES[engine], low) for low in FORMATS}
        found.append({"trap": trap, "engine": engine, **said})
    return found


def counts(found: list[Row]) -> dict[str, dict[str, int]]:
    """Return how many traps each engine keeps in each format."""
    engines = dict.fromkeys(row["engine"] for row in found)
    return {
        engine: {low: sum(row[low] == KEPT for row in found if row["engine"] == engine) for low in FORMATS}
        for engine in engines
    }


def cell(row: Row) -> str:
    """Return the outcome of a trap in an engine, in a few words; empty if both formats keep it."""
    lost = {low: row[low] for low in FORMATS if row[low] != KEPT}
    if len(set(lost.values())) == 1 and len(lost) == len(FORMATS):
        return str(next(iter(lost.values())))
    return ", ".join(f"{SHORT[low]} {what}" for low, what in lost.items())


def page(kept: Row) -> str:
    """Return docs/explain/traps.md for a result."""
    found, known = kept["rows"], kept["versions"]
    engines = list(counts(found))
    lines = [HEAD, "| | float16 | bfloat16 |", "|---|---|---|"]
    lines += [f"| {engine} | {said['float16']} | {said['bfloat16']} |" for engine, said in counts(found).items()]
    lines += [MIDDLE, f"| trap | what is dangerous | {' | '.join(engines)} |", "|---" * (len(engines) + 2) + "|"]
    cells = {(row["trap"], row["engine"]): cell(row) for row in found}
    for name in dict.fromkeys(row["trap"] for row in found):
        of_engines = " | ".join(cells[name, engine] for engine in engines)
        lines.append(f"| {name} | {TRAPS[name].danger} | {of_engines} |")
    lines.append(WRONG)
    where = f"{kept['machine']['processor']}; {', '.join(f'{name} {number}' for name, number in known.items())}"
    return "\n".join([*lines, f"\nMeasured by `python benchmarks/traps.py` on {where}.\n"])


HEAD = f"""# Traps for 16 bits

{len(TRAPS)} small programs that float32 computes well, and what becomes of them in 16 bits: norms, losses and
probabilities by hand, masks, labels and positions as arguments, long sums, loops, and constants that a format does not
have. Each is the same program in every framework (`tests/support/traps`), with its gradient. A program is *kept* if its
result and gradient are finite wherever those of float32 are, and differ from them by no more than a few roundings of
the format.

Programs that each engine keeps:
"""
MIDDLE = """
`torch.autocast` is PyTorch's own, for CPUs. `flax dtype=` is JAX with products in 16 bits and everything else by
promotion, as flax layers do. `TensorFlow's pass` is TensorFlow's own graph pass. The others are polyamp's.
Its autocast for PyTorch keeps the formats of native autocast, so that it costs the same. So it also loses what native
autocast loses, except for operations that CUDA's list covers. `rewrite` sees the whole program and follows [the flow
rule](flow_rule.md).

An empty cell means that both formats keep the program. Otherwise it shows the loss, such as an error in percent of the
length of the result.
"""
WRONG = """
## What stays wrong

No rule for formats helps where the program itself needs more than 16 bits:

- A product beyond 65504 that a program returns, that 16-bit work reads, or that is divided later by anything but a
  product, as in `v = a @ v` and then `v / norm(v)`: float16 has no such number. Divide before. Gram matrices and
  covariances that only a loss reads are float32, and so are the quotients of linear attention.
- `2 * a * b / (a + b)` (a harmonic mean, an F-measure) overflows from 256 on. Write `2 / (1 / a + 1 / b)`.
- Differences of function values, `sin(y + 0.001) - sin(y)`: the step is lost beside `y`. Use the derivative.
- The gradients of products that cancel, as in `mean(a @ a.T) + mean(b @ b.T) - 2 * mean(a @ b.T)`: each is rounded
  before they are added. Subtract the means instead. So are those of `y @ solve(y.T @ y + c, y.T @ target)`, predictions
  for the examples that were fitted, which hardly depend on `y`: a rule `"full"` for the layer that makes `y` cures it.
- A constant that is added to a 16-bit value and removed by a minimum or maximum, as in `(y - min(y)) / (max(y) -
  min(y))`, leaves the roundings of the sum. Differences with means and with other values are computed in float32.
- Small steps in a Python loop, `y = y + 0.005 * f(y)`, are float32 where a program is rewritten. Under ambient autocast
  of PyTorch each is lost beside `y`, and in TensorFlow the gradients of the steps add up in
  16 bits. A loop of the framework (`scan`, `while`) carries both in float32.
- Parameters beyond 65504 in JAX, under `jax.jit` and float16: their numbers are not known when they are cast. One that
  only scales values is right; a bias or a factor of a product becomes inf. `polyamp.lint` reports them.
- A constant array that the format can only round is rounded where a 16-bit value meets it. In bfloat16 a mask of -1e9
  becomes -998,244,352: what it hides stays hidden, but a result that shows the masked numbers themselves is off by
  0.2 % (`-1e9 * eye(n)` in a contrastive loss, in JAX and TensorFlow).
- A GRU that is written out ends 4 to 8 % above the bound of these programs in PyTorch and TensorFlow, as natively.
- Quotients of small differences (SSIM of images that hardly differ): their gradient is off by dozens of roundings in
  every engine.
- Ambient autocast of PyTorch goes operation by operation: it does not know readers.
"""


def table(found: list[Row]) -> Table:
    """Return a table of the traps that were lost."""
    shown = Table("trap", "engine", *FORMATS, title="Traps that are not kept", box=SIMPLE_HEAD)
    for row in found:
        if cell(row):
            shown.add_row(row["trap"], row["engine"], *(row[low] for low in FORMATS))
    return shown


def main(
    engine: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(ENGINES)}; may be repeated.")] = None,
    trap: Annotated[list[str] | None, typer.Option(help="By name; may be repeated.")] = None,
) -> None:
    """Run and print; if all traps ran in all engines, keep the result and write the document."""
    found = rows(trap or TRAPS, engine or ENGINES)
    console().print(table(found))
    for name, said in counts(found).items():
        console().print(f"{name}: {said['float16']} and {said['bfloat16']} of {len(trap or TRAPS)}")
    if not (engine or trap):
        versions = {module.__name__: module.__version__ for module in (polyamp, torch, jax, tensorflow)}
        kept = json.loads(keep("traps_cpu", versions, {"rows": found}).read_text())
        PAGE.write_text(page(kept))


if __name__ == "__main__":
    typer.run(main)
