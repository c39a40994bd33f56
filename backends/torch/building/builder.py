"""Builds a library once, into a cache that processes share, and finds it there again.

Each build has a folder, named by the hash of all its inputs; its manifest is written last and marks it as complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyamp.backends.torch.building.architectures import Capability, covers, is_architecture
from polyamp.backends.torch.building.recipes import Job, Recipe
from polyamp.errors import ExtensionError

COMMAND = "python -m polyamp.backends.torch.build"
MANIFEST = "manifest.json"
LOG = "build.log"
HASH = "sha256"  # of the library, key in its manifest
TAIL = 20  # lines of a compiler's output that an error repeats

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A library in the cache: its path, its GPUs, its compilers."""

    path: Path  # path of the library
    architectures: tuple[str, ...]  # such as ``"9.0+PTX"``; empty if it is for the CPU only
    compilers: str  # their versions
    reused: bool = True  # whether it existed before

    @property
    def log(self) -> str:
        """The commands that built it, and the compilers' output."""
        return self.path.with_name(LOG).read_text()


class BuildError(ExtensionError):
    """A compiler failed, or the cache cannot be written, or others can write it."""


def cache() -> Path:
    """Return the folder of the builds: ``POLYAMP_CACHE``, ``XDG_CACHE_HOME/polyamp`` or ``~/.cache/polyamp``."""
    own, shared = os.environ.get("POLYAMP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own).absolute() if own else Path(shared or Path.home() / ".cache").absolute() / "polyamp"
    except RuntimeError as error:
        raise _no_cache(str(error)) from error


def find(recipe: Recipe, capabilities: Sequence[Capability]) -> Built | None:
    """Return the newest library of these sources and flags with code for all these GPUs, built by any compiler."""
    refused: list[BuildError] = []
    for folder in _newest_first(recipe):
        built = _read(folder, recipe)
        if built and (not recipe.device or all(covers(built.architectures, gpu) for gpu in capabilities)):
            try:
                _check(built.path)
            except BuildError as error:
                refused.append(error)
            else:
                return built
    if refused:
        raise refused[0]
    return None


def _newest_first(recipe: Recipe) -> list[Path]:
    """Return the folders of a recipe's builds."""
    times = {}
    for path in cache().glob(f"{recipe.name}-*/{MANIFEST}"):
        with suppress(OSError):  # removed meanwhile
            times[path.parent] = path.stat().st_mtime
    return sorted(times, key=times.__getitem__, reverse=True)


def failed_before(job: Job) -> BuildError | None:
    """Return the error that `build` would raise at once, because the same sources and compilers failed before."""
    log = _failure_log(cache() / job.key)
    return _failed(log.read_text(), log) if log.exists() else None


def build(
    job: Job, *, retry: bool = False, force: bool = False, on_step: Callable[[str], None] = lambda source: None
) -> Built:
    """Return the library, and build it if the cache does not have it. If several processes ask, one builds."""
    try:
        folder = cache() / job.key
        with _locked(folder):
            check_alone(folder.parent)
            if folder.exists():
                check_alone(folder)
            return (not force and _whole(folder, job.recipe)) or _build(job, folder, retry, on_step)
    except OSError as error:
        raise _no_cache(str(error)) from error


def _build(job: Job, folder: Path, retry: bool, on_step: Callable[[str], None]) -> Built:
    before = failed_before(job)
    if before and not retry:
        raise before
    failed = _failure_log(folder)
    for stale in folder.parent.glob(f"{folder.name}.*.partial"):  # left by a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    _log.warning("polyamp builds %s once, with %s", job.recipe.file, job.toolchain.versions)
    digest, start = job.recipe.digest, time.monotonic()  # computed first: a source that changes now needs another build
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent) as made:
        _compile(job, Path(made), failed, on_step)
        _publish(job, Path(made), folder, {"digest": digest, "seconds": round(time.monotonic() - start, 1)})
    failed.unlink(missing_ok=True)
    return Built(folder / job.recipe.file, job.architectures, job.toolchain.versions, reused=False)


