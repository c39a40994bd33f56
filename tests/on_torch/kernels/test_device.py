"""What tests and benchmarks count on a GPU by, as far as that needs none."""

from __future__ import annotations

import pytest
import torch
from torch_device import host_syncs, is_kernel

from support.torch_waits import waits_are_errors


def test_a_failure_inside_leaves_no_mode_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(KeyError), waits_are_errors():
        raise KeyError
    assert modes == ["error", "default"]


@pytest.mark.parametrize(
    "name",
    [
        "void polyamp::adam_step_kernel<float, float>(polyamp::GradTable)",
        "ampere_sgemm_128x64_nn",
        "triton_poi_fused_add_mul_0",
        "Memory_efficient_attention_kernel",
        "void synchronize_blocks(int*)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    ],
)
def test_kernels_are_counted(name: str) -> None:
    assert is_kernel(name)


NOT_KERNELS = [
    "Memcpy DtoH (Device -> Pageable)",
    "Memset (Device)",
    "Context Sync",
    "Event Sync",
    "Stream Sync",
    "Device Sync",
    "Stream Wait Event",
    "Optimizer.step#AdamW.step",
    "Activity Buffer Request",
    "Lazy Function Loading",
]


@pytest.mark.parametrize("name", NOT_KERNELS)
def test_what_is_no_kernel_is_not(name: str) -> None:
    assert not is_kernel(name)


@pytest.mark.gpu
def test_waits_are_counted_on_a_gpu() -> None:
    there = torch.ones((), device="cuda")
    assert host_syncs(lambda: [there.item(), there.item()]) == 2
    assert host_syncs(lambda: there + 1) == 0
    assert torch.cuda.get_sync_debug_mode() == 0
