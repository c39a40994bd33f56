"""How the profile names the kernels of a GPU; the events are those of a step on an H200, as CUDA graphs."""

import pytest

from polyamp.backends.jax.profiling import _Event, _Program  # noqa: TID251

PROGRAM = """HloModule jit_step, is_scheduled=true

%narrow (param_0: f32[8,8]) -> bf16[8,8] {
  %param_0 = f32[8,8]{1,0} parameter(0)
  ROOT %convert.1 = bf16[8,8]{1,0} convert(%param_0), metadata={op_name="jit(step)/jvp(layer0)/convert_element_type"}
}

%added (param_0.1: bf16[8,8]) -> bf16[8,8] {
  %param_0.1 = bf16[8,8]{1,0} parameter(0)
  ROOT %add.1 = bf16[8,8]{1,0} add(%param_0.1, %param_0.1), metadata={op_name="jit(step)/jvp(layer0)/add"}
}

ENTRY %main (x: f32[8,8]) -> bf16[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %wrapped_convert.1 = bf16[8,8]{1,0} fusion(%x), kind=kLoop, calls=%narrow
  %cublas-gemm.1 = (bf16[8,8]{1,0}, s8[64]{0}) custom-call(%wrapped_convert.1, %wrapped_convert.1), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/jvp(layer0)/dot_general"}
  %get-tuple-element = bf16[8,8]{1,0} get-tuple-element(%cublas-gemm.1), index=0
  %loop_add_fusion.2 = bf16[8,8]{1,0} fusion(%get-tuple-element), kind=kLoop, calls=%added
  ROOT %cublas-gemm.2 = (bf16[8,8]{1,0}, s8[64]{0}) custom-call(%loop_add_fusion.2, %wrapped_convert.1), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/jvp(head)/dot_general"}
}
"""
KERNELS = (
    "wrapped_convert_1",
    "Memset 0",
    "nvjet_sm90_tst_128x128_64x6_2x1_v_bz_NNT",
    "loop_add_fusion_2",
    "nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT",
)


def test_kernels_in_cuda_graphs_are_the_instructions_of_the_program() -> None:
    events = [_Event(at, at + 1, "jit_step", "command_buffer_1", name) for at, name in enumerate(KERNELS * 2)]
    timed = list(_Program(PROGRAM).operations(events, runs=2))
    assert [(one.name, one.where, one.formats, one.kind) for one in timed[:5]] == [
        ("cast", "layer0", ("float32",), "casts"),
        ("Memset 0", "", (), "memory-bound"),
        ("matmul", "layer0", ("bfloat16",), "16-bit products"),
        ("add", "layer0", ("bfloat16",), "memory-bound"),
        ("matmul", "head", ("bfloat16",), "16-bit products"),
    ]
    assert timed[5:] == timed[:5]


@pytest.mark.parametrize("name", ["nvjet_sm90_tst_128x128_64x6_2x1_v_bz_NNT", "cutlass_80_wmma_tensorop_s161616gemm"])
def test_a_librarys_product_that_fits_no_instruction_is_a_product(name) -> None:
    (timed,) = _Program(PROGRAM).operations([_Event(0, 1, "jit_step", "command_buffer_1", name)], runs=1)
    assert (timed.name, timed.where, timed.kind) == ("matmul", "", "16-bit products")
