"""The formats that a device computes at full speed, for ``polyamp doctor`` and for the adapters' warnings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from polyamp.errors import warn_once
from polyamp.formats import format_of

FAST_SINCE: dict[str, tuple[int, int]] = {
    "float16": (7, 0),
    "bfloat16": (8, 0),
    "tensorfloat32": (8, 0),
    "float8_e4m3fn": (8, 9),
    "float8_e5m2": (8, 9),
}
"""First compute capability whose Tensor Cores support a format: Volta, Ampere, Ada (CUDA C++ Programming Guide)."""

_WITHOUT_TENSOR_CORES = re.compile(
    r"GTX 16\d\d|MX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b|CMP 30HX", re.IGNORECASE
)
"""GPUs of compute capability 7.5 without Tensor Cores, by name.

They have a TU116 or TU117 chip (NVIDIA, Turing tuning guide and the products' data sheets).
"""

_CPU_UNITS: dict[str, frozenset[str]] = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16", "avx_ne_convert"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "fphp"}),
}
"""CPU flags in Linux's spelling; one of a set is enough (Intel SDM, volume 2; Arm Architecture Reference Manual)."""


def fast_on_gpu(name: str, capability: str | tuple[int, ...] | None) -> list[str]:
    """Return the formats that an NVIDIA GPU has Tensor Cores for."""
    if capability is None:
        return []
    level = tuple(map(int, capability.split("."))) if isinstance(capability, str) else tuple(capability)
    if level == (7, 5) and _WITHOUT_TENSOR_CORES.search(name):
        return []
    return [format_name for format_name, first in FAST_SINCE.items() if level >= first]


def why_not_fast(name: str, capability: str) -> str:
    """Explain why a GPU has no Tensor Cores."""
    if tuple(map(int, capability.split("."))) < FAST_SINCE["float16"]:
        return f"{name} has no Tensor Cores: they need compute capability 7.0"
    return f"{name} has no Tensor Cores, unlike other GPUs of compute capability {capability}"


def fast_on_cpu(flags: Collection[str]) -> list[str]:
    """Return the 16-bit formats that a CPU has instructions for."""
    return [format_name for format_name, units in _CPU_UNITS.items() if units & set(flags)]


def cpu_flags() -> set[str]:
    """Return this CPU's flags as Linux lists them; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set()
    )


def report_slow_format(device: Mapping[str, Any], compute: str, *, cost: str = "", stacklevel: int = 3) -> None:
    """Warn once if a device has no hardware units for a 16-bit format and is therefore slow in it."""
    # On a CPU only bfloat16 is reported: float16 is used there to check results.
    is_cpu = str(device["name"]).startswith("cpu")
    if not format_of(compute).is_low or compute in device["fast"] or (is_cpu and compute != "bfloat16"):
        return
    others = ", ".join(device["fast"]) or "no 16-bit format"
    text = f"{device['name']} has no units for {compute}, and is slow in it{cost and f': {cost}'}."
    warn_once(f"{text} It has them for {others}.", stacklevel=stacklevel + 1)
