"""Do pieces of work in processes of their own, as many at a time as there are processors, and show how far they are.

>>> from functools import partial
>>> works = {"five": partial(divmod, 17, 3), "none": partial(divmod, 17, 0)}
>>> for name, done in finished(works, jobs=2):  # doctest: +SKIP
...     print(name, done.exception() or done.result())
none integer division or modulo by zero
five (5, 2)
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from typing import Any

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC")
"""Variables of the environment by which PyTorch, TensorFlow and XLA choose their numbers of threads."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def finished(
    works: Mapping[str, Callable[[], Any]], jobs: int, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, Future[Any]]]:
    """Yield each name with its finished future, in the order in which they end.

    Each piece of work starts a new Python, which a crash ends without the others; so the functions are importable.
    The processors are shared out evenly among the threads of the frameworks in them.

    Args:
        works: functions without arguments, by name; they start in this order.
        jobs: number of processes at a time.
        meanwhile: called about once a second.
    """
    share = max(1, cores() // jobs)
    with ThreadPoolExecutor(jobs) as threads:
        names = {threads.submit(_alone, work, share): name for name, work in works.items()}
        running = set(names)
        try:
            while running:
                ended, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                meanwhile()
                yield from ((names[future], future) for future in ended)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _alone(work: Callable[[], Any], threads: int) -> Any:
    """Return the result of a function that runs in a new process with a number of threads."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_limit, initargs=(threads,)) as process:
        return process.submit(work).result()


def _limit(threads: int) -> None:
    """Set the variables, unless they are set, before a framework reads them."""
    for name in THREADS:
        os.environ.setdefault(name, str(threads))
