"""The command that runs everything on a GPU: its plan, its limits, and that what was kept stays kept."""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from gpu import PARTS
from parts import Part, Runner, allowance, registered

import polyamp


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


def test_shares_are_of_what_is_left() -> None:
    build, step, rest = (part(name, "", seconds) for name, seconds in (("build", 50), ("step", 100), ("rest", 50)))
    assert allowance([build, step, rest], 400) == 100
    assert allowance([step, rest], 390) == 260
    assert allowance([rest], 31) == 31
    assert allowance([build._replace(firm=True), step, rest], 400) == 250
    assert allowance([build._replace(firm=True)], 20) == 20


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
