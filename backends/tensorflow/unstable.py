"""All private interfaces of TensorFlow that polyamp uses, in one place.

TensorFlow can change each of them in any release without notice; then the tests of this file's users fail.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tensorflow.core.framework import attr_value_pb2, tensor_shape_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import backprop, context, execute
from tensorflow.python.eager.polymorphic_function import atomic_function, function_type_utils
from tensorflow.python.framework import (
    constant_op,
    dtypes,
    kernels,
    op_def_registry,
    ops,
    tensor_shape,
    tensor_spec,
    tensor_util,
)
from tensorflow.python.framework.errors_impl import InaccessibleTensorError, NotFoundError
from tensorflow.python.ops import array_ops, control_flow_util, custom_gradient, math_ops
from tensorflow.python.training import optimizer
from tensorflow.python.util import nest, tf_decorator


@functools.cache
def leave_unconverted() -> None:
    """Make AutoGraph call polyamp's functions as they are from now on, as it calls those of TensorFlow and Keras."""
    # To convert them takes seconds.
    autograph_config.CONVERSION_RULES = (autograph_config.DoNotConvert("polyamp"), *autograph_config.CONVERSION_RULES)


# Rewriting a graph.


def operation_definition(op: str, library: Mapping[str, Any]) -> Any:
    """Return the inputs and outputs of an operation as an ``OpDef``: a registered one, or a function's signature."""
    known = op_def_registry.get(op)
    if known is None and op in library:
        return library[op].signature
    return known


@functools.cache
def registered_kernels(op: str) -> tuple[Any, ...]:
    """Return the kernels of an operation, each with its type of device and the types of its attributes."""
    return tuple(kernels.get_registered_kernels_for_op(op).kernel)


class FunctionLibrary(Mapping[str, Any]):
    """The functions that this process knows, each a ``FunctionDef``, by name."""

    def __getitem__(self, name: str) -> Any:
        try:
            return context.context().get_function_def(name)
        except NotFoundError:
            raise KeyError(name) from None

    def __iter__(self) -> Any:
        return iter(context.context().list_function_names())

    def __len__(self) -> int:
        return len(context.context().list_function_names())


def register(definitions: Sequence[Any], concrete: Any) -> Any:
    """Register functions with the runtime, for as long as the result lives."""
    # A graph that calls an unregistered function ends the process.
    known, original = context.context(), concrete.inference_fn
    for definition in definitions:
        known.add_function_def(definition)
    called = list(original.children)
    for definition in definitions[:-1]:
        kind = _function_type(definition.signature)
        called.append(atomic_function.AtomicFunction(definition.signature.name, known, kind, list(called)))
    return atomic_function.AtomicFunction(
        definitions[-1].signature.name,
        known,
        concrete.function_type,
        called,
        original.call_options,
        cached_graph=concrete.graph,
    )


def _function_type(signature: Any) -> Any:
    """Return the type of a function, which TensorFlow needs to save the function."""
    arguments, results = (
        tuple(tensor_spec.TensorSpec(None, dtypes.as_dtype(arg.type)) for arg in args)
        for args in (signature.input_arg, signature.output_arg)
    )
    return function_type_utils.function_type_lib.from_structured_signature((arguments, {}), results)


