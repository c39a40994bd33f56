"""Plant faults, one at a time, in the files that hold rules, and say which of them no test sees.

    python tests/faults.py                                  40 faults in each file, drawn by a seed
    python tests/faults.py polyamp/flow.py --each 1000      every fault of one file

A fault is killed if a test fails, or none ends in time. Of a file's tests only those run that ran the fault's line, the
quickest first, for at most a minute. A fault that no program can tell is listed with its reason in
``support/data/equivalent_faults.json``, and is not planted.
"""

import argparse
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.fault_kinds import Fault, faults  # noqa: E402

SECONDS = 60  # of tests for a fault
EQUIVALENT = json.loads((ROOT / "tests/support/data/equivalent_faults.json").read_text())

# The files that hold rules, by the suite and the tests that are run for them.
RULES: list[tuple[str, list[str], str, list[str]]] = [
    ("core", ["core"], "polyamp", ["scale", "policies"]),
    (
        "core,torch",
        [*(f"core/test_{name}.py" for name in ("readers", "norms", "flow", "flow_guards", "plan")), "on_torch/graphs"],
        "polyamp",
        ["numbering", "readers", "flow", "plan"],
    ),
    (
        "torch",
        ["on_torch/steps", "on_torch/test_step_machine.py", "on_torch/test_step_reproductions.py"],
        "backends/torch/step",
        ["provenance", "passes", "gradients", "masters", "scale", "optimizer", "fused"],
    ),
    ("torch", ["on_torch/graphs"], "backends/torch/graphs", ["decisions", "graph", "values", "writing"]),
    ("jax", ["on_jax/steps"], "backends/jax", ["gradients", "optimizer"]),
    ("jax", ["on_jax/graphs", "on_jax/autocast"], "backends/jax/graphs", ["decisions", "writing", "interpreter"]),
    ("tensorflow", ["on_tensorflow"], "backends/tensorflow", ["provenance", "scaler", "skipping"]),
    ("tensorflow", ["on_tensorflow/graphs"], "backends/tensorflow/graphs", ["decisions", "values", "writing"]),
    ("keras", ["on_keras"], "backends/keras", ["optimizer", "layers"]),
]


class Lines:
    """Which tests ran each line of some files, and how long each test took: a plugin of pytest."""

    def __init__(self, files: list[Path]) -> None:
        self.files = list(map(str, files))
        self.coverage = coverage.Coverage(data_file=None, include=self.files, config_file=False)
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def found(self) -> dict[str, Any]:
        data = self.coverage.get_data()
        lines = {
            file: {line: sorted({*tests} - {"", *self.failed}) for line, tests in data.contexts_by_lineno(file).items()}
            for file in self.files
        }
        return {"lines": lines, "seconds": {one: time for one, time in self.seconds.items() if one not in self.failed}}


def run(tests: list[str], suite: str, plugins: list[Any]) -> int:
    # A file named on the command line would have its assertions rewritten, from the source on the disk.
    options = shlex.split("-q --no-header --tb=no -p no:cacheprovider -m 'not slow' --doctest-modules --assert=plain")
    end = [] if plugins else ["-x"]
    return int(pytest.main([f"--suite={suite}", f"--rootdir={ROOT}", *options, *end, *tests], plugins))


def in_a_fork(work: Callable[[], int]) -> int:
    """Start the work in a copy of this process, and return the copy's number."""
    if process := os.fork():
        return process
    os.setpgid(0, 0)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    status = 70
    try:
        status = work()
    finally:
        os._exit(status)


def lines_of(files: list[Path], suite: str, tests: list[str]) -> dict[str, Any]:
    """Run the tests once, without a fault."""
    with tempfile.NamedTemporaryFile("r") as written:

        def work() -> int:
            watch = Lines(files)
            with watch.coverage.collect():
                status = run(tests, suite, [watch])
            Path(written.name).write_text(json.dumps(watch.found()))
            return status

        os.waitpid(in_a_fork(work), 0)
        return dict(json.loads(written.read()))


@contextmanager
def planted(file: Path, source: str) -> Iterator[None]:
    """Let the file be imported as this source."""
    own = SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: (  # type: ignore[method-assign]
        compile(source, self.path, "exec") if Path(self.path).resolve() == file else own(self, name)
    )
    yield
    SourceFileLoader.get_code = own  # type: ignore[method-assign]


def chosen(file: Path, fault: Fault, known: dict[str, Any]) -> list[str]:
    """The tests for a fault: all that run the file for a line that runs when it is imported."""
    lines = known["lines"][str(file)]
    tests = lines.get(str(fault.line)) or {test for tests in lines.values() for test in tests}
    seconds, total, quick = known["seconds"], 0.0, []
    for test in sorted(tests, key=lambda one: float(seconds.get(one, 0))):
        total += seconds.get(test, 0)
        if total > SECONDS and quick:
            break
        quick.append(test)
    return quick


def alive(file: Path, suite: str, drawn: list[Fault], known: dict[str, Any], jobs: int) -> Iterator[Fault]:
    """Plant each, and give those that no test sees."""
    source, waiting, running = file.read_text(), list(drawn), dict[int, tuple[Fault, float]]()

    def work(fault: Fault) -> int:
        with planted(file, fault.planted(source)):
            return run(chosen(file, fault, known), suite, [])

    while waiting or running:
        while waiting and len(running) < jobs:
            fault = waiting.pop(0)
            running[in_a_fork(lambda fault=fault: work(fault))] = fault, time.monotonic() + 3 * SECONDS  # type: ignore[misc]
        time.sleep(0.05)
        for process, (fault, end) in list(running.items()):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                running.pop(process)
                if os.waitstatus_to_exitcode(status) == 0:
                    yield fault
            elif time.monotonic() > end:
                os.killpg(process, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="of those that hold rules; all by default")
    parser.add_argument("--each", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()
    report: dict[str, Any] = {}
    for suite, tests, folder, names in RULES:
        files = {f"{folder}/{name}.py": (ROOT / folder / f"{name}.py").resolve() for name in names}
        files = {name: file for name, file in files.items() if name in (options.files or files)}
        if not files:
            continue
        for framework in {*suite.split(",")} - {"core"}:
            import_module(framework)  # once, and not for each fault
        known = lines_of([*files.values()], suite, [*files, *(f"tests/{one}" for one in tests)])
        for name, file in files.items():
            equivalent = {(one["was"], one["now"]) for one in EQUIVALENT.get(name, [])}
            every = [fault for fault in faults(file.read_text()) if (fault.was, fault.now) not in equivalent]
            drawn = random.Random(options.seed).sample(every, min(options.each, len(every)))
            left = []
            for fault in alive(file, suite, drawn, known, options.jobs):
                left.append(fault)
                print(f"  alive  {name}:{fault.line}  {fault.was}  ->  {fault.now}", flush=True)
            killed = len(drawn) - len(left)
            print(
                f"{name:40} planted {len(drawn):4}  killed {killed:4}  {100 * killed / len(drawn):3.0f} %", flush=True
            )
            report[name] = {"planted": len(drawn), "killed": killed, "alive": [[f.line, f.was, f.now] for f in left]}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return int(any(10 * one["killed"] < 9 * one["planted"] for one in report.values()))


if __name__ == "__main__":
    sys.exit(main())
