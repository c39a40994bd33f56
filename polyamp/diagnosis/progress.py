"""Progress of a long call: a bar on a terminal, lines elsewhere, or the caller's own function."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

Show = Callable[[int, int, str], None]
Progress = bool | Show


@contextmanager
def progressing(progress: Progress, total: int, title: str) -> Iterator[Callable[[str], None]]:
    """Provide a function to call with a line of text after each of ``total`` parts."""
    with ExitStack() as stack:
        show = progress if callable(progress) else _shown(stack, total, title) if progress else _nothing
        parts = itertools.count(1)
        yield lambda text: show(next(parts), total, text)


def _shown(stack: ExitStack, total: int, title: str) -> Show:
    if not sys.stderr.isatty():
        return _line
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        return _line
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
    bar = bars.add_task(title, total=total)
    return lambda done, total, text: bars.update(bar, completed=done, description=text)


def _line(done: int, total: int, text: str) -> None:
    print(f"{done}/{total} {text}", file=sys.stderr, flush=True)


def _nothing(done: int, total: int, text: str) -> None:
    """Show no progress."""
