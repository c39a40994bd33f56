"""The classifier of ``polyamp demo`` in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import polyamp
from polyamp.backends.torch.steps.optimizer import LossScaledOptimizer
from polyamp.demo import Array, Task, Trace
from polyamp.result import StepResult


class Classifier(nn.Module):
    """Two convolutions and a dense layer, as described in `polyamp.demo.Task`; NHWC images in, 10 logits out."""

    def __init__(self, weights: dict[str, Array]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding="same")
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(16, 32, 3, padding="same")
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.dense = nn.Linear(128, 10)
        self.load_state_dict({_torch_name(name): _torch_layout(value) for name, value in weights.items()})

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, 10) for images (n, 8, 8, 1)."""
        hidden = images.permute(0, 3, 1, 2)
        hidden = self.pool1(self.relu1(self.conv1(hidden)))
        hidden = self.pool2(self.relu2(self.conv2(hidden)))
        logits: Tensor = self.dense(hidden.permute(0, 2, 3, 1).flatten(1))
        return logits


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: for images of 8x8 pixels more do not help, and they are much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def train(task: Task) -> Trace:
    """Train as described in ``task``, and return the trace."""
    model = Classifier(task.weights)
    if task.policy.needs_master_weights:
        polyamp.convert(model, task.policy)
    inner = torch.optim.SGD(model.parameters(), lr=task.learning_rate, momentum=0.9)
    optimizer: LossScaledOptimizer = polyamp.wrap_optimizer(inner, task.policy)
    images, labels = torch.from_numpy(task.train_images), torch.from_numpy(task.train_labels).long()
    activation_bytes = _activation_bytes(model, images[torch.from_numpy(task.batches[0])], task)

    def train_on(batch: Array) -> tuple[float, StepResult]:
        chosen = torch.from_numpy(batch)
        return _train_step(model, optimizer, images[chosen], labels[chosen], task), optimizer.last_step

    return replace(
        task.run(train_on),
        accuracy=_accuracy(model, task),
        parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        activation_bytes=activation_bytes,
    )


def _train_step(model: nn.Module, optimizer: LossScaledOptimizer, images: Tensor, labels: Tensor, task: Task) -> float:
    with polyamp.autocast(task.policy, backend="torch"):
        logits = model(images)
    loss = functional.cross_entropy(logits.float(), labels)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def _accuracy(model: nn.Module, task: Task) -> float:
    with polyamp.autocast(task.policy, backend="torch"):
        guesses = model(torch.from_numpy(task.test_images)).argmax(dim=1)
    right: float = (guesses == torch.from_numpy(task.test_labels)).float().mean().item()
    return right


@torch.no_grad()
def _activation_bytes(model: nn.Module, images: Tensor, task: Task) -> int:
    """Return the size of the layers' outputs for one batch, in their actual dtypes."""
    sizes: list[int] = []

    def record(_: nn.Module, __: Any, output: Tensor) -> None:
        sizes.append(output.nbytes)

    handles = [layer.register_forward_hook(record) for layer in model.children()]
    with polyamp.autocast(task.policy, backend="torch"):
        model(images)
    for handle in handles:
        handle.remove()
    return sum(sizes)


def _torch_name(name: str) -> str:
    layer, kind = name.split("_")
    return f"{layer}.{'weight' if kind == 'kernel' else 'bias'}"


def _torch_layout(value: Array) -> Tensor:
    """Return a weight in torch's layout, outputs first, from (height, width, in, out) or (in, out)."""
    axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[value.ndim]
    return torch.from_numpy(value.transpose(axes).copy())
