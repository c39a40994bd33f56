"""What a loss function is given in the place of parameters: a pytree, or a flax NNX module that changes when called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from polyamp.backends.jax import trees
from polyamp.backends.jax.dtypes import is_floating


class Model(Protocol):
    """The trained part of a model, and how the loss function's view of the model is made of it."""

    trained: Any

    def build(self, trained: Any) -> Any:
        """What the loss function takes."""

    def changes(self, built: Any) -> Any:
        """Pytree of what the loss function changed in what it took."""

    def accept(self, changes: Any, finite: Any) -> None:
        """Take these changes on; those of floating-point values only where ``finite`` holds."""


class PytreeModel:
    """A pytree, of which the floating arrays are trained; a pure function changes nothing in it."""

    def __init__(self, params: Any) -> None:
        self.params = params
        self.trained = trees.trainable(params)

    def build(self, trained: Any) -> Any:
        return trees.merged(trained, self.params)

    def changes(self, built: Any) -> None:
        return None

    def accept(self, changes: None, finite: Any) -> None:
        """Nothing to take on."""


class NnxModel:
    """A ``flax.nnx.Module``, of which the ``nnx.Param`` variables are trained.

    The others (batch-norm statistics, counters of random numbers) stay in their own dtypes, and take on, in the module
    itself, the values that the loss function gives them.
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
        """The changes with the old statistics where the gradients overflowed: that step is going to be skipped.

        Counters of random numbers go on, and what the function has added stays.
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
    """``params`` as a model; flax is looked at only if the program has imported it.

    >>> model_of({"w": 1.0, "b": 2}).trained
    {'b': None, 'w': None}
    """
    nnx = sys.modules.get("flax.nnx")
    return NnxModel(params) if nnx is not None and isinstance(params, nnx.Module) else PytreeModel(params)


def as_pure(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Callable[[Any], Any]]:
    """A call without side effects: flax NNX modules in ``fn`` and its arguments as pytrees, in and out.

    Returns:
        A function and its arguments; and what gives the call's own results from that function's, after the modules
        have taken on the changes.
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
    """The part of a state that holds other arrays now: flax refuses to set a captured module even to what it has."""
    old = {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(before)}

    def is_changed(path: Any, variable: Any) -> bool:
        now = jax.tree.leaves(variable)
        return len(now) != len(old.get(path, ())) or any(
            new is not was for new, was in zip(now, old[path], strict=True)
        )

    return nnx.from_flat_state(
        [(path, variable) for path, variable in nnx.to_flat_state(after) if is_changed(path, variable)]
    )
