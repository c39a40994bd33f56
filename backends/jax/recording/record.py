"""The function `record`, which traces a step and returns a `polyamp.diagnosis.recording.Recording`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from polyamp.backends.jax import gradients, unstable
from polyamp.backends.jax.casting import is_floating, name_of
from polyamp.backends.jax.graphs.capture import Program, walk
from polyamp.backends.jax.graphs.rewrite import run_rewritten
from polyamp.backends.jax.modules import as_pure
from polyamp.backends.jax.recording.counting import Sample, spread_of
from polyamp.backends.jax.recording.replay import Replay
from polyamp.backends.jax.recording.values import Place, Record, sampled, samples_of, with_samples
from polyamp.backends.jax.state import initial_scalars, state_type, states_in
from polyamp.backends.jax.value_and_grad import differentiate
from polyamp.diagnosis.recording import ACTIVATION, PARAMETER, Observation, Recording
from polyamp.policies import Policy
from polyamp.settings import LossScale


def record(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    widened: bool,
    scale: float | None = None,
) -> Recording:
    """Record every tensor of one step; see `polyamp.interface.Adapter.record`."""
    # The step is traced and evaluated once more, inside one ``jax.jit``; only samples are kept. A program that equals
    # one of the last eight is not compiled again.
    traced, arrays, constants = _traced_step(step, args, kwargs, policy)
    arrays, own_scale = traced.scaled(arrays, scale)
    run = _compiled(traced, policy, widened)
    samples, loss = jax.device_get(run.samples(arrays, constants))
    own_loss = None if loss is None else float(loss)
    observations = tuple(
        Observation(one.kind, *one.origin[:-1], one.shape, spread)
        for one in run.records
        if (spread := spread_of(samples[one.sample], one.member, math.prod(one.shape))) is not None
    )
    return Recording("jax", str(policy), own_loss, own_scale, observations, traced.differentiates)


@dataclass(frozen=True)
class _TracedStep:
    """A training step as one traced program; steps that compute the same are equal."""

    jaxpr: Any = field(compare=False)
    text: str  # the fingerprint of the jaxpr
    differentiates: bool  # whether the step has its own backward pass. Else it got one here, if it returns a loss
    scale_index: int | None  # index of the loss scale in the jaxpr's arguments; None if it is not among them
    loss_index: int | None  # index of the unscaled loss in its results; None if it is not among them
    parameters: tuple[tuple[str, tuple[int, ...]], ...]  # name and shape of each floating-point argument

    def scaled(self, arrays: list[Any], scale: float | None) -> tuple[list[Any], float]:
        """Return the jaxpr's arguments with the given loss scale, and the scale in use."""
        if self.scale_index is None:
            return arrays, 1.0 if scale is None else float(scale)
        before, own, after = arrays[: self.scale_index], arrays[self.scale_index], arrays[self.scale_index + 1 :]
        own = own if scale is None else jax.device_put(np.full(own.shape, scale, own.dtype), own.sharding)
        return [*before, own, *after], float(np.asarray(own).flat[0])  # the first copy, if it is replicated


class _Run:
    """A step compiled together with its samples."""

    def __init__(self, step: _TracedStep, policy: Policy, widened: bool) -> None:
        self.records: list[Record] = []
        self._step, self._policy, self._widened = step, policy, widened
        self.samples = jax.jit(self._evaluated, compiler_options=unstable.quick_options())

    def _evaluated(self, arrays: Sequence[Any], constants: Sequence[Any]) -> tuple[list[Sample], Any]:
        step, replay = self._step, Replay(self._policy, widened=self._widened)
        inputs = enumerate(zip(arrays, step.jaxpr.invars, strict=True))
        values = [replay.given(array, var, scaled=index == step.scale_index) for index, (array, var) in inputs]
        outputs = replay.run(step.jaxpr, values, Place(), constants=constants)
        replay.leave(outputs, Place())
        records = sampled(_chosen(replay.records, step.parameters))
        samples = samples_of(records)
        self.records = with_samples(records, range(len(samples)))
        loss = None if step.loss_index is None else outputs[step.loss_index].array
        return samples, loss


_compiled = functools.lru_cache(maxsize=8)(_Run)


