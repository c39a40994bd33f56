"""Run each suite in a process of its own, as many at a time as there are processors, and report how each ended.

    python tests/suites.py             all of them, as the tox environment `all` does
    python tests/suites.py jax keras   these two

Of a suite that passes, the last line and the slowest tests are shown; of one that fails, all its output. Arguments
after ``--`` go to every pytest.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

TESTS = Path(__file__).parent
BIN = Path(sysconfig.get_path("scripts"))  # tests run against what is installed: `pytest`, never `python -m pytest`

PYTEST = {  # the longest first, so that the processors end together
    "parity": ["--suite=parity"],
    "tensorflow": ["--suite=tensorflow"],
    "jax": ["--suite=jax"],
    "torch": ["--suite=torch", f"--ignore={TESTS}/on_torch/steps", f"--ignore={TESTS}/on_torch/kernels"],
    "keras": ["--suite=keras", "--keras-backend=tensorflow"],
    "torch-steps": ["--suite=torch", f"{TESTS}/on_torch/steps", f"{TESTS}/on_torch/kernels"],
    "keras-on-jax": ["--suite=keras", "--keras-backend=jax", "-m", "backends"],
    "keras-on-torch": ["--suite=keras", "--keras-backend=torch", "-m", "backends"],
    # the examples of public names; the conftest is named because the package lies outside tests/
    "doctests": ["--suite=parity", "--doctest-modules", "--ignore-glob=*/integrations/*", f"{TESTS}/conftest.py"],
}
SLOW = re.compile(r"^[\d.]+s (?:call|setup) .*$", re.MULTILINE)  # lines of pytest's --durations

COMMANDS = {  # of the installed wheel, as its users run them: where no checkout is
    "doctor": ["polyamp", "doctor"],
    "demo": ["polyamp", "demo", "--framework=torch", "--steps=2"],
}


def command(name: str, more: list[str]) -> list[str]:
    if name in COMMANDS:
        return [str(BIN / COMMANDS[name][0]), *COMMANDS[name][1:]]
    return [str(BIN / "pytest"), *PYTEST[name], *(["--pyargs", "polyamp"] if name == "doctests" else []), *more]


def run(name: str, more: list[str]) -> tuple[str, int, float, str]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            command(name, more),
            cwd=elsewhere if name in COMMANDS else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    return name, done.returncode, time.monotonic() - began, done.stdout


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, more = arguments[:end] or [*PYTEST, *COMMANDS], arguments[end + 1 :]
    unknown = set(chosen) - {*PYTEST, *COMMANDS}
    if unknown:
        print(f"unknown suites {', '.join(sorted(unknown))}; there are {', '.join([*PYTEST, *COMMANDS])}")
        return 2
    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in as_completed([pool.submit(run, name, more) for name in chosen]):
            name, status, seconds, output = one.result()
            if status:
                failed.append(name)
                print(output)
            last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
            print(f"{name:15} {seconds:5.0f} s  status {status}  {last.strip(' =')}", flush=True)
            for line in () if status else SLOW.findall(output)[:8]:
                print(f"{'':15} {line}")
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
