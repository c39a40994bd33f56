"""``polyamp run``: a user's script, unmodified, with the modules that it lacks, and under a policy if one is named."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from polyamp.policies import policy as make_policy
from polyamp.run import run_script

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
