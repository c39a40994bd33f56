"""What does a probe cost? `polyamp.probe` of one step, compared with the step: forward and backward in float32.

Both are warm: the first probe of a step, in which JAX and TensorFlow trace and compile, is timed separately.

    python benchmarks/probe_cost.py [--framework torch] [--model MLP] [--rounds 9]
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any, NamedTuple

import typer
from interleave import console, interleave
from keeping import keep_timings, publish

import polyamp

MODELS = ("MLP", "CNN", "transformer", "LSTM")
PACKAGES = ("polyamp", "torch", "jax", "tensorflow-cpu", "tensorflow", "keras")


class Probed(NamedTuple):
    """A step to train with, and the same step to probe.

    Attributes:
        step: runs the forward and the backward pass, and waits for both.
        probe: probes the same step.
        device: the device that runs it.
    """

    step: Callable[[], Any]
    probe: Callable[[], Any]
    device: str


def torch_model(name: str) -> Probed:
    import torch
    from torch import nn

    class Last(nn.Module):
        """A module that returns the last output of a recurrent layer."""

        def forward(self, outputs: Any) -> torch.Tensor:
            return outputs[0][:, -1]

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    relu, block = nn.ReLU(), nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    body: dict[str, tuple[list[nn.Module], tuple[int, ...]]] = {
        "MLP": ([nn.Linear(512, 512), relu, nn.Linear(512, 512), relu], (128, 512)),
        "CNN": ([nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), relu, nn.Conv2d(32, 64, 3), relu], (32, 3, 32, 32)),
        "transformer": ([block], (8, 128, 256)),
        "LSTM": ([nn.LSTM(64, 128, batch_first=True), Last()], (64, 32, 64)),
    }
    layers, shape = body[name]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)).to(device)
    x, y = torch.randn(shape, device=device), torch.randint(0, 10, shape[:1], device=device)
    model(x)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    def step() -> None:
        loss_of(x, y).backward()
        model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return Probed(step, lambda: polyamp.probe(loss_of, x, y, policy="mixed_float16"), device)


def jax_model(name: str) -> Probed:
    import jax
    from jax_models import loss_of, task

    chosen = task(name)
    params, state, batch = chosen.arguments()
    loss = loss_of(chosen.make())
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return Probed(
        lambda: jax.block_until_ready(gradient(params, state, batch)),
        lambda: polyamp.probe(loss, params, state, batch, policy="mixed_float16"),
        jax.default_backend(),
    )


def tensorflow_model(name: str) -> Probed:
    import tensorflow as tf
    from tensorflow_models import MODELS as MAKERS

    make, shape = MAKERS[{"MLP": "MLP 4x1024", "transformer": "attention"}.get(name, name)]
    model = make()
    x, y = tf.random.normal(shape), tf.random.uniform(shape[:1], 0, 10, tf.int32)

    @tf.function
    def loss_of(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))

    @tf.function
    def gradient(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        return tape.gradient(loss, model.trainable_variables)

    device = "cuda" if tf.config.list_physical_devices("GPU") else "cpu"
    return Probed(
        lambda: [grad.numpy() for grad in gradient(x, y)],
        lambda: polyamp.probe(loss_of, x, y, policy="mixed_float16"),
        device,
    )


FRAMEWORKS = {"torch": torch_model, "jax": jax_model, "tensorflow": tensorflow_model}


def main(
    framework: Annotated[list[str] | None, typer.Option(help="A framework; may be repeated.")] = None,
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; all by default.")] = None,
    rounds: Annotated[int, typer.Option(help="How often each is timed.")] = 9,
) -> None:
    """Measure, print a table, and write it to results/."""
    timings, device = [], "cpu"
    installed = {entry.name: entry.version for entry in metadata.distributions() if entry.name in PACKAGES}
    for name in framework or [name for name in FRAMEWORKS if importlib.util.find_spec(name)]:
        for which in model or MODELS:
            made = FRAMEWORKS[name](which)
            device = made.device
            start = time.perf_counter()
            made.probe()
            console().print(f"{name} {which}: the first probe took {time.perf_counter() - start:.1f} s")
            timings += interleave(f"{name} {which}", {"step": made.step, "probe": made.probe}, rounds, calls=3)
            keep_timings(f"probe_cost_{device}", timings, installed)
    publish(f"probe_cost_{device}", timings, installed)


if __name__ == "__main__":
    typer.run(main)
