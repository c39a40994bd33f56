"""A file of finished runs, so that a parity that was interrupted goes on where it stopped.

Each line is the JSON of one run with the way in which it was trained. The file grows after every run; a last line that
was cut off, because the process was killed while it wrote, is trained again.

A line also has a fingerprint of the file that the training function is written in. If that was edited between two
calls, its old runs may be of another training: they are taken, and a warning reports it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyamp.equivalence.comparison import as_json
from polyamp.equivalence.training import Run
from polyamp.errors import InvalidValueError, warn_once
from polyamp.validation import shown

Key = tuple[str, str, str, int]
"""The training function, the policy, the negative control (or empty, or "again") and the seed."""
_START = '{"train": '
"""How each line starts, also one that was cut off: the last line of a file of something else must not be removed."""


@dataclass
class Journal:
    """The runs in a file, and those that are added to it."""

    path: Path | None  # the file; None keeps nothing
    runs: dict[Key, tuple[Run, bool]] = field(default_factory=dict)
    sources: dict[Key, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        try:
            self.path.open("a").close()
        except OSError as error:
            raise InvalidValueError(
                "the file of runs cannot be written",
                where="parity(keep=)",
                found=str(error),
                allowed="a file in a folder that exists",
                fix="make the folder first, or name another file",
            ) from error
        try:
            *lines, cut = self.path.read_text().split("\n")
            for line in lines:
                self._read(json.loads(line))
            if not (cut.startswith(_START) or _START.startswith(cut)):
                raise ValueError(f"its last line is not the start of a run: {shown(cut)}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidValueError(
                "this is not a file of runs",
                where="parity(keep=)",
                found=f"{self.path}: {error}",
                allowed="a new file, or one that parity(keep=) wrote",
                fix="name another file",
            ) from error
        if cut:
            self.path.write_text("".join(f"{line}\n" for line in lines))

    def _read(self, kept: dict[str, Any]) -> None:
        key = (kept["train"], kept["policy"], kept["control"], kept["seed"])
        metrics = {name: math.nan if value is None else float(value) for name, value in kept["metrics"].items()}
        run = Run(kept["seed"], math.nan, metrics, kept["skipped"], kept["failure"])
        self.runs[key], self.sources[key] = (run, kept["was_reached"]), kept.get("source", "")

    def take(self, key: Key, source: str) -> tuple[Run, bool]:
        """Return a run of this key, and warn if the training function has another source now."""
        if self.sources[key] not in ("", source):
            warn_once(
                f"{self.path} has runs of {key[0]} from before its file was edited. They are taken as they are: if "
                "what it trains has changed, name another file in parity(keep=)"
            )
        return self.runs[key]

    def add(self, key: Key, run: Run, was_reached: bool, source: str = "") -> None:
        """Keep a run."""
        self.runs[key], self.sources[key] = (run, was_reached), source
        if self.path is None:
            return
        train, policy, control, _ = key
        named = {"train": train, "source": source, "policy": policy, "control": control, "was_reached": was_reached}
        kept = {**named, **as_json(run)}
        del kept["value"]  # which of the metrics it is, the next call may choose anew
        with self.path.open("a") as file:
            file.write(json.dumps(kept) + "\n")
