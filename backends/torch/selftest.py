"""One operation on one of PyTorch's devices, for ``polyamp doctor --test``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from polyamp.backends.torch.dtypes import DTYPES


def _conv(images: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    # views of arrays with the channels last: PyTorch's channels_last, which is its fast layout
    return functional.conv2d(images.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1)).permute(0, 2, 3, 1)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))  # fused kernels want 4 dimensions
    return functional.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)


_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "matmul": torch.matmul,
    "conv": _conv,
    "layer_norm": lambda values: functional.layer_norm(values, values.shape[-1:]),
    "softmax": lambda values: torch.softmax(values, -1),
    "attention": _attention,
    "sum": lambda values: values.sum(-1),
}


def trial(
    operation: str, arrays: tuple[np.ndarray[Any, Any], ...], format_name: str, device: str
) -> tuple[np.ndarray[Any, Any], Callable[[int], object]]:
    """Run an operation; return its result, and a function that runs it so many times and waits for the device."""
    function = _OPERATIONS[operation]
    tensors = [torch.from_numpy(array).to(device, DTYPES[format_name]) for array in arrays]
    if operation == "conv":  # a kernel's layout is chosen once, as a module's weight is
        tensors[1] = tensors[1].permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last).permute(2, 3, 1, 0)

    def run(times: int) -> None:
        for _ in range(times):
            function(*tensors)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    return function(*tensors).float().cpu().numpy(), run
