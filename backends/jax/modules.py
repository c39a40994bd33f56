"""The first argument of a loss function: a pytree of parameters, or a flax NNX module, which a call can change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from polyamp.backends.jax import trees
from polyamp.backends.jax.dtypes import is_floating


class Model(Protocol):
    """The trained part of a model, and how the loss function's argument is built from it."""

    trained: Any

    def build(self, trained: Any) -> Any:
        """Return the argument of the loss function."""

    def changes(self, built: Any) -> Any:
        """Return a pytree of what the loss function changed in its argument."""

    def accept(self, changes: Any, finite: Any) -> None:
        """Store these changes in the model; those of floating-point values only if ``finite`` is true."""


class PytreeModel:
    """A pytree whose floating-point arrays are trained. A pure function does not change it."""

    def __init__(self, params: Any) -> None:
        self.params = params
        self.trained = trees.trainable(params)

    def build(self, trained: Any) -> Any:
        return trees.merged(trained, self.params)

    def changes(self, built: Any) -> None:
        return None

    def accept(self, changes: None, finite: Any) -> None:
        """Do nothing: there are no changes."""


class NnxModel:
    """A ``flax.nnx.Module`` whose ``nnx.Param`` variables are trained.

    The other variables (batch-norm statistics, random-number counters) keep their dtypes. The values that the loss
    function assigns to them are stored in the module itself.
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

    def accept(self, changes: Any, finite: Any) -> None:
        self.nnx.update(self.module, changes if finite is True else self._kept(changes, finite))

    def _kept(self, changes: Any, finite: Any) -> Any:
        """Return the changes, with the old statistics if the gradients overflowed, since that step will be skipped.

        Random-number counters still advance, and variables that the function added stay.
        """
        old = dict(self.nnx.to_flat_state(self.others))

        def kept(path: Any, variable: Any) -> Any:
            before = old.get(path)
            if before is None or len(jax.tree.leaves(before)) != len(jax.tree.leaves(variable)):
                return variable
            return jax.tree.map(lambda new, was: _statistic(finite, new, was), variable, before)

        flat = self.nnx.to_flat_state(changes)
        return self.nnx.from_flat_state([(path, kept(path, variable)) for path, variable in flat])


def _statistic(finite: Any, new: Any, old: Any) -> Any:
    if new is old or not (is_floating(new) and is_floating(old) and new.shape == old.shape):
        return new
    return jnp.where(finite, new, old)


def model_of(params: Any) -> Model:
    """Return ``params`` as a model. flax is considered only if the program has imported it.

    >>> model_of({"w": 1.0, "b": 2}).trained
    {'b': None, 'w': None}
    """
    nnx = sys.modules.get("flax.nnx")
    return NnxModel(params) if nnx is not None and isinstance(params, nnx.Module) else PytreeModel(params)


def as_pure(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Callable[[Any], Any]]:
    """Turn a call into one without side effects: its flax NNX modules become pytrees in the arguments and results.

    Returns:
        A function, its arguments, and a function that takes its results, stores the changes in the modules, and returns
        the results of the original call.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return fn, args, kwargs, lambda results: results
    owner = getattr(fn, "__self__", None)
    method = getattr(fn, "__func__", None) if isinstance(owner, nnx.Module) else None

    def is_stateful(leaf: Any) -> bool:
        return isinstance(leaf, nnx.Module | nnx.Rngs | nnx.Variable)

    leaves, tree = jax.tree.flatten((owner if method else fn, args, kwargs), is_leaf=is_stateful)
    places = [index for index, leaf in enumerate(leaves) if is_stateful(leaf)]
    if not places:
        return fn, args, kwargs, lambda results: results
    modules = [leaves[index] for index in places]
    definition, state = nnx.split(modules)

    def pure(state: Any, others: list[Any]) -> Any:
        own, given = nnx.merge(definition, state, copy=True), list(others)
        for index, module in zip(places, own, strict=True):
            given[index] = module
        own_fn, own_args, own_kwargs = jax.tree.unflatten(tree, given)
        results = method(own_fn, *own_args, **own_kwargs) if method else own_fn(*own_args, **own_kwargs)
        return results, _changes(nnx, state, nnx.state(own))

    def accept(results: Any) -> Any:
        own, changed = results
        nnx.update(modules, changed)
        return own

    others = [None if is_stateful(leaf) else leaf for leaf in leaves]
    return pure, (state, others), {}, accept


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
