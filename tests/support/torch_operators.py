"""One call of ``torch.ops.polyamp`` with all its arguments, and the same arithmetic in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from polyamp import LossScale
from polyamp.backends.torch.kernels import operators
from polyamp.backends.torch.kernels.control import SIZE, pack_
from polyamp.backends.torch.kernels.operators import STATS, WORKSPACE
from polyamp.backends.torch.kernels.optimizers import DECOUPLED, MAXIMIZE, NESTEROV, SGD, Adam, Settings
from polyamp.settings import LossScaleState

STORAGES = {  # formats of parameters, and of the master weights next to them
    "float32": (torch.float32, None),
    "float16_master": (torch.float16, torch.float32),
    "bfloat16_master": (torch.bfloat16, torch.float32),
}
ADAM = [
    Adam(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, flags=DECOUPLED),
    Adam(lr=1e-3, beta1=0.8, beta2=0.99, eps=1e-3, weight_decay=0.01, flags=MAXIMIZE),
    Adam(lr=3e-3, beta1=0.5, beta2=0.9, eps=1e-6, weight_decay=0.0, flags=0),
]
SGDS = [
    SGD(lr=1e-2, momentum=0.9, weight_decay=0.1, flags=NESTEROV),
    SGD(lr=1e-3, momentum=0.5, weight_decay=0.0, flags=MAXIMIZE),
]
PLAIN_SGD = [SGD(lr=1e-2, momentum=0.0, weight_decay=0.1, flags=0), SGD(1e-3, 0.0, 0.0, MAXIMIZE)]
CHUNK = 4096  # elements for each block of a step's kernel
SHAPES: list[tuple[int, ...]] = [(), (0,), (7,), (3, 3), (CHUNK - 1,), (CHUNK,), (2, CHUNK + 3), (20_001,)]
SCALE = 64.0


REFERENCE = SimpleNamespace(**{name: getattr(operators, name) for name in operators.SCHEMAS})


class Problem:
    """Parameters of one storage, their gradients and state, and the other arguments of a step.

    Args:
        rules: those of each group; their type is Adam or SGD. Tensors are assigned to groups in turns.
        shapes: those of the parameters.
        offset: how many elements after an aligned address the memory of each tensor starts.
        grad_offset: the same for gradients; None is ``offset``.
        scale: the factor of the gradients.
    """

    def __init__(
        self,
        rules: Sequence[Adam | SGD],
        storage: str = "float32",
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        *,
        device: str = "cpu",
        offset: int = 0,
        grad_offset: int | None = None,
        max_norm: float = math.inf,
        scale: float = SCALE,
        config: LossScale | None = None,
        seed: int = 0,
    ) -> None:
        self.rules, self.device, self.offset = list(rules), device, offset
        self.grad_offset = offset if grad_offset is None else grad_offset
        self.random = torch.Generator().manual_seed(seed)
        self.dtype, kept = STORAGES[storage]
        values = [torch.randn(shape, generator=self.random) for shape in shapes]
        self.params = [self._place(value.to(self.dtype)) for value in values]
        self.masters: list[Tensor] = []
        if kept is not None:
            self.masters = [self._place(value) for value in values]
        self.has_moments = isinstance(rules[0], Adam) or any(rule.momentum for rule in rules)
        self.firsts = [self._place(torch.zeros(shape)) for shape in shapes] if self.has_moments else []
        self.seconds = [self._place(torch.zeros(shape)) for shape in shapes]
        self.steps = [torch.zeros((), device=device) for _ in shapes]
        self.grads: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.lrs: list[Tensor] = []
        self.groups = torch.arange(len(shapes)) % len(rules)
        config = config or LossScale(init=scale)
        self.scale = torch.tensor(scale, device=device)
        self.settings = torch.tensor(Settings.of(config, max_norm=max_norm), dtype=torch.float64)
        self.stats = torch.zeros(STATS, dtype=torch.float64, device=device)
        self.workspace = torch.zeros(WORKSPACE, dtype=torch.float64, device=device)
        self.control = torch.zeros(SIZE, dtype=torch.int32, device=device)
        self.report = torch.full((SIZE,), -7, dtype=torch.int32, device=device)
        self.set_loss_scale(config.initial_state())
        self.new_gradients()

    def _place(self, tensor: Tensor, offset: int | None = None) -> Tensor:
        offset = self.offset if offset is None else offset
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=self.device)
        return memory[offset:].view(tensor.shape).copy_(tensor)

    def copy(self) -> Problem:
        """Return a copy with its own memory, aligned in the same way."""
        other = copy.copy(self)
        for name in ("params", "masters", "firsts", "seconds"):
            setattr(other, name, [self._place(tensor) for tensor in getattr(self, name)])
        other.grads = [self._place(grad, self.grad_offset) for grad in self.grads]
        for name in ("steps", "stats", "workspace", "control", "report"):
            setattr(other, name, copy.deepcopy(getattr(self, name)))
        return other

    def set_loss_scale(self, state: LossScaleState) -> None:
        pack_(self.control, state)

    def new_gradients(self) -> None:
        """Make random gradients, multiplied by the loss scale."""
        fresh = [torch.randn(param.shape, generator=self.random) * self.scale.item() for param in self.params]
        self.grads = [self._place(grad.to(self.dtype), self.grad_offset) for grad in fresh]

    def statistics(self, operators: Any) -> Tensor:
        operators.grad_stats(self.grads, self.losses, self.scale, self.stats, self.workspace)
        return self.stats

    def step(self, operators: Any) -> None:
        """Run the statistics and the step."""
        self.statistics(operators)
        self.apply(operators)

    def apply(self, operators: Any) -> None:
        numbers = [*self.rules[0]]
        rules = torch.tensor([[*rule, *[0.0] * (6 - len(numbers))] for rule in self.rules], dtype=torch.float64)
        shared = (
            self.groups, rules, self.lrs, self.scale, self.stats, self.control, self.workspace, self.settings,
            self.report,
        )  # fmt: skip
        if isinstance(self.rules[0], Adam):
            state = (self.firsts, self.seconds, self.steps)
            operators.adam_step_(self.params, self.masters, self.grads, *state, *shared)
        else:
            operators.sgd_step_(self.params, self.masters, self.grads, self.firsts, *shared)

    def values(self) -> list[Tensor]:
        """Return the parameters' exact values, in float32."""
        return [tensor.clone() for tensor in self.masters or self.params]

    def bits(self) -> list[Tensor]:
        """Return everything that a step may change, except the loss scale: copies, as integers."""
        whole = {2: torch.int16, 4: torch.int32}
        tensors = [*self.params, *self.masters, *self.firsts, *self.seconds, *self.steps]
        return [tensor.view(whole[tensor.element_size()]).clone() for tensor in tensors]

    def in_float64(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return values and moments after the next step, computed in float64."""
        scale = self.scale.item()
        norm = math.sqrt(sum((grad.double() / scale).square().sum().item() for grad in self.grads))
        factor = min(1.0, self.settings[0].item() / (norm + 1e-6)) / scale
        outcomes = []
        for index, (grad, value) in enumerate(zip(self.grads, self.values(), strict=True)):
            rule = self.rules[int(self.groups[index])]
            grad = grad.double() * (-factor if int(rule.flags) & MAXIMIZE else factor)
            first = self.firsts[index].double() if self.firsts else torch.zeros_like(grad)
            if isinstance(rule, Adam):
                outcomes.append(self._adam(rule, value.double(), grad, first, index))
            else:
                outcomes.append(self._sgd(rule, value.double(), grad, first))
        values, firsts, seconds = (list(column) for column in zip(*outcomes, strict=True))
        return values, firsts, seconds

    def _adam(self, rule: Adam, value: Tensor, grad: Tensor, first: Tensor, index: int) -> tuple[Tensor, ...]:
        lr, step = float(rule.lr), self.steps[index].item() + 1
        if int(rule.flags) & DECOUPLED:
            value = value * (1 - lr * rule.weight_decay)
        else:
            grad = grad + rule.weight_decay * value
        first = rule.beta1 * first + (1 - rule.beta1) * grad
        second = rule.beta2 * self.seconds[index].double() + (1 - rule.beta2) * grad.square()
        root = (second / (1 - rule.beta2**step)).sqrt() + rule.eps
        return value - lr * (first / (1 - rule.beta1**step)) / root, first, second

    def _sgd(self, rule: SGD, value: Tensor, grad: Tensor, first: Tensor) -> tuple[Tensor, ...]:
        grad = grad + rule.weight_decay * value
        first = rule.momentum * first + grad
        update = grad + rule.momentum * first if int(rule.flags) & NESTEROV else first
        return value - float(rule.lr) * update, first, torch.zeros_like(first)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether all are equal; for bits, or for numbers without NaN."""
    return len(one) == len(other) and all(map(torch.equal, one, other))
