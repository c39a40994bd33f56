"""TensorFlow's own mixed-precision passes: by name on a graph, and around the calls of a function.

They are frozen (github.com/tensorflow/tensorflow/pull/28609), support float16 only on GPUs and bfloat16 only on CPUs,
take no rules, and lower the update too, such as unscaling. `polyamp.rewrite` without ``engine="grappler"`` has none of
these limits.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import FLOAT32, Graph, Node
from polyamp.backends.tensorflow.graphs.kernels import default_device
from polyamp.backends.tensorflow.graphs.places import Places
from polyamp.backends.tensorflow.graphs.planning import UNLISTED, width_of
from polyamp.backends.tensorflow.graphs.refusals import check_format, tracing
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.unstable import optimize_graph, options_of
from polyamp.errors import InvalidTypeError, InvalidValueError, UnsupportedError, warn_once
from polyamp.flow import AS_WRITTEN
from polyamp.operations import OPERATIONS as TABLE
from polyamp.plan import Plan, PlannedOperation
from polyamp.policy import Policy
from polyamp.refusals import not_traced

_ENVIRONMENT = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
PASSES: dict[str, dict[str, str]] = {
    "auto_mixed_precision": {"SIMULATE_GPU": "1"},  # show without a GPU what it does for one
    "auto_mixed_precision_cpu": {"EMULATE_FP16": "0"},  # otherwise it casts around operations that stay float32
    "auto_mixed_precision_onednn_bfloat16": {},
}
"""The passes, each with the environment variables that make it run on every machine."""

_OPTIONS = {"float16": "auto_mixed_precision", "bfloat16": "auto_mixed_precision_onednn_bfloat16"}
_DEVICES = {"float16": "GPU", "bfloat16": "CPU"}
_changing = RLock()


def optimized(graph_def: Any, fetches: Sequence[str], name: str, *, inline: bool = False) -> Any:
    """Return a graph after one of TensorFlow's passes."""
    if name not in PASSES:
        raise InvalidValueError(
            "unknown mixed-precision pass of TensorFlow",
            where="optimized(name)",
            found=repr(name),
            allowed=", ".join(PASSES),
            fix="use one of the names above",
        )
    config = tf.compat.v1.ConfigProto()
    options = config.graph_options.rewrite_options
    options.optimizers.extend(["function", name] if inline else [name])
    options.meta_optimizer_iterations = options.ONE
    options.min_graph_nodes = -1  # graphs of three nodes too
    metagraph = tf.compat.v1.MetaGraphDef(graph_def=graph_def)
    metagraph.collection_def["train_op"].node_list.value.extend(fetches)
    with _environment({f"{_ENVIRONMENT}{key}": value for key, value in PASSES[name].items()}):
        return optimize_graph(config, metagraph)


