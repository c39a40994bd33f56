"""Decides whether compiled code is in use: loads it once per process, and reports why if it cannot.

``POLYAMP_EXTENSION`` decides: ``auto`` (use a library that is built; for a GPU build it at first use if compilers are
found), ``off``, or ``require`` (like ``auto``, with an error if there is nothing to use).
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from polyamp.backends.torch.building import architectures, builder, recipes, toolchain
from polyamp.backends.torch.building.builder import BuildError, Built
from polyamp.backends.torch.building.recipes import Job, Recipe
from polyamp.backends.torch.building.toolchain import Toolchain
from polyamp.errors import ExtensionError, InvalidValueError, warn_once

VARIABLE = "POLYAMP_EXTENSION"
MODES = ("auto", "off", "require")

_lock = threading.RLock()
_loaded: dict[str, Built] = {}
_answers: dict[tuple[str, torch.device], Built | ExtensionError] = {}  # by library and device


class LoadError(ExtensionError):
    """A library that was built does not load, or does not run on the device."""


@dataclass(frozen=True)
class Status:
    """The compiled operators in use, or the reason why there are none."""

    mode: str  # ``POLYAMP_EXTENSION``
    devices: tuple[str, ...] = ()  # the device types whose steps use it
    library: str | None = None  # its path
    architectures: tuple[str, ...] = ()  # the GPUs that it has code for
    compilers: str | None = None  # what built it
    autocast: str | None = None  # the path of the library for autocast's overrides, which are slower without it
    why: str | None = None  # what is missing, and what to do

    def __str__(self) -> str:
        if self.library is None:
            return f"CUDA extension not in use: {self.why}"
        made_for = f"compute capability {', '.join(self.architectures)}" if self.architectures else "the CPU alone"
        lines = [
            f"CUDA extension in use on {', '.join(self.devices)}: for {made_for}, by {self.compilers}, {self.library}"
        ]
        if self.autocast is None:
            lines.append(f"autocast's overrides are not compiled for this version of PyTorch: {builder.COMMAND}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the status for JSON."""
        return asdict(self) | {"devices": list(self.devices), "architectures": list(self.architectures)}


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
    """Return a library with a C interface, such as ``"autocast"``, or None. Build and load it as `available` does."""
    built = None if mode() == "off" else _obtained(name, _device(), required=required)
    return ctypes.CDLL(str(built.path)) if built else None


def status() -> Status:
    """Return which operators are in use, or would be after the first step. Load built libraries, but build nothing."""
    wanted = mode()
    if wanted == "off":
        return Status(wanted, why=f"{VARIABLE}=off")
    device = _device()
    try:
        built, overrides = _serving("operators", device, build=False), builder.find(recipes.autocast(), ())
    except ExtensionError as error:
        return Status(wanted, why=str(error))
    devices = sorted({"cpu", device.type})
    autocast = str(overrides.path) if overrides else None
    return Status(wanted, tuple(devices), str(built.path), built.architectures, built.compilers, autocast)


def _device() -> torch.device:
    return torch.device("cuda" if architectures.capabilities() else "cpu")


def _obtained(name: str, device: torch.device, *, required: bool = True) -> Built | None:
    """Return the library, if it works for this device; the first answer is cached."""
    key = name, device
    with _lock:
        if key not in _answers:
            _answers[key] = _answer(name, device)
    answer = _answers[key]
    if isinstance(answer, Built):
        return answer
    if required and mode() == "require":
        raise answer.with_traceback(None)
    return None


def _answer(name: str, device: torch.device) -> Built | ExtensionError:
    try:
        return _serving(name, device, build=True)
    except ExtensionError as error:
        if mode() == "auto" and isinstance(error, BuildError | LoadError):  # without a library, the doctor reports it
            warn_once(str(error))
        return error


def _serving(name: str, device: torch.device, *, build: bool) -> Built:
    """Return the loaded library, tested to run on the device."""
    recipe, gpus = recipes.RECIPES[name](), architectures.capabilities()
    if device.type == "cuda" and not gpus:
        raise ExtensionError("PyTorch sees no NVIDIA GPU", found=f"torch {torch.__version__}")
    with _lock:
        if name not in _loaded:
            built = builder.find(recipe, gpus) or _build(recipe, device.type, build)
            _load(recipe, built.path)
            _loaded[name] = built
    if device.type == "cuda" and recipe.device:
        _check_cuda(_loaded[name].path, device)
    return _loaded[name]


def _build(recipe: Recipe, device_type: str, build: bool) -> Built:
    if device_type != "cuda":
        found = None if build and mode() == "auto" else _compilers()
        raise ExtensionError(
            "it is not built, and for the CPU it is only built on request",
            where=recipe.file,
            found=found,
            fix=builder.COMMAND,
        )
    tools = _tools(recipe)
    chosen = architectures.choose("native", tools.nvcc.knows) if tools.nvcc else ()
    job = Job.of(recipe, tools, chosen)
    if not build:
        raise builder.failed_before(job) or ExtensionError(
            "it is not built yet", fix=f"the first step on a GPU builds it, or {builder.COMMAND}"
        )
    return builder.build(job)


def _tools(recipe: Recipe) -> Toolchain:
    """Return the compilers for a library; if one is missing, the error names the library."""
    try:
        return toolchain.find(cuda=bool(recipe.device))
    except ExtensionError as error:
        raise ExtensionError(
            "it is not built and cannot be built here",
            where=recipe.file,
            found="; ".join(line.strip() for line in str(error).splitlines()),
            fix=f"install what is missing, or bring a cache (POLYAMP_CACHE) in which {builder.COMMAND} built it",
        ) from None


def _compilers() -> str:
    """Return the versions of the compilers, or what is missing."""
    try:
        return toolchain.find(cuda=True).versions
    except ExtensionError as error:
        return str(error).partition("\n")[0]


def _load(recipe: Recipe, path: Path) -> None:
    """Load a library for good. Refuse a second one with the same operators: it would replace only part of the first."""
    others = [one for one in torch.ops.loaded_libraries if Path(one).name == path.name and Path(one) != path.resolve()]
    if others:
        raise LoadError("another build of the extension is loaded", found=others[0], fix="restart the process")
    try:
        if recipe.name == "operators":
            from polyamp.backends.torch.kernels import operators  # noqa: F401 # defines the operators of the library

        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise LoadError(
            "the extension does not load",
            where=str(path),
            found=error.__cause__ or error,
            fix=f"{builder.COMMAND} --force",
        ) from error


def _check_cuda(path: Path, device: torch.device) -> None:
    """Ask CUDA's runtime, which is linked into the library, whether driver and GPU run its code."""
    # It tests the current device, and so uses memory on it (a CUDA context): that must be the parameters' device.
    compiled = ctypes.CDLL(str(path))
    with torch.cuda.device(device):
        code = compiled.polyamp_cuda_ready()
    if code:
        compiled.polyamp_cuda_text.restype = ctypes.c_char_p
        raise LoadError(
            "the extension does not run on this GPU",
            where=f"{path}, on {device}",
            found=compiled.polyamp_cuda_text(code).decode(),
            fix=f"build it for this GPU and driver: {builder.COMMAND} --force",
        )
