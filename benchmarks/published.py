"""Numbers that others have published (published.json), to read next to ours."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

PUBLISHED = Path(__file__).parent / "published.json"


def published(models: Iterable[str]) -> list[dict[str, Any]]:
    """Return what others have measured of these models."""
    rows = json.loads(PUBLISHED.read_text())["rows"]
    return [row for model in dict.fromkeys(models) for row in rows if row["model"] == model]


def published_table(models: Iterable[str]) -> Table:
    """Return a table of others' numbers."""
    headings = ("model", "GPU", "batch", "float32 or TF32", "mixed", "ratio", "of")
    shown = Table(*headings, title="published by others, on their machines", box=SIMPLE_HEAD)
    for row in published(models):
        plain = f"{row['baseline']} {row['baseline_rate']:g}"
        mixed = f"{row['mixed']} {row['mixed_rate']:g} {row['unit']}"
        shown.add_row(row["model"], row["gpu"], str(row["batch"]), plain, mixed, f"{row['ratio']:.2f}", row["source"])
    return shown