class GrapplerRewritten:
    """A function with TensorFlow's pass enabled during its calls: ``polyamp.rewrite(fn, ..., engine="grappler")``.

    >>> from polyamp import policy
    >>> weight = tf.ones((2, 2))
    >>> fast = GrapplerRewritten(lambda x: tf.nn.relu(x @ weight), policy("mixed_bfloat16"))
    >>> fast(tf.ones((1, 2))).numpy(), fast.plan.totals["by_format"]["bfloat16"]
    (array([[2., 2.]], dtype=float32), 2)

    During a call the pass is enabled in the whole process, so it also changes functions that other threads call at the
    same time.

    Args:
        fn: a Python function, a ``tf.function`` or a ``ConcreteFunction``. A ``tf.function`` that is called directly
            runs as before.
        policy: its ``compute`` selects the pass; float32 leaves it disabled.
        jit_compile: as in ``tf.function``; None means the value of ``fn``.

    Raises:
        InvalidTypeError: ``fn`` is none of these.
        UnsupportedError: the policy has rules, the function is compiled by XLA, or the pass does not run on this
            machine's devices; when called: in another function's trace, or while functions run eagerly.
    """

    def __init__(self, fn: Callable[..., Any], policy: Policy, jit_compile: bool | None = None) -> None:
        _check(fn, policy, jit_compile)
        is_traced = hasattr(fn, "get_concrete_function") or hasattr(fn, "structured_outputs")
        self._plain = fn
        self._function: Any = fn if is_traced else tf.function(fn)
        self._name = getattr(fn, "__name__", "the function")
        self._policy = policy
        self._plan: Plan | None = None
        functools.update_wrapper(self, fn, updated=())

    @property
    def plan(self) -> Plan:
        """The plan for the first arguments.

        Raises:
            UsageError: the function was not called yet.
        """
        if self._plan is None:
            raise not_traced(where="rewrite(fn).plan")
        return self._plan

    @property
    def plain(self) -> Any:
        """The function as it was written."""
        return self._plain

    def traced_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GrapplerRewritten:
        """Make the plan for these arguments if there is none yet, and return this function."""
        if self._plan is None:
            self._plan = plan_of_pass(self._concrete(args, kwargs), self._policy)
            if self._policy.compute not in {"float32", *self._plan.totals["by_format"]}:
                warn_once(
                    f"TensorFlow's pass for {self._policy.compute} changed nothing in {self._name}: it found no "
                    'product that this build of TensorFlow lowers. polyamp.rewrite without engine="grappler" does not '
                    "depend on the build.",
                    stacklevel=4,
                )
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _check_call()
        self.traced_for(args, kwargs)
        with switched_on(self._policy.compute):
            return self._function(*args, **kwargs)

    def _concrete(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if hasattr(self._function, "structured_outputs"):
            return self._function
        with tracing(self._function):
            return self._function.get_concrete_function(*args, **kwargs)


@contextmanager
def switched_on(compute: str) -> Iterator[None]:
    """Enable TensorFlow's pass for a format inside the context, and restore the setting at the end. Nests."""
    wanted = {name: format_name == compute for format_name, name in _OPTIONS.items()}
    with _changing:
        before = tf.config.optimizer.get_experimental_options()
        tf.config.optimizer.set_experimental_options(wanted)
    try:
        yield
    finally:
        with _changing:
            # An option that nobody has set is None.
            tf.config.optimizer.set_experimental_options({name: before.get(name) for name in wanted})


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which the passes read at every run, and restore them at the end."""
    with _changing:
        before = {key: os.environ.get(key) for key in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value


def _check(fn: Any, policy: Policy, jit_compile: bool | None) -> None:
    check_format(policy.compute)
    if not callable(fn):
        raise InvalidTypeError(
            "this is not callable",
            where='rewrite(fn, engine="grappler")',
            found=type(fn).__qualname__,
            allowed="a function, a tf.function or a ConcreteFunction",
            fix="a GraphDef is for polyamp.backends.tensorflow.graphs.grappler.optimized",
        )
    if policy.rules:
        rules = ", ".join(rule.pattern for rule in policy.rules)
        raise _unsupported("does not support rules", rules, "a policy without rules")
    compiled = options_of(fn)["jit_compile"] if hasattr(fn, "python_function") else False
    if compiled if jit_compile is None else jit_compile:
        raise _unsupported("does not run under XLA", "jit_compile=True", "jit_compile=False")
    device, needed = default_device(), _DEVICES.get(policy.compute)
    if needed not in (None, device):
        raise _unsupported(f"supports {policy.compute} only on {needed}s", f"a {device}", f"a {needed}")


def _check_call() -> None:
    if not tf.executing_eagerly():
        raise _unsupported("works only for calls from eager code", "a call in another function's trace", "eager code")
    if tf.config.functions_run_eagerly():
        raise _unsupported("works only on graphs", "tf.config.run_functions_eagerly(True)", "traced functions")


def _unsupported(what: str, found: str, allowed: str) -> UnsupportedError:
    return UnsupportedError(
        f"TensorFlow's mixed-precision pass {what}",
        where='rewrite(fn, engine="grappler")',
        found=found,
        allowed=allowed,
        fix="leave engine= out: polyamp's own rewrite does not have this limit",
    )


def plan_of_pass(concrete: Any, policy: Policy) -> Plan:
    """Return the plan of a graph after TensorFlow's pass. For float16 this works without a GPU too."""
    graph_def = concrete.graph.as_graph_def()
    fetches = [tensor.op.name for tensor in concrete.outputs] + [op.name for op in concrete.graph.control_outputs]
    if policy.compute != "float32":
        graph_def = optimized(graph_def, fetches, _OPTIONS[policy.compute], inline=True)
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(graph_def, name="")
    graph = Graph(graph_def.node, {function.signature.name: function for function in graph_def.library.function})
    sizes = _Sizes(Places(concrete.graph), Places(imported))
    return Plan(str(policy), tuple(_operations(graph, sizes, tf.as_dtype(policy.compute))))


class _Sizes:
    """The numbers of elements of values."""

    def __init__(self, *known: Places) -> None:
        self._known = known

    def elements(self, graph: Graph, value: str) -> int:
        """Return the number of elements of a value. An inserted cast has as many as its input."""
        maker = graph.maker.get(value)
        while maker is not None and _is_inserted(maker):
            value = maker.inputs[0]
            maker = graph.maker.get(value)
        return next((size for places in self._known if (size := places.elements(graph, value))), 0)


def _operations(graph: Graph, places: _Sizes, low: tf.DType) -> Iterator[PlannedOperation]:
    counted: set[str] = set()
    for node in graph.nodes:
        if node.op not in UNLISTED and not _is_inserted(node):
            casts = [graph.maker[value] for value in node.inputs if value in graph.maker]
            casts = [cast for cast in casts if _is_inserted(cast) and cast.name not in counted]
            counted.update(cast.name for cast in casts)
            yield _planned(graph, places, node, casts, low)


def _planned(graph: Graph, places: _Sizes, node: Node, casts: Sequence[Node], low: tf.DType) -> PlannedOperation:
    types = {port.dtype for port in [*node.input_ports, *node.output_ports]}
    by_type = {low.as_datatype_enum: low.name, FLOAT32: "float32"}
    name = OPERATIONS.get(node.op, node.op)
    read = sum(_bytes(graph, places, cast, cast.inputs, cast.input_ports) for cast in casts)
    written = sum(_bytes(graph, places, cast, cast.outputs, cast.output_ports) for cast in casts)
    values, ports = [*node.inputs, *node.outputs], [*node.input_ports, *node.output_ports]
    return PlannedOperation(
        name,
        node.op,
        node.name,
        TABLE[name].op_class if name in TABLE else "keep",
        next((text for dtype, text in by_type.items() if dtype in types), AS_WRITTEN),
        "TensorFlow's pass",
        casts=len(casts),
        bytes_cast=read,
        bytes_moved=_bytes(graph, places, node, values, ports) + read + written,
        bytes_moved_float32=_bytes(graph, places, node, values, ports, {low.as_datatype_enum: FLOAT32}),
    )


def _bytes(
    graph: Graph,
    places: _Sizes,
    node: Node,
    values: Sequence[str],
    ports: Sequence[Any],
    instead: Mapping[int, int] | None = None,
) -> int:
    sizes = (width_of((instead or {}).get(port.dtype, port.dtype)) for port in ports)
    return sum(places.elements(graph, value) * size for value, size in zip(values, sizes, strict=True))


def _is_inserted(node: Node) -> bool:
    return node.op == "Cast" and node.name.endswith("-AutoMixedPrecision")
