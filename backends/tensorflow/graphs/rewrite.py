"""`rewrite`: a function whose graph runs under a policy, with its backward pass and the functions that it calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from polyamp.adapters import check_options
from polyamp.agreement import traced_for
from polyamp.backends.tensorflow.devices import report_slow
from polyamp.backends.tensorflow.graphs.capture import (
    FUNCTION,
    check_format,
    concrete_of,
    name_of,
    not_differentiable,
    walking,
)
from polyamp.backends.tensorflow.graphs.decisions import Inside, Pass
from polyamp.backends.tensorflow.graphs.planning import plan_of
from polyamp.backends.tensorflow.graphs.program import decided_for, decided_graph, lowered_in, lowers
from polyamp.backends.tensorflow.graphs.writing import Writer
from polyamp.backends.tensorflow.unstable import call_in_place_of, options_of, register
from polyamp.errors import not_traced, warn_once
from polyamp.formats import format_of
from polyamp.plan import Plan
from polyamp.policies import Policy
from polyamp.without_effect import NO_PRODUCTS, report_nothing_lowered, report_refused, report_unused

_PLANS = "_polyamp_plans"  # an attribute of a rewritten function's Python function, which bound methods share


class Rewritten(FUNCTION):
    """A ``tf.function`` whose graphs are rewritten, with its plan; the result of `rewrite`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten function; it is traced for new types and shapes of arguments."""
        with walking(self, args, kwargs):
            return super().__call__(*args, **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Return the rewritten function for arguments of these types and shapes."""
        with walking(self, args, kwargs):
            return super().get_concrete_function(*args, **kwargs)

    @property
    def plan(self) -> Plan:
        """The plan for the first arguments.

        Raises:
            UsageError: the function was not called yet.
        """
        plans = getattr(self.python_function, _PLANS)
        if not plans:
            raise not_traced(where="rewrite(fn).plan")
        plan: Plan = plans[0]()
        return plan

    @property
    def plain(self) -> Any:
        """The function as it was written."""
        return inspect.getattr_static(self, "__wrapped__")


def rewrite(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, *, jit_compile: bool | None = None
) -> Any:
    """Return a `Rewritten` function, or a ``GraphDef``, whose whole graph runs under a policy; see `polyamp.rewrite`.

    The function is traced as it is written, in float32. Then the flow rule decides every node, also in called
    functions and gradients. Updates of variables stay as they are. Arguments, results and variables keep their
    types.
    """
    check_format(policy.compute)
    if not callable(fn):
        check_options(
            _rewritten_graph, {} if jit_compile is None else {"jit_compile": jit_compile}, where="rewrite(graph_def)"
        )
        return _rewritten_graph(fn, policy)
    options = options_of(fn) if isinstance(fn, FUNCTION) else {}
    if jit_compile is not None:
        options["jit_compile"] = jit_compile
    rewritten = Rewritten(_traced_by(fn, policy), getattr(fn, "__name__", "function"), autograph=False, **options)
    functools.update_wrapper(rewritten, fn, updated=())
    if args or kwargs:
        rewritten.get_concrete_function(*args, **kwargs)
    return rewritten


def explain(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Plan:
    """Return the plan of a function's graph, or of a ``GraphDef``; see `polyamp.explain`."""
    check_format(policy.compute)
    if not callable(fn):
        decisions = decided_graph(fn, policy)  # refuses everything but graphs
        with tf.Graph().as_default() as graph:
            tf.graph_util.import_graph_def(fn, name="")
        return plan_of(decisions, graph)
    with walking(fn, args, kwargs):
        concrete = concrete_of(fn, args, kwargs)
    return plan_of(decided_for(concrete, policy), concrete.graph)


def _rewritten_graph(graph_def: Any, policy: Policy) -> Any:
    """Return a ``GraphDef`` that runs under a policy, to import instead of the original. Nodes keep their names."""
    decisions = decided_graph(graph_def, policy)
    _report(decisions, "the graph")
    new = tf.compat.v1.GraphDef()
    new.CopyFrom(graph_def)
    del new.node[:]
    new.node.extend(Writer(new.library.function.append).graph(decisions))
    return new


def _traced_by(fn: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    plans: list[Callable[[], Plan]] = []

    def traced(*args: Any, **kwargs: Any) -> Any:
        with traced_for(policy):
            concrete = concrete_of(fn, args, kwargs)
        decisions = decided_for(concrete, policy)
        if not plans:
            plans.append(functools.cache(lambda: plan_of(decisions, concrete.graph)))
        return _called(concrete, decisions, args, kwargs, name_of(fn))

    functools.update_wrapper(traced, fn, updated=())
    setattr(traced, _PLANS, plans)
    return traced


def _called(concrete: Any, decisions: Pass, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Call the rewritten ``concrete`` in the graph that is being built."""
    definition = concrete.function_def
    results = tuple(dtype for _, dtype in decisions.graph.results)
    written: list[Any] = []
    Writer(written.append).function(Inside(definition.signature.name, decisions, results), definition)
    _report(decisions, name)
    registered = register(written, concrete) if written else concrete.inference_fn
    with not_differentiable():
        return call_in_place_of(registered, concrete, args, kwargs)


def _report(decisions: Pass, name: str) -> None:
    """Warn once about everything that had no effect."""
    program = decisions.program
    report_unused(program.unused, where=name, paths="a name scope or layer", of=program.policy)
    for op, place in program.not_entered.items():
        warn_once(
            f"the functions of {op} ({place}) run as written in {name}: a rewrite does not enter them, so their "
            "products stay in float32. Rewrite the function that this operation takes, or use polyamp.autocast.",
        )
    report_refused(program.refused, where=name, of=program.policy)
    for operation, device in lowered_in(decisions):
        report_slow(operation, program.compute, device)
    if format_of(program.compute).is_low and not lowers(decisions) and not program.not_entered:
        why = f"{NO_PRODUCTS}, that this device's kernels take"
        report_nothing_lowered("rewrite", program.compute, where=name, why=why)
