"""A Python without some of this one's packages, like that of a machine without our installations."""

import re
import sys
import venv
from pathlib import Path


def python_without(folder: Path, *missing: str) -> Path:
    """Make a virtual environment of links to this Python's packages, without some of them, and without pip.

    Args:
        folder: the folder to make it in.
        missing: import names of the packages to leave out. Path files are left out too, and so editable installations.

    Returns:
        Its interpreter; processes that it starts use the same one.
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
