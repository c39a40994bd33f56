"""`record`: one training step, run up to its update, with everything in it counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.capture import check_format, check_function
from polyamp.backends.tensorflow.graphs.program import decided_for
from polyamp.backends.tensorflow.recording.replay import Replay
from polyamp.backends.tensorflow.recording.values import recorded, traced
from polyamp.backends.tensorflow.scaler import SCALES
from polyamp.backends.tensorflow.unstable import flat_inputs
from polyamp.diagnosis.recording import Observation, Recording
from polyamp.policies import Policy


def record(
    step: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    widened: bool,
    scale: float | None = None,
) -> Recording:
    """Run one step up to its update and count every tensor; variables have their old values afterwards."""
    check_format(policy.compute)
    check_function(step)
    concrete, differentiates, taken = traced(step, args, kwargs)
    outer, subjects = recorded(decided_for(concrete, policy, fuses=False), taken)
    # A function that creates variables is traced twice: nothing of the first trace is left.
    losses = [value for one in taken if (value := outer.value_of(one.loss)) is not None][:1]
    variables = concrete.graph.variables
    own = _scale_of(variables) if differentiates else None
    used = float(scale) if scale is not None else 1.0 if own is None else float(own)
    scaled = (tf.constant(used, tf.float32), args, dict(kwargs))
    inputs = flat_inputs(concrete, *((args, kwargs) if differentiates else (scaled, {})))
    replay = Replay(widened=widened)
    with _restored(variables):
        if own is not None:
            own.assign(used)
        results = replay.step(outer, inputs, losses)
    observed = [
        Observation(*subject, *replay.counted[place]) for place, subject in subjects.items() if place in replay.counted
    ]
    loss = float(results[0]) / (used if differentiates else 1.0) if results else None
    return Recording("tensorflow", str(policy), loss, used, tuple(observed), differentiates)


def _scale_of(variables: Sequence[Any]) -> Any:
    """Return the variable that holds the loss scale; None if there is none."""
    names = ((variable, variable.name.rpartition("/")[2].partition(":")[0]) for variable in variables)
    found = (variable for variable, name in names if name in SCALES and not variable.trainable)
    return next((one for one in found if one.shape == () and one.dtype == tf.float32), None)


@contextmanager
def _restored(variables: Sequence[Any]) -> Iterator[None]:
    """Restore the values of variables at the end."""
    before = [(variable, tf.identity(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
