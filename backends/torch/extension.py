"""The compiled extension: built by ``torch.utils.cpp_extension``, loaded once per process; a failure is reported.

``POLYAMP_EXTENSION`` decides: ``auto`` (use a library that is built; for a GPU build it at first use if compilers are
found), ``off``, or ``require`` (like ``auto``, with an error if there is nothing to use).

There are two libraries. Each has a folder in the cache, named by a hash of its sources, the version of PyTorch and the
GPUs; the file ``BUILT`` in it is written last and marks the library as complete.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyamp.errors import ExtensionError, InvalidValueError, warn_once

VARIABLE = "POLYAMP_EXTENSION"
MODES = ("auto", "off", "require")
COMMAND = "python -m polyamp.backends.torch.build"
CSRC = Path(__file__).parent / "csrc"
BUILT, FAILED = "built.txt", "failed.log"
INTERRUPTED = ("Killed", "signal terminated", "No space left", "out of memory", "Cannot allocate memory")
TAIL = 20  # lines of a compiler's output that an error repeats

# No fused multiply-add and no fast math, so that GPU and CPU return the same bits.
NVCC_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-lineinfo", "-Xcompiler=-fvisibility=hidden"]
CXX_FLAGS = ["-O3", "-fvisibility=hidden", "-ffp-contract=off"]

_log = logging.getLogger(__name__)


class Library(NamedTuple):
    """The sources of one library, and the flags of the C++ compiler."""

    host: tuple[str, ...]
    device: tuple[str, ...]  # left out where PyTorch or the machine has no CUDA
    flags: tuple[str, ...]


LIBRARIES = {
    "operators": Library(  # ``torch.ops.polyamp.*``, by PyTorch's stable ABI of 2.10
        ("arguments.cpp", "emulate.cpp", "operators.cpp", "binding_cpu.cpp"),
        ("launch.cu", "binding_cuda.cpp"),
        ("-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000"),
    ),
    "autocast": Library(("autocast.cpp",), (), ("-std=c++20",)),  # the boxed kernel of autocast's overrides
}

_lock = threading.RLock()
_loaded: dict[str, Path] = {}
_answers: dict[tuple[str, torch.device], Path | ExtensionError] = {}  # by library and device


class BuildError(ExtensionError):
    """A library cannot be compiled or loaded, or does not run on the device."""


@dataclass(frozen=True)
class Status:
    """The compiled operators in use, or the reason why there are none."""

    mode: str  # ``POLYAMP_EXTENSION``
    devices: tuple[str, ...] = ()  # the device types whose steps use it
    library: str | None = None  # its path
    built: str | None = None  # with what, and for which GPUs
    autocast: str | None = None  # the path of the library for autocast's overrides, which are slower without it
    why: str | None = None  # what is missing, and what to do

    def __str__(self) -> str:
        if self.library is None:
            return f"CUDA extension not in use: {self.why}"
        line = f"CUDA extension in use on {', '.join(self.devices)}: {self.built}, {self.library}"
        if self.autocast is None:
            line += f"\nautocast's overrides are not compiled for this version of PyTorch: {COMMAND}"
        return line

    def as_dict(self) -> dict[str, Any]:
        """Return the status for JSON."""
        return asdict(self) | {"devices": list(self.devices)}


def mode() -> str:
    """Return the value of ``POLYAMP_EXTENSION``; ``"auto"`` if it is not set."""
    value = os.environ.get(VARIABLE) or "auto"
    if value not in MODES:
        raise InvalidValueError(
            "unknown mode of the extension",
            where=VARIABLE,
            found=repr(value),
            allowed=", ".join(MODES),
            fix=f"set {VARIABLE} to one of these, or not at all",
        )
    return value


def available(device: str | torch.device) -> bool:
    """Load the compiled operators, and return whether they are in use for tensors on a device."""
    # For CUDA they are built first, if they are not built and a compiler is found. The answer is cached in the process
    # for each device: a later build is used by the next process.
    device = torch.device(device)
    if mode() == "off" or device.type not in ("cpu", "cuda"):
        return False
    return _obtained("operators", device) is not None


def library(name: str, *, required: bool = True) -> ctypes.CDLL | None:
    """Return a library with a C interface, such as ``"autocast"``, loaded as by `available`; None without it."""
    path = None if mode() == "off" else _obtained(name, _device(), required=required)
    return ctypes.CDLL(str(path)) if path else None


def status() -> Status:
    """Return which operators are in use, or would be after the first step. Load built libraries, but build nothing."""
    wanted = mode()
    if wanted == "off":
        return Status(wanted, why=f"{VARIABLE}=off")
    device = _device()
    try:
        path = _serving("operators", device, may_build=False)
    except ExtensionError as error:
        return Status(wanted, why=str(error))
    built, overrides = (path.parent / BUILT).read_text(), path_of("autocast")
    autocast = str(overrides) if (overrides.parent / BUILT).exists() else None
    return Status(wanted, tuple(sorted({"cpu", device.type})), str(path), built, autocast)


def path_of(name: str) -> Path:
    """Return the path of a library in ``POLYAMP_CACHE``, ``TORCH_EXTENSIONS_DIR`` or ``~/.cache/polyamp``."""
    made = hashlib.sha256(repr((LIBRARIES[name], NVCC_FLAGS, CXX_FLAGS, _gpus(), platform.machine())).encode())
    made.update(str(torch.__version__).encode())
    for source in sorted(CSRC.glob("*.[ch]*")):  # not check.py, nor the bytecode that Python leaves beside it
        made.update(f"\0{source.name}\0".encode() + source.read_bytes())
    # The last is `polyamp.report.cache_folder`, which a plain step need not load.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.environ.get("POLYAMP_CACHE") or os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(home, "polyamp")
    return Path(cache).absolute() / f"{name}-{made.hexdigest()[:20]}" / f"polyamp_{name}.so"


def build(name: str, *, force: bool = False) -> Path:
    """Load a library, built first unless the cache has it. Of several processes, one builds and the others wait."""
    lacking, path = _lacking(), path_of(name)
    if lacking:
        raise ExtensionError(
            "it is not built and cannot be built here",
            where=path.name,
            found=lacking,
            fix=f"install what is missing, or bring a cache (POLYAMP_CACHE) in which {COMMAND} built it",
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owners(path)
        with _locked(path.parent):
            if force:
                shutil.rmtree(path.parent, ignore_errors=True)
            failed = path.with_name(FAILED)
            if failed.exists():
                raise _failed(failed.read_text(), str(failed))
            if not path.with_name(BUILT).exists():
                _compile(name, path)
    except OSError as error:
        raise _failed(str(error), str(path)) from error
    return _load(name, path)


def _compile(name: str, path: Path) -> None:
    """Build a library in its folder by ``cpp_extension``, which loads it too."""
    from torch.utils import cpp_extension  # takes half a second, for setuptools

    made_for = f"torch {torch.__version__}, {_gpus() or 'for the CPU'}"
    _log.warning("polyamp builds %s once: %s", path.name, made_for)
    _define_operators()
    parts, folder = LIBRARIES[name], path.parent
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.joinpath("lock").unlink(missing_ok=True)  # torch's, left by a process that was killed; we hold our own
    sources = [str(CSRC / source) for source in (*parts.host, *(parts.device if _gpus() else ()))]
    linked = ["-Wl,-z,defs", "-ldl", f"-L{folder}"]
    runtime = next(Path(cpp_extension.CUDA_HOME or folder).glob("lib/libcudart.so.*"), None)
    if runtime is not None:  # NVIDIA's wheels lack the name that the linker looks for
        folder.joinpath("libcudart.so").unlink(missing_ok=True)
        folder.joinpath("libcudart.so").symlink_to(runtime)
    try:
        cpp_extension.load(
            f"polyamp_{name}",
            sources,
            extra_cflags=[*CXX_FLAGS, *parts.flags],
            extra_cuda_cflags=NVCC_FLAGS,
            extra_ldflags=linked,
            build_directory=str(folder),
            is_python_module=False,
        )
    except (RuntimeError, ValueError) as error:  # ValueError: an architecture that does not exist
        if not any(word in str(error) for word in INTERRUPTED):
            folder.joinpath(FAILED).write_text(str(error))
        raise _failed(str(error), str(folder / FAILED)) from None
    folder.joinpath(BUILT).write_text(made_for)


def _load(name: str, path: Path) -> Path:
    """Load a library, unless this process has it already; return the path of the loaded file."""
    with _lock:
        if name not in _loaded:
            _check_owners(path)
            _define_operators()
            try:
                torch.ops.load_library(path)  # type: ignore[no-untyped-call]
            except OSError as error:
                found = error.__cause__ or error
                fix = f"{COMMAND} --force"
                raise BuildError("the extension does not load", where=str(path), found=found, fix=fix) from error
            _loaded[name] = path
    return _loaded[name]


def _define_operators() -> None:
    """Define ``torch.ops.polyamp.*``, which the compiled kernels are registered for."""
    from polyamp.backends.torch.kernels import operators  # noqa: F401


def _gpus() -> str:
    """Return the GPU architectures to build for, in the words of ``TORCH_CUDA_ARCH_LIST``; empty without CUDA."""
    if torch.version.cuda is None:
        return ""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = sorted({torch.cuda.get_device_capability(index) for index in range(count)})
    return os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(f"{major}.{minor}" for major, minor in found)


def _device() -> torch.device:
    return torch.device("cuda" if torch.version.cuda and torch.cuda.is_available() else "cpu")


def _obtained(name: str, device: torch.device, *, required: bool = True) -> Path | None:
    """Return the path of a library that works on a device, else None; the first answer is cached."""
    key = name, device
    with _lock:
        if key not in _answers:
            try:
                _answers[key] = _serving(name, device, may_build=True)
            except ExtensionError as error:
                if mode() == "auto" and isinstance(error, BuildError):  # without a library, the doctor reports it
                    warn_once(str(error))
                _answers[key] = error
    answer = _answers[key]
    if isinstance(answer, Path):
        return answer
    if required and mode() == "require":
        raise answer.with_traceback(None)
    return None


def _serving(name: str, device: torch.device, *, may_build: bool) -> Path:
    """Load a library, built first if need be for a GPU; check that the device can run it; return its path."""
    if device.type == "cuda" and _device().type != "cuda":
        raise ExtensionError("PyTorch sees no NVIDIA GPU", found=f"torch {torch.__version__}")
    path = path_of(name)
    if (path.parent / BUILT).exists():
        path = _load(name, path)
    elif device.type == "cuda" and may_build:
        path = build(name)
    else:
        on_request = "the first step on a GPU builds it, or" if device.type == "cuda" else "for the CPU it is built by"
        raise ExtensionError("it is not built", where=path.name, found=_lacking(), fix=f"{on_request} {COMMAND}")
    if device.type == "cuda" and LIBRARIES[name].device:
        _check_cuda(path, device)
    return path


def _lacking() -> str | None:
    """Return what a build needs and this machine lacks, in words."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    if sys.platform != "linux":
        return f"{sys.platform}: the extension is built on Linux only"
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler}): install g++, or name one in CXX"
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        return f"{error}: pip install setuptools"
    if not cpp_extension.is_ninja_available():
        return "no ninja on PATH: pip install ninja"
    if _gpus() and cpp_extension.CUDA_HOME is None:
        return f"no CUDA compiler (nvcc): name a toolkit of CUDA {torch.version.cuda} in CUDA_HOME"
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock that other processes wait for, and that the system releases if this process is killed."""
    import fcntl  # not available on Windows

    file = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _check_owners(path: Path) -> None:
    """Refuse a library, or a folder of it, that another user can have written or can replace."""
    cache = path.parent.parent.resolve()
    for one in (cache, path.parent, path, path.with_name(BUILT)):
        if not os.path.lexists(one):  # not built yet
            continue
        found = one.lstat()
        is_open = found.st_mode & stat.S_IWOTH and not (one == cache and found.st_mode & stat.S_ISVTX)
        if is_open or stat.S_ISLNK(found.st_mode) or found.st_uid not in (0, os.geteuid()):
            raise BuildError(
                "others can write the built extension",
                where=str(one),
                found=f"{stat.filemode(found.st_mode)} of user {found.st_uid}",
                allowed=f"a folder or a file of user {os.geteuid()} or root, not a link, that others cannot write",
                fix="delete it, or name another folder in POLYAMP_CACHE",
            )


def _failed(output: str, where: str) -> BuildError:
    return BuildError(
        "the extension could not be built",
        where=where,
        found="\n".join(output.splitlines()[-TAIL:]),
        fix=f"{COMMAND} --force tries again; {VARIABLE}=off goes on without it; POLYAMP_CACHE names another folder",
    )


def _check_cuda(path: Path, device: torch.device) -> None:
    """Raise if, as CUDA's runtime reports, driver or GPU cannot run the library."""
    # It tests the current device, and so uses memory on it (a CUDA context): that must be the parameters' device.
    compiled = ctypes.CDLL(str(path))
    with torch.cuda.device(device):
        code = compiled.polyamp_cuda_ready()
    if code:
        compiled.polyamp_cuda_text.restype = ctypes.c_char_p
        raise BuildError(
            "the extension does not run on this GPU",
            where=f"{path}, on {device}",
            found=compiled.polyamp_cuda_text(code).decode(),
            fix=f"name this GPU in TORCH_CUDA_ARCH_LIST, or unset it, and run {COMMAND} --force",
        )
