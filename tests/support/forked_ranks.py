"""Ranks of torch.distributed as forks of one process, which imports torch once for all of them."""

import multiprocessing
import multiprocessing.connection
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 120  # seconds without an end of any rank

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"])


def run_ranks(count: int, program: Callable[..., None], folder: Path, *arguments: Any) -> list[int | None]:
    """Call ``program(rank, folder, *arguments)`` on every rank, and return how each process ended: 0, or why not.

    When one rank has failed, the others are killed, as torchrun does. A rank's output is in ``folder``; see `outputs`.

    Args:
        count: number of ranks. If it is 1, ``torch.distributed`` is not initialised.
        program: a function of a module in ``support``, which other processes can import.
        folder: an existing folder.
        *arguments: can be pickled.
    """
    rendezvous = folder / f"rendezvous_{len(list(folder.iterdir()))}"
    ranks = [
        _context.Process(target=_run, args=(rank, count, rendezvous, program, folder, arguments), daemon=True)
        for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    while running := [rank.sentinel for rank in ranks if rank.is_alive()]:
        ended = multiprocessing.connection.wait(running, TIMEOUT)
        if not ended or any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.kill()
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


def outputs(folder: Path) -> str:
    """Return what the ranks have printed, with their errors."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("output_*")))


def _run(
    rank: int, count: int, rendezvous: Path, program: Callable[..., None], folder: Path, arguments: tuple[Any, ...]
) -> None:
    output = os.open(folder / f"output_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    torch.set_num_threads(1)
    if count == 1:
        program(rank, folder, *arguments)
        return
    with default_group(rank, count, rendezvous):
        program(rank, folder, *arguments)
        dist.barrier()


@contextmanager
def default_group(rank: int, count: int, rendezvous: str | Path, **options: Any) -> Iterator[None]:
    """Be one rank of torch's default group. It is destroyed at the end, but not after an error, which may block.

    Args:
        rank: this rank.
        count: number of ranks.
        rendezvous: the file by which they meet; it does not exist before.
        **options: options of ``init_process_group``.
    """
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count, **options)
    yield
    dist.destroy_process_group()
