"""Number formats by neutral names, with their limits as data.

Each adapter has one table from these names to its framework's own dtypes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from polyamp.errors import InvalidValueError, did_you_mean, shown, warn_once, wrong_type


class Format(NamedTuple):
    """One binary floating-point format.

    >>> format_of("float16").max, format_of("float16").smallest_subnormal == 2.0**-24
    (65504.0, True)
    """

    name: str
    bits: int  # size in memory
    exponent_bits: int
    mantissa_bits: int  # stored, without the implicit leading one
    max: float
    smallest_normal: float
    source: str

    @property
    def epsilon(self) -> float:
        """Return the gap between 1 and the next larger value."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_subnormal(self) -> float:
        """Return the smallest positive value. Anything below half of it rounds to zero."""
        return self.smallest_normal * self.epsilon

    def holds(self, value: float) -> bool:
        """Return whether this format keeps a number, within the rounding error of bfloat16.

        A number next to 1 that rounds to 1 is not kept: programs write 1 - 1e-7 because of its distance from 1.

        >>> [format_of("float16").holds(value) for value in (1e-5, 1e-8, 65504.0, 1e30, float("-inf"), 1 - 1e-7)]
        [True, False, True, False, True, False]
        """
        magnitude = abs(value)
        if self.is_one(magnitude):
            return magnitude == 1
        if not math.isfinite(value) or self.smallest_normal <= magnitude <= self.max:
            return True
        rounded = round(magnitude / self.smallest_subnormal) * self.smallest_subnormal
        return magnitude < self.max and abs(rounded - magnitude) <= magnitude * 2.0**-8

    def is_one(self, value: float) -> bool:
        """Return whether this format rounds a number to 1.

        >>> [format_of("float16").is_one(value) for value in (1 - 1e-7, 1 + 1e-7, 0.999)]
        [True, True, False]
        """
        return 1 - self.epsilon / 4 <= value <= 1 + self.epsilon / 2

    @property
    def is_low(self) -> bool:
        """Return whether the format has 16 bits or fewer: Tensor Cores multiply those at full speed."""
        return self.bits <= 16


_IEEE = "IEEE 754-2019"
_OCP = "OCP 8-bit Floating Point Specification 1.0"

FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Format("float64", 64, 11, 52, (2 - 2.0**-52) * 2.0**1023, 2.0**-1022, _IEEE),
        Format("float32", 32, 8, 23, (2 - 2.0**-23) * 2.0**127, 2.0**-126, _IEEE),
        Format("tensorfloat32", 32, 8, 10, (2 - 2.0**-10) * 2.0**127, 2.0**-126, "NVIDIA A100 whitepaper"),
        Format("float16", 16, 5, 10, 65504.0, 2.0**-14, _IEEE),
        Format("bfloat16", 16, 8, 7, (2 - 2.0**-7) * 2.0**127, 2.0**-126, "Google Brain floating point"),
        Format("float8_e4m3fn", 8, 4, 3, 448.0, 2.0**-6, _OCP),
        Format("float8_e5m2", 8, 5, 2, 57344.0, 2.0**-14, _OCP),
    )
}

_ALIASES = {
    "f64": "float64",
    "fp64": "float64",
    "double": "float64",
    "f32": "float32",
    "fp32": "float32",
    "single": "float32",
    "full": "float32",
    "tf32": "tensorfloat32",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}


def name_of_dtype(dtype: object) -> str | None:
    """Return the format of a framework's own dtype; None if polyamp does not have it.

    >>> import numpy
    >>> name_of_dtype(numpy.float16), name_of_dtype(numpy.dtype("float32")), name_of_dtype(numpy.int32)
    ('float16', 'float32', None)

    Args:
        dtype: ``torch.float16``, ``jax.numpy.bfloat16``, ``tf.float16``, a NumPy type or dtype.
    """
    names = (getattr(dtype, key, None) for key in ("name", "__name__"))
    written = str(dtype).removeprefix("torch.") if type(dtype).__name__ == "dtype" else None  # torch's have no name
    return next((name for name in (*names, written) if isinstance(name, str) and name in FORMATS), None)


def format_of(name: str, *, where: str = "format") -> Format:
    """Look up a format by its name or a common short form.

    >>> format_of("bf16").name
    'bfloat16'

    Raises:
        InvalidTypeError: ``name`` is not a string; see `name_of_dtype`.
        InvalidValueError: ``name`` is unknown; the message lists the known ones.
    """
    if not isinstance(name, str):
        raise wrong_type(
            name,
            where=where,
            allowed=", ".join(FORMATS),
            fix='write the name, for example "float16"',
            what="a number format is named by a string",
        )
    known = name.strip().lower()
    found = FORMATS.get(_ALIASES.get(known, known))
    if found is None:
        raise InvalidValueError(
            "unknown number format",
            where=where,
            found=shown(name),
            allowed=", ".join((*FORMATS, *_ALIASES)),
            fix=f"{did_you_mean(known, (*FORMATS, *_ALIASES))}use one of the names above",
        )
    return found


def in_single(value: Any) -> Any:
    """Round a Python float to float32, as the frameworks' float32 scalars do; return anything else unchanged.

    >>> in_single(0.1), in_single(1e300) == FORMATS["float32"].max
    (0.10000000149011612, True)
    """
    if not isinstance(value, float):
        return value
    return struct.unpack("f", struct.pack("f", min(value, FORMATS["float32"].max)))[0]


# --- the formats that a device computes at full speed -----------------------------------------------------------------

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


def report_slow_format(device: Mapping[str, Any], compute: str, *, cost: str = "") -> None:
    """Warn once if a device has no hardware units for a 16-bit format and is therefore slow in it."""
    # On a CPU only bfloat16 is reported: float16 is used there to check results.
    is_cpu = str(device["name"]).startswith("cpu")
    if not format_of(compute).is_low or compute in device["fast"] or (is_cpu and compute != "bfloat16"):
        return
    others = ", ".join(device["fast"]) or "no 16-bit format"
    text = f"{device['name']} has no units for {compute}, and is slow in it{cost and f': {cost}'}."
    warn_once(f"{text} It has them for {others}.")
