"""`record`: one training step, run up to its update, with everything in it counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.capture import check_format, check_function
from polyamp.backends.tensorflow.graphs.program import decided_for
from polyamp.backends.tensorflow.recording.replay import Replay
from polyamp.backends.tensorflow.recording.step import traced
from polyamp.backends.tensorflow.scaler import SCALE
from polyamp.backends.tensorflow.unstable import flat_inputs
from polyamp.diagnosis.recording import Recording
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
    decisions = decided_for(concrete, policy, fuses=False)
    variables = concrete.graph.variables
    own = _scale_of(variables) if differentiates else None
    used = float(scale) if scale is not None else 1.0 if own is None else float(own)
    scaled = (tf.constant(used, tf.float32), args, dict(kwargs))
    inputs = flat_inputs(concrete, *((args, kwargs) if differentiates else (scaled, {})))
    replay = Replay(taken, widened=widened)
    with _restored(variables):
        if own is not None:
            own.assign(used)
        found = replay.step(decisions, inputs)
    loss = None if found is None else float(found) / (used if differentiates else 1.0)
    return Recording("tensorflow", str(policy), loss, used, tuple(replay.observations()), differentiates)


def _scale_of(variables: Sequence[Any]) -> Any:
    """Return the variable that holds the loss scale; None if there is none."""
    names = ((variable, variable.name.rpartition("/")[2].partition(":")[0]) for variable in variables)
    found = (variable for variable, name in names if name == SCALE and not variable.trainable)
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
