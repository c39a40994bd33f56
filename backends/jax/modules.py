"""Arguments of functions: pytrees of parameters, and flax NNX modules and other objects, which a call can change."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.backends.jax.casting import is_floating, is_traced, merged, trainable


class PytreeModel:
    """A pytree whose floating-point arrays are trained. A pure function does not change it."""

    held = None

    def __init__(self, params: Any) -> None:
        self.params = params
        self.trained = trainable(params)

    def build(self, trained: Any, held: None) -> Any:
        return merged(trained, self.params)

    def changes(self, built: Any) -> None:
        return None

    def accept(self, changes: None, finite: Any) -> None:
        """Do nothing: there are no changes."""


class NnxModel:
    """A ``flax.nnx.Module`` whose ``nnx.Param`` variables are trained."""

    # The other variables (batch-norm statistics, random-number counters) are held: they keep their dtypes. The values
    # that the loss function assigns to them are stored in the module itself.

    def __init__(self, module: Any) -> None:
        from flax import nnx

        self.nnx, self.module = nnx, module
        parts: Any = nnx.split(module, nnx.Param, ...)
        self.definition, self.trained, self.held = parts

    def build(self, trained: Any, held: Any) -> Any:
        """Return the argument of the loss function."""
        return self.nnx.merge(self.definition, trained, held, copy=True)

    def changes(self, built: Any) -> Any:
        """Return a pytree of what the loss function changed in its argument."""
        return self.nnx.state(built, self.nnx.Not(self.nnx.Param))

    def accept(self, changes: Any, finite: Any) -> None:
        """Store these changes in the module; those of floating-point values only if ``finite`` is true."""
        self.nnx.update(self.module, _kept(self.nnx, self.held, changes, finite))


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
        """Return the arguments, with new objects of this state; and these objects."""
        if not self.objects:
            return rest, None
        own, leaves = self.nnx.merge(self.definition, state, copy=True), jax.tree.leaves(rest, is_leaf=_is_place)
        for place, each in zip(self.places, own, strict=True):
            leaves[place] = each
        return jax.tree.unflatten(self.tree, leaves), own

    def changes(self, state: Any, own: Any) -> Any:
        """Return a pytree of what the function changed in the objects that were built from this state."""
        return _changes(self.nnx, state, self.nnx.state(own)) if self.objects else None

    def accept(self, changes: Any, finite: Any) -> None:
        """Store these changes; those of floating-point values only if ``finite`` is true."""
        if self.objects:
            self.nnx.update(self.objects, _kept(self.nnx, self.state, changes, finite))


def is_stateful(leaf: object) -> bool:
    """Return whether a call can change a leaf: whether it is an object of flax NNX."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.Module | nnx.Rngs | nnx.Variable)


def _is_place(leaf: object) -> bool:
    """Return whether a leaf is an object of flax NNX, or None, which takes its place."""
    return leaf is None or is_stateful(leaf)


def _kept(nnx: Any, before: Any, changes: Any, finite: Any) -> Any:
    """Return the changes, with the old statistics if the gradients overflowed, since that step will be skipped."""
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


def model_of(params: Any) -> PytreeModel | NnxModel:
    """Return ``params`` as a model. flax is considered only if the program has imported it."""
    nnx = sys.modules.get("flax.nnx")
    return NnxModel(params) if nnx is not None and isinstance(params, nnx.Module) else PytreeModel(params)


class Call(NamedTuple):
    """A call without side effects."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    argnums: Sequence[int]  # the positions of the arguments that are parameters
    accept: Callable[[Any], Any]  # applies the changes to flax NNX modules, and returns the call's own results


def as_pure(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Sequence[int] = (0,)
) -> Call:
    """Turn a call into one without side effects: its flax NNX modules become pytrees in the arguments and results."""
    nnx = sys.modules.get("flax.nnx")
    owner = getattr(fn, "__self__", None)
    method = getattr(fn, "__func__", None) if nnx is not None and isinstance(owner, nnx.Module) else None
    objects = NnxArguments((owner if method else fn, args, kwargs))
    if not objects.objects:
        return Call(fn, args, kwargs, argnums, lambda results: results)
    leaves, tree = jax.tree.flatten(objects.rest, is_leaf=_is_place)
    flags = [*_flags(objects.rest[0], False, _is_place), *parameters_among(args, kwargs, argnums, _is_place)]

    def pure(parameters: Any, others: list[Any]) -> Any:
        state, given = parameters
        given = [held if flag else other for held, other, flag in zip(given, others, flags, strict=True)]
        (own_fn, own_args, own_kwargs), own = objects.build(state, jax.tree.unflatten(tree, given))
        results = method(own_fn, *own_args, **own_kwargs) if method else own_fn(*own_args, **own_kwargs)
        return results, objects.changes(state, own)

    def accept(results: Any) -> Any:
        own, changed = results
        objects.accept(changed, True)
        return own

    held = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
    others = [None if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
    return Call(pure, ((objects.state, held), others), {}, (0,), accept)


def _changes(nnx: Any, before: Any, after: Any) -> Any:
    """Return the part of a state with new arrays: flax refuses to assign to a captured module, even its own value."""
    old = {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(before)}

    def is_changed(path: Any, variable: Any) -> bool:
        now = jax.tree.leaves(variable)
        return len(now) != len(old.get(path, ())) or any(
            new is not was for new, was in zip(now, old[path], strict=True)
        )

    return nnx.from_flat_state(
        [(path, variable) for path, variable in nnx.to_flat_state(after) if is_changed(path, variable)]
    )


def is_module(node: object) -> bool:
    """Return whether an object is a module of equinox, flax or the like, by the name of a class that it inherits from.

    >>> is_module({"w": 1.0})
    False
    """
    return any(base.__name__ == "Module" for base in type(node).__mro__)


def parameters_among(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: Sequence[int],
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[bool]:
    """Return for each leaf whether it is a parameter: in an argument at ``argnums``, or in a module."""
    flags = [flag for place, arg in enumerate(args) for flag in _flags(arg, place in argnums, is_leaf)]
    return flags + _flags(kwargs, False, is_leaf)


def _flags(tree: Any, are_parameters: bool, is_leaf: Callable[[Any], bool] | None) -> list[bool]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: is_module(node) or (is_leaf is not None and is_leaf(node)))
    counts = [(len(jax.tree.leaves(node, is_leaf=is_leaf)), are_parameters or is_module(node)) for node in nodes]
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
