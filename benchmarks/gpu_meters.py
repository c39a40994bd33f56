"""Meters for whole steps: TF32 on and off, the GPU's peak rate, and the operations of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from torch_device import DEVICE, settle

FORMATS = {"float32": torch.float32, "TF32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def use_tf32(on: bool) -> None:
    """Turn TensorFloat-32 on or off for products and for convolutions.

    PyTorch's own defaults are off for products and on for convolutions. These are the two older switches, and
    no other is set: PyTorch >= 2.9 raises if they are mixed with ``fp32_precision`` or ``matmul.allow_tf32``.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def matmul_peaks(size: int) -> dict[str, float]:
    """Return the measured operations per second of one large product in each format (not the promised ones)."""
    return {name: _matmul_rate(size, dtype, tf32=name == "TF32") for name, dtype in FORMATS.items()}


def _matmul_rate(size: int, dtype: torch.dtype, tf32: bool) -> float:
    use_tf32(tf32)
    one, other = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    rates = []
    for _ in range(13):
        settle()
        start = time.perf_counter()
        for _ in range(5):
            one @ other
        settle()
        rates.append(5 * 2 * size**3 / (time.perf_counter() - start))
    return statistics.median(rates[3:])


def operations(run: Callable[[], Any]) -> int:
    """Count the multiplications and additions of one call's products, convolutions and attention."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())
