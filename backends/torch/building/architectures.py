"""GPU architectures of machine code: compute capabilities such as ``"9.0"``, or ``"9.0+PTX"`` to include PTX.

The names are those of PyTorch's ``TORCH_CUDA_ARCH_LIST``. Code for a capability runs on later ones of the same major
version, PTX on all later ones (NVIDIA, CUDA C++ Programming Guide, Application Compatibility).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from polyamp.errors import ExtensionError, InvalidValueError

ALL = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
"""Turing to Blackwell: the GPUs with Tensor Cores that CUDA 13 compiles for; the last one includes its PTX."""

DEFAULT = "9.0"
"""The architecture to build if there is no GPU."""

Capability = tuple[int, int]


def capabilities() -> tuple[Capability, ...]:
    """Return the compute capabilities of the visible NVIDIA GPUs, each once; empty if PyTorch has no CUDA."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return ()
    return tuple(sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}))


def choose(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the architectures that a text names, if the compiler knows them."""
    if text == "all":
        *others, last = [name for name in ALL if name in known]
        return (*others, f"{last}+PTX")
    if text == "native":
        return _sorted({_for(capability, known) for capability in capabilities()} or {DEFAULT})
    named = {name.strip() for name in text.split(",")}
    unknown = sorted(name for name in named if name.removesuffix("+PTX") not in known)
    if unknown:
        raise InvalidValueError(
            "the compiler does not know this GPU architecture",
            where="--arch",
            found=", ".join(map(repr, unknown)),
            allowed=f"all, native, or of {', '.join(known)} a comma list, each with or without +PTX",
            fix="name the compute capability of your GPU, or leave --arch out",
        )
    return _sorted(named)


def covers(architectures: Sequence[str], capability: Capability) -> bool:
    """Return whether machine code or PTX for these architectures runs on a GPU."""
    return any(_runs(name, capability) for name in architectures)


def is_architecture(name: str) -> bool:
    """Return whether a text is the name of an architecture."""
    return re.fullmatch(r"\d+\.\d(\+PTX)?", name) is not None


def gencode(architectures: Sequence[str]) -> list[str]:
    """Return the options for nvcc."""
    options = []
    for name in architectures:
        digits = name.removesuffix("+PTX").replace(".", "")
        kinds = ("sm", "compute") if name.endswith("+PTX") else ("sm",)
        options += [f"-gencode=arch=compute_{digits},code={kind}_{digits}" for kind in kinds]
    return options


def _runs(name: str, capability: Capability) -> bool:
    made_for = _number(name)
    same_major = made_for[0] == capability[0]
    return made_for <= capability and (same_major or name.endswith("+PTX"))


def _for(capability: Capability, known: Sequence[str]) -> str:
    """Return the architecture for a GPU. If the compiler does not know it, return the newest older one, as PTX."""
    exact = "{}.{}".format(*capability)
    if exact in known:
        return exact
    older = [name for name in known if _number(name) < capability]
    if not older:
        raise ExtensionError(
            "this CUDA compiler does not support a GPU this old",
            found=f"compute capability {exact}",
            allowed=", ".join(known),
            fix="install an older CUDA toolkit and name it in CUDA_HOME: 12.9 was the last for 5.0 to 7.0",
        )
    return f"{max(older, key=_number)}+PTX"


def _number(name: str) -> Capability:
    found = re.match(r"(\d+)\.(\d)", name)
    if found is None:
        raise InvalidValueError("unknown GPU architecture", found=repr(name), allowed="such as 9.0 or 9.0+PTX")
    return int(found[1]), int(found[2])


def _sorted(names: set[str]) -> tuple[str, ...]:
    once = {name for name in names if f"{name}+PTX" not in names}
    return tuple(sorted(once, key=_number))
