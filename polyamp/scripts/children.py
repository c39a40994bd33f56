"""Child processes that ``multiprocessing`` starts afresh: they get the hooks and the policy of the run, and report.

Under "spawn" and "forkserver" a child is a new Python. The first object that it unpickles is the preparation data, and
only then it imports the main module. So the data carry a `Start`, whose unpickling begins a session there:

    parent: get_preparation_data -> {..., "polyamp": Start(policy, folder)}
    child:  unpickles Start -> hooks are installed -> imports the script as __mp_main__ -> trains -> writes its summary
    parent: reads the summaries from the folder, for its report
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

from polyamp.policies import Policy
from polyamp.scripts.imports import Finder
from polyamp.scripts.places import SCRIPTS
from polyamp.scripts.session import Session, current, start
from polyamp.scripts.summary import summary_of

_FORKSERVER = "ignore"
"""The name with which the fork server prepares itself. It has no hooks, so it must not import the script."""


class Start:
    """What a child needs to begin: unpickling it does so."""

    def __init__(self, policy: Policy | None, folder: Path) -> None:
        self._arguments = None if policy is None else policy.to_dict(), str(folder), sorted(SCRIPTS)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return begin_child, self._arguments


@contextmanager
def followed(session: Session) -> Iterator[Path]:
    """Let the children of this block begin sessions of their own; yield the folder of their summaries."""
    original = spawn.get_preparation_data
    with tempfile.TemporaryDirectory(prefix="polyamp-run-", ignore_cleanup_errors=True) as folder:
        _prepare_with(Start(session.policy, Path(folder)))
        try:
            yield Path(folder)
        finally:
            spawn.get_preparation_data = original


def _prepare_with(start: Start) -> None:
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = dict(original(name))
        if name == _FORKSERVER:
            for key in ("main_path", "init_main_from_path", "init_main_from_name"):
                data.pop(key, None)
            return data
        return {"polyamp": start, **data}

    spawn.get_preparation_data = get_preparation_data


def begin_child(policy: dict[str, Any] | None, folder: str, scripts: list[str]) -> None:
    """Begin the session of a child process; its own children get one too.

    Args:
        policy: `Policy.to_dict` of the run's policy, or None.
        folder: where summaries go.
        scripts: `polyamp.scripts.places.SCRIPTS` of the parent.
    """
    if current() is not None:
        return
    SCRIPTS.update(scripts)
    session = Session(None if policy is None else Policy.from_dict(policy))
    start(session)
    _prepare_with(Start(session.policy, Path(folder)))
    Finder(session).install()
    _report_at_exit(session, folder)
    util.register_after_fork(session, lambda _: _report_at_exit(session, folder))  # the fork server's children clear it


def _report_at_exit(session: Session, folder: str) -> None:
    util.Finalize(None, _write_summary, args=(session, folder, os.getpid()), exitpriority=-100)


def _write_summary(session: Session, folder: str, process: int) -> None:
    if os.getpid() == process and Path(folder).is_dir() and session.has_results:
        summary = summary_of(session, error=sys.exc_info()[1])
        Path(folder, f"{process}.json").write_text(json.dumps({"process": process, **summary}))


def summaries_in(folder: Path) -> list[dict[str, Any]]:
    """Return the summaries that children have written, in the order of their process numbers."""
    files = sorted(folder.glob("*.json"), key=lambda file: int(file.stem))
    return [json.loads(file.read_text()) for file in files]
