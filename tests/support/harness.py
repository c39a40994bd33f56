"""What a framework needs for the tests that are the same in all of them: a harness that drives it with NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from polyamp import Policy, StepResult

Arrays = Mapping[str, NDArray[Any]]


class Session(Protocol):
    """A wrapped optimizer and the parameters it trains."""

    holder: Any  # the argument of `polyamp.save_loss_scale`: the wrapped optimizer, or its state

    def step(self, grads: Arrays) -> StepResult:
        """Run one step with float32 gradients that are not scaled yet.

        The gradients are multiplied by the loss scale in the framework, cast to the parameters' format, as after a
        scaled backward pass, and passed to the wrapped optimizer.
        """

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the parameters in their stored format (bfloat16 as ``ml_dtypes.bfloat16``)."""

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return everything else that a skipped step must not change: master weights, moments, step counters."""

    def load_loss_scale(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved loss-scale state."""


class Harness(Protocol):
    """One framework, driven with NumPy arrays."""

    name: str  # the adapter's

    def start(
        self,
        weights: Arrays,
        policy: Policy,
        *,
        optimizer: Literal["sgd", "adam"] = "sgd",
        learning_rate: float = 0.1,
        **options: Any,
    ) -> Session:
        """Store ``weights`` in the policy's ``param`` format, and wrap a plain optimizer with these options."""

    def plain_optimizer(self) -> Any:
        """Return an optimizer that is not wrapped."""

    def tree(self, arrays: Arrays) -> Any:
        """Return the arrays as the framework's own arrays, in a dict."""

    def arrays(self, tree: Any) -> dict[str, NDArray[Any]]:
        """Convert the result of ``tree`` back to NumPy arrays."""


def same_bits(left: Arrays, right: Arrays) -> bool:
    """Return whether two sets of arrays are equal bit by bit, including NaN and negative zero."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and left[name].tobytes() == right[name].tobytes() for name in left
    )


def random_arrays(seed: int, scale: float = 1.0) -> dict[str, NDArray[np.float32]]:
    """Return normal float32 arrays of several shapes, one of them with a single element."""
    rng = np.random.default_rng(seed)
    shapes = {"matrix": (4, 3), "vector": (5,), "single": (1,)}
    return {name: (rng.standard_normal(shape) * scale).astype(np.float32) for name, shape in shapes.items()}


def spoiled(grads: Arrays, value: float) -> dict[str, NDArray[Any]]:
    """Return the gradients with one element, the last of the matrix, replaced by a non-finite value."""
    copies = {name: array.copy() for name, array in grads.items()}
    copies["matrix"][-1, -1] = value
    return copies


def overflow_trace(seed: int, steps: int, share: float = 0.3) -> list[bool]:
    """Choose at random which steps have finite gradients; ``share`` is the expected share of the others."""
    return [bool(draw > share) for draw in np.random.default_rng(seed).random(steps)]
