"""`polyamp run` runs a script as Python does: its names, arguments, imports, errors, exit code and processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polyamp import cli
from polyamp import policy as make_policy
from polyamp.errors import InvalidValueError, UsageError
from polyamp.run import run_script

FACTS = """
import pickle, sys
class Here:
    pass
assert pickle.loads(pickle.dumps(Here)) is Here
assert sys.modules["__main__"].Here is Here
print(__name__, __file__, sys.argv[1:], __package__, sep="|")
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # under ``python -P`` it is not searched otherwise
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def write(name: str, text: str) -> str:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return name


def command(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["run", *words])


def test_a_file_runs_as_main(capsys: pytest.CaptureFixture[str]) -> None:
    main = sys.modules["__main__"]
    assert run_script(write("train.py", FACTS), ("--lr", "1")) is None
    out, err = capsys.readouterr()
    assert out == f"__main__|{Path.cwd() / 'train.py'}|['--lr', '1']|\n", "standard output is the script's"
    assert "polyamp run train.py: ended" in err
    assert sys.modules["__main__"] is main


@pytest.mark.parametrize(
    ("name", "module"),
    [("package/train.py", "package.train"), ("package/__main__.py", "package"), ("tool/__main__.py", "")],
)
def test_a_module_or_folder_runs_as_main(name: str, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("package/__init__.py", "")
    write("package/other.py", "value = 3")
    write(name, ("from .other import value\n" if module else "") + FACTS)
    assert run_script(module or "tool", is_module=bool(module)) is None
    assert capsys.readouterr().out == f"__main__|{Path.cwd() / name}|[]|{'package' if module else ''}\n"


def test_options_after_the_script_are_the_scripts() -> None:
    write("train.py", "import sys; print(sys.argv)")
    result = command("--report", "report.json", "train.py", "--policy", "x", "-m", "--", "--report", "y")
    assert result.exit_code == 0, result.output
    assert "train.py', '--policy', 'x', '-m', '--', '--report', 'y']" in result.output
    assert json.loads(Path("report.json").read_text())["exit"] == "ended"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit(True)", 1),
        ("1 / 0", 1),
    ],
)
def test_the_exit_code_is_the_scripts(code: str, expected: int) -> None:
    assert command(write("train.py", code)).exit_code == expected


def test_a_module_that_does_not_exist_fails_as_python_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(run_script("absent_module", is_module=True), ImportError)
    assert "No module named absent_module" in capsys.readouterr().err


def test_an_error_has_the_traceback_of_the_script_alone(capsys: pytest.CaptureFixture[str]) -> None:
    write(
        "train.py",
        "def inner():\n    try:\n        1 / 0\n    except ZeroDivisionError:\n        raise KeyError(2)\ninner()\n",
    )
    error = run_script("train.py", report=Path("report.json"))
    assert isinstance(error, KeyError)
    one: BaseException | None = error
    while one is not None:
        lines, trace = [], one.__traceback__
        while trace is not None:
            lines.append(Path(trace.tb_frame.f_code.co_filename).name)
            trace = trace.tb_next
        assert set(lines) == {"train.py"}
        one = one.__context__
    assert json.loads(Path("report.json").read_text())["exit"] == "KeyError: 2"
    with pytest.raises(SystemExit):
        cli.app(["run", "train.py"])
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == 2
    assert "polyamp/" not in shown.partition("Traceback")[2]


def test_the_scripts_own_hook_shows_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    write("train.py", "import sys\nsys.excepthook = lambda *error: print('hook', error[1])\nraise ValueError('x')")
    before = sys.excepthook
    with pytest.raises(SystemExit):
        cli.app(["run", "train.py"])
    assert "hook x" in capsys.readouterr().out
    assert sys.excepthook is before


@pytest.mark.parametrize("name", ["absent.py", "empty"])
def test_a_script_that_does_not_exist_is_refused(name: str) -> None:
    Path("empty").mkdir()
    result = command(name)
    assert isinstance(result.exception, InvalidValueError)
    assert "no such script" in str(result.exception)


def test_a_report_that_cannot_be_written_is_refused_before_the_script_runs() -> None:
    write("train.py", "open('ran', 'w').close()")
    result = command("--report", "nowhere/report.json", "train.py")
    assert "cannot be written" in str(result.exception)
    assert not Path("ran").exists()


def test_auto_is_refused_because_the_script_loads_the_framework() -> None:
    write("train.py", "open('ran', 'w').close()")
    result = command("--policy", "Auto", "train.py")
    assert "depends on the loaded framework" in str(result.exception)
    assert not Path("ran").exists()


def test_a_policy_without_a_framework_is_a_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "jax", "tensorflow", "keras"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    run_script(write("train.py", ""), policy=make_policy("mixed_float16"))
    assert "verdict: No model ran in 16 bits" in capsys.readouterr().err


def test_a_refusal_is_the_commands_error_even_if_the_script_catches_it() -> None:
    refusing = "from polyamp.run import current\ntry:\n    current().refuse('unsafe here', fix='do not')\nexcept:\n"
    result = command(write("train.py", refusing + "    pass\n"))
    assert isinstance(result.exception, UsageError)
    assert f"where:   {Path.cwd() / 'train.py'}:3" in str(result.exception)


def test_the_first_rank_reports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    run_script(write("train.py", ""), report=Path("report.json"))
    assert capsys.readouterr().err == ""
    assert not Path("report.json").exists()


def test_an_interrupt_ends_the_process_as_it_ends_python() -> None:
    write("train.py", "import time\nprint('here', flush=True)\ntime.sleep(60)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    start, pipe = [sys.executable, "-m", "polyamp", "run", "train.py"], subprocess.PIPE
    running = subprocess.Popen(start, stdout=pipe, stderr=pipe, text=True, env=environment)
    assert running.stdout is not None
    assert running.stdout.readline() == "here\n"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "KeyboardInterrupt" in err
    assert "polyamp/" not in err.partition("Traceback")[2]
