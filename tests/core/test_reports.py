"""Warnings about what a policy could not do in a program, and files: whole or not at all."""

import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polyamp import errors
from polyamp.diagnosis.comparison import Run
from polyamp.diagnosis.parity import add_run, read_runs
from polyamp.errors import InvalidValueError, forget_warnings
from polyamp.report import write_json
from polyamp.rules import Rule
from polyamp.without_effect import report_nothing_lowered, report_refused, report_unused


def shown_by(report: object, *args: object, **kwargs: object) -> list[tuple[str, str]]:
    """The warnings of a report, each with the file that it points at."""
    forget_warnings()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            report(*args, **kwargs)  # type: ignore[operator]
    return [(str(one.message), one.filename) for one in found]


def test_reports_are_shown_once_and_point_at_the_caller() -> None:
    rules = [Rule("haed/*", "full"), Rule("tail", "full")]
    unused = shown_by(report_unused, rules, where="step", paths="a module", of="mixed_float16")
    assert [message.partition(":")[0] for message, _ in unused] == [
        "the rule 'haed/*' of mixed_float16 matched nothing in step",
        "the rule 'tail' of mixed_float16 matched nothing in step",
    ]
    unlowered = shown_by(report_nothing_lowered, "rewrite", "float16", where="step")
    assert [message for message, _ in unlowered] == [
        "rewrite to float16 changed nothing in step: it has no float32 operation of class lower, such as matmul and "
        "conv. polyamp.explain shows the reason for each operation."
    ]
    missing = {"there is no float16 kernel for Tanh on CPU": "rule 'tanh'"}
    refused = shown_by(report_refused, missing, where="step", of="mixed_float16")
    assert [message for message, _ in refused] == [
        "rule 'tanh' of mixed_float16 has no effect in step: there is no float16 kernel for Tanh on CPU."
    ]
    assert {file for _, file in [*unused, *unlowered, *refused]} == {__file__}


def test_a_report_points_past_an_installed_trainer_at_the_script_that_called_it() -> None:
    code = compile(
        "def fit(report, *args, **kwargs): report(*args, **kwargs)", "/env/lib/site-packages/trainer/loop.py", "exec"
    )
    trainer: dict[str, Any] = {"__name__": "trainer.loop"}
    exec(code, trainer)
    [(_, file)] = shown_by(trainer["fit"], report_nothing_lowered, "rewrite", "float16", where="step")
    assert file == __file__


def test_a_folder_whose_name_begins_as_the_package_s_is_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(errors.__file__).parent
    monkeypatch.setattr(errors, "_INSTALLED", ())  # as in a checkout
    assert errors.is_users(f"{package}_demo/train.py")
    assert not errors.is_users(f"{package}/verbs.py")


def test_a_rule_of_an_unknown_policy_is_reported_too() -> None:
    [(message, _)] = shown_by(report_unused, [Rule("haed", "full")], where="TensorFlow code", paths="a name scope")
    assert message.startswith("the rule 'haed' matched nothing in TensorFlow code: ")


# --- files ------------------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file grow beyond a size."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_old_report_and_every_finished_run(tmp_path: Path) -> None:
    report, runs = tmp_path / "report.json", tmp_path / "runs.jsonl"
    write_json({"old": 1}, report)
    report.chmod(0o600)
    add_run(runs, ("m:train", "p", 0), Run(0, {"loss": 0.5}))
    with full_disk(200):
        with pytest.raises(InvalidValueError, match="the file cannot be written"):
            write_json({"new": "x" * 1000}, report)
        with pytest.raises(InvalidValueError, match="the disk is full"):
            add_run(runs, ("m:train", "p", 1), Run(1, {"loss": 0.5}, failure="x" * 300))
    assert report.read_text() == '{\n "old": 1\n}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "runs.jsonl"]
    add_run(runs, ("m:train", "p", 2), Run(2, {"loss": 0.5}))  # after the line that was cut
    with pytest.warns(UserWarning, match="in line 2;"):
        assert [key[-1] for key in read_runs(runs)] == [0, 2]
    (tmp_path / "link.json").symlink_to(report)
    write_json({"new": 2}, tmp_path / "link.json")
    assert report.read_text() == '{\n "new": 2\n}\n'
    assert report.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["no/such/folder.json", ".", 3, "a\0b", None])
def test_a_file_that_cannot_be_written_is_refused(path: str) -> None:
    with pytest.raises(InvalidValueError, match="the file cannot be written"):
        write_json({}, path)
