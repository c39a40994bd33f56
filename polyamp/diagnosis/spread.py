"""The spread of a tensor's magnitudes over powers of two, and what a narrow format would lose of them.

A float32 number's exponent field has 256 values. The number of elements with each value, and the sum of their
magnitudes, answer every question about any format at any loss scale. Adapters collect only these numbers, on the
device.

For example, float16 rounds magnitudes below 2**-25 to zero. If 1 % of a gradient's elements are smaller, that 1 % is
lost in float16, and a loss scale of 2**3 saves those of 2**-28 and more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from polyamp.formats import Format, format_of
from polyamp.report import power

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LOWEST = -127
"""The lowest exponent of float32 numbers: that of zero and subnormals. The highest is 127."""

FIELDS = 256
"""The number of values of float32's exponent field: 0 is zeros and subnormals, 255 is inf and NaN."""

SAMPLE = 2**14
"""The most elements that a histogram counts. For larger tensors, every k-th element is counted, with an odd k.

A share of 0.1 % is then known to about 0.025 % (one standard deviation of a binomial share). The largest magnitude, inf
and NaN are searched for in all elements.
"""


def stride(elements: int) -> int:
    """Return the k for which every k-th element, in memory order, is counted; see `SAMPLE`."""
    step = -(-elements // SAMPLE)
    return max(1, step | 1)


@dataclass(frozen=True)
class Spread:
    """The magnitudes of a tensor's elements, counted by exponent."""

    elements: int  # number of elements
    # number of counted elements; fewer if only a sample was counted. ``zeros``, ``counts`` and ``mass`` are of the
    # counted elements, the other numbers of all
    seen: int
    zeros: int  # number of zeros
    inf: int  # number of infinite elements
    nan: int  # number of NaNs
    largest: float  # largest finite magnitude; 0.0 if there is none
    # number of finite, non-zero elements with each exponent from `LOWEST` to 127. Exponent ``e`` means magnitudes
    # from ``2**e`` up to, but not including, ``2**(e + 1)``
    counts: tuple[int, ...]
    mass: tuple[float, ...]  # sum of the magnitudes of those elements

    @classmethod
    def of_sample(cls, elements: int, sample: NDArray[np.float32], inf: int, nan: int, largest: float) -> Spread:
        """Count a sample of a tensor; ``inf``, ``nan`` and ``largest`` are those of all its elements."""
        import numpy as np

        bits = np.ascontiguousarray(sample).reshape(-1).view(np.int32) & 0x7FFFFFFF  # without the sign
        fields = bits >> 23
        counts = np.bincount(fields, minlength=FIELDS)[:-1]  # without inf and NaN
        mass = np.bincount(fields, bits.view(np.float32), FIELDS)[:-1]
        zeros = bits.size - int(np.count_nonzero(bits))
        counts[0] -= zeros
        return cls(elements, bits.size, zeros, inf, nan, largest, tuple(counts.tolist()), tuple(mass.tolist()))

    def merged(self, other: Spread) -> Spread:
        """Merge two spreads: the result counts the elements of both."""
        return Spread(
            self.elements + other.elements,
            self.seen + other.seen,
            self.zeros + other.zeros,
            self.inf + other.inf,
            self.nan + other.nan,
            max(self.largest, other.largest),
            tuple(map(sum, zip(self.counts, other.counts, strict=True))),
            tuple(map(sum, zip(self.mass, other.mass, strict=True))),
        )

    def scaled(self, exponent: int) -> Spread:
        """Return the spread of the same elements times ``2**exponent``, for example to remove a loss scale."""
        factor = 2.0**exponent
        mass = _shifted([part * factor for part in self.mass], exponent)
        counts = tuple(map(round, _shifted(self.counts, exponent)))
        return replace(self, largest=self.largest * factor, counts=counts, mass=tuple(mass))

    @property
    def is_finite(self) -> bool:
        """Return whether no element is inf or NaN."""
        return not (self.inf or self.nan)

    def flushed(self, format_name: str) -> float:
        """Return the share of elements that a format rounds to zero."""
        # Zeros do not count, since nothing of them is lost. A magnitude of exactly half the smallest subnormal also
        # rounds to zero but counts as kept, because other magnitudes with its exponent are kept.
        return _share(self.counts[: self._flushed_bins(format_of(format_name))], self.seen)

    def lost(self, format_name: str) -> float:
        """Return the share of the sum of magnitudes (L1) that a format loses at its lower end."""
        return self._lost_at(format_of(format_name), 0)

    def headroom(self, format_name: str) -> float:
        """Return by how many powers of two the largest magnitude can grow before it overflows."""
        if not self.is_finite:
            return -math.inf
        if not self.largest:
            return math.inf
        return math.log2(format_of(format_name).max) - math.log2(self.largest)

    def smallest_scale(self, format_name: str, tolerance: float) -> float:
        """Return the smallest power of two at which a format loses at most this share of the L1 mass; 0 for zeros."""
        if not any(self.mass):
            return 0.0
        found = format_of(format_name)
        first = _flush_exponent(found) + LOWEST
        exponents = range(first, first + 2 * FIELDS)
        return 2.0 ** exponents[bisect_left(exponents, True, key=lambda by: self._lost_at(found, by) <= tolerance)]

    def largest_scale(self, format_name: str) -> float:
        """Return the largest power of two at which nothing overflows; inf for zeros, 0 if an element is not finite."""
        room = self.headroom(format_name)
        return 2.0 ** math.floor(room) if math.isfinite(room) else (math.inf if room > 0 else 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the spread as JSON values; exponents without elements are left out."""
        exponents = {str(place + LOWEST): [count, self.mass[place]] for place, count in enumerate(self.counts) if count}
        names = ("elements", "seen", "zeros", "inf", "nan", "largest")
        return {**{name: getattr(self, name) for name in names}, "exponents": exponents}

    def _lost_at(self, found: Format, exponent: int) -> float:
        """Return the share of the L1 mass that a format loses of the elements times ``2**exponent``."""
        # What rounds to zero is lost, and a subnormal is off by a quarter of the subnormals' distance on average.
        bounds = _flush_exponent(found), round(math.log2(found.smallest_normal))
        flushed, normal = (max(0, bound - exponent - LOWEST) for bound in bounds)
        off = sum(self.counts[flushed:normal]) * found.smallest_subnormal / 4 * 2.0**-exponent
        return _share([*self.mass[:flushed], off], math.fsum(self.mass))

    def _flushed_bins(self, found: Format) -> int:
        return max(0, _flush_exponent(found) - LOWEST)


class Window(NamedTuple):
    """The safe range of loss scales, as powers of two: next to nothing is lost, and nothing overflows."""

    low: float  # at smaller scales, a gradient loses more of its L1 mass than is tolerated
    high: float  # at larger scales, a gradient comes too near to overflow; this includes the margin

    @property
    def is_empty(self) -> bool:
        """Return whether no scale suits all gradients."""
        return self.low > self.high

    def as_dict(self) -> dict[str, Any]:
        """Return the window as JSON values."""
        return {"low": self.low, "high": self.high, "empty": self.is_empty}

    def __contains__(self, scale: object) -> bool:
        return isinstance(scale, int | float) and self.low <= scale <= self.high

    def __repr__(self) -> str:
        return f"Window({self})"

    def __str__(self) -> str:
        return f"{power(self.low)} .. {power(self.high)}"


def _flush_exponent(found: Format) -> int:
    """Return the exponent below which magnitudes round to zero: that of half the smallest subnormal."""
    return round(math.log2(found.smallest_subnormal)) - 1


def _shifted(values: Sequence[float], by: int) -> list[float]:
    """Return the values shifted by some indices; values shifted beyond an end are added up at that end."""
    moved = [0.0] * len(values)
    for place, value in enumerate(values):
        moved[min(max(place + by, 0), len(values) - 1)] += value
    return moved


def _share(parts: Sequence[float], whole: float) -> float:
    return math.fsum(parts) / whole if whole else 0.0
