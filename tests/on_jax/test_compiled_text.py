"""benchmarks/hlo.py counts the work in XLA's text of programs that JAX 0.10.2 compiled for an H200 (data/compiled).

``--compilers`` compiles one again; that needs jax-cuda13-plugin and jax-cuda13-pjrt, but not a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DATA = Path(__file__).parent / "data" / "compiled"
COMPILE_ONE = """
import json, jax_gpu_compiled as compiled
found = compiled.measured(["MLP"], ["bfloat16"], ["triton"], compiled.SMALL)
print(json.dumps([each.row for each in found]))
"""


def load() -> ModuleType:
    """Import the file: the benchmarks are not a package, and the installed wheel does not have them."""
    spec = importlib.util.spec_from_file_location("hlo", BENCHMARKS / "hlo.py")
    assert spec
    assert spec.loader
    sys.modules["hlo"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hlo = load()


def kernels_of(name: str) -> list:
    return hlo.kernels(hlo.parse((DATA / f"{name}.txt").read_text()))


def moved(kernel: object) -> tuple[dict[str, int], dict[str, int]]:
    return dict(kernel.reads), dict(kernel.writes)


def test_fusion_reads_its_operands_and_writes_its_results() -> None:
    """256×128 by 128×64, cast to bfloat16 in the kernel of the product, which sums in four parts; a bias and a ReLU."""
    product, bias, total = kernels_of("dense")
    assert (product.kind, product.products) == ("Triton", ("bf16 × bf16",))
    assert moved(product) == ({"f32": 4 * (256 * 128 + 128 * 64)}, {"f32": 4 * 256 * 64 * 4})
    assert moved(bias) == ({"f32": 4 * 256 * 64 * 4 + 64 * 4}, {"bf16": 256 * 64 * 2})
    assert moved(total) == ({"bf16": 256 * 64 * 2}, {"f32": 64 * 4})
    assert "dot_general" in product.op_name


@pytest.mark.parametrize(
    ("name", "kind", "form", "read", "written"),
    [
        ("library", "cuBLAS", "f16", 2 * (256 * 128 + 128 * 64), 2 * 256 * 64),
        ("conv", "cuDNN", "bf16", 2 * (8 * 16 * 16 * 32 + 3 * 3 * 32 * 64), 2 * 8 * 16 * 16 * 64),
    ],
)
def test_library_calls_move_operands_and_results_and_no_workspace(
    name: str, kind: str, form: str, read: int, written: int
) -> None:
    (call,) = (kernel for kernel in kernels_of(name) if kernel.kind == kind)
    assert call.products == (f"{form} × {form}",)
    assert moved(call) == ({form: read}, {form: written})


def test_body_of_a_loop_counts_as_often_as_it_turns() -> None:
    """A scan over 16×128 numbers: each turn reads a row, and writes one into the result in place."""
    by_name = {kernel.name: kernel for kernel in kernels_of("scan")}
    step, update = by_name["loop_tanh_fusion"], by_name["loop_dynamic_update_slice_fusion"]
    assert (step.times, update.times, step.known, update.known) == (16, 16, True, True)
    assert moved(step) == ({"f32": 2 * 128 * 4, "s32": 4}, {"f32": 128 * 4})
    assert moved(update) == ({"f32": 128 * 4, "s32": 4}, {"f32": 128 * 4})
    assert update.bytes == 16 * (2 * 128 * 4 + 4)
    assert by_name["loop_broadcast_fusion"].times == 1


def test_rows_of_a_table_are_read_and_updated_as_far_as_they_are_asked_for() -> None:
    """32 of 1000 rows of 64 numbers, looked up, and added to in place."""
    rows, indices = 32 * 64, {"s32": 32 * 4}
    lookup, update = kernels_of("embedding")
    assert moved(lookup) == ({"f32": 4 * rows, **indices}, {"bf16": 2 * rows})
    assert moved(update) == ({"f32": 2 * 4 * rows, **indices}, {"f32": 4 * rows})


def test_every_line_of_a_real_program_is_read() -> None:
    for file in DATA.iterdir():
        module = hlo.parse(file.read_text())
        lines = [line for line in file.read_text().splitlines() if " = " in line and line.startswith("  ")]
        assert sum(len(each.instructions) for each in module.computations.values()) == len(lines)
        assert all(computation.root for computation in module.computations.values())


@pytest.mark.parametrize(
    ("form", "size"),
    [("f32", 12), ("bf16", 6), ("pred", 3), ("s4", 2), ("f8e4m3fn", 3), ("c64", 24), ("token", 0)],
)
def test_bytes_of_formats(form: str, size: int) -> None:
    assert hlo.Array(form, (3,)).bytes == size


@pytest.mark.compilers
def test_program_that_is_compiled_now_is_counted_as_xla_counts_it() -> None:
    """It needs another process, because it sets JAX's platforms."""
    run = subprocess.run(
        [sys.executable, "-c", COMPILE_ONE],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS), "PYTHONSAFEPATH": "", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])
    assert len(rows) == 8
    for row in rows:
        form = {"float32": "f32", "bfloat16": "bf16"}[row["format"]]
        assert row["products"] == {f"Triton {form} × {form}": 14}
        assert row["kernels_in_loops_of_unknown_turns"] == 0
        assert row["bytes_like_xla"] == pytest.approx(row["xla_bytes"], rel=0.01)
