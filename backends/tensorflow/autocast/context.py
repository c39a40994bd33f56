"""Ambient autocast: inside a region, products of TensorFlow's own functions run in 16 bits.

When a product is made, in eager code or in a trace, its float32 inputs are cast down and its outputs are cast back up.
So Python code sees only float32, and code that depends on types (``tf.cond``, loops, ``py_function``, custom gradients)
works unchanged. In a graph TensorFlow removes pairs of casts that cancel.

For example, in a region for mixed_bfloat16, ``x @ w`` calls the generated function ``gen_math_ops.mat_mul``. The first
region replaced this function by one that asks for the current `Lowering` and calls the original with ``x`` and ``w`` in
bfloat16; the result is cast to float32. Outside regions it calls the original directly.
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
from polyamp.backends.tensorflow.devices import report_slow
from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Node, NodeDef
from polyamp.backends.tensorflow.graphs.kernels import default_device, lowerable
from polyamp.backends.tensorflow.graphs.refusals import check_format
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import Parameter
from polyamp.markers import UPDATE_SCOPE
from polyamp.operations import OPERATIONS as TABLE
from polyamp.policy import Policy
from polyamp.reports import report_nothing_lowered, report_unused
from polyamp.rules import Rule, decide


@contextmanager
def autocast_context(policy: Policy) -> Iterator[None]:
    """Run operations of class ``lower`` in the policy's ``compute`` format; a float32 policy disables this.

    It applies to eager code and to functions that are traced inside. A ``tf.function`` keeps one trace for each policy,
    and one for calls outside. The backward pass has the formats of its forward pass, even if it is taken outside; code
    of ``tf.recompute_grad`` and custom gradients runs under the policy of the forward call. Regions can be nested and
    entered again. Threads and async tasks do not see each other's regions.

    >>> from polyamp import policy
    >>> third = tf.constant([[1 / 3]])
    >>> with autocast_context(policy("mixed_bfloat16")):
    ...     product = third @ tf.ones((1, 1))
    >>> product.dtype, float(product[0, 0])
    (tf.float32, 0.333984375)

    Code that it cannot see runs as it is written: replica threads of a ``tf.distribute.MirroredStrategy`` and
    ``tf.py_function`` (enter the region inside the function that they run), a ``ConcreteFunction`` or SavedModel that
    was traced before, operations that are not in `OPERATIONS`, such as your own, and references into
    ``tensorflow.python.ops.gen_*`` that another package imported before the first region. ``polyamp.rewrite`` sees the
    whole graph instead.

    Args:
        policy: its ``compute`` format and its rules, by operation and by name scope (each Keras layer opens one). An
            operation without a kernel for the format on its device runs in float32. Inputs of other types stay as the
            user wrote them.

    Raises:
        UnsupportedError: the format is not float32 or a 16-bit float, nor tensorfloat32 while TensorFlow has it
            enabled.

    Warns:
        PolyampWarning: TensorFlow ran inside, and nothing was ever lowered under this policy; or the path of a rule
            matched nothing.
    """
    lowering = lowering_of(policy)
    before = unstable.newest_tensor()
    with entered(lowering):
        yield
    if lowering is not None and unstable.newest_tensor() > before + 1:
        lowering.report()


def lowering_of(policy: Policy) -> Lowering | None:
    """Return what a policy lowers; None if it lowers nothing.

    Raises:
        UnsupportedError: the format is not float32 or a 16-bit float.
    """
    # TensorFlow itself multiplies float32 numbers in this format, unless that is disabled.
    is_native = policy.compute == "tensorfloat32" and tf.config.experimental.tensor_float_32_execution_enabled()
    if not is_native:
        check_format(policy.compute)
    with _replacing:
        return None if is_native or policy.compute == "float32" else _lowering(policy.compute, policy.rules)


@contextmanager
def entered(lowering: Lowering | None) -> Iterator[None]:
    """Use a lowering, or none, in this thread or async task inside the context."""
    outer = _entered.get()
    _entered.set((*outer, lowering))
    try:
        yield
    finally:
        _entered.set(outer)


def autocast_everywhere(policy: Policy | None) -> None:
    """Autocast outside regions too, in every thread, from now on; None ends this.

    Raises:
        UnsupportedError: the format is not float32 or a 16-bit float; nothing is changed.
    """
    global _everywhere
    _everywhere = None if policy is None else lowering_of(policy)


def is_everywhere() -> bool:
    """Return whether `autocast_everywhere` is in force."""
    return _everywhere is not None


def is_lowering() -> bool:
    """Return whether autocast of polyamp, or TensorFlow's own pass, lowers operations that run now."""
    return current() is not None or bool(tf.config.optimizer.get_experimental_options().get("auto_mixed_precision"))


