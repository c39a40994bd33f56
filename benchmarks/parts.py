"""Run programs one after the other within a time, from a checkout that is not installed, and keep their output.

A part that fails or hangs does not prevent others from running: at its limit it is interrupted, and killed if it does
not end, with all processes that it started. Results that it kept before stay.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LEAST = 10.0  # seconds: with less left no part is started
GRACE = 8.0  # seconds between the interrupt and the kill, for programs to print their state
OWN_END = 15.0  # seconds before its limit at which a part that knows the limit should end by itself
MOST_OUTPUT = 200_000  # bytes of a part in the log


class Part(NamedTuple):
    """A program to run.

    Attributes:
        name: its name.
        set: the group of parts that one command runs within a time.
        seconds: its planned share of its set's time.
        command: arguments of Python; it runs in the checkout.
        keeps: its files among the results.
        small: more arguments, with which it takes a moment on a CPU.
        within: whether it accepts ``--within SECONDS`` and ends by itself.
        firm: whether it may take more than its share, because all later parts need it.
        variables: environment variables of this part alone.
    """

    name: str
    set: str
    seconds: float
    command: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    small: tuple[str, ...] = ("--small",)
    within: bool = False
    firm: bool = False
    variables: tuple[tuple[str, str], ...] = ()


@dataclass
class Outcome:
    """The outcome of a part.

    Attributes:
        part: its name.
        set: its set.
        command: the command that ran.
        status: ``passed``, ``failed``, ``stopped`` at its limit, ``left out`` or, until then, ``running``.
        limit: seconds that it was allowed.
        seconds: seconds that it took.
        code: its exit status, negative for a signal.
        tail: the end of what it printed.
    """

    part: str
    set: str
    command: str
    status: str
    limit: float = 0.0
    seconds: float = 0.0
    code: int | None = None
    tail: str = ""


def allowance(parts: Sequence[Part], left: float | None) -> float:
    """Return the seconds that the first of the parts may take of the time left for all of them.

    >>> build = Part("build", "first", 50, (), firm=True)
    >>> step = Part("step", "first", 150, ())
    >>> allowance([step, build], 100), allowance([build, step], 100), allowance([step], 80)
    (75.0, 62.5, 80.0)
    >>> allowance([step], None)  # no limit for all: many times the plan, so that nothing hangs forever
    600.0
    """
    part = parts[0]
    if left is None:
        return 4.0 * part.seconds
    fair = left * part.seconds / sum(one.seconds for one in parts)
    return min(left, 2.5 * fair) if part.firm else fair


def registered(folder: Path, root: Path = ROOT) -> str:
    """Write into ``folder`` the metadata that an installation would register; return a PYTHONPATH of both."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = runpy.run_path(str(root / "polyamp" / "version.py"))["__version__"]
    info = folder / f"{project['name']}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n", encoding="utf-8"
    )
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in of.items()) for group, of in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    adapters = root / "polyamp" / "backends"
    if not adapters.is_dir():  # a link; a copy without links has a file there, or nothing
        adapters.unlink(missing_ok=True)
        adapters.symlink_to(Path("..", "backends"), target_is_directory=True)
    return os.pathsep.join([str(root), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


class Runner:
    """A runner of parts, in their order, each in its own process group.

    Args:
        results: the folder of results, where ``gpu.json`` and ``gpu.log`` are kept up to date.
        environment: environment variables of all parts.
        within: seconds for all of them; None means no limit.
        about: more entries of ``gpu.json``.
        tell: prints a line for people.
    """

    def __init__(
        self,
        results: Path,
        environment: dict[str, str],
        within: float | None,
        about: dict[str, Any],
        tell: Callable[[str], None] = print,
    ) -> None:
        self.results, self.environment, self.about, self.tell = results, environment, about, tell
        self.deadline = None if within is None else time.monotonic() + within
        self.outcomes: list[Outcome] = []
        self.log = results / "gpu.log"
        results.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")

    def left(self) -> float | None:
        """The seconds that are left for all."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def run(self, parts: Sequence[Part], *, small: bool = False) -> list[Outcome]:
        """Run all parts, or as many as there is time for."""
        for place, part in enumerate(parts):
            limit = allowance(parts[place:], self.left())
            arguments = [*part.command, *(part.small if small else ())]
            if part.within:
                arguments += ["--within", f"{max(limit - OWN_END, limit / 2):.0f}"]
            outcome = Outcome(part.name, part.set, f"python {' '.join(arguments)}", "left out", round(limit, 1))
            self.outcomes.append(outcome)
            left = self.left()
            if left is None or left >= LEAST:
                self._run(outcome, arguments, limit, self.environment | dict(part.variables))
            self.keep()
        return self.outcomes

    def keep(self) -> None:
        """Write ``gpu.json``, whole or not at all."""
        whole = self.results / "gpu.json.part"
        whole.write_text(json.dumps({**self.about, "parts": [asdict(one) for one in self.outcomes]}, indent=2) + "\n")
        whole.replace(self.results / "gpu.json")

    def _run(self, outcome: Outcome, arguments: list[str], limit: float, environment: dict[str, str]) -> None:
        outcome.status = "running"
        self.keep()
        self.tell(f"\n==== {outcome.part}, at most {limit:.0f} s: {outcome.command}")
        start = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"\n==== {outcome.part}: {outcome.command}\n".encode())
            log.flush()
            begin = log.tell()
            outcome.code, stopped = _call(arguments, environment, log, limit)
        outcome.seconds = round(time.monotonic() - start, 1)
        outcome.status = "stopped" if stopped else "failed" if outcome.code else "passed"
        output = self._output(begin)
        outcome.tail = output[-1500:] if outcome.status == "passed" else output[-6000:]
        self.tell(output[-2500:].rstrip())
        self.tell(f"==== {outcome.part} {outcome.status} after {outcome.seconds:.0f} s")

    def _output(self, begin: int) -> str:
        """Return the output of a part; of a long one, the beginning and the end."""
        output = self.log.read_bytes()[begin:]
        if len(output) > MOST_OUTPUT:
            output = output[: MOST_OUTPUT // 4] + b"\n[... left out ...]\n" + output[-MOST_OUTPUT * 3 // 4 :]
            os.truncate(self.log, begin)
            with self.log.open("ab") as log:
                log.write(output)
        return output.decode(errors="replace")


def _call(arguments: list[str], environment: dict[str, str], log: Any, limit: float) -> tuple[int | None, bool]:
    """Run a part; return its exit status, and whether it had to be stopped."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    stopped = False
    try:
        process.wait(max(limit - GRACE, limit / 2))
    except subprocess.TimeoutExpired:
        stopped = True
        _signal(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(GRACE, limit / 2))
    finally:  # also if this program is interrupted, and for processes that the part left behind
        _signal(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # do not wait for one that hangs in a driver
        process.wait(5)
    return process.returncode, stopped


def _signal(group: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, what)
