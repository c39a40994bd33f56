"""Intercept TensorFlow's functions, so that they ask for the current lowering.

Each generated function that may be lowered, such as ``gen_math_ops.mat_mul``, is replaced once and for all by one that
asks for the current lowering. So do the places where TensorFlow traces functions and takes gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow import unstable
from polyamp.backends.tensorflow.autocast.lowering import Lowering, Operation, current, entered, names_operation
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.operations import OPERATIONS as TABLE
from polyamp.rules import Rule

_STRUCTURE = {"tensor_list", "loop_edge", "save"}  # the type of the values that they hold is declared elsewhere


def lowering_for(compute: str, rules: tuple[Rule, ...]) -> Lowering:
    """Return the one lowering of all policies with this format and these rules, and intercept what it may lower."""
    with _replacing:
        return _lowering(compute, rules)


@functools.cache
def intercept() -> None:
    """Make TensorFlow ask for the current lowering when it traces functions and when it takes gradients."""

    def traced_for() -> Any:
        lowering = current()
        return None if lowering is None else lowering.key()

    def backward() -> AbstractContextManager[None]:
        """Return a context without autocast: a gradient already has the formats of its forward operation."""
        return nullcontext() if current() is None else entered(None)

    unstable.remember_names()
    unstable.intercept_traces(traced_for)
    unstable.intercept_gradients(backward, lambda: functools.partial(_own_gradient, current(), unstable.scope_path()))


@contextmanager
def _own_gradient(lowering: Lowering | None, scope: str) -> Iterator[None]:
    """Return a context for the custom gradient of a function: the function's lowering, in a scope of gradients."""
    name = "/".join(filter(None, ("gradient_tape", scope)))
    with entered(lowering), nullcontext() if tf.executing_eagerly() else tf.name_scope(f"{name}/"):
        yield


def _replace(natives: Iterable[str]) -> None:
    """Replace operations by versions that check for autocast. They stay replaced, which costs little."""
    replaced = {}
    for native in set(natives) - _replaced:
        _replaced.add(native)
        functions, parameters = unstable.generated_functions(native)
        for function, positional in zip(functions, (True, False), strict=False):
            replaced[function] = _looking(Operation(native, function, parameters, positional))
    unstable.replace_functions(replaced)


_replaced: set[str] = set()
_replacing = Lock()


def _looking(operation: Operation) -> Callable[..., Any]:
    original = operation.original

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        lowering = current()
        return original(*args, **kwargs) if lowering is None else lowering.run(operation, args, kwargs)

    return run


@functools.cache
def _lowering(compute: str, rules: tuple[Rule, ...]) -> Lowering:
    """Make the lowering, once: policies that share it also share traces."""
    intercept()
    wanted = _may_lower(rules) - _STRUCTURE
    _replace(native for native, canonical in OPERATIONS.items() if canonical in wanted)
    return Lowering(compute, rules)


def _may_lower(rules: tuple[Rule, ...]) -> set[str]:
    """Return the canonical operations that may be ``lower`` somewhere, by the table or by rules."""
    raising = [rule for rule in rules if rule.op_class == "lower"]
    anywhere = not all(map(names_operation, raising))
    return {
        name
        for name, entry in TABLE.items()
        if entry.op_class == "lower"
        or (entry.op_class != "keep" and (anywhere or any(rule.matches(name) for rule in raising)))
    }
