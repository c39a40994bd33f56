"""Arguments of functions: pytrees of parameters, and flax NNX modules and other objects, which a call can change."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.backends.jax.casting import check_tree, is_floating, is_traced, merged, trainable


class NnxArguments:
    """The flax NNX objects in the arguments of a function: modules, random numbers, metrics."""

    def __init__(self, arguments: Any) -> None:
        self.nnx: Any = sys.modules.get("flax.nnx")
        self.objects: list[Any] = []
        self.state, self.rest = None, arguments
        if self.nnx is None:
            return
        leaves, self.tree = jax.tree.flatten(arguments, is_leaf=_is_place)
        self.places = [place for place, leaf in enumerate(leaves) if is_stateful(leaf)]
        self.objects = [leaves[place] for place in self.places]
        if self.objects:
            self.definition, self.state = self.nnx.split(self.objects)
            self.rest = jax.tree.unflatten(self.tree, [None if is_stateful(leaf) else leaf for leaf in leaves])

    def build(self, state: Any, rest: Any) -> tuple[Any, Any]:
        """Return the arguments, with new NNX objects from ``state`` in them, and these objects alone."""
        if not self.objects:
            return rest, None
        own, leaves = self.nnx.merge(self.definition, state, copy=True), jax.tree.leaves(rest, is_leaf=_is_place)
        for place, each in zip(self.places, own, strict=True):
            leaves[place] = each
        return jax.tree.unflatten(self.tree, leaves), own

    def contents(self, own: Any) -> dict[Any, list[Any]]:
        """Return the arrays of these objects by their paths."""
        flat = self.nnx.to_flat_state(self.nnx.state(own)) if self.objects else ()
        return {path: jax.tree.leaves(variable) for path, variable in flat}

    def changes(self, before: dict[Any, list[Any]], own: Any) -> Any:
        """Return the state of objects for the arrays that a call changed; ``before``: `contents` before the call."""
        # flax refuses to assign to a captured module, even its own value.
        if not self.objects:
            return None
        now, state = self.contents(own), self.nnx.to_flat_state(self.nnx.state(own))
        same = {path for path, arrays in now.items() if list(map(id, arrays)) == list(map(id, before.get(path, ())))}
        return self.nnx.from_flat_state([(path, variable) for path, variable in state if path not in same])

    def accept(self, changes: Any, finite: Any) -> None:
        """Write changes to the caller's objects; those of floating-point values only if ``finite``."""
        if self.objects:
            self.nnx.update(self.objects, _kept(self.nnx, self.state, changes, finite))


def is_stateful(leaf: object) -> bool:
    """Return whether a call can change a leaf: whether it is an object of flax NNX."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.Module | nnx.Rngs | nnx.Variable)


def _is_place(leaf: object) -> bool:
    """Return whether a leaf is an object of flax NNX, or the None that stands for one."""
    return leaf is None or is_stateful(leaf)


def _kept(nnx: Any, before: Any, changes: Any, finite: Any) -> Any:
    """Return changes; if ``finite`` is false the step is skipped, so they have the old floating-point values."""
    # Random-number counters still advance, and variables that the function added stay.
    if finite is True:
        return changes
    known = dict(nnx.to_flat_state(before))

    def kept(path: Any, variable: Any) -> Any:
        old = known.get(path)
        if old is None or len(jax.tree.leaves(old)) != len(jax.tree.leaves(variable)):
            return variable
        return jax.tree.map(lambda new, was: _statistic(finite, new, was), variable, old)

    return nnx.from_flat_state([(path, kept(path, variable)) for path, variable in nnx.to_flat_state(changes)])


def _statistic(finite: Any, new: Any, old: Any) -> Any:
    if new is old or not (is_floating(new) and is_floating(old) and new.shape == old.shape):
        return new
    return jnp.where(finite, new, old)


def is_nnx_module(params: object) -> bool:
    """Return whether an argument is a ``flax.nnx.Module``. flax is considered only if the program has imported it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(params, nnx.Module)


def trained_in(params: Any) -> Any:
    """Return what is trained of an argument: the ``nnx.Param`` variables of an NNX module, the arrays of a pytree."""
    if not is_nnx_module(params):
        return trainable(params)
    nnx: Any = sys.modules["flax.nnx"]
    return nnx.state(params, nnx.Param)


def with_trained(params: Any, trained: Any) -> Any:
    """Return an argument with ``trained`` in place of its trained arrays; an NNX module is changed in place."""
    if not is_nnx_module(params):
        return merged(trained, params)
    sys.modules["flax.nnx"].update(params, trained)
    return params


class Call(NamedTuple):
    """A call without side effects."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: Sequence[bool]  # for each leaf of the arguments, whether it is a parameter
    accept: Callable[[Any], Any]  # applies the changes to flax NNX modules, and returns the call's own results


def as_pure(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Sequence[int] = (0,)
) -> Call:
    """Turn a call into one without side effects, by making flax NNX modules pytrees in arguments and results."""
    check_tree((args, kwargs), where="the arguments of the function")
    owner = getattr(fn, "__self__", None)
    method = getattr(fn, "__func__", None) if is_nnx_module(owner) else None
    objects = NnxArguments((owner if method else fn, args, kwargs))
    if not objects.objects:
        return Call(fn, args, kwargs, _parameters_among(args, kwargs, argnums), lambda results: results)

    def pure(state: Any, rest: Any) -> Any:
        (own_fn, own_args, own_kwargs), own = objects.build(state, rest)
        before = objects.contents(own)
        results = method(own_fn, *own_args, **own_kwargs) if method else own_fn(*own_args, **own_kwargs)
        return results, objects.changes(before, own)

    def accept(results: Any) -> Any:
        own, changed = results
        objects.accept(changed, True)
        return own

    rest_fn, rest_args, rest_kwargs = objects.rest
    flags = [*_flags(objects.state, True), *_flags(rest_fn, False)]
    flags += _parameters_among(rest_args, rest_kwargs, argnums)
    return Call(pure, (objects.state, objects.rest), {}, flags, accept)


def is_module(node: object) -> bool:
    """Return whether an object is a module of equinox, flax or the like, by the name of a class that it inherits from.

    >>> is_module({"w": 1.0})
    False
    """
    return any(base.__name__ == "Module" for base in type(node).__mro__)


def _parameters_among(args: Sequence[Any], kwargs: dict[str, Any], argnums: Sequence[int]) -> list[bool]:
    """Return for each leaf whether it is a parameter: in an argument at ``argnums``, or in a module."""
    flags = [flag for place, arg in enumerate(args) for flag in _flags(arg, place in argnums)]
    return flags + _flags(kwargs, False)


def _flags(tree: Any, are_parameters: bool) -> list[bool]:
    nodes = jax.tree.leaves(tree, is_leaf=is_module)
    counts = [(len(jax.tree.leaves(node)), are_parameters or is_module(node)) for node in nodes]
    return [flag for count, flag in counts for _ in range(count)]


def arrays_of_modules(fn: Any) -> frozenset[int]:
    """Return the ids of the traced arrays in the modules that a function is, wraps, is a method of or captures."""
    wrapped = inspect.unwrap(fn)  # of jax.vmap and the like
    try:
        captured = list(inspect.getclosurevars(wrapped).nonlocals.values())
    except (TypeError, ValueError):  # not a Python function, or a captured variable without a value yet
        captured = []
    modules = [node for node in (getattr(wrapped, "__self__", wrapped), *captured) if is_module(node)]
    return frozenset(id(leaf) for leaf in jax.tree.leaves(modules) if is_traced(leaf))
