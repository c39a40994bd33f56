"""What docs/troubleshooting.md and docs/diagnosis.md show below a command or a piece of Python is what it prints.

Numbers are left out of the comparison: the examples' text differs from one Python to the next.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("docs/troubleshooting.md", "docs/diagnosis.md")
SHOWN = re.compile(r"^```(python|sh)\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)

SHORTER = {"sweep": ["--lowest", "0", "--highest", "24", "--every", "12"]}
"""Options for commands that take minutes as they are written; the last of an option holds."""


def shown(document: str, language: str) -> list[tuple[str, str]]:
    """Each piece of a document in that language, with what is shown below it."""
    found = SHOWN.findall((ROOT / document).read_text())
    return [(code, output) for kind, code, output in found if kind == language]


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]{3,}", text))


COMMANDS = [piece for document in DOCUMENTS for piece in shown(document, "sh") if piece[0].startswith("polyamp")]


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command.split(" --")[0] for command, _ in COMMANDS])
def test_command_prints_what_is_shown(command: str, output: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT / "examples"), "XLA_FLAGS": ""}
    script = f"set -- {command.strip().removeprefix('polyamp')} {' '.join(SHORTER.get(command.split()[1], []))}"
    run = f'{script}; exec "{sys.executable}" -m polyamp "$@"'
    done = subprocess.run(
        ["bash", "-c", run], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == (3 if "error:" in output else 0), done.stderr
    assert words(output) <= words(done.stdout), words(output) - words(done.stdout)
    pictures = re.findall(r"--plot (\S+)", command)
    assert all((tmp_path / picture).stat().st_size > 1000 for picture in pictures)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_prints_what_is_shown(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    namespace: dict[str, object] = {}
    for code, output in shown(document, "python"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, document, "exec"), namespace)
        assert words(output) <= words(printed.getvalue()), words(output) - words(printed.getvalue())
