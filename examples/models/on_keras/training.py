"""What the Keras models share: the library's own networks made thinner, and a training run as a user writes it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import polyamp
from models.data import Part, batches_of

CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SIZES = ("filters", "units")


def thinned(make_model: Callable[[], keras.Model], width: float, **settings: Any) -> keras.Model:
    """Return a model with the layers of another one, each ``width`` times as wide, except the last.

    >>> def make_model():
    ...     return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(64, 3), keras.layers.Dense(10)])
    >>> [layer.output.shape[-1] for layer in thinned(make_model, 1 / 16).layers]
    [4, 10]

    Args:
        make_model: returns the whole model, functional or sequential as ``keras.applications`` makes them. Its weights
            take no memory.
        width: 1 for the whole model.
        **settings: other settings for all layers that have them, such as ``momentum=0.9``.
    """
    with keras.StatelessScope(initialize_variables=False):
        whole = make_model()
    config = whole.get_config()
    for layer in config["layers"]:
        layer.pop("build_config", None)  # the shapes of the whole model
        chosen = layer["config"]
        chosen |= {name: value for name, value in settings.items() if name in chosen}
        if chosen["name"] != whole.layers[-1].name:
            chosen |= {name: max(1, round(chosen[name] * width)) for name in SIZES if name in chosen}
    return type(whole).from_config(config)


def adam(rate: float, steps: int) -> Callable[[], keras.optimizers.Optimizer]:
    """Return a maker of Adam whose learning rate rises for a fifth of the steps and then falls to 0 along a cosine."""
    warm_up = steps // 5
    schedule = keras.optimizers.schedules.CosineDecay(0.0, steps - warm_up, warmup_target=rate, warmup_steps=warm_up)
    return lambda: keras.optimizers.Adam(schedule, beta_2=0.99)


@dataclass(frozen=True)
class Training:
    """Train a model in the same way under any policy.

    The seed decides the float32 weights, what dropout leaves out, and the order of the examples.
    """

    make_model: Callable[[], keras.Model]
    """Returns a new model, its weights decided by Keras' global seed."""
    make_optimizer: Callable[[], keras.optimizers.Optimizer]
    steps: int
    batch: int = 32
    loss: Any = CROSS_ENTROPY
    metrics: tuple[Any, ...] = ("accuracy",)
    by_rewrite: bool = False
    """Whether `polyamp.rewrite` changes the graph of the whole step, on TensorFlow, instead of `polyamp.convert`."""

    def run(self, policy: polyamp.Policy, seed: int, part: Part) -> keras.Model:
        """Return the model after training; the next run under this policy trains the same model anew."""
        model, optimizer_state = _compiled(self, policy)
        rows = np.concatenate(batches_of(Part(part.y, part.y), self.batch, self.steps, seed))
        x, y = keras.tree.map_structure(lambda array: array[rows], part.x), part.y[rows]
        if int(model.optimizer.iterations) == 0:  # the first fit builds what is left, which draws numbers in PyTorch
            model.fit(*keras.tree.map_structure(lambda array: array[: self.batch], (x, y)), self.batch, verbose=0)
        for variable, value in zip(model.variables, _initial(self, seed), strict=True):
            variable.assign(value)
        for variable, value in zip(model.optimizer.variables, optimizer_state, strict=True):
            variable.assign(value)
        keras.utils.set_random_seed(seed)  # of the numbers that dropout draws in PyTorch
        model.fit(x, y, self.batch, shuffle=False, verbose=0)
        return model

    def test(self, policy: polyamp.Policy, seed: int, train: Part, test: Part) -> dict[str, float]:
        """Train, and return the metrics and the loss on the test part."""
        return tested(self.run(policy, seed, train), test)

    def _seeded(self, seed: int) -> keras.Model:
        keras.utils.clear_session()
        keras.utils.set_random_seed(seed)
        return self.make_model()


def tested(model: keras.Model, part: Part) -> dict[str, float]:
    """Return the metrics, then the loss."""
    found = model.evaluate(part.x, part.y, batch_size=1000, verbose=0, return_dict=True)
    return {**{name: value for name, value in found.items() if name != "loss"}, "loss": found["loss"]}


@functools.cache
def _initial(training: Training, seed: int) -> list[np.ndarray]:
    """Return the weights that a seed decides, for every policy: to make a large model takes seconds."""
    return [np.array(variable) for variable in training._seeded(seed).variables]


@functools.cache
def _compiled(training: Training, policy: polyamp.Policy) -> tuple[keras.Model, list[np.ndarray]]:
    """Return a compiled model and the state of its new optimizer. A large step is traced for many seconds, once."""
    model = training._seeded(0)
    if not training.by_rewrite:
        polyamp.convert(model, policy)
    optimizer = polyamp.wrap_optimizer(training.make_optimizer(), policy, max_grad_norm=1.0)
    optimizer.build(model.trainable_variables)  # else the first step is traced twice
    uses_xla = keras.backend.backend() == "jax"  # JAX runs one operation after another without it
    model.compile(optimizer, training.loss, metrics=[*training.metrics], jit_compile=uses_xla)
    if training.by_rewrite:
        model.train_step = polyamp.rewrite(model.train_step, policy=policy, backend="tensorflow")
        model.test_step = polyamp.rewrite(model.test_step, policy=policy, backend="tensorflow")
    return model, [np.array(variable) for variable in optimizer.variables]  # copies: in PyTorch arrays may be views
