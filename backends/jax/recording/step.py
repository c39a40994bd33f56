"""What a recording is made of: one traced program, differentiated by its author or here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.backends.jax import marks, unstable
from polyamp.backends.jax.autocast import run_autocasted
from polyamp.backends.jax.dtypes import is_floating
from polyamp.backends.jax.gradients import value_and_grad
from polyamp.backends.jax.modules import as_pure
from polyamp.backends.jax.program import Program
from polyamp.backends.jax.state import find_state, holds_state, initial_scalars, state_type
from polyamp.loss_scale import LossScale
from polyamp.policy import Policy

Function = Callable[..., Any]


class Step:
    """A training step as one traced program.

    What has a backward pass already runs as it was written. A function that returns the loss, or ``(loss, aux)``, is
    differentiated here, by its first argument and under the policy. Any other function runs under the policy.

    Attributes:
        closed: the jaxpr.
        arrays: its arguments.
        differentiates: whether the step has its own backward pass.
        scale: what the loss is multiplied by.
        scale_index: which of the arguments that is; None where it is none of them.
        loss_index: which of the results the unscaled loss is; None where there is no such result.
        parameters: name and shape of each floating argument.
    """

    def __init__(
        self, step: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, scale: float | None
    ) -> None:
        given = dict(kwargs)
        with policy:
            trace = _Trace(step, args, given)
            self.differentiates = unstable.has_backward(trace.program.closed)
            if not self.differentiates and _is_loss(trace.results):
                args = (_holder_of(scale), *args)
                trace = _Trace(_differentiated(step, policy, has_aux=isinstance(trace.results, tuple)), args, given)
            elif not self.differentiates:
                trace = _Trace(step, args, given, policy)
        self.closed, self.arrays = trace.program.closed, list(trace.program.arrays)
        self.loss_index = trace.loss_index
        self.parameters = _floating(args)
        self.scale_index, self.scale = self._scale((args, given), scale)

    def _scale(self, holder: Any, scale: float | None) -> tuple[int | None, float]:
        """Where the loss scale is, and what it is; a scale that was given takes its place there."""
        if not holds_state(holder):
            return None, 1.0 if scale is None else float(scale)
        array = find_state(holder).scalars.scale
        index = next((index for index, one in enumerate(self.arrays) if one is array), None)
        if index is not None and scale is not None:
            self.arrays[index] = jnp.full_like(array, scale)
        return index, float(array if scale is None else scale)


class _Trace:
    """A call, traced; under a policy where one is given.

    Attributes:
        program: its jaxpr, and its arrays.
        results: what it returns, with shapes and dtypes for arrays.
        loss_index: which array of all that it returns is the loss: the one floating scalar that it shows.
    """

    def __init__(self, fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy | None = None) -> None:
        pure, own_args, own_kwargs, _ = as_pure(fn, args, kwargs)

        def call(args: Any, kwargs: Any) -> Any:
            return pure(*args, **kwargs)

        def under_policy(args: Any, kwargs: Any) -> Any:
            return run_autocasted(call, policy, args, kwargs)

        self.program = Program(call if policy is None else under_policy, (own_args, own_kwargs), {})
        outputs = unstable.specs_of_results(self.program.closed)
        results = self.program.results(outputs)
        self.results = results if pure is fn else results[0]
        shown = [part for part in _parts(self.results) if _is_scalar(part)]
        self.loss_index = next(i for i, spec in enumerate(outputs) if spec is shown[0]) if len(shown) == 1 else None


def _differentiated(fn: Function, policy: Policy, *, has_aux: bool) -> Function:
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        loss, grads = value_and_grad(fn, policy, has_aux)(*args, **kwargs)
        return {"loss": loss[0] if has_aux else loss, "gradients": [marks.gradients(grads)]}

    return differentiated


def _holder_of(scale: float | None) -> Any:
    """What `value_and_grad` finds a loss scale in."""
    config = LossScale.fixed(1.0)
    scalars = initial_scalars(config)._replace(scale=jnp.float32(1.0 if scale is None else scale))
    return state_type(config)(*scalars, inner_state=None, master_weights=None)


def _is_loss(results: Any) -> bool:
    return _is_scalar(results[0] if isinstance(results, tuple) and len(results) == 2 else results)


def _is_scalar(part: Any) -> bool:
    return is_floating(part) and part.shape == ()


def _parts(results: Any) -> Sequence[Any]:
    """What stands by itself in what a step returns."""
    if isinstance(results, Mapping):
        return list(results.values())
    return results if isinstance(results, tuple | list) else [results]


def _floating(args: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each floating array in some arguments, in order."""
    found = jax.tree.leaves_with_path(args)
    return [(marks.name_of(path[1:]), leaf.shape) for path, leaf in found if is_floating(leaf)]
