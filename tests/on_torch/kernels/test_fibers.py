"""The kernels as a GPU has them, with barriers, shuffles, atomics and many blocks, run on the CPU: see fiber.h."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from polyamp.backends.torch.extension import CSRC
from support.own_process import run_tests
from support.torch_fibers import RACE, look_for_races, operators_on_fibers, races_program

pytestmark = pytest.mark.compilers

HERE = Path(__file__).parent
SEEDS = range(5)  # of random orders: a race is seen where its two accesses come close to each other

ACCESS = re.compile(
    r"""
    (?:Read|Write|read|write)\ of\ size\ .*\n   # its stack comes next, the innermost function first
    (?:.*/cuda_on_cpu\.h:.*\n)*                 # CUDA's functions are the harness'
    .*\ (\S+):\d+\ \(                           # the file and line of a function
    """,
    re.VERBOSE,
)


def synchronizations() -> list[str]:
    """The lines of the kernels that are a barrier or a fence."""
    lines = enumerate((CSRC / "kernels.cuh").read_text().splitlines(), start=1)
    return [f"kernels.cuh:{number}" for number, line in lines if re.search(r"__(syncthreads|threadfence)\(\)", line)]


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return races_program(tmp_path_factory.mktemp("races"))


def test_the_operators_pass_their_tests_on_fibers(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    operators_on_fibers(tmp_path)
    profile = pytestconfig.getoption("--hypothesis-profile") or "ci"
    run_tests(
        HERE / "test_kernels.py",
        "torch",
        *("-k", "compiled or not reference"),
        *("--hypothesis-seed=0", f"--hypothesis-profile={profile}"),
        POLYAMP_CACHE=str(tmp_path),
        POLYAMP_EXTENSION="require",
        POLYAMP_FIBERS_COUNTS=str(tmp_path / "counts"),
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    counts = json.loads((tmp_path / "counts").read_text())
    assert counts["shuffles"] > counts["barriers"] > counts["blocks"] > counts["launches"] > 1000, counts


def test_no_race_is_seen_in_the_kernels(races: Path) -> None:
    done = look_for_races(races)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout


@pytest.mark.parametrize("left_out", synchronizations())
def test_no_barrier_and_no_fence_can_be_left_out_unseen(races: Path, left_out: str) -> None:
    environments = [{"POLYAMP_FIBERS_WITHOUT": left_out, "POLYAMP_FIBERS_SEED": str(seed)} for seed in SEEDS]
    assert any(is_told_of(look_for_races(races, **environment)) for environment in environments)


def is_told_of(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a race of two accesses in the kernels' sources was seen, or threads that do not meet."""
    accesses = ACCESS.findall(done.stderr)
    in_kernels = len(accesses) == 2 and all(Path(file).parent.name == CSRC.name for file in accesses)
    return (done.returncode == RACE and in_kernels) or has_refused(done)


def has_refused(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == -signal.SIGABRT and done.stderr.startswith("fibers: ")
