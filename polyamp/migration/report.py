"""What `polyamp migrate` found in each file: the places, the converted text, and the diff between both."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Place(NamedTuple):
    """One place in a file.

    Attributes:
        line: from 1.
        what: what is there.
        write: what to write instead, or the page to read; empty for a place that was converted and needs a look.
    """

    line: int
    what: str
    write: str


@dataclass(frozen=True)
class Migration:
    """One file: its text before and after, and the places that a person has to decide about.

    Attributes:
        path: the file.
        before: its bytes.
        after: the converted bytes; the same bytes where there is nothing to convert, or a place was refused.
        refused: places that cannot be converted; with one of them the file stays as it is.
        notes: places that are converted and need a look; each has a comment in the result.
        named: words of trainers' configurations, which are only named, with the page to read.
        failure: why the file could not be read or parsed; empty otherwise.
    """

    path: str
    before: bytes
    after: bytes
    refused: tuple[Place, ...] = ()
    notes: tuple[Place, ...] = ()
    named: tuple[Place, ...] = ()
    failure: str = ""
    encoding: str = "utf-8"

    @property
    def outcome(self) -> str:
        """``unchanged``, ``converted``, ``look`` (converted, with comments), ``refused`` or ``unreadable``."""
        if self.failure:
            return "unreadable"
        if self.refused:
            return "refused"
        if self.before == self.after:
            return "unchanged"
        return "look" if self.notes else "converted"

    @property
    def diff(self) -> str:
        """The unified diff from before to after; empty if nothing changes."""
        before, after = (text.decode(self.encoding).splitlines() for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, f"a/{self.path}", f"b/{self.path}", lineterm="")
        return "".join(f"{line}\n" for line in lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the migration as JSON values."""
        places = {name: [place._asdict() for place in getattr(self, name)] for name in ("refused", "notes", "named")}
        return {"file": self.path, "outcome": self.outcome, **places, "failure": self.failure, "diff": self.diff}


DECIDE = ("look", "refused", "unreadable")
"""The outcomes that a person has to look at."""


@dataclass(frozen=True)
class Report:
    """All files of one run of `polyamp migrate`."""

    migrations: tuple[Migration, ...]
    written: tuple[str, ...] = field(default=())

    @property
    def needs_decision(self) -> bool:
        """Whether a person has to decide about a place."""
        return any(one.outcome in DECIDE for one in self.migrations)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"files": [one.as_dict() for one in self.migrations], "written": list(self.written)}

    def __str__(self) -> str:
        lines = [line for one in self.migrations for line in _lines(one)]
        return "\n".join([*lines, self.summary])

    @property
    def summary(self) -> str:
        """One line: how many files have which outcome."""
        counts = {name: sum(one.outcome == name for one in self.migrations) for name in _SUMMARY}
        return ", ".join(f"{count} {_SUMMARY[name]}" for name, count in counts.items() if count) or "no Python file"


_SUMMARY = {
    "converted": "converted",
    "look": "converted with comments to look at",
    "refused": "left as it is, for a person to decide",
    "unreadable": "not readable",
    "unchanged": "with nothing to convert",
}


def _lines(migration: Migration) -> list[str]:
    path = migration.path
    found = [f"{path}: {migration.failure}"] if migration.failure else []
    for place in migration.refused:
        found += [f"{path}:{place.line}: {place.what}", f"    write: {place.write}"]
    if migration.refused:
        found += [f"{path}: left as it is, since not all of it can be converted"]
    found += [f"{path}:{place.line}: look: {place.what}" for place in migration.notes if not migration.refused]
    return found + [f"{path}:{place.line}: {place.what}: see {place.write}" for place in migration.named]
