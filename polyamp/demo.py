"""``polyamp demo``: real handwritten digits, trained in float32 and in mixed precision in every installed framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyamp.policy import Policy

Array = NDArray[Any]


@dataclass(frozen=True)
class Task:
    """One training run, the same in every framework.

    The model: 3x3 convolution to 16 channels (padded to the same size), relu, 2x2 max pool, 3x3 convolution to 32
    channels, relu, 2x2 max pool, flatten in (height, width, channel) order, dense to 10 classes. The loss is the mean
    softmax cross-entropy of the batch, in float32; the optimizer is SGD with momentum 0.9.

    Attributes:
        policy: what to train under.
        weights: float32 initial weights: ``conv1_kernel`` (3, 3, 1, 16) and ``conv2_kernel`` (3, 3, 16, 32) as (height,
            width, in, out); ``dense_kernel`` (128, 10); ``conv1_bias``, ``conv2_bias``, ``dense_bias``.
        train_images, test_images: float32 in [0, 1], (n, 8, 8, 1).
        train_labels, test_labels: int32, (n,).
        batches: int indices into the training set, (steps, batch).
        learning_rate: of SGD.
        on_step: called after every step, for a progress bar.
    """

    policy: Policy
    weights: dict[str, Array]
    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array
    batches: Array
    learning_rate: float = 0.05
    on_step: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Trace:
    """What a run gave.

    Attributes:
        losses: unscaled float32 loss of every step.
        scales: loss scale after every step.
        applied: whether each step was applied.
        accuracy: share of test images that are right, 0 to 1.
        parameter_bytes: of the parameters as they are stored (without master weights).
        activation_bytes: of the outputs of the layers (both convolutions, both relus, both pools, the dense layer) for
            one training batch.
        seconds: of training, without the first step (tracing and compilation).
        first_step_seconds: of the first step.
    """

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    accuracy: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    seconds: float = 0.0
    first_step_seconds: float = 0.0
