"""One operation on one of PyTorch's devices, for ``polyamp doctor --test``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyamp.backends.torch.dtypes import DTYPES


def _conv(images: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    # views of arrays with the channels last: PyTorch's channels_last, which is its fast layout
    return torch.nn.functional.conv2d(images.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1)).permute(0, 2, 3, 1)


_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "matmul": torch.matmul,
    "conv": _conv,
    "sum": lambda values: values.sum(-1),
}


def trial(operation: str, arrays: tuple[Any, ...], format_name: str, device: str) -> tuple[Any, Any]:
    """Run an operation; return its result, and a function that runs it a given number of times and then waits."""
    function = _OPERATIONS[operation]
    tensors = [torch.from_numpy(array).to(device, DTYPES[format_name]) for array in arrays]

    def run(times: int) -> None:
        for _ in range(times):
            function(*tensors)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    return function(*tensors).float().cpu().numpy(), run
