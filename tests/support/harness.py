"""What the harnesses of all frameworks share: each drives its framework with NumPy arrays.

A harness starts sessions: parameters in the policy's ``param`` format, and a plain optimizer, wrapped. A session's
``step`` takes float32 gradients that are not scaled yet; those that are missing are None in the framework, and zeros in
JAX. It multiplies them by the scaled loss, which is 1 before, casts them to the parameters' format, as after a scaled
backward pass, and returns the `StepResult`. ``weights`` are the parameters, ``memory`` is everything else that a
skipped step must not change, and ``holder`` is the argument of `polyamp.save_loss_scale`. ``assign`` writes parameters,
as a user's code does.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


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


def endless_trees(leaf: Any) -> dict[str, list[Any]]:
    """Return trees that no walk comes to the end of: with 2**40 paths, within itself, deeper than any recursion."""
    shared, cyclic, deep = [leaf], [leaf], [leaf]
    cyclic.append(cyclic)
    for depth in range(3000):
        deep = [deep]
        shared = [shared, shared] if depth < 40 else shared
    return {"shared": shared, "cyclic": cyclic, "deep": deep}