def _chosen(records: Sequence[Record], parameters: Sequence[tuple[str, tuple[int, ...]]]) -> list[Record]:
    """Return the records in the order of a recording, each tensor once."""
    gradients = [record for record in records if record.kind == PARAMETER]
    named = [record for record in gradients if record.named]
    own = named or _matched(gradients, parameters)
    replaced = {record.replaces for record in own}
    others = [record for record in records if record.kind != PARAMETER and record.origin.number not in replaced]
    if any(record.scaled for record in others):  # those that are not scaled belong to the forward pass, recomputed
        others = [record if record.scaled else record._replace(kind=ACTIVATION) for record in others]
    return [*others, *own]


def _matched(gradients: Sequence[Record], parameters: Sequence[tuple[str, tuple[int, ...]]]) -> list[Record]:
    """Return gradients with names: of consecutive parameters of the same shapes, else of those of unique shape."""
    shapes, wanted = [shape for _, shape in parameters], [record.shape for record in gradients]
    starts = range(len(shapes) - len(wanted) + 1)
    first = next((start for start in starts if shapes[start : start + len(wanted)] == wanted), None)
    if first is None:
        known = {shape: name for name, shape in parameters if shapes.count(shape) == 1}
        names = [known.get(shape, f"gradient {index}") for index, shape in enumerate(wanted)]
    else:
        names = [name for name, _ in parameters[first : first + len(wanted)]]
    return [
        record._replace(origin=record.origin._replace(name=name)) for record, name in zip(gradients, names, strict=True)
    ]


def _traced_step(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy
) -> tuple[_TracedStep, list[Any], Sequence[Any]]:
    """Return a step, and the arguments and constants of its jaxpr in this call."""
    # A step with its own backward pass runs as it was written. A function that returns the loss, or ``(loss, aux)``, is
    # differentiated by its first argument, under the policy. Any other function runs under the policy.
    given = dict(kwargs)
    with policy:
        program, results, loss_index = _trace(step, args, given)
        differentiates = any(equation.is_backward for equation in walk(program.closed))
        has_aux = isinstance(results, tuple) and len(results) == 2
        if not differentiates and _is_scalar(results[0] if has_aux else results):
            one = LossScale.fixed(1.0)
            args = (state_type(one, policy)(*initial_scalars(one), inner_state=None, master_weights=None), *args)
            program, _, loss_index = _trace(_differentiated(step, policy, has_aux=has_aux), args, given)
        elif not differentiates:
            program, _, loss_index = _trace(step, args, given, policy)
    (jaxpr, constants), arrays = unstable.opened(program.closed), program.arrays
    own = [state.scalars.scale for state in states_in((args, given))]
    index = next((place for place, array in enumerate(arrays) if any(array is one for one in own)), None)
    found = jax.tree.leaves_with_path(args)
    floating = tuple((name_of(path[1:]), leaf.shape) for path, leaf in found if is_floating(leaf))
    text = unstable.fingerprint(jaxpr)
    return _TracedStep(jaxpr, text, differentiates, index, loss_index, floating), arrays, constants


def _trace(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy | None = None
) -> tuple[Program, Any, int | None]:
    """Trace a call, under a policy if given; return the program, its results, and the index of the loss in them."""
    call = as_pure(fn, args, kwargs)

    def under_policy(*args: Any, **kwargs: Any) -> Any:
        return run_rewritten(call.fn, policy, args, kwargs, name=None)

    program = Program(call.fn if policy is None else under_policy, *call[1:4])
    outputs = unstable.specs_of_results(program.closed)
    results = program.results(outputs) if call.fn is fn else program.results(outputs)[0]
    loss = _loss_in(results)
    return program, results, next((index for index, spec in enumerate(outputs) if spec is loss), None)


def _differentiated(fn: Callable[..., Any], policy: Policy, *, has_aux: bool) -> Callable[..., Any]:
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        loss, grads = differentiate(fn, policy, has_aux)(*args, **kwargs)
        return {"loss": loss[0] if has_aux else loss, "gradients": [gradients.marked_gradients(grads)]}

    return differentiated


def _is_scalar(part: Any) -> bool:
    return is_floating(part) and part.shape == ()


def _loss_in(results: Any) -> Any:
    """Return the only floating-point scalar at the top level of a step's results, else the only one named loss."""
    scalars = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(results) if _is_scalar(leaf)]
    alone = [leaf for path, leaf in scalars if len(path) <= 1]
    called = [leaf for path, leaf in scalars if name_of(path).endswith("loss")]
    return next((found[0] for found in (alone, called) if len(found) == 1), None)
