"""PyTorch's devices: what each computes fast, and a warning at first use if one is slow in a policy's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyamp.backends.torch import extension
from polyamp.formats import fast_on_gpu, report_slow_format, why_not_fast


def describe() -> dict[str, Any]:
    """Return PyTorch's version, its devices with the formats that each computes fast, the extension, and notes."""
    from polyamp.backends.torch.step.fused import why_not_on  # other programs do not load the operators

    *gpus, cpu = devices()
    notes = [] if gpus else ["no CUDA device: no Tensor Cores"]
    notes += [why_not_fast(gpu["name"], gpu["capability"]) for gpu in gpus if not gpu["fast"]]
    compiled = extension.status()
    why_not_fused = why_not_on(torch.device("cuda" if gpus else "cpu"), builds=False)
    if why_not_fused is not None:
        notes.append(why_not_fused)
    return {
        "version": torch.__version__,
        "devices": [*gpus, cpu],
        "current": torch.cuda.current_device() if gpus else 0,
        "extension": compiled.as_dict(),
        "settings": settings(),
        "notes": [*notes, str(compiled)],
    }


def settings() -> dict[str, str]:
    """Return both switches of TF32: for products, and for convolutions."""
    read = {
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
        "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    }
    return {name: _read(value) for name, value in read.items()}


def _read(value: Callable[[], object]) -> str:
    try:
        return str(value())
    except RuntimeError as error:  # set by PyTorch's newer interface: the older one cannot be read
        return f"unreadable: {error}"


def devices() -> tuple[dict[str, Any], ...]:
    """Return the GPUs, then the CPU, each with its ``name`` and the formats that are ``fast`` there."""
    return (*map(_gpu, range(torch.cuda.device_count())), _cpu())


REPORTED: set[str] = set()


def report_slow(compute: str) -> None:
    """Warn at the first use of a compute format if a GPU here is slow in it."""
    if compute not in REPORTED:
        REPORTED.add(compute)
        for index in range(torch.cuda.device_count()):
            report_slow_format(_gpu(index), compute)


def _gpu(index: int) -> dict[str, Any]:
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return {
        "name": f"cuda:{index} {name}",
        "capability": ".".join(map(str, capability)),
        "fast": fast_on_gpu(name, capability),
    }


def _cpu() -> dict[str, Any]:
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # not in torch 2.10
    fast = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}
    return {
        "name": f"cpu ({torch.backends.cpu.get_cpu_capability()})",
        "fast": [name for name, flags in fast.items() if any(able.get(flag) for flag in flags)],
    }
