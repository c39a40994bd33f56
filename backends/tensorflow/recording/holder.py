"""What `polyamp.lint` judges in addition to a plan: the optimizer of a step, and its 16-bit variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.capture import concrete_of, walking
from polyamp.backends.tensorflow.recording.step import name_of, plain_function
from polyamp.backends.tensorflow.scaler import SCALE, LossScaler
from polyamp.diagnosis.lint import Holder, Kind, takes
from polyamp.policies import Policy


def holder(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Holder:
    """Return what lint judges in addition to a plan; see `polyamp.interface.Adapter.holder`."""
    variables = list(getattr(target, "trainable_variables", ()))
    if takes(target, args, kwargs):
        with walking(target, args, kwargs):
            variables += concrete_of(plain_function(target), args, kwargs).graph.variables
    scaler, low = getattr(optimizer, "scaler", optimizer), (tf.float16, tf.bfloat16)
    names = dict.fromkeys(name_of(one) for one in variables if one.trainable and tf.as_dtype(one.dtype) in low)
    has_masters = isinstance(scaler, LossScaler) and scaler.has_masters
    return Holder("tensorflow", _kind_of(optimizer, variables), tuple(names), has_masters)


def _kind_of(optimizer: Any, variables: Sequence[Any]) -> Kind:
    """Return the kind of an optimizer, or of the scaling in a step's own variables."""
    names = {variable.name.rpartition("/")[2].partition(":")[0] for variable in variables}
    kinds = type(optimizer).__mro__
    if "overflow_scale" in names or any(kind.__module__.startswith("polyamp.") for kind in kinds):
        return "wrapped"  # only polyamp's loss scale has that variable
    if SCALE in names or any("LossScaleOptimizer" in kind.__name__ for kind in kinds):
        return "native scaler"
    return "plain" if optimizer is not None else ""
