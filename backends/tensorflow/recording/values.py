"""The traced step of a recording with its gradients, and the values of its decided graph that are recorded.

For example, in ``loss = sum(cast(x @ w, float32))`` the product and the sum are activations. The cast computes nothing,
so it is not recorded; `Body.producer` follows it to the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.backends.tensorflow import unstable
from polyamp.backends.tensorflow.gradients import SIXTEEN_BIT
from polyamp.backends.tensorflow.graphs.capture import concrete_of, walking
from polyamp.backends.tensorflow.graphs.decisions import Pass, TypedNode
from polyamp.backends.tensorflow.graphs.graph import FLOAT32
from polyamp.backends.tensorflow.recording.dependence import Dependence
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Kind
from polyamp.errors import no_loss
from polyamp.operations import OPERATIONS as TABLE

_FLOATS = {kind.as_datatype_enum: kind.name for kind in (tf.float16, tf.bfloat16, tf.float32, tf.float64)}
LOW = tuple(kind.as_datatype_enum for kind in (tf.float16, tf.bfloat16))
_COMPUTING = ("lower", "full", "promote", "follow")
_UNSEEN = ("custom_call", "call", "cond", "while_loop")  # perhaps only their results are known, not what is inside
_HANDING = ("Iterator", "Optional", "TensorArray", "Unstage")  # they hold values and are not in the table
_ORDER = (ACTIVATION, GRADIENT, PARAMETER)


class Subject(NamedTuple):
    """One recorded value: the first fields of an `Observation`."""

    kind: Kind
    name: str
    where: str
    op_class: str
    format: str


class Body:
    """The body of one graph or function, with the bodies of the functions that it calls."""

    def __init__(
        self,
        decisions: Pass,
        taken: Sequence[Taken],
        known: dict[Any, Body],
        dependence: Dependence,
        gradients: frozenset[str] = frozenset(),
    ) -> None:
        self.decisions, self.recorded = decisions, set[str]()
        self._taken = taken
        self._gradients = dependence.of(decisions, gradients)
        self._decided = {decided.node.name: decided for decided in decisions.nodes}
        self._used, self._varying = decisions.graph.made_from(self._roots()), _varying(decisions)
        self.inside: dict[str, list[Body]] = {}
        for decided in decisions.nodes:
            keys = [
                (id(one.decisions), names)
                for one, names in zip(decided.inside, dependence.inside(decided, self._gradients), strict=True)
            ]
            for one, key in zip(decided.inside, keys, strict=True):
                if key not in known:
                    known[key] = Body(one.decisions, taken, known, dependence, key[1])
            self.inside[decided.node.name] = [known[key] for key in keys]
        # 32-bit values that are rounded for the node that takes them, by the value that is computed
        self.rounded: dict[str, int] = {}
        self._read_as = self._cast_down()

    def _cast_down(self) -> dict[str, str]:
        """Return, for float32 values that are computed here and then rounded to 16 bits, the value that is rounded."""
        found: dict[str, str] = {}
        for decided in self.decisions.nodes:
            for value, dtype in zip(decided.node.inputs, decided.input_types, strict=True):
                known = self.decisions.known.get(value)
                if dtype in LOW and known is not None and known.dtype == FLOAT32:
                    body, made = self.producer(value)
                    if body is self and made in self.decisions.graph.maker:
                        found[made], self.rounded[value] = value, dtype
        return found

    def records_inside(self, name: str) -> bool:
        """Return whether a function that a node calls has recorded values."""
        return any(body.recorded or any(map(body.records_inside, body.inside)) for body in self.inside[name])

    def _roots(self) -> list[str]:
        """Return the values that are needed: gradients taken here, else all results and inputs of effects."""
        tensors = (tensor for one in self._taken for tensor in (one.loss, *one.grads))
        here = [value for value in map(self.value_of, tensors) if value is not None]
        graph = self.decisions.graph
        effects = (value for node in graph.nodes if not node.outputs for value in node.inputs)
        return here or [*graph.returns, *effects]

    def value_of(self, tensor: Any) -> str | None:
        """Return the value that a symbolic tensor is in this graph; None if it belongs to another graph."""
        if tensor.graph is not self.decisions.traced or tensor.op.name not in self._decided:
            return None
        return self._decided[tensor.op.name].node.outputs[tensor.value_index]

    def producer(self, value: str) -> tuple[Body, str]:
        """Find where a value is computed, through casts, moves and the functions that return it."""
        node = self.decisions.graph.maker.get(value)
        if node is None:
            return self, value
        if self.inside[node.name]:
            body = self.inside[node.name][-1]
            return body.producer(body.decisions.graph.returns[node.outputs.index(value)])
        moves = not _computes(self._decided[node.name]) and node.inputs
        return self.producer(node.inputs[0]) if moves else (self, value)

    def computed(self) -> Iterator[tuple[Body, str, Subject]]:
        """Yield the floating-point values that nodes compute and others use, in order."""
        for decided in self.decisions.nodes:
            for body in self.inside[decided.node.name]:
                yield from body.computed()
            for value in self._computed(decided):
                kind = GRADIENT if value in self._gradients else ACTIVATION
                value = self._read_as.get(value, value)
                where = self.decisions.scopes.scope_of(decided.node)
                yield self, value, self._subject(value, kind, decided.operation, where)

    def parameters(self) -> Iterator[tuple[Body, str, Subject]]:
        """Yield the gradients of variables that are taken in this body and those inside."""
        for one in self._taken:
            for name, grad in zip(one.names, one.grads, strict=True):
                if (value := self.value_of(grad)) is not None:
                    yield self, value, self._subject(value, PARAMETER, name, "")
        for bodies in self.inside.values():
            for body in bodies:
                yield from body.parameters()

    def _computed(self, decided: TypedNode) -> list[str]:
        name, parts = decided.node.name, self.decisions.parts
        if not _computes(decided) or decided.inside or name in parts.update or name in parts.averaging:
            return []
        pairs = zip(decided.node.outputs, decided.results, strict=True)
        wanted = self._used & (self._gradients | self._varying)
        return [value for value, known in pairs if known.dtype in _FLOATS and value in wanted]

    def _subject(self, value: str, kind: Kind, name: str, where: str) -> Subject:
        body, made = self.producer(value)
        maker = body.decisions.graph.maker.get(made)
        op_class = "keep" if maker is None else _class(body._decided[maker.name])
        dtype = body.decisions.known[made].dtype
        if kind != PARAMETER:
            dtype = self.rounded.get(value, dtype)
        return Subject(kind, name, where, op_class, _FLOATS.get(dtype, "float32"))


def recorded(decisions: Pass, taken: Sequence[Taken]) -> tuple[Body, dict[tuple[Body, str], Subject]]:
    """Return all values that are recorded of a step: in the order of computation, gradients of parameters last."""
    dependence = Dependence([seed for one in taken for seed in one.seeds])
    outer = Body(decisions, taken, {}, dependence)
    parameters = list(outer.parameters())
    made = {body.producer(value) for body, value, _ in parameters}
    # Such a value is recorded as the parameter's gradient only.
    others = [found for found in outer.computed() if found[0].producer(found[1]) not in made]
    subjects: dict[tuple[Body, str], Subject] = {}
    for body, value, subject in sorted([*others, *parameters], key=lambda found: _ORDER.index(found[2].kind)):
        subjects.setdefault((body, value), subject)  # a function may be called several times
        body.recorded.add(value)
    return outer, subjects


def _varying(decisions: Pass) -> set[str]:
    """Return the values that depend on arguments or variables, not only on constants and random bits."""
    found = {name for name, _ in decisions.graph.arguments}
    for decided in decisions.nodes:
        if decided.operation != "random" and not found.isdisjoint(decided.node.inputs):
            found.update(decided.node.outputs)
    return found


def _class(decided: TypedNode) -> str:
    """Return the class of an operation, also for one inside the update."""
    entry, op_class = TABLE.get(decided.operation), decided.decision.op_class
    return entry.op_class if op_class == "keep" and entry is not None else op_class


def _computes(decided: TypedNode) -> bool:
    """Return whether a node computes values, instead of moving, casting or receiving them."""
    entry = TABLE.get(decided.operation)
    if entry is None:
        return not decided.node.op.startswith(_HANDING)
    return entry.op_class in _COMPUTING or decided.operation in _UNSEEN


class Taken(NamedTuple):
    """Gradients with respect to variables, as a graph takes them."""

    loss: Any  # the differentiated tensor, which is symbolic
    names: tuple[str, ...]  # names of the variables
    grads: tuple[Any, ...]  # for each a symbolic tensor: the gradient, or the stored rows of a sparse one
    seeds: tuple[Any, ...]  # the gradients of the loss from which the backward pass starts, symbolic tensors


def traced(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, bool, tuple[Taken, ...]]:
    """Trace a step, and return whether it takes gradients itself, and those that are taken, in order."""
    # If it returns only a loss, a step that takes its gradients is traced, with the loss scale as its first argument.
    plain = plain_function(step)
    concrete, taken = _watched(plain, args, kwargs)
    if taken:
        return concrete, True, taken
    _loss_of(concrete.structured_outputs)
    concrete, taken = _watched(_differentiated(plain), (tf.constant(1.0), args, dict(kwargs)), {})
    return concrete, False, taken


def plain_function(step: Any) -> Any:
    """Return the function that a step was made from, to trace it again without a rewrite."""
    while isinstance(getattr(type(step), "plain", None), property):  # a rewritten function
        step = step.plain
    return getattr(step, "python_function", step)


def _watched(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Taken, ...]]:
    taken: list[Taken] = []

    def take(loss: Any, sources: Any, grads: Any, seeds: Any) -> None:
        found = _taken(loss, sources, grads, seeds)
        if found is not None:
            taken.append(found)

    with unstable.watched_gradients(take), walking(function, args, kwargs):
        concrete = concrete_of(function, args, kwargs)
    return concrete, tuple(taken)


def _taken(loss: Any, sources: Any, grads: Any, seeds: Any) -> Taken | None:
    loss = next((one for one in tf.nest.flatten(loss) if tf.is_symbolic_tensor(one)), None)
    pairs = [
        (name_of(source), grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad))
        for source, grad in zip(_flat(sources), _flat(grads), strict=True)
        if grad is not None and _is_variable(source)
    ]
    if loss is None or not pairs:
        return None
    names, values = zip(*pairs, strict=True)
    return Taken(loss, names, values, tuple(one for one in _flat(seeds) if tf.is_symbolic_tensor(one)))


def _flat(tree: Any) -> list[Any]:
    return list(tf.nest.flatten(tree))  # IndexedSlices are leaves


def _is_variable(source: Any) -> bool:
    return hasattr(source, "assign") and hasattr(source, "dtype") and source.dtype != tf.resource


def name_of(variable: Any) -> str:
    """Return a variable's name: Keras' path if it has one, else TensorFlow's name."""
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])


def _differentiated(step: Any) -> Callable[..., None]:
    def gradients(scale: tf.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        with tf.GradientTape() as tape:
            loss = _loss_of(step(*args, **kwargs))
            wide = tf.cast(loss, tf.float32) if loss.dtype in SIXTEEN_BIT else loss
        tape.gradient(wide, tape.watched_variables(), tf.cast(scale, wide.dtype))

    return gradients


def _loss_of(result: Any) -> tf.Tensor:
    """Return the loss that a step returns, alone or before something else."""
    loss = result[0] if isinstance(result, tuple | list) and result else result
    if tf.is_tensor(loss) and loss.dtype.is_floating and loss.shape.rank in (0, None):
        return loss
    shown = f"a tensor of {loss.dtype.name} with shape {loss.shape}" if tf.is_tensor(loss) else type(loss).__name__
    raise no_loss(shown, allowed="a floating scalar, or a tuple that starts with it; or a step that takes gradients")
