"""Drive the JAX adapter with NumPy arrays: optax optimizers outside ``jit``."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import polyamp
from support.harness import Arrays

OPTIMIZERS = {"sgd": optax.sgd, "adam": optax.adam}


class JaxSession:
    """An optimizer, its parameters and its state, outside ``jit``.

    When XLA compiles, it contracts a multiplication and an addition into one rounding in some programs, so two
    optimizers could not be compared bit for bit. Compiled steps have their own tests.
    """

    def __init__(self, tx: Any, params: dict[str, jax.Array]) -> None:
        self.tx, self.params, self.holder = tx, params, tx.init(params)

    def step(self, grads: Arrays, loss: float = 1.0) -> polyamp.StepResult:
        factor = polyamp.scale_loss(jnp.float32(loss), self.holder)
        known = {name: jnp.zeros_like(param) for name, param in self.params.items()} | dict(grads)
        scaled = {name: (known[name] * factor).astype(param.dtype) for name, param in self.params.items()}
        updates, self.holder = self.tx.update(scaled, self.holder, self.params)
        self.params = optax.apply_updates(self.params, updates)
        return self.holder.last_step

    def assign(self, weights: Arrays) -> None:
        self.params = {name: jnp.asarray(array, self.params[name].dtype) for name, array in weights.items()}

    def weights(self) -> dict[str, NDArray[Any]]:
        return {name: np.asarray(param) for name, param in self.params.items()}

    def memory(self) -> dict[str, NDArray[Any]]:
        kept = (self.holder.inner_state, self.holder.master_weights)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(kept)}

    def load_loss_scale(self, saved: Mapping[str, Any]) -> None:
        self.holder = polyamp.load_loss_scale(self.holder, saved)


class JaxHarness:
    """optax optimizers on dicts of arrays."""

    name = "jax"

    def start(
        self,
        weights: Arrays,
        policy: polyamp.Policy,
        *,
        optimizer: Literal["sgd", "adam"] = "sgd",
        learning_rate: float = 0.1,
        **options: Any,
    ) -> JaxSession:
        tx = polyamp.wrap_optimizer(OPTIMIZERS[optimizer](learning_rate), policy, **options)
        return JaxSession(tx, policy.cast_to_param(self.tree(weights)))

    def plain_optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)

    def tree(self, arrays: Arrays) -> dict[str, jax.Array]:
        return {name: jnp.asarray(array) for name, array in arrays.items()}

    def arrays(self, tree: dict[str, jax.Array]) -> dict[str, NDArray[Any]]:
        return {name: np.asarray(array) for name, array in tree.items()}
