"""The policy of FSDP2 that `Policy.to_fsdp` makes. Training with it is tested in steps/ranks.py."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import polyamp

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("float32", (F32, F32, F32)),
        ("p=f32,c=tf32,o=f32", (F32, F32, F32)),
        ("mixed_float16", (F16, F32, F32)),
        ("mixed_bfloat16", (BF16, F32, F32)),
        ("float16", (F16, F32, F16)),
        ("bfloat16", (BF16, F32, BF16)),
        ("O2", (None, F32, None)),
        ("O3", (F16, F32, F16)),
    ],
)
def test_formats_are_those_of_the_policy(spec: str, expected: tuple[Any, ...]) -> None:
    assert polyamp.policy(spec).to_fsdp() == MixedPrecisionPolicy(*expected)


def test_options_replace_the_defaults() -> None:
    found = polyamp.policy("mixed_float16").to_fsdp(reduce="bf16", output=torch.float16, cast_forward_inputs=False)
    assert found == MixedPrecisionPolicy(F16, BF16, F16, cast_forward_inputs=False)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("mixed_float16", {"reduce": "float8_e5m2"}),
        ("mixed_float16", {"output": "float8_e4m3fn"}),
        ("p=f32,c=float8_e4m3fn,o=f32", {}),
    ],
)
def test_formats_that_fsdp_lacks_are_refused(spec: str, options: dict[str, str]) -> None:
    with pytest.raises(polyamp.errors.UnsupportedError, match="float64, float32, tensorfloat32, float16, bfloat16"):
        polyamp.policy(spec).to_fsdp(**options)
