"""``polyamp demo`` prints its table and writes its numbers and its picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyamp import cli
from polyamp.demo import POLICIES

STEPS = 12


def test_demo_prints_a_table_and_writes_json_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "demo.json"), "--plot", str(tmp_path / "demo.png")]
    monkeypatch.setattr(sys, "argv", ["polyamp", "demo", "--steps", str(STEPS), *files])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "demo.json").read_text())
    assert len(report["runs"]) == 4 * len(POLICIES)
    for run in report["runs"]:
        assert run["framework"].split()[0] in printed
        assert len(run["losses"]) == len(run["scales"]) == len(run["applied"]) == STEPS
        assert run["parameter_bytes"] > 0 < run["activation_bytes"]
        assert (run["largest_difference"] == 0) is (run["policy"] == "float32")
    assert {framework["version"] for framework in report["frameworks"].values()}
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_demo_of_one_framework(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyamp", "demo", "--steps", "3", "--framework", "torch", "--json", "one.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {run["framework"] for run in json.loads((tmp_path / "one.json").read_text())["runs"]} == {"torch"}
