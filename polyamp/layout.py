"""How reports are laid out as plain text, and written as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike


def aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Rows of text as columns two blanks apart; the columns ``right`` are flush right.

    >>> print(aligned([("name", "n"), ("a", "10")], right=[1]))
    name   n
    a     10
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if index in set(right) else str.ljust for index in range(len(widths))]
    lines = ("  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def in_bytes(count: int) -> str:
    """A number of bytes for people.

    >>> in_bytes(512), in_bytes(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def power(value: float) -> str:
    """A power of two as such, another number as it is.

    >>> power(4096.0), power(3.0), power(0.0), power(float("inf"))
    ('2^12', '3', '0', 'inf')
    """
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:g}"


def share(value: float) -> str:
    """A share as a percentage; one that is not zero does not read as zero.

    >>> share(0.1523), share(0.00001), share(0.0)
    ('15.2%', '<0.1%', '0.0%')
    """
    return "<0.1%" if 0 < value < 0.0005 else f"{value:.1%}"


def plural(count: int, noun: str, ending: str = "s") -> str:
    """A number of things.

    >>> plural(1, "cast"), plural(0, "cast"), plural(2, "batch", "es")
    ('1 cast', '0 casts', '2 batches')
    """
    return f"{count} {noun}{'' if count == 1 else ending}"


def write_json(values: Any, path: str | PathLike[str]) -> None:
    """Write JSON values to a file, a final newline after them. Refuses inf and NaN, which JSON does not have."""
    import json  # takes milliseconds, which `import polyamp` does not need to

    with open(path, "w") as file:
        file.write(json.dumps(values, indent=1, allow_nan=False) + "\n")


def finite(value: float | None) -> float | None:
    """A number as JSON has it: None for inf and NaN.

    >>> finite(1.5), finite(float("nan"))
    (1.5, None)
    """
    return value if value is not None and math.isfinite(value) else None