def current() -> Lowering | None:
    """Return the lowering that applies here and now."""
    stack = _entered.get()
    return stack[-1] if stack else _everywhere


_entered: ContextVar[tuple[Lowering | None, ...]] = ContextVar("polyamp_tensorflow_autocast", default=())
_everywhere: Lowering | None = None


class Lowering:
    """A compute format and rules, with a record of their effect in this process.

    Attributes:
        compute: the format of ``lower`` operations.
        rules: the policy's rules.
        dtype: the format's dtype.
        lowered: whether any operation was lowered.
    """

    def __init__(self, compute: str, rules: tuple[Rule, ...]) -> None:
        self.compute, self.rules = compute, rules
        self.dtype = tf.as_dtype(compute)
        self.lowered = False
        self._kept: dict[str, str] = {}
        self._told = set[tuple[str, str]]()
        self._decided: dict[tuple[str, str], str] = {}
        # A rule for an operation that does not occur is fine; a path that does not occur may be a mistake.
        self._unused = [rule for rule in rules if not _names_operation(rule)]

    def run(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with these arguments, lowered if the policy says so, and return its results."""
        inputs = operation.bound(args, kwargs) if self._lowers(operation.canonical) else None
        low = () if inputs is None else self._attributes(operation, inputs)
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
            report_nothing_lowered(
                "autocast", self.compute, where="TensorFlow", why=why, remedy=remedy, stacklevel=_TO_USER
            )
            return
        paths = "a name scope or layer with a product"
        report_unused(self._unused, where=f"autocast to {self.compute}", paths=paths, stacklevel=_TO_USER)

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
        device = _device_type(unstable.current_device())
        found = _lowerable(operation.native, device, tuple(types.items()), self.dtype.as_datatype_enum)
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


_TO_USER = 8  # number of frames from a warning to the user's ``with polyamp.autocast(...)``
_REMEMBERED = 4096  # most decisions to keep: every trace has new names of scopes


class Operation:
    """One of TensorFlow's generated functions.

    Attributes:
        native: the type of the node that it makes.
        canonical: the name of that in `polyamp.operations`.
        original: the function.
        inputs: its parameters that are tensors, or lists of tensors, of a type that is not fixed.
    """

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


@functools.cache
def _lowering(compute: str, rules: tuple[Rule, ...]) -> Lowering:
    """Return the one lowering of all policies with this format and these rules, so that they share traces."""
    intercept()
    wanted = _may_lower(rules) - _STRUCTURE
    _replace(native for native, canonical in OPERATIONS.items() if canonical in wanted)
    return Lowering(compute, rules)


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
    """Run a function's custom gradient under the lowering of the function, in a scope like that of other gradients."""
    name = "/".join(filter(None, ("gradient_tape", scope)))
    with entered(lowering), nullcontext() if tf.executing_eagerly() else tf.name_scope(f"{name}/"):
        yield


def _replace(natives: Iterable[str]) -> None:
    """Make operations look for autocast. This is never undone, and costs little outside regions."""
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


_STRUCTURE = {"tensor_list", "loop_edge", "save"}  # the type of the values that they hold is declared elsewhere


def _may_lower(rules: tuple[Rule, ...]) -> set[str]:
    """Return the canonical operations that may be ``lower`` somewhere, by the table or by rules."""
    raising = [rule for rule in rules if rule.op_class == "lower"]
    anywhere = not all(map(_names_operation, raising))
    return {
        name
        for name, entry in TABLE.items()
        if entry.op_class == "lower"
        or (entry.op_class != "keep" and (anywhere or any(rule.matches(name) for rule in raising)))
    }


def _names_operation(rule: Rule) -> bool:
    return any(map(rule.matches, TABLE))


@functools.cache
def _device_type(device: str) -> str:
    return tf.DeviceSpec.from_string(device).device_type or default_device()


@functools.cache
def _lowerable(native: str, device: str, types: tuple[tuple[str, int], ...], dtype: int) -> tuple[str, ...]:
    """See `polyamp.backends.tensorflow.graphs.kernels.lowerable`."""
    operation = unstable.operation_definition(native, {})
    definition = NodeDef(name=native, op=native, device=f"/device:{device}:0")
    for attribute in operation.attr:
        if attribute.type == "type":
            definition.attr[attribute.name].type = dict(types).get(attribute.name, 0)
        elif attribute.type == "int" and not attribute.HasField("default_value"):
            definition.attr[attribute.name].i = 1  # the length of a list, on which no kernel depends
    return lowerable(Node(definition, operation, in_function=False), dtype)