def call_in_place_of(registered: Any, concrete: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the result of `register` like ``concrete(*args, **kwargs)``, with the captured inputs of ``concrete``."""
    return registered.call_preflattened(flat_inputs(concrete, args, kwargs))


def options_of(function: Any) -> dict[str, Any]:
    """Return the options with which a ``tf.function`` was made, to make another one like it."""
    return {
        "input_signature": function.input_signature,
        "jit_compile": function._jit_compile,
        "reduce_retracing": function._reduce_retracing,
    }


def graph_of(name: str, within: Any) -> Any:
    """Return the graph from which a function of a graph was made; None if it is not known."""
    known = within._functions.get(name) if within is not None else None
    return getattr(known, "_cached_graph", None)


# Promotion: the functions by which TensorFlow's Python code makes operations.


def generated_functions(op: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions that make an operation: the one of ``gen_*_ops``, and the same in ``tf.raw_ops``."""
    generated = [module for name, module in sys.modules.items() if name.startswith("tensorflow.python.ops.gen_")]
    found = next((module for module in generated if hasattr(module, op)), None)
    if found is None:
        return ()
    raw = getattr(found, op)
    return getattr(found, raw.__name__), raw


def true_division() -> Callable[..., Any]:
    """Return the function behind ``x / y``, which refuses mixed types before it makes an operation."""
    function: Callable[..., Any] = math_ops._truediv_python3
    return function


def replace_functions(replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replace functions in all of TensorFlow's modules, under every name that they have there."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "tensorflow"]
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value in replaced:
                setattr(module, name, replaced[value])


# Names.


@functools.cache
def name_custom_gradients() -> None:
    """Name the operations of custom gradients, from now on, as TensorFlow names those of its own gradients."""
    for name in ("_eager_mode_decorator", "_graph_mode_decorator"):
        setattr(custom_gradient, name, _named(getattr(custom_gradient, name)))


def _named(decorator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decorator)
    def decorated(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        scope = "/".join(filter(None, ("gradient_tape", scope_path())))

        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            result, gradient = function(*args, **kwargs)

            @functools.wraps(gradient)
            def run(*args: Any, **kwargs: Any) -> Any:
                with nullcontext() if context.executing_eagerly() else ops.name_scope(f"{scope}/"):
                    return gradient(*args, **kwargs)

            return result, tf_decorator.make_decorator(gradient, run)

        return decorator(named, args, kwargs)

    return decorated


def scope_path() -> str:
    """Return the name scopes around the next operation: those of its graph, of outer graphs, and of eager code."""
    known = context.context()
    scopes = [known.scope_name]
    graph = None if known.executing_eagerly() else ops.get_default_graph()
    while graph is not None:
        scopes.insert(1, as_asked(graph, graph.get_name_scope()))
        graph = getattr(graph, "outer_graph", None)
    return "/".join(filter(None, (scope.strip("/") for scope in scopes)))


@functools.cache
def remember_names() -> None:
    """Make graphs remember, from now on, the names that the code asked for; see `as_asked`."""
    original = ops.Graph.unique_name

    @functools.wraps(original)
    def unique_name(self: Any, name: str, *args: Any, **kwargs: Any) -> str:
        unique: str = original(self, name, *args, **kwargs)
        if unique.rpartition("/")[2] != name.rpartition("/")[2]:
            if not hasattr(self, _ASKED):
                setattr(self, _ASKED, {})
            getattr(self, _ASKED)[unique] = name.rpartition("/")[2]
        return unique

    ops.Graph.unique_name = unique_name


_ASKED = "_polyamp_asked"


def as_asked(graph: Any, path: str) -> str:
    """Return the name of a scope or node as the code asked for it, without the numbers that TensorFlow added."""
    # Keras enters a layer's scope twice. So in graphs the layer ``dense`` has the scope ``dense_1``, and the layer
    # ``dense_1`` has the scope ``dense_1_1``.
    parts = path.split("/")
    prefixes = ("/".join(parts[: end + 1]) for end in range(len(parts)))
    return "/".join(_asked(graph, prefix) or part for prefix, part in zip(prefixes, parts, strict=True))


def _asked(graph: Any, prefix: str) -> str:
    while graph is not None:
        known = getattr(graph, _ASKED, {})
        # A gradient has the scope of its forward operation, below an extra one.
        if found := known.get(prefix) or known.get(prefix.partition("/")[2]):
            return str(found)
        graph = getattr(graph, "outer_graph", None)
    return ""


def is_recording() -> bool:
    """Return whether a ``tf.GradientTape`` records what is computed here."""
    return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()


# Errors of tracing.

OUT_OF_SCOPE = InaccessibleTensorError


def graphs_around() -> list[Any]:
    """Return the graph that is being built and the graphs around it; else TensorFlow 1's default graph."""
    graphs, graph = [], ops.get_default_graph()
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs


def compiles_by_xla(graph: Any) -> bool:
    """Return whether XLA will compile the function whose graph is built, as with ``jit_compile=True``."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


# Recording a step.


@contextmanager
def watched_gradients(taken: Callable[[Any, Any, Any, Any], None]) -> Iterator[None]:
    """Call ``taken(target, sources, gradients, seeds)`` whenever a gradient is taken inside the context."""
    # A graph does not record which value is the gradient of which variable, but the tape and the optimizers of
    # TensorFlow 1 know it. The seeds are the gradients of the target, from which a backward pass starts. If the code
    # passes none, the seeds are new tensors of ones, to distinguish them from other constants.
    tape, legacy = backprop.GradientTape.gradient, optimizer.Optimizer.compute_gradients

    @functools.wraps(tape)
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
        seeds = _seeds(target) if output_gradients is None else output_gradients
        result = tape(self, target, sources, seeds, *args, **kwargs)
        taken(target, sources, result, seeds)
        return result

    @functools.wraps(legacy)
    def compute_gradients(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(legacy).bind(self, loss, *args, **kwargs)
        if callable(loss):  # a tape takes them
            return legacy(*bound.args, **bound.kwargs)
        seeds = bound.arguments.get("grad_loss")
        bound.arguments["grad_loss"] = seeds = _seeds(loss) if seeds is None else seeds
        pairs = legacy(*bound.args, **bound.kwargs)
        taken(loss, [variable for _, variable in pairs], [grad for grad, _ in pairs], seeds)
        return pairs

    backprop.GradientTape.gradient = autograph.do_not_convert(gradient)
    optimizer.Optimizer.compute_gradients = autograph.do_not_convert(compute_gradients)
    try:
        yield
    finally:
        backprop.GradientTape.gradient, optimizer.Optimizer.compute_gradients = tape, legacy


def _seeds(target: Any) -> Any:
    """Return ones for each tensor of a target; None, for TensorFlow to choose, if it has anything but tensors."""
    flat = nest.flatten(target)
    if not all(ops.is_symbolic_tensor(one) and one.dtype.is_floating for one in flat):
        return None
    return nest.pack_sequence_as(target, [array_ops.identity(array_ops.ones_like(one)) for one in flat])


def run_operation(definition: Any, inputs: Sequence[Any], attributes: Mapping[str, Any], outputs: int) -> Sequence[Any]:
    """Run a node with these inputs and attributes in eager code."""
    if definition.op == "Const":
        value = attributes["value"].tensor
        return [constant_op.constant(tensor_util.MakeNdarray(value), value.dtype)]
    own = {name: value for name, value in attributes.items() if not name.startswith("_")}
    with ops.device(definition.device or None):
        flat = tuple(part for name, value in own.items() for part in (name, _python(value)))
        return execute.quick_execute(definition.op, outputs, list(inputs), flat, context.context()) or []


def _python(attribute: Any) -> Any:
    """Return an attribute of a node as eager code takes it."""
    kind = attribute.WhichOneof("value")
    if kind == "list":
        return [_scalar(one) for _, listed in attribute.list.ListFields() for one in listed]
    return _scalar(getattr(attribute, kind))


def _scalar(value: Any) -> Any:
    if isinstance(value, tensor_shape_pb2.TensorShapeProto):
        return tensor_shape.TensorShape(value)
    return value.name if isinstance(value, attr_value_pb2.NameAttrList) else value


def elements_of(dataset: Any, types: Sequence[int]) -> Any:
    """Return the elements, each a tuple, of a dataset that is given as a tensor."""
    specs = tuple(tensor_spec.TensorSpec(None, dtypes.as_dtype(dtype)) for dtype in types)
    return dataset_ops._VariantDataset(dataset, specs)


def dataset_of(elements: Sequence[Sequence[Any]]) -> Any:
    """Return a dataset with these elements, at least one, as a tensor."""
    parts = (dataset_ops.DatasetV2.from_tensors(tuple(element)) for element in elements)
    return functools.reduce(lambda one, other: one.concatenate(other), parts)._variant_tensor


def flat_inputs(concrete: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the inputs of a ``ConcreteFunction``, including captured ones, for a call with these arguments."""
    bound = function_type_utils.canonicalize_function_inputs(args, kwargs, concrete.function_type)
    return [*concrete.function_type.unpack_inputs(bound), *concrete.captured_inputs]


def events_in(file: Path) -> Iterator[tuple[str, float, float]]:
    """Yield the name, start and end of each event in a file of the profiler: of the GPUs, else of the host."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    for plane in gpus or space.planes:
        for line in plane.lines:
            for event in line.events:
                names = {plane.stat_metadata[one.metadata_id].name: one for one in event.stats}
                name = plane.event_metadata[event.metadata_id].name
                if "tf_op" in names:  # of a kernel of a GPU: the node that launched it
                    name = plane.stat_metadata[names["tf_op"].ref_value].name or names["tf_op"].str_value
                start = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
                yield name, start, start + event.duration_ps / 1e12
