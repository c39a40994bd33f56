"""One run from beginning to end: the hooks around the script, and the report after it."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from polyamp.errors import InvalidValueError, UsageError
from polyamp.policies import Policy
from polyamp.scripts import children, imports, sources
from polyamp.scripts.report import RunReport
from polyamp.scripts.runner import Program, Script, without_own_frames
from polyamp.scripts.session import Session, running
from polyamp.scripts.summary import summary_of


def run_script(script: Script, policy: Policy | None = None, report: Path | None = None) -> BaseException | None:
    """Run a script, report at the end, and return the exception that ended it, without polyamp's frames.

    Args:
        script: what to run.
        policy: the policy to train under; None only supplies what the script lacks.
        report: the file for the report as JSON.

    Raises:
        InvalidValueError: there is no such script, or the report cannot be written there.
        UsageError: the script cannot be run safely.
    """
    _check_file(report)
    session = Session(policy)
    session.sources = sources.sources_of(script.target, is_module=script.is_module)
    with ExitStack() as stack:
        stack.enter_context(running(session))
        folder = stack.enter_context(children.followed(session))
        error = _run(script, session, stack)
        if _reports():
            made = RunReport(script, summary_of(session, error), children.summaries_in(folder), _exit_of(error))
            _flush()
            made.show(Console(stderr=True, width=None if sys.stderr.isatty() else 120))
            if report is not None:
                made.write(report)
    if session.refusal is not None:
        raise session.refusal.with_traceback(None) from None  # also if the script caught it
    return None if error is None else without_own_frames(error)


def _run(script: Script, session: Session, stack: ExitStack) -> BaseException | None:
    """Run a script under the import hook, and return what it raised."""
    program = None
    try:
        stack.enter_context(imports.hooked(session))
        program = Program(script)
        program.run()
    except BaseException as error:
        if program is None and isinstance(error, InvalidValueError):
            raise
        return error
    return None


def _reports() -> bool:
    """Return whether this process reports: of several ranks that ``torchrun`` starts, the first one."""
    return os.environ.get("RANK", "0") == "0"


def _exit_of(error: BaseException | None) -> str:
    if error is None:
        return "ended"
    if isinstance(error, SystemExit):
        return f"exit code {error.code if isinstance(error.code, int) else int(error.code is not None)}"
    if isinstance(error, UsageError):
        return "refused"
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def _check_file(report: Path | None) -> None:
    if report is not None and not (report.absolute().parent.is_dir() and not report.is_dir()):
        raise InvalidValueError(
            "the report cannot be written there",
            where="polyamp run --report",
            found=str(report),
            allowed="a file in a folder that exists",
            fix="make the folder first; training would be done before the report fails",
        )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
