"""What `polyamp.lint` judges in addition to a plan: the optimizer, the parameters, and whether a step scales its loss.

A gradient of a scaled loss is made from the loss scale: ``jax.grad`` of ``polyamp.scale_loss(loss, opt_state)`` starts
at their product. In ``jax.grad`` of the plain loss, no equation leads from the scale to the gradients that the wrapped
optimizer divides by it. Nothing at run time can see that, since both are only arrays.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from polyamp.backends.jax import gradients, unstable
from polyamp.backends.jax.casting import is_low, name_of, trainable
from polyamp.backends.jax.graphs.capture import Program
from polyamp.backends.jax.modules import as_pure
from polyamp.backends.jax.optimizer import Step
from polyamp.backends.jax.state import is_of_optax, is_state, states_in
from polyamp.diagnosis.lint import Holder, Kind, takes
from polyamp.errors import UsageError
from polyamp.flow import parameter
from polyamp.policies import Policy


def holder(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Holder:
    """Return what lint judges in addition to a plan; see `polyamp.interface.Adapter.holder`."""
    step, held = getattr(optimizer, "step", None), (_state_of(optimizer, args), args, dict(kwargs))
    own, states = step if isinstance(step, Step) else None, states_in(held)
    is_scaled = any(map(_is_native_scaler, jax.tree.leaves(held, is_leaf=_is_native_scaler)))
    plain: Kind = "plain" if optimizer is not None else ""
    parameters = args[0] if args else target
    leaves = jax.tree.leaves_with_path(parameters, is_leaf=lambda node: is_state(node) or is_of_optax(node))
    return Holder(
        "jax",
        "wrapped" if own or states else "native scaler" if is_scaled else plain,
        tuple(name_of(path) for path, leaf in leaves if is_low(leaf)),
        any(one.master_weights is not None for one in states) or (own is not None and own.master_weights),
        tuple(name_of(path) for path, leaf in leaves if _is_beyond(leaf, policy)),
        _unscaled(target, args, dict(kwargs), policy) if takes(target, args, kwargs) else (),
    )


def _is_beyond(leaf: Any, policy: Policy) -> bool:
    """Return whether a float32 array has numbers that the compute format cannot hold."""
    is_known = isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, jax.core.Tracer)
    is_one = is_known and leaf.size and leaf.dtype == np.float32
    return bool(is_one and parameter(float(abs(leaf).max()), policy.compute).unfit)


def _state_of(optimizer: Any, args: tuple[Any, ...]) -> Any:
    """Return an optax optimizer's first state, which shows the optimizer's parts; return any other object itself."""
    init = getattr(optimizer, "init", None)
    if not (callable(init) and args):
        return optimizer
    try:
        return jax.eval_shape(init, trainable(args[0]))
    except (TypeError, ValueError, AttributeError, UsageError):  # the first argument does not hold its parameters
        return optimizer


def _is_native_scaler(node: object) -> bool:
    """Return whether this is a loss scale of flax or jmp, by its name, since neither package is imported."""
    names = {(base.__module__.partition(".")[0], base.__name__) for base in type(node).__mro__}
    return not names.isdisjoint(_NATIVE_SCALERS)


_NATIVE_SCALERS = {("flax", "DynamicScale"), ("jmp", "DynamicLossScale"), ("jmp", "StaticLossScale")}


def _unscaled(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy) -> tuple[str, ...]:
    """Return the lines of updates that divide gradients by a loss scale although their loss was not scaled."""
    scales = [state.scalars.scale for state in states_in((args, kwargs)) if state.settings.scales]
    if not scales:
        return ()
    with policy:
        program = Program(*as_pure(target, args, kwargs)[:4])
    found = _Updates()
    found.run(program.closed, [_SCALED * any(array is scale for scale in scales) for array in program.arrays], False)
    return tuple(found.unscaled)


_SCALED, _BACKWARD = 1, 2  # what leads to a value: a loss scale, a backward pass


class _Updates:
    """The updates in a program, found in one pass over it. The body of a loop is read once."""

    def __init__(self) -> None:
        self.unscaled: dict[str, None] = {}
        self._divides = False  # whether the last update divides by a loss scale

    def run(self, closed: Any, given: Sequence[int], is_backward: bool) -> list[int]:
        """Return, as flags for each output of a jaxpr, whether a loss scale or a backward pass leads to it."""
        jaxpr, _ = unstable.opened(closed)
        known = dict(zip(reversed(jaxpr.invars), reversed(given), strict=False))

        def read(atoms: Sequence[Any]) -> list[int]:
            return [known.get(atom, 0) if unstable.is_variable(atom) else 0 for atom in atoms]

        for equation in jaxpr.eqns:
            inputs, late = read(equation.invars), is_backward or "transpose" in unstable.transformations(equation)
            is_made = late and any(map(unstable.is_variable, equation.invars))  # not the zeros for what is not used
            value = functools.reduce(operator.or_, inputs, _BACKWARD * is_made)
            mark = equation.params["name"] if equation.primitive.name == "name" else ""
            if mark == gradients.SCALE:
                self._divides = bool(value & _SCALED)
            elif gradients.mark_of(mark) is not None and self._divides and value == _BACKWARD:
                self.unscaled[unstable.users_line(equation)] = None
            parts = [self.run(part, inputs, late) for part in unstable.inner_programs(equation)]
            fitting = [part for part in parts if len(part) == len(equation.outvars)]
            outputs = zip(*fitting, strict=True) if fitting else [(value,)] * len(equation.outvars)
            known |= {
                var: functools.reduce(operator.or_, each) for var, each in zip(equation.outvars, outputs, strict=True)
            }
        return read(jaxpr.outvars)
