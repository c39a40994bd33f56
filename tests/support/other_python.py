"""A Python that lacks some of this one's packages: what a machine has on which nothing of ours was installed."""

from __future__ import annotations

import re
import sys
import venv
from pathlib import Path


def python_without(folder: Path, *missing: str) -> Path:
    """Make a virtual environment of links to this Python's packages, without those that are named, and without pip.

    Args:
        folder: where to make it.
        missing: names as they are imported. Path files are left out too, and editable installations with them.

    Returns:
        Its interpreter, which the processes that it starts find as their own.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    left_out = re.compile(rf"({'|'.join(missing)})([-.].*)?|__editable__.*|.*\.(pth|egg-link)|__pycache__")
    for place in map(Path, sys.path):
        if place.name in ("site-packages", "dist-packages") and place.is_dir():
            for entry in place.iterdir():
                if not left_out.fullmatch(entry.name) and not (packages / entry.name).exists():
                    (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
