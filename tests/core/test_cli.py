"""The command line works with no framework installed, and says what is missing."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import polyamp
from polyamp import adapters
from support.other_python import python_without


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "polyamp", *arguments], cwd=cwd, capture_output=True, text=True)


def test_version() -> None:
    assert run("version").stdout.strip() == polyamp.__version__


def test_help_names_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("doctor", "demo", "explain", "diagnose", "parity", "run"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("demo", "--framework", "nonesuch"), "no adapter of that name"), (("demo", "--steps", "0"), "--steps")],
)
def test_bad_arguments_are_told_without_a_traceback(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


WITHOUT_FRAMEWORKS = """
import shlex
import subprocess
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "jax", "tensorflow", "keras"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
from polyamp.cli import main
main()
"""


def test_without_frameworks_doctor_and_demo_say_how_to_get_each() -> None:
    command = [sys.executable, "-c", WITHOUT_FRAMEWORKS, "doctor"]
    table = subprocess.run(command, capture_output=True, text=True)
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    tested = subprocess.run([*command, "--test"], capture_output=True, text=True)
    demo = subprocess.run([*command[:-1], "demo"], capture_output=True, text=True)
    assert (table.returncode, done.returncode, tested.returncode, demo.returncode) == (0, 0, 0, 1), done.stderr
    assert 'pip install "polyamp[all]"' in demo.stderr
    found = json.loads(done.stdout)
    assert (found["polyamp"], found["problem"]) == (polyamp.__version__, None)
    assert found["frameworks"].keys() == set(adapters.names())
    for name, framework in found["frameworks"].items():
        assert not framework["installed"]
        assert f'pip install "polyamp[{name}]"' in framework["why"]
        assert f'pip install "polyamp[{name}]"' in table.stdout
        assert f'pip install "polyamp[{name}]"' in tested.stdout
        assert f'pip install "polyamp[{name}]"' in demo.stdout


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("OSError('no libcuda')", "OSError: no libcuda"),
        ("ModuleNotFoundError('no jax.own', name='jax.own')", "ModuleNotFoundError: no jax.own"),
    ],
)
def test_a_broken_framework_is_named_and_the_others_are_shown(error: str, said: str) -> None:
    broken = WITHOUT_FRAMEWORKS.replace("        if", f"        if name == 'jax': raise {error}\n        if")
    command = [sys.executable, "-c", broken]
    commands = (["doctor"], ["doctor", "--test"], ["demo"])
    ran = [subprocess.run([*command, *words], capture_output=True, text=True) for words in commands]
    assert [done.returncode for done in ran] == [0, 0, 1]
    for done in ran:
        assert f"jax does not load: {said}" in done.stdout
        assert 'pip install "polyamp[torch]"' in done.stdout
        assert "Traceback" not in done.stderr


def test_a_doctor_who_is_not_asked_for_slow_frameworks_does_not_wait_for_them() -> None:
    blocked = WITHOUT_FRAMEWORKS.replace("        if", SLOW, 1)
    done = subprocess.run([sys.executable, "-c", blocked, "doctor"], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("takes long to load") == 2
    assert "the process ended" in done.stdout
    assert not done.stderr
    done = subprocess.run([sys.executable, "-c", blocked, "doctor", "torch"], capture_output=True, text=True)
    assert ("torch" in done.stdout, "keras" in done.stdout) == (True, False)


SLOW = """        if name in ("tensorflow", "keras"):
            sys.stderr.write("a line of a log")
            __import__("time").sleep(600)
        if name == "torch":
            __import__("os").abort()
        if"""


def test_a_region_before_pytorch_is_imported_is_refused() -> None:
    code = "import polyamp\nwith polyamp.autocast('mixed_float16'): pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "only PyTorch has an autocast to enter" in done.stderr
    assert all(verb in done.stderr for verb in ("polyamp.rewrite(step", "polyamp.convert(model"))


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def uninstalled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a Python that finds the package, as in a checkout, but no distribution of it."""
    folder = tmp_path_factory.mktemp("uninstalled")
    python = python_without(folder / "venv", "polyamp")
    package = folder / "path" / "polyamp"
    package.parent.mkdir()
    package.symlink_to(Path(polyamp.__file__).parent)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(package.parent)}
        command = [str(python), "-P", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_a_doctor_who_finds_no_adapter_says_that_polyamp_is_not_installed(uninstalled: Run) -> None:
    done = uninstalled("-m", "polyamp", "doctor")
    assert done.returncode == 1
    assert "polyamp is not installed" in done.stdout
    assert "pip install -e ." in done.stdout
    as_json = uninstalled("-m", "polyamp", "doctor", "--json")
    assert as_json.returncode == 1
    assert "none is registered" in json.loads(as_json.stdout)["problem"]


@pytest.mark.parametrize(
    "call",
    [
        "polyamp.wrap_optimizer(object())",
        "polyamp.wrap_optimizer(object(), backend='torch')",
        "polyamp.autocast('mixed_float16').__enter__()",
        "__import__('polyamp.cli').cli.demo()",
    ],
)
def test_without_entry_points_errors_say_what_to_install(uninstalled: Run, call: str) -> None:
    done = uninstalled("-c", f"import polyamp\n{call}")
    assert done.returncode == 1
    assert "found by entry points, and none is registered" in done.stderr
    assert "to do:   pip install -e ." in done.stderr


@pytest.mark.parametrize(("output", "status"), [(">&-", 0), (">/dev/full", 1)])
def test_an_output_that_cannot_be_written_is_an_error_without_a_traceback(output: str, status: int) -> None:
    command = f"{shlex.quote(sys.executable)} -m polyamp version {output}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert ("the output cannot be written" in done.stderr) is (status == 1)