def _compile(job: Job, folder: Path, failed: Path, on_step: Callable[[str], None]) -> None:
    """Build the library and its log in ``folder``; if a compiler fails, write its output to ``failed``."""

    def make(source: str) -> str:
        output = _run(job.compile(source), folder)
        on_step(source)
        return output

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            log = [*pool.map(make, job.sources)]
        log.append(_run(job.link(), folder))
    except subprocess.CalledProcessError as error:
        output = _shown(error.cmd, error.output)
        if error.returncode < 0:  # killed, which does not mean that the next try fails
            raise _failed(output) from None
        failed.write_text(output)
        raise _failed(output, failed) from None
    (folder / LOG).write_text("".join(log))
    on_step(job.recipe.file)


def _publish(job: Job, made: Path, folder: Path, facts: dict[str, Any]) -> None:
    facts[HASH] = _hash_of(made / job.recipe.file)
    manifest = {"architectures": job.architectures, "compilers": job.toolchain.versions, **facts}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2))
    folder.mkdir(mode=0o755, exist_ok=True)
    (made / job.recipe.file).chmod(0o755)  # whatever the umask is: nobody else may write a library that is loaded
    for name in (job.recipe.file, LOG, MANIFEST):
        os.replace(made / name, folder / name)


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "LC_ALL": "C"}  # `checks` reads the output
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env=environment, check=True, text=True, errors="replace", **both)
    return _shown(command, done.stdout)


def _shown(command: Sequence[str], output: str) -> str:
    return f"$ {' '.join(command)}\n{output}"


def _read(folder: Path, recipe: Recipe) -> Built | None:
    """Return the build of this recipe in a folder of the cache; None if it is of another recipe, or incomplete."""
    path = folder / recipe.file
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        built = Built(path, tuple(manifest["architectures"]), manifest["compilers"])
        is_sound = all(map(is_architecture, built.architectures)) and isinstance(built.compilers, str)
        is_sound = is_sound and isinstance(manifest[HASH], str)  # builds of other versions have none
        return built if is_sound and manifest["digest"] == recipe.digest and path.exists() else None
    except (OSError, ValueError, TypeError, KeyError):  # damaged: a new build replaces it
        return None


def _whole(folder: Path, recipe: Recipe) -> Built | None:
    """Return the build in a folder, if its hash is unchanged."""
    built = _read(folder, recipe)
    return built if built and _hash_of(built.path) == _promised(built.path) else None


def _check(library: Path) -> None:
    """Refuse a library that somebody else may have changed, since it would be loaded."""
    for path in (library.parent.parent, library.parent, library):
        check_alone(path)
    if _hash_of(library) != _promised(library):
        raise BuildError(
            "the built extension was changed after the build",
            where=str(library),
            found="another hash than in its manifest",
            fix=f"build it again: {COMMAND} --force",
        )


def check_alone(path: Path) -> None:
    """Refuse a file or folder that somebody else can write."""
    # A group counts as somebody else, unless it is the user's own, with the user's number. In a folder such as
    # ``/tmp``, which everybody can write, nobody can rename files of others.
    if not hasattr(os, "getuid"):  # Windows
        return
    found = path.stat()
    own_group = found.st_gid == found.st_uid
    shared = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not own_group)
    kept_apart = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_uid in (os.getuid(), 0) and (not shared or kept_apart):
        return
    raise BuildError(
        "others can write the built extension",
        where=str(path),
        found=f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}",
        allowed=f"owner {os.getuid()}, and no one else who can write",
        fix=f"chmod go-w {path}, or set POLYAMP_CACHE to a folder of your own and build again: {COMMAND}",
    )


def _hash_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _promised(library: Path) -> str:
    """Return the hash in a manifest that `_read` has accepted."""
    return str(json.loads(library.with_name(MANIFEST).read_text())[HASH])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock that other processes wait for; the system releases it if this process is killed."""
    import fcntl  # not available on Windows

    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _failure_log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.failed.log")


def _failed(output: str, log: Path | None = None) -> BuildError:
    return BuildError(
        "the extension could not be built",
        where=str(log) if log else None,
        found="\n".join(output.splitlines()[-TAIL:]),
        fix=f"{COMMAND} tries again; POLYAMP_EXTENSION=off goes on without it and without a word",
    )


def _no_cache(found: str) -> BuildError:
    return BuildError(
        "the extension could not be built",
        found=found,
        fix="set POLYAMP_CACHE to a folder that can be written, or see to it that this one can",
    )
