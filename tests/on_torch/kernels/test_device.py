"""What tests and benchmarks count on a GPU by, as far as that needs none."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch_device import Event, Launches, host_syncs, is_kernel

from support.torch_waits import waits_are_errors

PROTOTYPE = "Synchronization debug mode is a prototype feature"


class Modes:
    """In the place of torch's setter, which needs a GPU: like it, it sets the mode and then warns, once."""

    def __init__(self) -> None:
        self.mode = "default"
        self.warned = False

    def __call__(self, mode: str) -> None:
        self.mode = mode
        if not self.warned:
            self.warned = True
            warnings.warn(PROTOTYPE, UserWarning, stacklevel=2)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Modes:
    made = Modes()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", made)
    return made


def enter_and_leave() -> None:
    with waits_are_errors():
        pass


def fail_inside() -> None:
    with waits_are_errors():
        raise KeyError


def test_a_warning_that_is_an_error_leaves_no_mode_behind(modes: Modes) -> None:
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match=PROTOTYPE):
        enter_and_leave()
    assert modes.mode == "default"


def test_a_failure_inside_leaves_no_mode_behind(modes: Modes) -> None:
    with pytest.raises(KeyError):
        fail_inside()
    assert modes.mode == "default"


def test_the_warning_of_the_prototype_fails_no_test(modes: Modes) -> None:
    with waits_are_errors():
        assert modes.mode == "error"


def test_cublas_may_find_no_context() -> None:
    """In a thread of autograd, when a matrix product is its first work on the GPU."""
    warnings.warn("Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set", stacklevel=1)


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_set_sync_debug_mode"), reason="a build of PyTorch without CUDA")
def test_torch_itself_leaves_no_mode_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    setter = torch._C._cuda_set_sync_debug_mode
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setter({"default": 0, "error": 2}[mode]))
    with pytest.raises(KeyError):
        fail_inside()
    assert torch._C._cuda_get_sync_debug_mode() == 0


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


def test_only_kernels_and_copies_take_time() -> None:
    events = [Event(name, 100.0) for name in NOT_KERNELS] + [Event("adam_step_kernel", 7.0)]
    assert Launches.of(events) == (1, 2, 207.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nobody_counted_waits() -> None:
    assert host_syncs(lambda: None) is None


@pytest.mark.gpu
def test_waits_are_counted_on_a_gpu() -> None:
    there = torch.ones((), device="cuda")
    assert host_syncs(lambda: [there.item(), there.item()]) == 2
    assert host_syncs(lambda: there + 1) == 0
    assert torch.cuda.get_sync_debug_mode() == 0
