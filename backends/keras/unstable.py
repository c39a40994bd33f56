"""Everything that polyamp uses of Keras, or of the framework below it, beyond its public interface.

Any release can change any of it without notice; the tests of this file's users then fail.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras.src.backend import AutocastScope
from keras.src.backend.common import stateless_scope

_TORCH_PARAMETERS = "_torch_params."  # comes before a path if Keras layers are torch modules


def layers_inside(layer: Any) -> list[Any]:
    """Return the layers directly inside a layer, as Keras' own trainers find them."""
    # ``layers`` is public only on models, but layers such as ``MultiHeadAttention`` also have inner layers.
    found: list[Any] = layer._flatten_layers(include_self=False, recursive=False)
    return found


def calls_in(model: Any) -> list[tuple[Any, list[Any]]]:
    """Return the calls of operations in a sequential or functional model, each with the makers of its inputs."""
    if isinstance(model, keras.Sequential):
        return list(zip(model.layers, [[], *([one] for one in model.layers)], strict=False))
    nodes = (node for _, nodes in sorted(model._nodes_by_depth.items(), reverse=True) for node in nodes)
    return [(node.operation, [tensor._keras_history.operation for tensor in node.input_tensors]) for node in nodes]


def is_preprocessing(layer: Any) -> bool:
    """Return whether a layer is one of Keras' preprocessing or augmentation layers, or of a subclass."""
    return any(kind.__module__.startswith("keras.src.layers.preprocessing.") for kind in type(layer).__mro__)


def marked(error: Exception) -> Exception:
    """Mark an error so that Keras raises it unchanged, and return it."""
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error


def autocast_variables(format_name: str) -> AbstractContextManager[Any]:
    """Return a context in which a layer reads its floating-point variables in this format."""
    context: AbstractContextManager[Any] = AutocastScope(format_name)
    return context


def in_stateless_scope() -> bool:
    """Return whether a ``keras.StatelessScope`` is open, as around the loss on JAX."""
    return bool(stateless_scope.in_stateless_scope())


def is_mapped(variable: Any) -> bool:
    """Return whether a ``keras.StatelessScope`` gives a variable another value here."""
    return in_stateless_scope() and stateless_scope.get_stateless_scope().get_current_value(variable) is not None


def added_weights(layer: Any) -> list[Any]:
    """Return the variables that layers made as not trainable, without frozen trainable ones and without seeds."""
    layers = {id(one): one for one in layer._flatten_layers()}
    found = (variable for one in layers.values() for variable in one._non_trainable_variables)
    return list({id(variable): variable for variable in found if "float" in str(variable.dtype)}.values())


def before_training(prepare: Callable[[Any], Callable[[Any], None] | None]) -> None:
    """Call a function with every model whose function for training is made from now on, as ``fit`` does at first.

    If ``prepare`` returns a function, this is called with the logs of every few calls of the function for training.
    """
    # Not at `compile`: Python looks that method up before the argument that imports this adapter is evaluated.
    owner = next(kind for kind in keras.Model.__mro__ if "make_train_function" in vars(kind))
    original = vars(owner)["make_train_function"]

    @functools.wraps(original)
    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.train_function is not None and not force:
            return original(self, force)
        look = prepare(self)
        result = original(self, force)
        if look is not None:
            self.train_function = _looked_at(self.train_function, look)
        return result

    owner.make_train_function = make_train_function


def before_testing(prepare: Callable[[Any], None]) -> None:
    """Call a function with every model whose function for ``evaluate`` is made from now on."""
    owner = next(kind for kind in keras.Model.__mro__ if "make_test_function" in vars(kind))
    original = vars(owner)["make_test_function"]

    @functools.wraps(original)
    def make_test_function(self: Any, force: bool = False) -> Any:
        if self.test_function is None or force:
            prepare(self)
        return original(self, force)

    owner.make_test_function = make_test_function


_EVERY = 16  # calls; a look waits for the device


def _looked_at(function: Callable[..., Any], look: Callable[[Any], None]) -> Callable[..., Any]:
    calls = itertools.count()

    def train_function(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if next(calls) % _EVERY == 0:
            look(result[0] if isinstance(result, tuple) else result)  # on JAX, the state comes after the logs
        return result

    return train_function


def built_on(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built on."""
    return list(optimizer._trainable_variables)


def index_in(optimizer: Any, variable: Any) -> int:
    """Return the position of a variable among those that an optimizer was built on."""
    index: int = optimizer._get_variable_index(variable)
    return index


def layout_of(variable: Any) -> Any:
    """Return how a variable is laid out over devices, which Keras also gives an optimizer's slots; None if not."""
    return getattr(variable, "_layout", None)


def update_variables(model: Any) -> None:
    """Make ``fit`` on JAX write its current values to the variables, as Keras does before callbacks that save."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def jax_trace(tracer: Any) -> Any:
    """Return the trace that a JAX tracer belongs to; no public name tells one trace from another."""
    return tracer._trace


def variable_path(name: str) -> str:
    """Return a variable's path in Keras from its name in Keras' backend."""
    return name.rpartition(_TORCH_PARAMETERS)[2]


def build_loss(model: Any, batch: Sequence[Any]) -> None:
    """Make a compiled model build its loss now, and not at its first step, which is inside a trace."""
    loss = getattr(model, "_compile_loss", None)
    if loss is not None and not loss.built and len(batch) > 1:
        loss.build(batch[1], model(batch[0], training=False))


def build_metrics_and_optimizer(model: Any, data: Any) -> None:
    """Make a compiled model build all that its step uses, as ``fit`` does before the first step."""
    if model.compiled:
        model._symbolic_build(data_batch=data)
