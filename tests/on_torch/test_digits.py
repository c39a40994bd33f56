"""The demo's classifier, as `polyamp.demo.Task` describes it, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import registry
from polyamp.demo import Task


def task_for(policy: str, **changes: Any) -> Task:
    rng = np.random.default_rng(0)
    shapes = {"conv1_kernel": (3, 3, 1, 16), "conv2_kernel": (3, 3, 16, 32), "dense_kernel": (128, 10)}
    weights = {name: (rng.standard_normal(shape) / 6).astype(np.float32) for name, shape in shapes.items()}
    weights |= {name: rng.standard_normal(size).astype(np.float32) / 6
                for name, size in (("conv1_bias", 16), ("conv2_bias", 32), ("dense_bias", 10))}  # fmt: skip
    images = rng.random((24, 8, 8, 1), dtype=np.float32)
    labels = rng.integers(0, 10, 24).astype(np.int32)
    settings = {"batches": np.arange(24).reshape(3, 8), **changes}
    return Task(polyamp.policy(policy), weights, images, labels, images, labels, **settings)


def layer(images: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    hidden = np.maximum(np.einsum("nhwcij,ijco->nhwo", windows, kernel) + bias, 0)
    count, height, width, channels = hidden.shape
    return hidden.reshape(count, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def first_loss(task: Task) -> float:
    weights, batch = task.weights, task.batches[0]
    hidden = layer(task.train_images[batch], weights["conv1_kernel"], weights["conv1_bias"])
    hidden = layer(hidden, weights["conv2_kernel"], weights["conv2_bias"])
    logits = hidden.reshape(len(batch), -1) @ weights["dense_kernel"] + weights["dense_bias"]
    picked = logits[np.arange(len(batch)), task.train_labels[batch]]
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - picked))


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [("float32", 1e-6), ("mixed_float16", 2e-3), ("mixed_bfloat16", 2e-2), ("O2", 2e-3), ("bfloat16", 5e-2)],
)
def test_the_first_loss_is_that_of_the_model_in_numpy(policy: str, tolerance: float) -> None:
    task = task_for(policy)
    trace = registry.adapter_named("torch").train_digits(task)
    assert trace.losses[0] == pytest.approx(first_loss(task), rel=tolerance)
    assert trace.applied == [True] * 3
    assert len(trace.scales) == len(trace.losses) == 3


@pytest.mark.parametrize(("policy", "bits"), [("float32", (32, 32)), ("mixed_float16", (32, 16)), ("O2", (16, 16))])
def test_bytes_are_those_of_the_policys_formats(policy: str, bits: tuple[int, int]) -> None:
    trace = registry.adapter_named("torch").train_digits(task_for(policy))
    values_in_outputs = 8 * (2 * 8 * 8 * 16 + 4 * 4 * 16 + 2 * 4 * 4 * 32 + 2 * 2 * 32 + 10)
    assert trace.parameter_bytes == 6090 * bits[0] // 8
    assert trace.activation_bytes == values_in_outputs * bits[1] // 8


def test_the_progress_bar_hears_of_every_step() -> None:
    steps: list[None] = []
    registry.adapter_named("torch").train_digits(task_for("float32", on_step=lambda: steps.append(None)))
    assert len(steps) == 3
