"""benchmarks/hlo.py counts the work in XLA's text of programs that JAX 0.10.2 compiled for an H200 (data/compiled)."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import hlo

DATA = Path(__file__).parent / "data" / "compiled"


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
    assert update.bytes == 16 * (2 * 128 * 4 + 4)


def test_rows_of_a_table_are_read_and_updated_as_far_as_they_are_asked_for() -> None:
    """32 of 1000 rows of 64 numbers, looked up, and added to in place."""
    rows, indices = 32 * 64, {"s32": 32 * 4}
    lookup, update = kernels_of("embedding")
    assert moved(lookup) == ({"f32": 4 * rows, **indices}, {"bf16": 2 * rows})
    assert moved(update) == ({"f32": 2 * 4 * rows, **indices}, {"f32": 4 * rows})
