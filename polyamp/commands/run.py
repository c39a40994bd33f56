"""``polyamp run``: a user's script, unmodified, with the modules that it lacks, and under a policy if one is named."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import polyamp
from polyamp import registry
from polyamp.diagnosis.health import health
from polyamp.errors import InvalidValueError, UsageError
from polyamp.plan import Plan
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.run import Finder, NoScriptError, Session, execute, running, without_own_frames

_ROWS = 12  # operations in the table; the JSON has all

PolicyName = Annotated[
    str | None, typer.Option("--policy", help="Train under this policy, by name. Without it only shims are installed.")
]
ReportFile = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report as JSON.")]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as after python -m.")]
Target = Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, folder or module.", show_default=False)]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own.", show_default=False)]

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}
"""Click's settings: what follows the script is the script's."""


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
    chosen = None if policy is None else make_policy(policy)
    hook, sys.excepthook = sys.excepthook, sys.__excepthook__  # typer's is not the one that a script expects
    try:
        error = run_script(script, arguments or (), is_module=is_module, policy=chosen, report=report)
        if error is not None:
            _end_with(error)
    finally:
        sys.excepthook = hook


def _end_with(error: BaseException) -> NoReturn:
    """End the process as Python does after an exception of the main program."""
    if isinstance(error, SystemExit):
        raise error
    sys.excepthook(type(error), error, error.__traceback__)  # the script's own, if it set one
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1)


def run_script(
    target: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    policy: Policy | None = None,
    report: Path | None = None,
) -> BaseException | None:
    """Run a script, report at the end, and return the exception that ended it, without polyamp's frames."""
    if report is not None and not (report.absolute().parent.is_dir() and not report.is_dir()):
        raise InvalidValueError(
            "the report cannot be written there",
            where="polyamp run --report",
            found=str(report),
            allowed="a file in a folder that exists",
            fix="make the folder first; training would be done before the report fails",
        )
    session, error = Session(policy), None
    with running(session):
        try:
            Finder(session).install()
            execute(session, target, arguments, is_module)
        except NoScriptError:
            raise
        except BaseException as raised:
            error = raised
        if os.environ.get("RANK", "0") == "0":  # of the ranks that torchrun starts, the first one reports
            made = _report(session, error) | {"script": target, "arguments": list(arguments)}
            _show(made)
            if report is not None:
                report.write_text(json.dumps(made, indent=1, allow_nan=False) + "\n")
    if session.refusal is not None:
        raise session.refusal.with_traceback(None) from None  # also if the script caught it
    return error if error is None else without_own_frames(error)


def _report(session: Session, error: BaseException | None) -> dict[str, Any]:
    found, loss = [health(one) for one in session.holders], session.last_loss()
    policy = session.policy
    plans = [Plan(str(policy), tuple(many), engine=title) for title, many in session.operations.items() if many]
    has_low = session.has_low or any(plan.totals["by_format"].keys() & {"float16", "bfloat16"} for plan in plans)
    verdicts: list[str] = []
    for one in found:
        if one.steps and one.skipped == one.steps:
            verdicts.append(f"All {one.steps:,} steps were skipped, so nothing was trained. {one.finding}")
        elif one.alarming:
            verdicts.append(f"Loss scaling: {one.why}. {one.finding}")
    if loss is not None and not math.isfinite(loss):
        verdicts.append(f"The last loss is {loss}: look for its first non-finite value with polyamp.diagnose.")
    if policy is not None and error is None:
        if not session.begun:
            verdicts.append("No framework that polyamp supports was imported: nothing changed.")
        elif policy.compute in ("float16", "bfloat16") and not has_low:
            verdicts.append(
                "Nothing ran in 16 bits: nothing changed. Processes that the script starts itself are not followed: "
                "start them with torchrun."
            )
    return {
        "polyamp": polyamp.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "frameworks": {adapter.name: adapter.describe() for adapter in registry.in_use()},
        "policy": None if policy is None else str(policy),
        "exit": _exit_of(error),
        "supplied": sorted(set(session.supplied)),
        "interfaces": session.interfaces,
        "plans": [plan.as_dict() for plan in plans],
        "health": [{**one.as_dict(), "text": str(one)} for one in found],
        "loss": loss if loss is None or math.isfinite(loss) else None,
        "notes": session.notes,
        "refusal": None if session.refusal is None else str(session.refusal),
        "verdicts": [] if session.refusal is not None else list(dict.fromkeys(verdicts)),
    }


def _exit_of(error: BaseException | None) -> str:
    if error is None:
        return "ended"
    if isinstance(error, SystemExit):
        return f"exit code {error.code if isinstance(error.code, int) else int(error.code is not None)}"
    if isinstance(error, UsageError):
        return "refused"
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def _show(report: dict[str, Any]) -> None:
    """Print the report on standard error, after what the script printed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    policy = report["policy"] or "no policy: mixed precision is the script's own"
    lines = [f"polyamp run {report['script']}: {report['exit']}; {policy}"]
    lines += [f"supplied: {', '.join(report['supplied'])}"] if report["supplied"] else []
    lines += [f"used: {one['interface']}" + f" at {one['where']}" * bool(one["where"]) for one in report["interfaces"]]
    lines += [f"loss scale: {one['text']}" for one in report["health"]] + [f"note: {one}" for one in report["notes"]]
    for line in dict.fromkeys(lines):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for plan in report["plans"]:
        counted: dict[str, Counter[str]] = {}
        for one in plan["operations"]:
            counted.setdefault(one["name"], Counter())[one["format"]] += 1
        table = Table("operation", "ran in", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name, formats in sorted(counted.items(), key=lambda item: -item[1].total())[:_ROWS]:
            table.add_row(escape(name), ", ".join(f"{format_name} {count}" for format_name, count in formats.items()))
        if len(counted) > _ROWS:
            table.add_row(f"{len(counted) - _ROWS} more", "--report FILE lists them")
        console.print(f"{plan['engine']}:", highlight=False, markup=False)
        console.print(table)
    for verdict in report["verdicts"]:
        console.print(f"verdict: {verdict}", style="bold red", highlight=False, markup=False, soft_wrap=True)
