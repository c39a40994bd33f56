"""The command that runs everything on a GPU: its plan, its limits, and that what was kept stays kept."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import keeping
import pytest
from gpu import PARTS, SETS
from parts import Part, Runner, allowance, registered

import polyamp

MOST_FILES = 8
COMES_ALONG = {"gpu.json", "gpu.log"}


def part(name: str, code: str, seconds: float = 10, **more: bool) -> Part:
    return Part(name, "first", seconds, ("-c", code), small=(), **more)


@pytest.fixture
def runner(tmp_path: Path) -> Callable[..., Runner]:
    return lambda within: Runner(tmp_path / "results", dict(os.environ), within, {"machine": "any"}, lambda line: None)


def told(tmp_path: Path) -> dict[str, dict[str, object]]:
    found = json.loads((tmp_path / "results" / "gpu.json").read_text())
    return {one["part"]: one for one in found["parts"]}


HANGS = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print("began", flush=True)
time.sleep(600)
"""  # noqa: E501


def alive(process: int) -> bool:
    """Whether it runs: one that was killed may wait for its new parent to look."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_part_that_hangs_is_killed_with_all_it_started_and_the_others_run(
    tmp_path: Path, runner: Callable[..., Runner]
) -> None:
    child = tmp_path / "child"
    hangs = Part("hangs", "first", 2, ("-c", HANGS, str(child)), small=())
    before, after = part("before", "print('one')", 100), part("after", "print('two')", 100)
    begin = time.monotonic()
    outcomes = runner(120).run([before, hangs, after])
    assert time.monotonic() - begin < 60
    assert [one.status for one in outcomes] == ["passed", "stopped", "passed"]
    assert not alive(int(child.read_text()))
    parts = told(tmp_path)
    assert parts["before"]["tail"] == "one\n"
    assert "began" in str(parts["hangs"]["tail"])
    assert parts["after"]["code"] == 0


def test_what_there_is_no_time_for_is_left_out_and_said_to_be(tmp_path: Path, runner: Callable[..., Runner]) -> None:
    outcomes = runner(10.5).run([part("slow", "import time; time.sleep(1)"), part("late", "print('never')")])
    assert [one.status for one in outcomes] == ["passed", "left out"]
    assert told(tmp_path)["late"]["tail"] == ""


def test_shares_are_of_what_is_left() -> None:
    build, step, rest = (part(name, "", seconds) for name, seconds in (("build", 50), ("step", 100), ("rest", 50)))
    assert allowance([build, step, rest], 400) == 100
    assert allowance([step, rest], 390) == 260
    assert allowance([rest], 31) == 31
    assert allowance([build._replace(firm=True), step, rest], 400) == 250
    assert allowance([build._replace(firm=True)], 20) == 20


@pytest.mark.parametrize("name", SETS)
def test_a_set_leaves_few_files(name: str) -> None:
    kept = {file for one in PARTS if one.set == name for file in one.keeps}
    assert len(kept | COMES_ALONG) <= MOST_FILES
    assert all("/" not in file for file in kept)


def test_every_part_is_a_program_that_there_is() -> None:
    root = Path(__file__).parents[2]
    files = {word for one in PARTS for word in one.command if word.endswith(".py") and "=" not in word}
    assert [file for file in sorted(files) if not (root / file).exists()] == []


def test_a_checkout_is_registered_as_pip_registers_it(tmp_path: Path) -> None:
    paths = registered(tmp_path).split(os.pathsep)
    (made,) = metadata.distributions(name="polyamp", path=paths[1:2])
    real = metadata.distribution("polyamp")
    assert made.version == real.version == polyamp.__version__
    assert {(one.group, one.name, one.value) for one in made.entry_points} == {
        (one.group, one.name, one.value) for one in real.entry_points
    }


@pytest.mark.parametrize("broken", ["a file", "nothing"])
def test_a_copy_without_links_gets_its_adapters(tmp_path: Path, broken: str) -> None:
    root = tmp_path / "checkout"
    (root / "polyamp").mkdir(parents=True)
    (root / "backends").mkdir()
    (root / "pyproject.toml").write_bytes((Path(__file__).parents[2] / "pyproject.toml").read_bytes())
    if broken == "a file":
        (root / "polyamp" / "backends").write_text("../backends")
    registered(tmp_path / "registered", root)
    assert (root / "polyamp" / "backends").samefile(root / "backends")


def row(case: str, value: int) -> dict[str, object]:
    return {"case": case, "value": value}


def test_rows_of_other_cases_stay_and_those_of_other_versions_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "RESULTS", tmp_path / "new")

    def kept_after(version: str, *rows: dict[str, object]) -> object:
        keeping.Keeper("steps", {"torch": version}, key=["case"]).add(rows)
        return json.loads((tmp_path / "new" / "steps.json").read_text())["rows"]

    assert kept_after("1", row("a", 1), row("b", 2)) == [row("a", 1), row("b", 2)]
    assert kept_after("1", row("b", 3)) == [row("a", 1), row("b", 3)]
    assert kept_after("2", row("c", 4)) == [row("c", 4)]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["steps.json"]
