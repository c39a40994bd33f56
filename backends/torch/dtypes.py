"""The table from polyamp's format names to torch dtypes."""

from __future__ import annotations

import torch

from polyamp.formats import format_of

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tensorfloat32": torch.float32,  # a way to multiply float32 values, which stay float32 in memory
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}

SIXTEEN_BIT = frozenset({torch.float16, torch.bfloat16})


def dtype_of(format_name: str) -> torch.dtype:
    """Return the dtype that stores the values of a format."""
    return DTYPES[format_of(format_name).name]


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name as in `polyamp.formats`, without ``torch.``."""
    return str(dtype).removeprefix("torch.")
