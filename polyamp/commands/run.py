"""``polyamp run``: a user's script, unmodified, with the modules that it lacks, and under a policy if one is named."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polyamp.commands.show import check_files
from polyamp.diagnosis.health import health
from polyamp.errors import InvalidValueError
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.report import Report
from polyamp.run import Finder, Session, execute, is_script

PolicyName = Annotated[
    str | None, typer.Option("--policy", help="Train under this policy, by name. Without it only shims are installed.")
]
ReportFile = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report as JSON.")]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as after python -m.")]
Target = Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, folder or module.", show_default=False)]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own.", show_default=False)]


def run(
    script: Target,
    arguments: Arguments = None,
    policy: PolicyName = None,
    report: ReportFile = None,
    is_module: IsModule = False,
) -> None:
    """Run a script unmodified: supply modules that it lacks, such as apex, and with --policy turn mixed precision on.

    The report goes to standard error. The exit code is the script's; it is 1 if the script cannot be run safely.
    """
    if not is_module and not Path(script).is_file() and not Path(script, "__main__.py").is_file():
        raise InvalidValueError(
            "there is no such script",
            where="polyamp run",
            found=script,
            allowed="a Python file, or a folder with __main__.py; after -m the name of a module",
            fix="options of polyamp run come before the script, the script's own after it",
        )
    check_files(None if report is None else str(report))
    chosen = None if policy is None else make_policy(policy)
    hook, sys.excepthook = sys.excepthook, sys.__excepthook__  # typer's is not the one that a script expects
    try:
        error = run_script(script, arguments or (), is_module=is_module, policy=chosen, report=report)
        if isinstance(error, SystemExit):
            raise error
        if error is not None:
            sys.excepthook(type(error), error, error.__traceback__)  # the script's own, if it set one
            raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1)
    finally:
        sys.excepthook = hook


def run_script(
    target: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    policy: Policy | None = None,
    report: Path | None = None,
) -> BaseException | None:
    """Run a script, report at the end, and return the exception that ended it, without the frames that called it."""
    session, error = Session(policy), None
    with session:
        try:
            Finder(session).install()
            execute(target, arguments, is_module)
        except BaseException as raised:
            error = raised
        if os.environ.get("RANK", "0") == "0":  # of the ranks that torchrun starts, the first one reports
            made = _RunReport(session, target, arguments, error)
            print(end="", flush=True)
            if sys.stderr is not None:
                print(made, file=sys.stderr, flush=True)
            if report is not None:
                made.save(report)
    if session.refusal is not None:
        raise session.refusal.with_traceback(None) from None  # also if the script caught it
    while error is not None and (trace := error.__traceback__) and not is_script(trace.tb_frame.f_code.co_filename):
        error.__traceback__ = trace.tb_next
    return error


class _RunReport(Report):
    """Reports how a script ended, what it used, what ran in which format, and what went badly."""

    def __init__(self, session: Session, target: str, arguments: Sequence[str], error: BaseException | None) -> None:
        self._session, self._script, self._arguments = session, target, list(arguments)
        self._health = [health(one) for one in session.holders]
        self._exit = "ended" if error is None else f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        if session.refusal is not None:
            self._exit = "refused"
        elif isinstance(error, SystemExit):
            self._exit = f"exit code {int(error.code if isinstance(error.code, int) else error.code is not None)}"
        self._verdicts = list(self._find_verdicts()) if session.refusal is None else []

    def as_dict(self) -> dict[str, Any]:
        session = self._session
        return {
            "script": self._script,
            "arguments": self._arguments,
            "policy": None if session.policy is None else str(session.policy),
            "exit": self._exit,
            "supplied": sorted(session.supplied),
            "interfaces": [{"interface": one, "where": where} for one, where in session.interfaces.items()],
            "operations": session.operations,
            "health": [one.as_dict() for one in self._health],
            "refusal": None if session.refusal is None else str(session.refusal),
            "verdicts": self._verdicts,
        }

    def heading(self) -> str:
        session = self._session
        lines = [f"polyamp run {self._script}: {self._exit}; {session.policy or 'no policy'}"]
        lines += [f"supplied: {', '.join(sorted(session.supplied))}"] if session.supplied else []
        lines += [f"used: {one} at {where}" for one, where in session.interfaces.items()]
        return "\n".join([*lines, *(f"loss scale: {one}" for one in self._health)])

    def rows(self) -> list[tuple[str, ...]]:
        ran = self._session.operations.items()
        rows = [(name, ", ".join(f"{form} {count}" for form, count in forms.most_common())) for name, forms in ran]
        return [("operation", "ran in"), *rows] if rows else []

    def sentences(self) -> list[str]:
        return [f"verdict: {one}" for one in self._verdicts]

    def _find_verdicts(self) -> Iterator[str]:
        session, low = self._session, {"float16", "bfloat16"}
        for one in self._health:
            if one.steps and one.skipped == one.steps:
                yield f"All {one.steps:,} steps were skipped, so nothing was trained. {one.finding}"
            elif one.alarming:
                yield f"Loss scaling: {one.why}. {one.finding}"
        yield from (f"Gradients were not checked: {why}." for why in session.unchecked)
        wants_low = session.policy is not None and session.policy.compute in low and self._exit == "ended"
        if wants_low and all(low.isdisjoint(forms) for forms in session.operations.values()):
            yield "Nothing ran in 16 bits: nothing changed. Start processes with torchrun; others are not followed."
