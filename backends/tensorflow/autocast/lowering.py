"""A policy's effect on single operations, and the lowering that applies here and now.

For example, the lowering of mixed_bfloat16 runs ``gen_math_ops.mat_mul(x, w)`` as follows: it binds the arguments to
their names, finds that the type attribute ``T`` has a kernel for bfloat16, calls the original function with ``x`` and
``w`` in bfloat16, and casts the result to float32.

TensorFlow's functions are intercepted: each generated function that may be lowered, such as ``gen_math_ops.mat_mul``,
is replaced once and for all by one that asks for the current lowering. So do the places where TensorFlow traces
functions and takes gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from threading import Lock
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow import unstable
from polyamp.backends.tensorflow.autocast.promotion import run_promoted
from polyamp.backends.tensorflow.devices import device_type, lowerable_types, report_slow
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, UPDATE_SCOPE
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import Parameter
from polyamp.flow import decide
from polyamp.operations import OPERATIONS as TABLE
from polyamp.rules import Rule
from polyamp.without_effect import report_nothing_lowered, report_unused

_REMEMBERED = 4096  # most decisions to keep: every trace has new names of scopes


class Lowering:
    """A compute format and rules, with a record of their effect in this process."""

    def __init__(self, compute: str, rules: tuple[Rule, ...]) -> None:
        self.compute, self.rules = compute, rules
        self.dtype = tf.as_dtype(compute)
        self.lowered = False
        self.observer: Callable[[Operation, bool], None] | None = None
        self._kept: dict[str, str] = {}
        self._told = set[tuple[str, str]]()
        self._decided: dict[tuple[str, str], str] = {}
        # A rule for an operation that does not occur is fine; a path that does not occur may be a mistake.
        self._unused = [rule for rule in rules if not any(map(rule.matches, TABLE))]

    def run(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with these arguments, in 16 bits if the policy lowers it, and return its results."""
        inputs = operation.bound(args, kwargs) if self._lowers(operation.canonical) else None
        low = () if inputs is None else self._attributes(operation, inputs)
        if inputs is not None and self.observer is not None:
            self.observer(operation, bool(low))
        if inputs is None or not low:
            return operation.original(*args, **kwargs)
        self.lowered = True
        for name, (attribute, is_list) in operation.inputs.items():
            if attribute in low and name in inputs:
                inputs[name] = [self._down(one) for one in inputs[name]] if is_list else self._down(inputs[name])
        results = operation.original(**inputs)
        return self._up(results) if tf.is_tensor(results) else tf.nest.map_structure(self._up, results)

    def key(self) -> tuple[Lowering, str]:
        """Return the key of a trace: functions are traced again for another key."""
        return self, unstable.scope_path() if self.rules else ""

    def report(self) -> None:
        """Warn once about everything that had no effect."""
        if not self.lowered:
            why = "; ".join(self._kept.values()) or "it saw no float32 operation of class lower, such as a matmul"
            remedy = (
                "It sees eager code and functions that are traced inside it. Enter it inside the function that "
                "MirroredStrategy runs, or pass the whole step to polyamp.rewrite."
            )
            report_nothing_lowered("autocast", self.compute, where="TensorFlow", why=why, remedy=remedy)
            return
        paths = "a name scope or layer with a product"
        report_unused(self._unused, where=f"autocast to {self.compute}", paths=paths)

    def _lowers(self, canonical: str) -> bool:
        path = unstable.scope_path()
        key = (canonical, path if self.rules else "")
        if key not in self._decided:
            if len(self._decided) > _REMEMBERED:
                self._decided.clear()
            self._decided[key] = decide(self.rules, *key).op_class
            self._unused = [rule for rule in self._unused if not rule.matches(*key)]
        return self._decided[key] == "lower" and UPDATE_SCOPE not in path

    def _attributes(self, operation: Operation, inputs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the type attributes that change to the compute format."""
        types = operation.types(inputs)
        if FLOAT32 not in types.values():
            return ()
        device = device_type(unstable.current_device())
        found = lowerable_types(operation.native, device, tuple(sorted(types.items())), self.dtype.as_datatype_enum)
        if not found:
            self._kept[operation.native] = f"there is no {self.compute} kernel for {operation.native} on {device}"
        elif (operation.canonical, device) not in self._told:
            self._told.add((operation.canonical, device))
            report_slow(operation.canonical, self.compute, device)
        return found

    def _down(self, value: Any) -> tf.Tensor:
        # This takes half the time of tf.cast.
        return tf.raw_ops.Cast(x=tf.convert_to_tensor(value, tf.float32), DstT=self.dtype)

    def _up(self, value: Any) -> Any:
        return tf.raw_ops.Cast(x=value, DstT=tf.float32) if getattr(value, "dtype", None) == self.dtype else value


class Operation:
    """One of TensorFlow's generated functions."""

    def __init__(
        self, native: str, original: Callable[..., Any], parameters: Mapping[str, Parameter], positional: bool
    ) -> None:
        self.native, self.original = native, original
        self.canonical = OPERATIONS[native]
        self._positional = tuple(parameters) if positional else ()
        self.inputs = {name: parameter for name, parameter in parameters.items() if parameter.attribute}

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return arguments by name; None if they do not fit, and then TensorFlow raises its own error."""
        named = {**dict(zip(self._positional, args, strict=False)), **kwargs}
        return named if len(named) == len(args) + len(kwargs) else None

    def types(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """Return the type attributes that follow from the inputs; an attribute is left out if inputs disagree."""
        found: dict[str, set[int]] = {}
        for name, (attribute, is_list) in self.inputs.items():
            value: Any = inputs.get(name)
            found.setdefault(attribute, set()).update(map(_type, value if is_list else [value]))
        for kinds in found.values():
            kinds.discard(0)
        return {attribute: kinds.pop() for attribute, kinds in found.items() if len(kinds) == 1}


def _type(value: Any) -> int:
    """Return a value's number in TensorFlow's ``DataType``; 0 if it adopts the type of the other operands."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices):
        return tf.variant.as_datatype_enum  # TensorFlow takes these apart
    return 0 if dtype is None else tf.as_dtype(dtype).base_dtype.as_datatype_enum


@contextmanager
def entered(lowering: Lowering | None) -> Iterator[None]:
    """Use a lowering, or none, in this thread or async task inside the context."""
    outer = _entered.get()
    _entered.set((*outer, lowering))
    try:
        yield
    finally:
        _entered.set(outer)


def set_everywhere(lowering: Lowering | None) -> None:
    """Use a lowering, or none, outside all contexts, in every thread, from now on."""
    global _everywhere
    _everywhere = lowering


def everywhere() -> Lowering | None:
    """Return the lowering that applies outside all contexts."""
    return _everywhere


def current() -> Lowering | None:
    """Return the lowering that applies here and now."""
    stack = _entered.get()
    return stack[-1] if stack else _everywhere


_entered: ContextVar[tuple[Lowering | None, ...]] = ContextVar("polyamp_tensorflow_autocast", default=())
_everywhere: Lowering | None = None


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
        if lowering is not None:
            return lowering.run(operation, args, kwargs)
        return run_promoted(original, args, kwargs) if _promotes.get() else original(*args, **kwargs)

    return run


@contextmanager
def promoting() -> Iterator[None]:
    """Promote float32 with 16 bits inside the context, where no lowering applies; see `run_promoted`."""
    _intercept_all()
    token = _promotes.set(True)
    try:
        yield
    finally:
        _promotes.reset(token)


_promotes: ContextVar[bool] = ContextVar("polyamp_tensorflow_promotes", default=False)


@functools.cache
def _intercept_all() -> None:
    """Replace all operations, and the division that compares types before it makes one."""

    def divide(*args: Any, **kwargs: Any) -> Any:
        return run_promoted(original, args, kwargs) if _promotes.get() else original(*args, **kwargs)

    original = unstable.true_division()
    with _replacing:
        _replace(OPERATIONS)
        unstable.replace_functions({original: divide})


@functools.cache
def _lowering(compute: str, rules: tuple[Rule, ...]) -> Lowering:
    """Make the lowering, once: policies that share it also share traces."""
    intercept()
    raises = any(rule.op_class == "lower" for rule in rules)
    may = {"lower"} if not raises else {entry.op_class for entry in TABLE.values()} - {"keep"}
    wanted = {name for name, entry in TABLE.items() if entry.op_class in may} - _STRUCTURE
    _replace(native for native, canonical in OPERATIONS.items() if canonical in wanted)
    return Lowering(compute, rules)
