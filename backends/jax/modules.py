"""What a loss function is given in the place of parameters: a pytree, or a flax NNX module that changes when called."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from polyamp.backends.jax import trees


class Model(Protocol):
    """The trained part of a model, and how the loss function's view of the model is made of it."""

    trained: Any

    def build(self, trained: Any) -> Any:
        """What the loss function takes."""

    def changes(self, built: Any) -> Any:
        """Pytree of what the loss function changed in what it took."""

    def accept(self, changes: Any) -> None:
        """Take these changes on."""


class PytreeModel:
    """A pytree, of which the floating arrays are trained; a pure function changes nothing in it."""

    def __init__(self, params: Any) -> None:
        self.params = params
        self.trained = trees.trainable(params)

    def build(self, trained: Any) -> Any:
        return trees.merged(trained, self.params)

    def changes(self, built: Any) -> None:
        return None

    def accept(self, changes: None) -> None:
        """Nothing to take on."""


class NnxModel:
    """A ``flax.nnx.Module``, of which the ``nnx.Param`` variables are trained.

    The others (batch-norm statistics, counters of random numbers) stay in their own dtypes, and take on, in the module
    itself, the values that the loss function gives them.
    """

    def __init__(self, module: Any) -> None:
        from flax import nnx

        self.nnx, self.module = nnx, module
        parts: Any = nnx.split(module, nnx.Param, ...)
        self.definition, self.trained, self.others = parts

    def build(self, trained: Any) -> Any:
        return self.nnx.merge(self.definition, trained, self.others, copy=True)

    def changes(self, built: Any) -> Any:
        return self.nnx.state(built, self.nnx.Not(self.nnx.Param))

    def accept(self, changes: Any) -> None:
        self.nnx.update(self.module, changes)


def model_of(params: Any) -> Model:
    """``params`` as a model; flax is looked at only if the program has imported it.

    >>> model_of({"w": 1.0, "b": 2}).trained
    {'b': None, 'w': None}
    """
    nnx = sys.modules.get("flax.nnx")
    return NnxModel(params) if nnx is not None and isinstance(params, nnx.Module) else PytreeModel(params)
