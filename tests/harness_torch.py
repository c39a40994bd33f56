"""Drives the PyTorch adapter for `polyamp.testing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

import polyamp
from polyamp.backends.torch import LossScaledOptimizer
from polyamp.backends.torch.dtypes import dtype_of
from polyamp.policy import Policy
from polyamp.result import StepResult
from polyamp.testing import Arrays


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """A copy; bfloat16, which NumPy lacks, as ``ml_dtypes.bfloat16``."""
    tensor = tensor.detach().clone()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


class TorchSession:
    """One wrapped torch optimizer and its parameters."""

    def __init__(self, params: dict[str, torch.Tensor], holder: LossScaledOptimizer) -> None:
        self.params = params
        self.holder = holder

    def step(self, grads: Arrays) -> StepResult:
        scale = self.holder.scale(torch.ones(()))
        for name, param in self.params.items():
            param.grad = (torch.from_numpy(np.array(grads[name], np.float32)) * scale).to(param.dtype)
        self.holder.step()
        self.holder.zero_grad()
        return self.holder.last_step

    def weights(self) -> dict[str, NDArray[Any]]:
        return {name: to_numpy(param) for name, param in self.params.items()}

    def memory(self) -> dict[str, NDArray[Any]]:
        trained = [param for group in self.holder.param_groups for param in group["params"]]
        kept = {f"trained/{index}": to_numpy(param) for index, param in enumerate(trained)}
        for index, param in enumerate(trained):
            for key, value in self.holder.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    kept[f"state/{index}/{key}"] = to_numpy(value)
        return kept

    def load_loss_scale(self, saved: Mapping[str, Any]) -> None:
        polyamp.load_loss_scale(self.holder, saved)


class TorchHarness:
    """PyTorch, driven with NumPy arrays."""

    name = "torch"

    def start(
        self,
        weights: Arrays,
        policy: Policy,
        *,
        optimizer: Literal["sgd", "adam"] = "sgd",
        learning_rate: float = 0.1,
        **options: Any,
    ) -> TorchSession:
        dtype = dtype_of(policy.param)
        params = {name: torch.nn.Parameter(torch.from_numpy(np.array(w)).to(dtype)) for name, w in weights.items()}
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        plain = kind(list(params.values()), lr=learning_rate)
        return TorchSession(params, polyamp.wrap_optimizer(plain, policy, **options))

    def plain_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)

    def tree(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}

    def arrays(self, tree: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
        return {name: to_numpy(tensor) for name, tensor in tree.items()}
