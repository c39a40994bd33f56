"""What the old interfaces share: pytree nodes with fields that are not leaves, and the warning about each function.

JAX makes nodes from any objects, such as ``jax.ShapeDtypeStruct`` and tracers, so a node made from leaves is never
checked. A field with a known number belongs to the structure of the tree, and one that is traced is a leaf. That is
decided when the user makes the object, and stays: what ``jax.jit`` returns must have as many leaves as was traced.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np

from polyamp.backends.jax.dtypes import is_traced
from polyamp.backends.jax.graphs.refusals import users_level
from polyamp.errors import warn_deprecated

Node = TypeVar("Node")


def made(kind: type[Node], **fields: Any) -> Node:
    """Return an object with these fields, without a call of its constructor.

    >>> class Pair:
    ...     def __init__(self, first):
    ...         raise ValueError(first)
    >>> made(Pair, first=1).first
    1
    """
    node = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(node, name, value)
    return node


def is_static(value: object) -> bool:
    """Return whether a field is a scalar with a known value, which can be part of the structure of a tree.

    >>> is_static(2.0), is_static(np.ones([])), is_static(np.ones(2)), is_static(jax.ShapeDtypeStruct((), float))
    (True, True, False, False)
    """
    known = isinstance(value, int | float | np.ndarray | np.generic | jax.Array) and not is_traced(value)
    return known and np.ndim(value) == 0  # type: ignore[arg-type]


def hashable(value: Any) -> Any:
    """Return a scalar as an object that can be hashed, with its dtype.

    >>> hashable(np.ones([], np.float16))
    np.float16(1.0)
    """
    return np.asarray(value)[()] if isinstance(value, np.ndarray | jax.Array) else value


def replaced(old: str, instead: str) -> None:
    """Warn once that an old function was used, at the user's line, with the line that replaces it.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     replaced("jmp.half()", "jnp.float16")
    >>> len(caught)
    1
    """
    warn_deprecated(old, instead, stacklevel=users_level())
