"""Capture a function as a graph: trace it as it is written, in float32.

The errors for functions that cannot be rewritten name the node and its source line.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import Places
from polyamp.backends.tensorflow.unstable import (
    OUT_OF_SCOPE,
    graphs_around,
    leave_unconverted,
    name_custom_gradients,
    remember_names,
)
from polyamp.errors import InvalidTypeError, UnsupportedError, UsageError, check_compute, kind_of
from polyamp.nesting import check_tree, too_deep

FUNCTION: Any = type(tf.function(lambda: None))
"""The class of a ``tf.function``."""


def name_of(fn: Any) -> str:
    """Return a function's name with the place where it was written, because many have the name ``<lambda>``."""
    plain = inspect.unwrap(getattr(fn, "python_function", fn))
    name, code = getattr(plain, "__name__", "function"), getattr(plain, "__code__", None)
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else name


def concrete_of(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return ``fn`` traced for these arguments, as it is written."""
    leave_unconverted()
    remember_names()
    name_custom_gradients()
    function = fn if isinstance(fn, FUNCTION) else tf.function(fn)
    with tracing(fn):
        concrete = function.get_concrete_function(*args, **kwargs)
    check_captures(fn, concrete)
    return concrete


@contextmanager
def walking(fn: Any, *arguments: Any) -> Iterator[None]:
    """Refuse arguments with too many paths to their tensors: TensorFlow walks along each, and would not finish."""
    where = f"the arguments of {getattr(fn, '__name__', 'a function')}"  # every call comes here: to find a line is slow
    check_tree(arguments, where)
    try:
        yield
    except RecursionError as error:
        raise too_deep(where) from error


_INSTEAD = {
    "tensorfloat32": "it is a way to multiply float32: tf.config.experimental.enable_tensor_float_32_execution(True)"
}
POLICY_ATTRIBUTE = "_polyamp_policy"  # of nodes that a rewrite added or changed
_GRADIENT = "PolyampRewritten"


def check_format(compute: str) -> None:
    """Raise if TensorFlow's kernels do not have a compute format."""
    check_compute(compute, framework="TensorFlow", where="policy.compute", instead=_INSTEAD)


def check_graph(graph_def: Any) -> None:
    """Raise unless this is a ``GraphDef`` that was not rewritten before."""
    if not isinstance(graph_def, tf.compat.v1.GraphDef):
        raise _neither(graph_def)
    ours = next((node for node in graph_def.node if POLICY_ATTRIBUTE in node.attr), None)
    if ours is not None:
        raise rewritten_before(f"node {ours.name}", ours.attr[POLICY_ATTRIBUTE].s.decode())


def check_function(fn: Any) -> None:
    """Raise if ``fn`` is not callable."""
    if not callable(fn):
        raise _neither(fn)


def _neither(thing: Any) -> InvalidTypeError:
    return InvalidTypeError(
        "rewrite needs a function or a graph",
        where="rewrite(fn)",
        found=kind_of(thing),
        allowed="a function, a tf.function, a ConcreteFunction or, for polyamp.rewrite, a GraphDef",
        fix="pass the function itself, then its arguments; for a tf.Graph, pass graph.as_graph_def()",
    )


def rewritten_before(name: str, policy: str) -> UsageError:
    """Return the error for a graph with a function that was rewritten under another policy."""
    return UsageError(
        "this function or graph was rewritten already",
        where=name,
        found=f"rewritten for {policy}",
        fix="rewrite the original function, or use the same policy",
    )


@contextmanager
def tracing(fn: Any) -> Iterator[None]:
    """Replace TensorFlow's tracing errors by errors that name the remedy."""
    try:
        yield
    except OUT_OF_SCOPE as error:
        raise _refused(fn, _FOREIGN, error, _PASS_TENSOR) from error
    except TypeError as error:
        if "Operation" not in str(error):
            raise
        fix = "return tensors or None; a tf.function runs operations with effects by itself"
        raise _refused(fn, "it returns an operation", error, fix) from error
    except ValueError as error:
        if "singleton tf.Variable" not in str(error):
            raise
        fix = "make variables, layers and optimizers once, outside of the function"
        raise _refused(fn, "each call makes new variables", error, fix) from error
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise _refused(fn, "it runs in a replica", error, "rewrite the function that calls strategy.run") from error


def check_captures(fn: Any, concrete: Any) -> None:
    """Raise if a function captured a tensor of a graph that is not being built around it."""
    around = graphs_around()
    symbolic = (tensor for tensor in concrete.captured_inputs if tf.is_symbolic_tensor(tensor))
    foreign = next((tensor for tensor in symbolic if tensor.graph not in around), None)
    if foreign is not None:
        raise _refused(fn, _FOREIGN, Places(foreign.graph).of(foreign.op.name, foreign.op.name), _PASS_TENSOR)


_FOREIGN = "it takes a tensor of another graph"
_PASS_TENSOR = "pass that tensor as an argument"


def _refused(fn: Any, why: str, error: object, fix: str) -> UsageError:
    return UsageError(
        f"the function cannot be traced: {why}",
        where=f"rewrite({getattr(fn, '__name__', fn)})",
        found=str(error).strip(),
        fix=fix,
    )


@contextmanager
def not_differentiable() -> Iterator[None]:
    """Make calls inside this context raise if a gradient is taken through them."""
    calls = ("PartitionedCall", "StatefulPartitionedCall")
    with tf.compat.v1.get_default_graph().gradient_override_map(dict.fromkeys(calls, _GRADIENT)):
        yield


def _refuse_gradient(operation: Any, *inputs: Any) -> Any:
    if operation is not None:
        raise UnsupportedError(_NO_GRADIENT, where=operation.name, fix=_REWRITE_STEP)
    # A SavedModel stores the gradients of its operations: there this is traced, and raises when it runs.
    with tf.control_dependencies([tf.debugging.Assert(False, [f"{_NO_GRADIENT}: {_REWRITE_STEP}"])]):
        return list(map(tf.identity, inputs))


_NO_GRADIENT = "gradients cannot be taken through a rewritten function"
_REWRITE_STEP = (
    "rewrite the whole step, with its tf.GradientTape; if no gradient is needed, call it inside tape.stop_recording()"
)
tf.RegisterGradient(_GRADIENT)(tf.autograph.experimental.do_not_convert(_refuse_gradient))
