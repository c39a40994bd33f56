"""One forward pass over a captured graph: the flow rule decides every node, and the pass writes the new graph.

The new graph differs from the captured one only in its casts. The dtypes of results on cast inputs are computed on fake
tensors, which have no data. For example, under ``mixed_bfloat16`` the function ``lambda x, y: torch.exp(x @ y)``::

    captured           decided                             written
    matmul(x, y)       lower: bfloat16                     matmul(x.to(bfloat16), y.to(bfloat16))
    exp(matmul)        full: float32                       exp(matmul.to(float32))
    output(exp)        a result has its declared dtype     output(exp)

For each node the pass keeps what is `Known` of its value in the new graph, which the flow rule needs for the next ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import checkpoint

from polyamp.backends.torch import unstable
from polyamp.backends.torch.dtypes import DTYPES
from polyamp.backends.torch.graphs import writing
from polyamp.backends.torch.graphs.graph import (
    Aliases,
    addend_of,
    line_near,
    native_name,
    operands_of,
    operation_of,
    path_of,
)
from polyamp.backends.torch.graphs.planning import plan_entry, result_entry
from polyamp.backends.torch.graphs.values import (
    Known,
    Numbers,
    constant_of,
    dtypes_of,
    factor_of,
    fake_as,
    is_floating,
    is_integral,
    is_readable,
    join_values,
    known_value,
    largest_in,
    map_known,
    numbers_of,
    tensors_of,
    value_by_type,
    value_of,
    value_without_floats,
)
from polyamp.backends.torch.graphs.writing import AS_IT_IS, Attributes, Manner, Writing, may_exceed
from polyamp.errors import UsageError
from polyamp.flow import AS_WRITTEN, NO_FLOATS, TABLE, WEAK, Decision, Value
from polyamp.plan import Decider, PlannedOperation
from polyamp.readers import DIVIDES, Read, look

# Operations whose Python numbers are operands, unlike those of a reshape.
_WITH_NUMBERS = frozenset(
    {"add", "sub", "mul", "div", "floor_div", "remainder", "lerp", "addcmul", "addcdiv", "compare"}
    | {"where", "clip", "maximum", "minimum", "fill", "scatter", "pad"}
)
_ITEM = Decision("slice", "neutral", TABLE)
_AUTOCAST = {"_enter_autocast": 1, "_exit_autocast": -1}
_MAKING = frozenset({"constant", "fill"})  # they make a tensor of a number
# Operations that promote integers to the type of floating operands, in which large ones may not fit.
_WITH_INTEGERS = frozenset({*_WITH_NUMBERS, "pow", "mean"} - {"pad", "scatter", "fill"})

_EXACT = frozenset({"cast", "integer", "add", "sub", "mul", "where"})  # of integers, as floating values they are exact


class Shared(NamedTuple):
    """What the passes over a graph and its bodies share."""

    decider: Decider
    attributes: Attributes
    operations: list[PlannedOperation]
    numbers: Numbers


class Pass:
    """The decisions for one graph, and the new graph, which is written as they are made."""

    def __init__(
        self,
        module: GraphModule,
        graph: Graph,
        arguments: Mapping[Node, Known],
        shared: Shared,
        off: int = 0,
        state: Mapping[Node, Node] = MappingProxyType({}),
    ) -> None:
        self.module, self.graph, self.aliases, self.shared = module, graph, Aliases(module.graph), shared
        self.decider, self.attributes, self.operations, self.numbers = shared
        self._low = DTYPES[self.decider.compute]
        self._off = off  # how many regions turn autocast off here
        self._state = state  # arguments that are assigned after the graph has run, and what is assigned to them
        self.known = {node: known._replace(number=self.numbers[node]) for node, known in arguments.items()}
        self._new = Writing(graph, unstable.fake_mode_of(node.meta.get("example_value") for node in module.graph.nodes))
        self._rounding: set[Node] = set()  # nodes with several results, whose first is rounded where it is used
        self._again: dict[Node, bool] = {}  # nodes that may be written again; whether gradients are recorded there
        self._anew: dict[tuple[Node, tuple[str, ...]], Known] = {}  # nodes that were written again, in float32
        self._largest: dict[
            Node, float
        ] = {}  # how large the integers in a value may be, if more than its dtype is known
        self._returned: dict[Node, Node] = {}  # the value behind each result
        for node, known in self.known.items():
            self._note_integers(node, known.tensor)
        for node in filter(self.aliases.is_touched, arguments):  # no constants
            self.numbers.add(node)
        self._classes = {node: found for node in module.graph.nodes if (found := self._read_node(node)) is not None}
        self._asked = self._look()
        for node, known in self.known.items():
            if known.tensor is not None and (node in self._asked or self.aliases.is_touched(node)):
                self.known[node] = known._replace(value=self._constant(node, known.tensor))
        for node in module.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self.known[node] = self._write_node(node)._replace(number=self.numbers[node])

    def results(self, *, as_declared: bool = True) -> Any:
        """Return the graph's results, with `Known` instead of nodes, cast to the declared dtypes."""
        (given,) = self.module.graph.output_node().args
        return map_arg(given, self._restore if as_declared else self.known.__getitem__)

    def _restore(self, given: Node) -> Known:
        known = self._widen(given, ("saturated",))
        node = self._new.cast(known, None)
        if self._returned.setdefault(node, known.node) is not known.node:  # equal results do not share their memory
            node = self._new.cast(known._replace(number=None), None)
        if self._new.made:
            self.operations.append(result_entry(self.known[given], self._new.made))
        self._new.made.clear()
        return known._replace(node=node, fake=known.declared)

    def finish(self, results: Any) -> None:
        """Write the graph's output, and remove 16-bit nodes that were written again and are not used any more."""
        self.graph.output(map_known(results, lambda known: known.node))
        for node, _ in reversed(self._anew):
            written = [self.known[node].node, *self.known[node].node.all_input_nodes]
            for one in written:
                if not one.users and one.op.startswith("call") and (one is written[0] or one.target == "to"):
                    self.graph.erase_node(one)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _read_node(self, node: Node) -> Decision | None:
        """Return the class of a node's operation; number the node's value (see `Numbers`). Nothing is written yet."""
        if node.op in ("placeholder", "output"):
            return None
        if node.op == "get_attr":
            held = getattr(self.module, str(node.target))
            is_tensor = isinstance(held, Tensor)
            self._note_integers(node, held)
            self.numbers.add(node, is_constant=is_tensor and not self.aliases.is_touched(node))
            return None
        name = native_name(node)
        if name == "_enter_autocast" and node.args[2]:
            raise under_autocast(line_near(node))
        self._off += _AUTOCAST.get(name, 0)
        if name == "_set_grad_enabled":
            self.numbers.records = bool(node.args[0])
        found = self._classify(node) if self._is_operation(node) else None
        if found is not None:
            self._largest[node] = largest_in(node, self._largest)
        self.numbers.add_call(node, operation_of(node))
        for changed in {name for one in self.aliases.changed[node] for name in self.aliases.names(one)}:
            self.numbers.add(changed)
        return found

    def _note_integers(self, node: Node, held: Any) -> None:
        """Record how large the integers of a captured tensor are, unless the graph changes them."""
        if isinstance(held, Tensor) and is_integral(held) and is_readable(held) and not self.aliases.is_touched(node):
            self._largest[node] = float(held.abs().max())

    def _look(self) -> dict[Any, str]:
        """Return what the readers of each value ask of it; see `polyamp.readers.look`."""
        nodes = self.module.graph.nodes
        written: dict[Any, Any] = {node: [new] for node, new in self._state.items()}
        for node in nodes:
            for state in {name for one in self.aliases.changed[node] for name in self.aliases.names(one)}:
                if state.op in ("placeholder", "get_attr") and native_name(node) in ("copy_", "setitem"):
                    written[state] = [node.args[-1]]
        return look(
            [self._read(node) for node in nodes if node.op.startswith("call")],
            results={*filter(self.aliases.is_touched, nodes), *self.module.graph.output_node().all_input_nodes},
            constants={node for node in nodes if node.op != "output" and self.numbers.is_constant(node)},
            written=written,
            number=lambda node: self.numbers[node],
        )

    def _read(self, node: Node) -> Read:
        """Return an operation as `polyamp.readers` takes it; the bodies of calls are not followed."""
        decision = self._classes.get(node, _ITEM)
        used = [] if decision.operation in _MAKING else [one for one in operands_of(node) if self._floats(one)]
        outputs = [node] if self._floats(node) else []
        return Read(decision.operation, decision.op_class, used, outputs, factor_of(node, decision.operation))

    def _floats(self, node: Node) -> bool:
        return any(map(is_floating, tensors_of(self._declared(node))))

    def _constant(self, node: Node, tensor: Tensor) -> Value:
        """Return the facts about a captured tensor; without its role if the graph changes the tensor's numbers."""
        value = constant_of(tensor, self.decider, divides=self._asked.get(node) == DIVIDES)
        return value._replace(role="") if self.aliases.is_touched(node) else value

    def _is_operation(self, node: Node) -> bool:
        """Return whether a node computes with tensors, and is not one of several results of another."""
        if native_name(node) in _AUTOCAST or _runs_bodies(node):
            return False
        used = [self._declared(one) for one in node.all_input_nodes]
        is_item = native_name(node) == "getitem" and not isinstance(used[0], Tensor)
        return not is_item and bool(tensors_of((self._declared(node), used)))

    def _declared(self, node: Node) -> Any:
        return self.known[node].declared if node in self.known else node.meta.get("example_value")

    def _write_node(self, node: Node) -> Known:
        if node in self._classes:
            return self._write_operation(node, self._classes[node])
        example = node.meta.get("example_value")
        if node.op == "get_attr":
            return self._write_attribute(node, example)
        if native_name(node) in _AUTOCAST:
            self._off += _AUTOCAST[native_name(node)]
            return Known(None, None, None)
        if unstable.is_operator_of_bodies(node.target, "tag_activation_checkpoint"):
            return self._write_checkpoint(node)
        if unstable.is_operator_of_bodies(node.target, "cond"):
            return self._write_branches(node)
        if native_name(node) == "getitem" and tensors_of(self._declared(node.all_input_nodes[0])):
            return self._write_item(node, self.known[node.all_input_nodes[0]])
        if native_name(node) == "_set_grad_enabled":
            self._new.records = bool(node.args[0])
        return Known(self.graph.node_copy(node, lambda used: self.known[used].node), example, example)

    def _write_attribute(self, node: Node, example: Any) -> Known:
        """Write a constant tensor of the graph; or a body, if the operator that runs it is not decided."""
        held = getattr(self.module, str(node.target))
        if isinstance(held, Tensor):
            return Known(self._add_attribute(held), example, example, self._constant(node, held), tensor=held)
        decided = all(map(_runs_bodies, node.users))
        return Known(None if decided else self._add_attribute(held), None, None)

    def _add_attribute(self, held: Any) -> Node:
        return self.graph.create_node("get_attr", self.attributes.add(held))

    def _write_item(self, node: Node, source: Known) -> Known:
        """Write one of several results of an operation."""
        index: Any = node.args[1]
        value = source.value[index] if isinstance(source.value, list) else source.value
        new = self._new.copy(node, {one: self.known[one].node for one in node.all_input_nodes}, source.fake[index])
        declared = node.meta.get("example_value")
        known = Known(new, source.fake[index], declared, known_value(declared) if is_integral(declared) else value)
        return self._round(known) if index == 0 and node.args[0] in self._rounding else known

    def _write_operation(self, node: Node, decision: Decision) -> Known:
        inputs = [self.known[used] for used in node.all_input_nodes]
        decision, known = self._decide(node, decision)
        value = value_by_type(known, inputs)
        if self.numbers.is_constant(node) and isinstance(value, Value) and decision.operation != "mean":
            # what is made of constants alone may be the weights of an average
            value = value._replace(role="weights") if value.role in ("", "statistic") else value
        known = known._replace(value=value)
        self.decider.lowered |= decision.format == self.decider.compute
        if tensors_of(known.declared) or self.aliases.changed[node]:
            self.operations.append(plan_entry(node, decision, inputs, known, self._new.made))
        self._new.made.clear()
        return known

    def _classify(self, node: Node) -> Decision:
        """Return the decision about the class of an operation; a user's rule for ``mul`` also decides squares."""
        path, plain = path_of(node), operation_of(node) or native_name(node)
        name = self.numbers.specific(node, plain)
        decision, of_plain = self.decider.decide(name, path), self.decider.decide(plain, path)
        if self._off and decision.op_class not in ("neutral", "keep"):
            return Decision(name, "full", "torch.autocast(enabled=False)")
        return of_plain if decision.reason == TABLE != of_plain.reason else decision

    def _operands(self, node: Node, decision: Decision) -> list[Value]:
        """Return the facts about a node's operands, in order, without a product's addend if that gets saturated."""
        operands = [(used, self._value(used)) for used in operands_of(node)]
        addend = addend_of(node) if decision.op_class == "lower" else None
        return [
            value
            for used, value in operands
            if (is_floating(self.known[used].declared) and not (used is addend and may_exceed(value)))
            or (
                decision.operation in _WITH_INTEGERS
                and is_integral(self.known[used].declared)
                and (value.state != "weak" or value.unfit)
            )
        ]

    def _value(self, node: Node) -> Value:
        """Return the facts about a value; for integers, the facts that they have as floating values."""
        value = value_of(self.known[node])
        limited = self._largest.get(node, math.inf)
        return self.decider.integers(value, limited) if is_integral(self.known[node].declared) else value

    def _apply_rule(self, node: Node, decision: Decision, floating: list[Node]) -> Decision:
        """Return a node's decision with the format that the flow rule decides, and the facts about the result."""
        operation = decision.operation
        numbers = numbers_of(node) if operation in _WITH_NUMBERS | _MAKING else []
        constant = self.decider.constant(*numbers)
        if not floating:
            known = [self.known[one] for one in node.all_input_nodes if tensors_of(self.known[one].declared)]
            given = [join_values(one.value) if isinstance(one.value, list) else one.value for one in known]
            output = value_without_floats(operation, given, constant)
            is_exact = is_floating(self._declared(node)) and operation in _EXACT
            output = self.decider.integers(output, self._largest[node]) if is_exact else output
            return decision._replace(output=output, reason=NO_FLOATS)
        values = self._operands(node, decision)
        values_and_numbers = [*values, constant] if constant.unfit else values
        decision = self.decider.flow(decision, values_and_numbers, asked=self._asked.get(node, ""))
        if operation == "fill" and len(values) == 1 and values[0].state in ("input", "strong"):
            return decision._replace(output=constant)  # it uses the shape of its operand, and not its numbers
        return self._make_possible(node, decision, values)

    def _make_possible(self, node: Node, decision: Decision, values: Sequence[Value]) -> Decision:
        """Return a decision, or another if memory, the user's own dtypes or kernels rule it out."""
        if self.aliases.keeps(node):
            moved = next((value for value in values if value.state == "strong"), next(iter(values), WEAK))
            return _as_written(decision, "its memory is changed in place elsewhere", moved)
        if decision.operation == "cast" and any(value.state == "low" for value in values):
            return decision._replace(output=Value("strong", "cast"))
        if decision.format != AS_WRITTEN and node.kwargs.get("dtype") == torch.float32:
            output = Value("strong", decision.operation)
            return decision._replace(
                format="float32", output=output, reason="dtype=torch.float32 was asked for", anew=()
            )
        if decision.output.state == "low" and decision.is_wide:
            return decision._replace(format="float32")
        return decision

    def _decide(self, node: Node, decision: Decision) -> tuple[Decision, Known]:
        """Decide and write an operation; leave it as the user wrote it if PyTorch cannot run it as decided."""
        used = dict.fromkeys([*operands_of(node), *node.all_input_nodes])
        floating = [one for one in used if is_floating(self.known[one].declared)]
        decision = self._apply_rule(node, decision, floating)
        if decision.format == AS_WRITTEN:
            return decision, self._write(node, AS_IT_IS, decision.output)
        how = writing.manner(node, decision, floating, self._low)
        try:
            known = self._write(node, how, decision.output, decision.anew)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            refusal = f"{native_name(node)} does not run in {decision.format}: {str(error).partition(chr(10))[0]}"
        else:
            if not self.aliases.changed[node]:
                self._again[node] = self._new.records
            return decision, known._replace(value=writing.of_results(decision.operation, known.value, known.fake))
        self.decider.refuse(refusal, decision)
        return _as_written(decision, refusal), self._write(node, AS_IT_IS, WEAK)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self, node: Node, how: Manner, value: Value, anew: tuple[str, ...] = ()) -> Known:
        """Write a node with its inputs cast to the wanted dtypes, and return the facts about its result."""
        used, addend = node.all_input_nodes, addend_of(node)
        wanted = dict.fromkeys(how.cast, how.dtype)
        if addend in wanted and writing.takes_wide_mask(node) and self.known[addend].fake.dtype == torch.float32:
            del wanted[addend]
        fakes = {one: fake_as(self.known[one], wanted.get(one), self._new.mode) for one in used}
        example = node.meta.get("example_value")
        same = all(dtypes_of(fake) == dtypes_of(self.known[one].declared) for one, fake in fakes.items())
        fake = example if same else self._new.run_on_fakes(node, fakes)
        changed = self.aliases.changed[node]
        taken = {one: self._widen(one, anew) for one in used}
        inputs = {one: self._new.cast(taken[one], wanted.get(one), adds=one is addend) for one in used}
        known = Known(self._new.copy(node, inputs, fake), fake, example, value)
        self._forget(changed)
        if self.aliases.is_pinned(node):
            return known._replace(node=self._new.cast(known, None), fake=example)
        if how.rounded and isinstance(fake, Tensor):
            known = self._round(known)
        elif how.rounded:
            self._rounding.add(node)
        for one in changed:
            new = known if isinstance(fake, Tensor) else Known(inputs[one], fakes[one], None, value)
            for name in self.aliases.names(one) & self.known.keys():  # every node with that memory
                self.known[name] = new._replace(declared=self.known[name].declared, number=self.numbers[node])
        return known

    def _round(self, known: Known) -> Known:
        """Cast a float32 result to the compute format."""
        return known._replace(node=self._new.cast(known, self._low), fake=fake_as(known, self._low, self._new.mode))

    def _widen(self, node: Node, roles: tuple[str, ...]) -> Known:
        """Return a node's value; if it is low with one of these roles, write node and inputs again in float32.

        Some nodes cannot be written again: their inputs were changed in place, or gradients were not recorded there.
        """
        known = self.known[node]
        if isinstance(known.value, list) or known.value.state != "low" or known.value.role not in roles:
            return known
        if self._again.get(node) is not self._new.records or known.fake.dtype == torch.float32:
            return known
        if (node, roles) not in self._anew:
            wide = {one: self._widen(one, roles) for one in node.all_input_nodes}
            fakes = {one: fake_as(given, torch.float32, self._new.mode) for one, given in wide.items()}
            fake = self._new.run_on_fakes(node, fakes)
            inputs = {one: self._new.cast(given, torch.float32) for one, given in wide.items()}
            self._new.made.append((known, torch.float32))
            self._anew[node, roles] = known._replace(node=self._new.copy(node, inputs, fake), fake=fake)
        return self._anew[node, roles]

    def _forget(self, changed: Sequence[Node]) -> None:
        """Forget the casts of values that were changed in place, since these casts have the old values."""
        names = {name for one in changed for name in self.aliases.names(one)}
        for name in names:
            for node in (name, *name.users):
                self._again.pop(node, None)
        stale = {self.known[name].number for name in names & self.known.keys()}
        self._new.forget(stale)

    # --- bodies -------------------------------------------------------------------------------------------------------

    def _write_checkpoint(self, node: Node) -> Known:
        """Decide the body of a checkpoint. Its casts are in the body, and so recomputed with it."""
        body, *given = cast(tuple[Any, ...], node.args)
        held, results = self._decide_body(body, given, as_declared=False)
        options = {**node.kwargs, "use_reentrant": False}
        call = self.graph.create_node("call_function", checkpoint, (held, *map(self._node_of, given)), options)
        call.meta = dict(node.meta)
        self._forget(self.aliases.changed[node])
        fakes = tuple(known.fake for known in results)
        return Known(call, fakes, node.meta.get("example_value"), [known.value for known in results])

    def _write_branches(self, node: Node) -> Known:
        """Decide both bodies of a conditional. Their results have the declared dtypes, so that they agree."""
        condition, *bodies, operands = cast(tuple[Any, ...], node.args)
        decided = [self._decide_body(body, operands, as_declared=True) for body in bodies]
        inputs = tuple(map(self._node_of, operands))
        call = self.graph.create_node(
            "call_function", node.target, (self._node_of(condition), *(held for held, _ in decided), inputs)
        )
        call.meta = dict(node.meta)
        example = node.meta.get("example_value")
        either = zip(*(results for _, results in decided), strict=True)
        return Known(call, example, example, [join_values([value_of(one) for one in results]) for results in either])

    def _node_of(self, given: Any) -> Any:
        return self.known[given].node if isinstance(given, Node) else given

    def _decide_body(self, body: Any, given: Sequence[Any], *, as_declared: bool) -> tuple[Node, list[Known]]:
        """Decide a body for its arguments; return the node that refers to it, and its results."""
        captured: GraphModule = getattr(self.module, str(body.target))
        graph, arguments = Graph(), dict[Node, Known]()
        for placeholder, argument in zip(captured.graph.find_nodes(op="placeholder"), given, strict=True):
            outer = self.known[argument] if isinstance(argument, Node) else Known(argument, argument, argument)
            arguments[placeholder] = outer._replace(node=graph.node_copy(placeholder))
            self.numbers.add_same(placeholder, argument)
        passed = Pass(captured, graph, arguments, self.shared, self._off)
        results = passed.results(as_declared=as_declared)
        passed.finish(results)
        called = GraphModule(self.attributes, graph, "Body")
        called.meta = captured.meta
        return self._add_attribute(called), results


def under_autocast(where: str) -> UsageError:
    """Return the error for code in another autocast region, which would cast a second time."""
    return UsageError(
        "the code is already under another autocast: its operations would be cast twice",
        where=where,
        found="torch.autocast",
        allowed="one of the two",
        fix="remove the autocast region, and write rules for the modules inside it: "
        'polyamp.policy(policy, rules={"head": "full"})',
    )


def _as_written(decision: Decision, reason: str, output: Value = WEAK) -> Decision:
    return decision._replace(format=AS_WRITTEN, output=output, reason=reason, anew=())


def _runs_bodies(node: Node) -> bool:
    """Return whether the bodies that a node calls are decided too."""
    return any(unstable.is_operator_of_bodies(node.target, name) for name in ("tag_activation_checkpoint", "cond"))
