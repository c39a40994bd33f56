"""The JAX adapter: a table from each verb of `polyamp` to its function."""

import numpy as np

from polyamp.adapters import AdapterTable
from polyamp.backends.jax import unstable
from polyamp.backends.jax.casting import cast
from polyamp.backends.jax.devices import describe
from polyamp.backends.jax.graphs.rewrite import autocast, planned, rewritten_for
from polyamp.backends.jax.operations import OPERATIONS
from polyamp.backends.jax.state import holds_state, load_loss_scale, loss_scale_of
from polyamp.backends.jax.value_and_grad import scale_loss, value_and_grad


def owns(obj: object) -> bool:
    """Return whether ``obj`` is a pytree node that someone registered with JAX, or a NumPy array, which JAX takes."""
    known = obj is None or isinstance(obj, dict | list | tuple)
    return isinstance(obj, np.ndarray | np.generic) or not (known or unstable.children_of(obj) is None)


adapter = AdapterTable(
    "jax",
    OPERATIONS,
    owns=owns,
    verbs={
        "describe": describe,
        "least_over_ranks": "polyamp.backends.jax.devices:least_over_ranks",
        "trial": "polyamp.backends.jax.selftest:trial",
        "cast": cast,
        "wrap_optimizer": "polyamp.backends.jax.transformation:wrap_optimizer",
        "scale_loss": scale_loss,
        "loss_scale_of": loss_scale_of,
        "holds_loss_scale": holds_state,
        "load_loss_scale": load_loss_scale,
        "value_and_grad": value_and_grad,
        "autocast_function": autocast,
        "rewrite": rewritten_for,
        "explain": planned,
        "record": "polyamp.backends.jax.recording.record:record",
        "holder": "polyamp.backends.jax.recording.holder:holder",
        "profiler": "polyamp.backends.jax.profiling:profiler",
    },
)
