"""Drive the TensorFlow adapter with NumPy arrays: ``tf.compat.v1.train`` optimizers in a ``tf.function``."""

from collections.abc import Mapping
from typing import Any, Literal

import tensorflow as tf
from numpy.typing import NDArray

import polyamp
from support.harness import Arrays

OPTIMIZERS = {
    "sgd": tf.compat.v1.train.GradientDescentOptimizer,
    "adam": tf.compat.v1.train.AdamOptimizer,
}


class TensorFlowSession:
    """One wrapped optimizer and the variables that it trains, in a compiled step."""

    def __init__(self, variables: dict[str, tf.Variable], holder: Any) -> None:
        self.variables, self.holder = variables, holder
        self._step = tf.function(self._apply, autograph=False)
        self._make_slots()

    def _apply(self, grads: dict[str, tf.Tensor], loss: float = 1.0) -> None:
        factor = self.holder.scale_loss(tf.constant(loss))
        pairs = [
            (tf.cast(grads[name] * factor, variable.dtype) if name in grads else None, variable)
            for name, variable in self.variables.items()
        ]
        self.holder.apply_gradients(pairs)

    def _make_slots(self) -> None:
        """Make the slots by tracing, so that there is memory to compare before the first step."""
        self._step.get_concrete_function({name: tf.TensorSpec(var.shape) for name, var in self.variables.items()})

    def step(self, grads: Arrays, loss: float | None = None) -> polyamp.StepResult:
        tensors = {name: tf.constant(array) for name, array in grads.items()}
        if loss is None:
            self._step(tensors)
        else:  # only eager code reports a loss where it is scaled
            self._apply(tensors, loss)
        return self.holder.last_step

    def assign(self, weights: Arrays) -> None:
        for name, array in weights.items():
            self.variables[name].assign(array)

    def weights(self) -> dict[str, NDArray[Any]]:
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def memory(self) -> dict[str, NDArray[Any]]:
        scalars = {variable.ref() for variable in self.holder.scaler.stored}
        kept = [variable for variable in self.holder.variables() if variable.ref() not in scalars]
        return {f"{index}/{variable.name}": variable.numpy() for index, variable in enumerate(kept)}

    def load_loss_scale(self, saved: Mapping[str, Any]) -> None:
        polyamp.load_loss_scale(self.holder, saved)


class TensorFlowHarness:
    """TensorFlow, driven with NumPy arrays."""

    name = "tensorflow"

    def start(
        self,
        weights: Arrays,
        policy: polyamp.Policy,
        *,
        optimizer: Literal["sgd", "adam"] = "sgd",
        learning_rate: float = 0.1,
        **options: Any,
    ) -> TensorFlowSession:
        variables = {name: tf.Variable(tf.cast(array, policy.param), name=name) for name, array in weights.items()}
        plain = OPTIMIZERS[optimizer](learning_rate)
        return TensorFlowSession(variables, polyamp.wrap_optimizer(plain, policy, **options))

    def plain_optimizer(self) -> tf.compat.v1.train.Optimizer:
        return tf.compat.v1.train.GradientDescentOptimizer(0.1)

    def tree(self, arrays: Arrays) -> dict[str, tf.Tensor]:
        return {name: tf.constant(array) for name, array in arrays.items()}

    def arrays(self, tree: Mapping[str, tf.Tensor]) -> dict[str, NDArray[Any]]:
        return {name: tensor.numpy() for name, tensor in tree.items()}
