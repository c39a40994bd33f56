"""``polyamp demo``: train handwritten digits in float32 and mixed precision, in every installed framework."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyamp import registry
from polyamp.dispatch import TRAIN_DIGITS
from polyamp.errors import MissingFrameworkError
from polyamp.loss_scale import LossScale
from polyamp.policies import Policy, policy
from polyamp.refusals import missing
from polyamp.registry import Registered
from polyamp.result import StepResult

Array = NDArray[Any]

# The scale grows every 40 steps instead of 2 000, so that a short run shows growth, an overflow and a skipped step.
POLICIES = (
    policy("float32"),
    policy("mixed_bfloat16"),
    policy("mixed_float16", loss_scale=LossScale(interval=40)),
)


@dataclass(frozen=True)
class Task:
    """One training run, the same in every framework."""

    # The model: 3x3 convolution to 16 channels (padded to the same size), relu, 2x2 max pool, 3x3 convolution to 32
    # channels, relu, 2x2 max pool, flatten in (height, width, channel) order, dense to 10 classes. The loss is the mean
    # softmax cross-entropy of the batch, in float32; the optimizer is SGD with momentum 0.9.

    policy: Policy  # the policy to train under
    # float32 initial weights: ``conv1_kernel`` (3, 3, 1, 16) and ``conv2_kernel`` (3, 3, 16, 32) as (height, width, in,
    # out); ``dense_kernel`` (128, 10); ``conv1_bias``, ``conv2_bias``, ``dense_bias``
    weights: dict[str, Array]
    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array
    batches: Array  # int indices into the training set, (steps, batch)
    learning_rate: float = 0.05  # learning rate of SGD
    on_step: Callable[[], None] = lambda: None  # called after every step, for a progress bar

    def run(self, step: Callable[[Array], tuple[float, StepResult]]) -> Trace:
        """Train on every batch, and return the losses, scales and times; accuracy and bytes are still 0."""
        # The host waits for the numbers of each step.
        trace, times = Trace(), [time.perf_counter()]
        for batch in self.batches:
            loss, result = step(batch)
            trace.losses.append(loss)
            trace.scales.append(result.scale)
            trace.applied.append(result.applied)
            times.append(time.perf_counter())
            self.on_step()
        return replace(trace, seconds=times[-1] - times[1], first_step_seconds=times[1] - times[0])


@dataclass(frozen=True)
class Trace:
    """The numbers of one training run."""

    losses: list[float] = field(default_factory=list)  # unscaled float32 loss of each step
    scales: list[float] = field(default_factory=list)  # loss scale after each step
    applied: list[bool] = field(default_factory=list)  # whether each step was applied
    accuracy: float = 0.0  # share of test images classified correctly, 0 to 1
    parameter_bytes: int = 0  # bytes of the parameters as stored (without master weights)
    # bytes of the layers' outputs (both convolutions, both relus, both pools, the dense layer) for one training batch
    activation_bytes: int = 0
    seconds: float = 0.0  # training time without the first step, which traces and compiles
    first_step_seconds: float = 0.0  # time of the first step


@dataclass(frozen=True)
class Run:
    """The result of one framework under one policy."""

    framework: str  # the adapter's title, such as ``keras on jax``
    policy: str  # the policy's text
    trace: Trace  # the run's numbers
    baseline: Trace  # the float32 trace of the same framework

    @cached_property
    def largest_difference(self) -> float:
        """Return the largest difference between a step's loss and the float32 loss of the same step."""
        return float(np.max(np.abs(np.subtract(self.trace.losses, self.baseline.losses))))

    @property
    def skipped(self) -> int:
        """Return the number of steps that were not applied."""
        return self.trace.applied.count(False)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as JSON values."""
        summary = {"largest_difference": self.largest_difference, "skipped": self.skipped}
        return {"framework": self.framework, "policy": self.policy, **summary, **asdict(self.trace)}


def digits_task(steps: int = 300, batch: int = 64, seed: int = 0) -> Task:
    """Return the digits task in float32: scikit-learn's 1 797 images of 8x8 pixels, one in five held out for testing.

    Weights are drawn with variance 2 / fan_in (He et al., "Delving Deep into Rectifiers", ICCV 2015).

    Raises:
        MissingFrameworkError: scikit-learn, which ships the images, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise missing("scikit-learn", extra="demo") from error
    rng = np.random.default_rng(seed)
    digits = load_digits()
    order = rng.permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    train = len(labels) * 4 // 5
    per_epoch = train // batch
    epochs = [rng.permutation(train)[: per_epoch * batch].reshape(-1, batch) for _ in range(steps // per_epoch + 1)]
    return Task(
        policy=POLICIES[0],
        weights=initial_weights(rng),
        train_images=images[:train],
        train_labels=labels[:train],
        test_images=images[train:],
        test_labels=labels[train:],
        batches=np.concatenate(epochs)[:steps],
    )


def initial_weights(rng: np.random.Generator) -> dict[str, Array]:
    """Draw the float32 weights that every framework starts from; see `Task`."""
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense": (128, 10)}
    weights: dict[str, Array] = {}
    for name, shape in shapes.items():
        deviation = np.sqrt(2 / np.prod(shape[:-1]))
        weights[f"{name}_kernel"] = (rng.standard_normal(shape) * deviation).astype(np.float32)
        weights[f"{name}_bias"] = np.zeros(shape[-1], np.float32)
    return weights


def trainers(names: Iterable[str] | None = None) -> tuple[list[Registered], list[str]]:
    """Return the adapters that can train the digits, and an install hint for each framework that is not installed."""
    adapters, absent = [], []
    for name in registry.names() if names is None else names:
        try:
            adapter = registry.adapter_named(name)
        except MissingFrameworkError as error:
            absent.append(str(error))
            continue
        if TRAIN_DIGITS.offered_by(adapter):
            adapters.append(adapter)
    return adapters, absent


def runs(
    adapters: Iterable[Registered], task: Task, announce: Callable[[str], None] = lambda title: None
) -> Iterator[Run]:
    """Train under every policy in every framework, float32 first. Announce each run, and yield it when it ends."""
    for adapter in adapters:
        framework, baseline = adapter.describe().get("title", adapter.name), None
        for chosen in POLICIES:
            announce(f"{framework} {_short(chosen)}")
            trace: Trace = TRAIN_DIGITS.of(adapter)(replace(task, policy=chosen))
            baseline = baseline or trace
            yield Run(framework, _short(chosen), trace, baseline)


def _short(chosen: Policy) -> str:
    return str(chosen).partition(" ")[0]


def report(adapters: Iterable[Registered], done: list[Run]) -> dict[str, Any]:
    """Return all runs as JSON values, with the machine and the frameworks they ran on."""
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }
    frameworks = {adapter.name: adapter.describe() for adapter in adapters}
    return {"machine": machine, "frameworks": frameworks, "runs": [run.as_dict() for run in done]}


def plot(done: list[Run], path: str) -> None:
    """Draw loss and loss scale over the steps into an image file, one column per framework."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise missing("matplotlib", extra="plot") from error
    frameworks = list(dict.fromkeys(run.framework for run in done))
    figure = Figure(figsize=(4.5 * len(frameworks), 6), layout="constrained")
    axes = figure.subplots(2, len(frameworks), sharex=True, sharey="row", squeeze=False)
    for run in done:
        above, below = axes[:, frameworks.index(run.framework)]
        above.plot(run.trace.losses, label=run.policy, linewidth=0.9)
        below.step(range(len(run.trace.scales)), run.trace.scales, label=run.policy, where="post")
    for column, framework in enumerate(frameworks):
        axes[0, column].set(title=framework, yscale="log")
        axes[1, column].set(xlabel="step")
        axes[1, column].set_yscale("log", base=2)
    axes[0, 0].set_ylabel("training loss (nats)")
    axes[1, 0].set_ylabel("loss scale")
    axes[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=150)
