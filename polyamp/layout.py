"""Plain-text layout of reports, and JSON output."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike


def aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Align rows of text in columns two blanks apart; the columns in ``right`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if index in set(right) else str.ljust for index in range(len(widths))]
    lines = ("  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def in_bytes(count: int) -> str:
    """Format a number of bytes for people."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def power(value: float) -> str:
    """Format a power of two as such, and any other number unchanged."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:g}"


def share(value: float) -> str:
    """Format a share as a percentage. A share that is not zero never prints as zero."""
    return "<0.1%" if 0 < value < 0.0005 else f"{value:.1%}"


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Format a count with its noun."""
    return f"{count} {noun}{'' if count == 1 else ending}"


class JsonReport(ABC):
    """A report that can be converted to JSON values and saved."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""

    def save(self, path: str | PathLike[str]) -> None:
        """Write `as_dict` to a JSON file."""
        write_json(self.as_dict(), path)


def write_json(values: Any, path: str | PathLike[str]) -> None:
    """Write JSON values to a file, with a final newline. Refuses inf and NaN, which JSON does not have."""
    import json  # costs milliseconds that `import polyamp` does not need

    with open(path, "w") as file:
        file.write(json.dumps(values, indent=1, allow_nan=False) + "\n")


def finite(value: float | None) -> float | None:
    """Return a number for JSON: None for inf and NaN."""
    return value if value is not None and math.isfinite(value) else None
