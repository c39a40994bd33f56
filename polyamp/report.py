"""What the results of verbs have in common: printing as an aligned table and sentences, and JSON values."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import suppress
from io import BytesIO
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, ClassVar

from polyamp.errors import InvalidValueError, brief, missing, refuses_unreadable


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Align rows of text in columns two blanks apart; the columns in ``right`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if index in right else str.ljust for index in range(len(widths))]
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


class Report(ABC):
    """The result of a verb: a heading, a table and sentences for people, and JSON values for programs."""

    RIGHT: ClassVar[Collection[int]] = ()  # the columns of numbers, which are aligned to the right

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""

    @abstractmethod
    def heading(self) -> str:
        """Return what the report is about, in a line or two."""

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table, its header first; empty if there is nothing to show."""
        return []

    def sentences(self) -> list[str]:
        """Return what follows from the table, one sentence per line."""
        return []

    def table(self) -> str:
        """Return the rows as an aligned table."""
        rows = self.rows()
        return aligned(rows, self.RIGHT) if rows else ""

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (self.heading(), self.table(), "\n".join(self.sentences()))))

    @refuses_unreadable
    def save(self, path: str | PathLike[str]) -> None:
        """Write `as_dict` to a JSON file."""
        write_json(self.as_dict(), path)


def write_json(values: Any, path: str | PathLike[str]) -> None:
    """Write JSON values to a file. Refuses inf and NaN, which JSON does not have."""
    import json  # costs milliseconds that `import polyamp` does not need

    write_whole(path, f"{json.dumps(values, indent=1, allow_nan=False)}\n".encode())


def write_whole(path: str | PathLike[str], content: bytes) -> None:
    """Write a file whole or not at all: a full disk or a kill leaves what was there before."""
    try:
        target = os.path.realpath(path)  # of a link, the file that it names
        is_file = os.path.isfile(target)
        if os.path.exists(target) and not is_file:  # a pipe or a device, which has nothing to lose
            with open(target, "wb") as file:
                file.write(content)
            return
        part = f"{target}.{os.urandom(4).hex()}.part"
        try:
            with open(part, "xb") as file:
                file.write(content)
            if is_file:
                os.chmod(part, os.stat(target).st_mode)
            os.replace(part, target)
        finally:
            with suppress(OSError):
                os.unlink(part)
    except (OSError, TypeError, ValueError) as error:
        raise unwritable(path, getattr(error, "strerror", None) or error) from error


def cache_folder() -> Path:
    """Return the folder for what can be made again: ``POLYAMP_CACHE``, or ``polyamp`` in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("POLYAMP_CACHE") or os.path.join(home, "polyamp")).absolute()


def unwritable(path: object, found: object) -> InvalidValueError:
    """Return the error for a file that cannot be written."""
    return InvalidValueError(
        "the file cannot be written",
        where=brief(path),
        found=found,
        allowed="a file in a folder that exists, on a disk with room",
        fix="make the folder first, or name another file; what was there is unchanged",
    )


def finite(value: float | None) -> float | None:
    """Return a number for JSON: None for inf and NaN."""
    return value if value is not None and math.isfinite(value) else None


def figure_for(path: str | PathLike[str], size: tuple[float, float]) -> Any:
    """Return an empty figure of matplotlib, for an image file."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise missing("matplotlib", extra="plot") from error
    figure = Figure(figsize=size, layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if _ending(path) not in known:
        raise InvalidValueError(
            "no image format has this ending",
            where="plot(path)",
            found=brief(path),
            allowed=", ".join(f".{ending}" for ending in sorted(known)),
            fix="name the file, for example, parity.png",
        )
    return figure


def save_figure(figure: Any, path: str | PathLike[str]) -> None:
    """Write a figure into an image file."""
    image = BytesIO()
    figure.savefig(image, dpi=150, format=_ending(path))
    write_whole(path, image.getvalue())


def _ending(path: str | PathLike[str]) -> str:
    return PurePath(path).suffix.lstrip(".").lower() if isinstance(path, str | PathLike) else ""
