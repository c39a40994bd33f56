"""The step of a recording: one traced program, differentiated by its author or here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.autocast.function import run_autocasted
from polyamp.backends.jax.dtypes import is_array, is_floating
from polyamp.backends.jax.graphs.program import Program
from polyamp.backends.jax.modules import as_pure
from polyamp.backends.jax.steps import marks
from polyamp.backends.jax.steps.finding import find_state
from polyamp.backends.jax.steps.state import holds_state, initial_scalars, state_type
from polyamp.backends.jax.steps.value_and_grad import unreported
from polyamp.loss_scale import LossScale
from polyamp.policies import Policy

Function = Callable[..., Any]


class TracedStep(NamedTuple):
    """A training step as one traced program."""

    closed: Any  # the jaxpr
    differentiates: bool  # whether the step has its own backward pass. Else it got one here, if it returns a loss
    adds_scale: bool  # whether the state of a wrapped optimizer was put before its arguments
    scale_index: int | None  # index of the loss scale in the jaxpr's arguments; None if it is not among them
    loss_index: int | None  # index of the unscaled loss in its results; None if it is not among them
    parameters: tuple[tuple[str, tuple[int, ...]], ...]  # name and shape of each floating-point argument
    is_pure: bool  # whether no flax NNX module is among its arguments

    def arrays(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the jaxpr's arguments for another call of a pure step."""
        given = ((_holder(), *args) if self.adds_scale else args, dict(kwargs))
        return [leaf for leaf in jax.tree.leaves(given) if is_array(leaf)]

    def scaled(self, arrays: list[Any], scale: float | None) -> tuple[list[Any], float]:
        """Return the jaxpr's arguments with the given loss scale, and the scale in use."""
        if self.scale_index is None:
            return arrays, 1.0 if scale is None else float(scale)
        before, own, after = arrays[: self.scale_index], arrays[self.scale_index], arrays[self.scale_index + 1 :]
        own = own if scale is None else jnp.full_like(own, scale)
        return [*before, own, *after], float(np.asarray(own).flat[0])  # the first copy, if it is replicated


def traced(
    step: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy
) -> tuple[TracedStep, list[Any]]:
    """Return a step, and the arguments of its jaxpr in this call."""
    # A step with its own backward pass runs as it was written. A function that returns the loss, or ``(loss, aux)``, is
    # differentiated by its first argument, under the policy. Any other function runs under the policy.
    given = dict(kwargs)
    with policy:
        trace = _Trace(step, args, given)
        differentiates = unstable.has_backward(trace.program.closed)
        adds_scale = not differentiates and _is_loss(trace.results)
        if adds_scale:
            args = (_holder(), *args)
            trace = _Trace(_differentiated(step, policy, has_aux=isinstance(trace.results, tuple)), args, given)
        elif not differentiates:
            trace = _Trace(step, args, given, policy)
    closed, arrays = trace.program.closed, trace.program.arrays
    index = _scale_index(arrays, (args, given))
    return TracedStep(
        closed, differentiates, adds_scale, index, trace.loss_index, _floating(args), trace.is_pure
    ), arrays


class _Trace:
    """A traced call, under a policy if one is given."""

    def __init__(
        self, fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy | None = None
    ) -> None:
        pure, own_args, own_kwargs, *_ = as_pure(fn, args, kwargs)

        def under_policy(args: Any, kwargs: Any) -> Any:
            if policy is None:
                return pure(*args, **kwargs)
            return run_autocasted(lambda *own: pure(*own, **kwargs), policy, *args)

        self.program = Program(under_policy, (own_args, own_kwargs), {})
        outputs = unstable.specs_of_results(self.program.closed)
        results = self.program.results(outputs)
        self.is_pure = pure is fn
        self.results = results if self.is_pure else results[0]
        loss = _loss_in(self.results)
        self.loss_index = next((index for index, spec in enumerate(outputs) if spec is loss), None)


def _differentiated(fn: Function, policy: Policy, *, has_aux: bool) -> Function:
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        loss, grads = unreported(fn, policy, has_aux)(*args, **kwargs)
        return {"loss": loss[0] if has_aux else loss, "gradients": [marks.gradients(grads)]}

    return differentiated


def _holder() -> Any:
    """Return an optimizer state from which `value_and_grad` reads the loss scale 1."""
    settings = LossScale.fixed(1.0)
    return state_type(settings, False)(*initial_scalars(settings), inner_state=None, master_weights=None)


def _scale_index(arrays: Sequence[Any], holder: Any) -> int | None:
    if not holds_state(holder):
        return None
    scale = find_state(holder).scalars.scale
    return next((index for index, array in enumerate(arrays) if array is scale), None)


def _is_loss(results: Any) -> bool:
    return _is_scalar(results[0] if isinstance(results, tuple) and len(results) == 2 else results)


def _is_scalar(part: Any) -> bool:
    return is_floating(part) and part.shape == ()


def _loss_in(results: Any) -> Any:
    """Return the only floating-point scalar at the top level of a step's results, else the only one named loss."""
    scalars = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(results) if _is_scalar(leaf)]
    alone = [leaf for path, leaf in scalars if len(path) <= 1]
    called = [leaf for path, leaf in scalars if marks.name_of(path).endswith("loss")]
    return next((found[0] for found in (alone, called) if len(found) == 1), None)


def _floating(args: tuple[Any, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found = jax.tree.leaves_with_path(args)
    return tuple((marks.name_of(path[1:]), leaf.shape) for path, leaf in found if is_floating(leaf))
