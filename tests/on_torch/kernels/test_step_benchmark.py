"""What the benchmark of optimizer steps measures."""

from __future__ import annotations

import pytest
import torch
from optimizer_step import SETS, Case, Which, cases, failed, on_device
from torch_device import Launches


def test_main_and_rest_are_all_and_share_none() -> None:
    main, rest, everything = (cases(SETS, which) for which in (Which.main, Which.rest, Which.all))
    assert len(set(everything)) == len(everything) == len(main) + len(rest)
    assert {case.set for case in main} == {case.set for case in rest} == set(SETS)
    assert main[: len(SETS)] == [Case(name, "AdamW", "float32", True, True) for name in SETS]
    assert any(case.misaligned for case in main)
    assert any(case.against_compiled for case in main)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_misaligned_gradients_begin_12_bytes_into_a_buffer(dtype: torch.dtype) -> None:
    from optimizer_step import _moved

    grad = torch.randn(3, 5).to(dtype)
    moved = _moved(grad)
    assert moved.data_ptr() % 16 == 12
    assert moved.is_contiguous()
    assert torch.equal(moved, grad)


def test_a_step_whose_kernels_run_for_less_of_it_is_bound_by_the_host() -> None:
    assert on_device(Launches(2, 0, 50.0), 40.0, 100.0)["bound_by"] == "host"
    assert on_device(Launches(2, 0, 95.0), 40.0, 100.0)["bound_by"] == "device"
    assert on_device(Launches(2, 0, 50.0), 40.0, 100.0)["kernels_share_of_copy_bandwidth"] == 0.8
    assert set(on_device(Launches(0, 0, 0.0), 40.0, 100.0).values()) == {None}


@pytest.mark.parametrize(
    ("left_out", "is_failure"),
    [
        ({"reason": "the 100 s were over"}, False),
        ({"reason": "OutOfMemoryError: 3 GB"}, False),
        ({"variant": "native compiled", "reason": "BackendCompilerFailed: of theirs"}, False),
        ({"variant": "polyamp, replayed", "reason": "RuntimeError: it waits"}, True),
        ({"reason": "RuntimeError: CUDA error"}, True),
    ],
)
def test_what_fails_of_ours_fails_the_program(left_out: dict[str, str], is_failure: bool) -> None:
    assert failed([left_out]) is is_failure
