"""Casts of pytrees to a format, with JAX's dtypes for formats, tests of leaves, and leaves that are None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from polyamp import nesting
from polyamp.backends.jax import unstable
from polyamp.errors import InvalidValueError, kind_of, shown
from polyamp.formats import format_of


def dtype_of(format_name: str) -> np.dtype[Any]:
    """Return the dtype that stores a format. TensorFloat-32 is a way to multiply float32, not a way to store it."""
    name = format_of(format_name).name
    dtype = jnp.dtype("float32" if name == "tensorfloat32" else name)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise InvalidValueError(
            "JAX has float64 switched off",
            where="a cast in JAX",
            found=repr(format_name),
            allowed="float32 and narrower",
            fix='call jax.config.update("jax_enable_x64", True) when the program starts, or choose another format',
        )
    return dtype


def is_array(leaf: object) -> TypeGuard[Any]:
    """Return whether a leaf is a JAX (also traced) or NumPy array, or a NumPy scalar, of numbers that JAX computes."""
    return isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm")


def is_floating(leaf: object) -> TypeGuard[Any]:
    """Return whether a leaf is a floating-point array, or the description of one (``jax.ShapeDtypeStruct``)."""
    return (is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)) and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_low(leaf: object) -> TypeGuard[Any]:
    """Return whether a leaf is a floating-point array of 16 bits or fewer."""
    return is_floating(leaf) and leaf.dtype.itemsize <= 2


def is_traced(value: object) -> bool:
    """Return whether a value is being traced and so has no number yet."""
    return isinstance(value, jax.core.Tracer)


check_tree = partial(nesting.check_tree, children=unstable.children_of, deepest=400)
"""Refuse a pytree that JAX cannot walk to its end."""


def name_of(path: Any) -> str:
    """Return a key path joined by ``/``, without a flax NNX variable's own field; "params" if the path is empty."""
    name: str = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.removesuffix("/.value").removesuffix("/value") or "params"


@contextmanager
def fitting(first: Any, second: Any, *, where: str, names: tuple[str, str], fix: str) -> Iterator[None]:
    """Refuse two pytrees whose leaves differ, and name the differences; None fits, unless ``first`` has only None."""
    # Missing leaves are refused only if the code inside fails: ``optax.lookahead`` takes gradients of a part of its
    # parameters.
    check_tree((first, second), where=where)
    found = (jax.tree.leaves_with_path(tree, is_leaf=_is_none) for tree in (first, second))
    own, other = ({name_of(path): _kind(leaf) for path, leaf in leaves} for leaves in found)
    pairs = {name: (own.get(name, "nothing"), other.get(name, "nothing")) for name in {**own, **other}}
    is_empty = not {*own.values()} - {"None"} and bool({*other.values()} - {"None"})
    compared = {name: kinds for name, kinds in pairs.items() if is_empty or kinds[0] != "None"}
    unlike = [name for name, (one, two) in compared.items() if one != two or one.startswith("a ")]
    try:
        if is_empty or (unlike and own.keys() == other.keys()):
            raise TypeError("leaves differ")
        yield
    except Exception as error:
        if not unlike and same_structure(first, second):
            raise
        raise InvalidValueError(
            f"the {names[0]} do not have the structure of the {names[1]}",
            where=where,
            found="; ".join(f"{name}: {' for '.join(pairs[name])}" for name in unlike[:8]) or kind_of(first),
            allowed=f"the structure of the {names[1]}: {shown(jax.tree.structure(second))}",
            fix=fix,
        ) from error


def _kind(leaf: Any) -> str:
    """Return the kind and shape of an array or number, such as ``real(2,)``; for anything else its class."""
    if not (is_array(leaf) or isinstance(leaf, int | float | complex)):
        return "None" if leaf is None else f"a {kind_of(leaf)}"
    is_key = jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.extended)
    return f"{'key' if is_key else 'complex' if jnp.iscomplexobj(leaf) else 'real'}{jnp.shape(leaf)}"


def same_structure(first: Any, second: Any) -> bool:
    """Return whether two pytrees have one structure."""
    return len({jax.tree.structure(tree) for tree in (first, second)}) == 1


def cast(tree: Any, format_name: str) -> Any:
    """Return a pytree with its floating-point arrays in a format and all other leaves unchanged. No host sync.

    >>> cast({"w": jnp.ones(2), "n": jnp.arange(2), "p": 0.5}, "float16")["w"].dtype
    dtype('float16')

    Args:
        tree: any pytree; NumPy arrays stay NumPy arrays, and a ``jax.ShapeDtypeStruct`` stays one.
        format_name: a format of `polyamp.formats.FORMATS`.

    Raises:
        InvalidValueError: the format is unknown, or it is float64 and JAX has float64 disabled.
    """
    dtype = dtype_of(format_name)
    check_tree(tree, where="a cast in JAX")
    return jax.tree.map(lambda leaf: _as(leaf, dtype) if is_floating(leaf) else leaf, tree)


def widened(tree: Any) -> Any:
    """Return a pytree with its 16-bit arrays in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if is_low(leaf) else leaf, tree)


def _as(leaf: Any, dtype: np.dtype[Any]) -> Any:
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)  # type: ignore[no-untyped-call]
    with np.errstate(over="ignore"):  # beyond the format's range the result is inf, as in IEEE 754
        return leaf.astype(dtype)


def trainable(tree: Any) -> Any:
    """Return a pytree with None for every leaf that cannot have a gradient, as ``equinox.filter`` does."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) else None, tree)


def merged(first: Any, second: Any) -> Any:
    """Return ``first`` with the leaves of ``second`` where ``first`` has None."""
    return map_with_none(lambda one, other: other if one is None else one, first, second)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def map_with_none(function: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """Map a function over the leaves of two pytrees; None in the first one is a leaf."""
    return jax.tree.map(function, first, second, is_leaf=_is_none)
