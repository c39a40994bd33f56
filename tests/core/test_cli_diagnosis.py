"""The commands that look at a user's own function: what they load, what they print, and how they end."""

import sys
from pathlib import Path
from typing import Any

import pytest

from polyamp import cli
from polyamp.cli_target import load, step_of  # noqa: TID251

TARGETS = """
def step(*batch):
    return 1.0

def loss():
    return 0.5

def with_arguments():
    return step, 1, 2

def loss_and_aux():
    return 0.5, "aux"

def in_mapping():
    return {"step": step, "args": (1, 2), "kwargs": {"flag": True}, "policy": "mixed_bfloat16", "optimizer": "adam"}

def unknown_key():
    return {"step": step, "arguments": (1, 2)}

def no_step():
    return {"args": (1, 2)}

def gives_number():
    return 3.0

def needs_batch(batch):
    return step, batch

class nested:
    inner = staticmethod(loss)

number = 3
"""

BROKEN = "import nothing_of_that_name"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with modules of targets; nothing of them stays imported."""
    (tmp_path / "targets.py").write_text(TARGETS)
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # PYTHONSAFEPATH keeps the current directory out
    for name in ("targets", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path  # type: ignore[misc]
    sys.modules.pop("targets", None)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["polyamp", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("explain", "targets"), "not the name of a function"),
        (("diagnose", "targets.py:step"), "not the name of a function"),
        (("diagnose", ":loss"), "not the name of a function"),
        (("diagnose", "../x:one"), "not the name of a function"),
        (("diagnose", "..x:one"), "not the name of a function"),
        (("diagnose", "missing:loss"), "no module missing"),
        (("diagnose", "targets.missing:loss"), "no module targets.missing"),
        (("diagnose", "targets:missing"), "one of its functions: "),
        (("diagnose", "targets:nested.missing"), "targets has no nested.missing"),
        (("diagnose", "targets:number"), "3 (int)"),
        (("explain", "targets:needs_batch"), "needs_batch(batch)"),
        (("diagnose", "targets:unknown_key"), "unknown 'arguments'"),
        (("diagnose", "targets:no_step"), 'a function under "step"'),
        (("parity", "targets:gives_number"), "train(policy, seed) itself"),
        (("parity", "targets:in_mapping"), 'a function under "train"'),
        (("diagnose", "targets:loss", "--policy", "mixed_float17"), "mixed_float17"),
        (("diagnose", "targets:loss", "--backend", "theano"), "no adapter of that name"),
    ],
)
def test_errors_are_told_without_a_traceback(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    assert run(monkeypatch, *arguments) == 1
    said = capsys.readouterr().err
    assert says in said
    assert "to do:" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("arguments", [("diagnose",), ("explain", "a:b", "--no")])
def test_a_wrong_command_line_is_exit_code_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    assert run(monkeypatch, *arguments) == 2


def test_an_import_that_fails_inside_of_the_module_goes_through(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        load("broken:anything")


@pytest.mark.parametrize(
    ("name", "step", "args"),
    [("loss", "loss", ()), ("with_arguments", "step", (1, 2)), ("loss_and_aux", "loss_and_aux", ())],
)
def test_a_step_in_any_form(folder: Path, name: str, step: str, args: tuple[int, ...]) -> None:
    found = step_of(f"targets:{name}")
    assert (found.step.__name__, found.args) == (step, args)


def test_a_verb_gets_the_options_that_it_knows(folder: Path) -> None:
    def verb(step: Any, /, *args: Any, policy: str, other: int = 0, **kwargs: Any) -> tuple[Any, ...]:
        return args, policy, kwargs

    target = step_of("targets:in_mapping")
    assert target.call(verb) == ((1, 2), "mixed_bfloat16", {"flag": True})
    assert target.call(verb, policy="mixed_float16")[1] == "mixed_float16"
