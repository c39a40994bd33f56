"""Drive the Keras adapter with NumPy arrays, on the backend that Keras runs on."""

from collections.abc import Mapping
from typing import Any, Literal

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

import polyamp
from support.harness import Arrays


def to_numpy(tensor: Any) -> NDArray[Any]:
    """Return a copy; bfloat16, which NumPy does not have, as ``ml_dtypes.bfloat16``."""
    return np.array(ops.convert_to_numpy(tensor))


class KerasSession:
    """One wrapped Keras optimizer and the variables it trains, outside traced functions."""

    def __init__(self, variables: dict[str, keras.Variable], holder: Any) -> None:
        self.variables, self.holder = variables, holder
        holder.build(list(variables.values()))

    def step(self, grads: Arrays, loss: float = 1.0) -> polyamp.StepResult:
        factor = self.holder.scale_loss(ops.array(loss))
        pairs = [
            (ops.cast(ops.array(grads[name]) * factor, var.dtype) if name in grads else None, var)
            for name, var in self.variables.items()
        ]
        self.holder.apply_gradients(pairs)
        return self.holder.last_step

    def assign(self, weights: Arrays) -> None:
        for name, array in weights.items():
            self.variables[name].assign(array)

    def weights(self) -> dict[str, NDArray[Any]]:
        return {name: to_numpy(variable) for name, variable in self.variables.items()}

    def memory(self) -> dict[str, NDArray[Any]]:
        scalars = {id(variable) for variable in self.holder.scaler.stored}
        kept = [variable for variable in self.holder.variables if id(variable) not in scalars]
        return {f"{index}/{variable.path}": to_numpy(variable) for index, variable in enumerate(kept)}

    def load_loss_scale(self, saved: Mapping[str, Any]) -> None:
        polyamp.load_loss_scale(self.holder, saved)


class KerasHarness:
    """Keras, driven with NumPy arrays."""

    name = "keras"

    def start(
        self,
        weights: Arrays,
        policy: polyamp.Policy,
        *,
        optimizer: Literal["sgd", "adam"] = "sgd",
        learning_rate: float = 0.1,
        **options: Any,
    ) -> KerasSession:
        variables = {name: keras.Variable(array, dtype=policy.param, name=name) for name, array in weights.items()}
        kind = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[optimizer]
        return KerasSession(variables, polyamp.wrap_optimizer(kind(learning_rate), policy, **options))

    def plain_optimizer(self) -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.1)

    def tree(self, arrays: Arrays) -> dict[str, keras.Variable]:
        return {name: keras.Variable(array, dtype=array.dtype.name, trainable=False) for name, array in arrays.items()}

    def arrays(self, tree: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        return {name: to_numpy(value) for name, value in tree.items()}
