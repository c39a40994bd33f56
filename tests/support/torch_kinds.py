"""A module with many kinds of parameters, to train with and without master weights."""

import math
from typing import Any

import torch

from polyamp.backends.torch import LossScaledOptimizer


class Net(torch.nn.Module):
    """Parameters of many kinds; gradients are random and do not depend on the values."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, usual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        parameter = torch.nn.Parameter
        self.image = parameter(torch.randn(2, 3, 4, 5).to(dtype, memory_format=torch.channels_last))
        self.turned = parameter(torch.randn(4, 3, dtype=dtype).t())
        self.scalar = parameter(torch.tensor(1.5, dtype=dtype))
        self.empty = parameter(torch.empty(0, 3, dtype=dtype))
        self.wide = parameter(torch.randn(5))
        self.unused = parameter(torch.randn(3, dtype=dtype))
        self.frozen = parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.tied = self.turned
        if not usual:  # fused kernels refuse it
            self.exact = parameter(torch.randn(2, dtype=torch.float64))
            self.waves = parameter(torch.randn(3, dtype=torch.complex64))
        self.random = torch.Generator().manual_seed(1)

    def loss(self) -> torch.Tensor:
        used = [param for name, param in self.named_parameters() if name not in ("unused", "frozen")]
        reals = [torch.view_as_real(param) if param.is_complex() else param for param in used]
        randoms = [torch.randn(param.shape, generator=self.random).to(param.device) for param in reals]
        return sum((param.float() * random).sum() for param, random in zip(reals, randoms, strict=True))

    def low(self) -> list[torch.Tensor]:
        return [param.detach() for param in self.parameters() if param.element_size() == 2]


def train(net: Net, opt: LossScaledOptimizer, steps: int = 1, *, overflow: bool = False) -> None:
    for _ in range(steps):
        opt.zero_grad()
        opt.backward(net.loss())
        if overflow:
            net.turned.grad[0, 0] = math.nan
        opt.step()
        assert opt.last_step.applied != overflow


def bits(value: Any) -> Any:
    """Return a structure with its tensors as bytes; of a distributed tensor this rank's shard."""
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        return value.dtype, value.shape, value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    return [bits(entry) for entry in value] if isinstance(value, list) else value


def memory(net: torch.nn.Module, opt: LossScaledOptimizer) -> Any:
    """Return everything that a step may change, except the loss scale."""
    state = opt.state_dict()
    return bits([list(net.parameters()), state["state"], state["param_groups"], state["master_weights"]])
