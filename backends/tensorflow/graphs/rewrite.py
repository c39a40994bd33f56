"""`rewrite`: a function whose graph runs under a policy, with its backward pass and the functions that it calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.devices import report_slow
from polyamp.backends.tensorflow.graphs.capture import (
    FUNCTION,
    check_format,
    check_function,
    check_scaling,
    concrete_of,
    name_of,
    not_differentiable,
)
from polyamp.backends.tensorflow.graphs.decisions import Inside, Pass
from polyamp.backends.tensorflow.graphs.functions import decided_for, decided_graph, lowered_in, lowers
from polyamp.backends.tensorflow.graphs.planning import plan_of
from polyamp.backends.tensorflow.graphs.scaling import misscaled
from polyamp.backends.tensorflow.graphs.writing import Writer
from polyamp.backends.tensorflow.unstable import call_in_place_of, options_of, register
from polyamp.errors import check_options, not_traced, warn_once
from polyamp.formats import format_of
from polyamp.plan import NO_PRODUCTS, Plan, report_nothing_lowered, report_refused, report_unused
from polyamp.policies import Policy, traced_for
from polyamp.policies import policy as make_policy

_PLANS = "_polyamp_plans"  # an attribute of a rewritten function's Python function, which bound methods share


class Rewritten(FUNCTION):
    """A ``tf.function`` whose graphs are rewritten, with its plan; the result of `rewrite`."""

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
    fn: Any,
    *args: Any,
    policy: Policy | str | None = None,
    jit_compile: bool | None = None,
    **kwargs: Any,
) -> Rewritten:
    """Return a function whose whole graph, including its backward pass, runs under a policy.

    The function is traced as it is written, in float32. Then the flow rule decides every node, also in the functions
    that it calls and in gradients. Updates of variables stay as they are. Arguments, results and variables keep their
    types.

    >>> weight = tf.Variable(tf.ones((4, 2)))
    >>> def step(x):
    ...     with tf.GradientTape() as tape:
    ...         loss = tf.reduce_mean(tf.square(x @ weight))
    ...     weight.assign_sub(0.1 * tape.gradient(loss, weight))
    ...     return loss
    >>> fast = rewrite(step, tf.ones((3, 4)), policy="mixed_bfloat16")
    >>> [op.native for op in fast.plan.operations if op.format == "bfloat16"][:2]
    ['MatMul', 'Mul']
    >>> float(fast(tf.ones((3, 4)))), weight.dtype
    (16.0, tf.float32)

    Args:
        fn: a Python function, a ``tf.function`` (its ``jit_compile``, ``input_signature`` and ``reduce_retracing``
            stay in force), or a ``ConcreteFunction``.
        *args: example arguments, to trace now instead of at the first call. A tensor may be a ``tf.TensorSpec``.
        policy: a policy or its name, bound now; None means the current policy.
        jit_compile: as in ``tf.function``; None means the value of ``fn``.
        **kwargs: example keyword arguments.

    Returns:
        A ``tf.function`` with an attribute ``plan``. It traces and rewrites once for each signature. You cannot take
        gradients through it: rewrite the step that takes them.

    Raises:
        InvalidTypeError: ``fn`` is not callable.
        UnsupportedError: TensorFlow does not compute in the policy's format.
        UsageError: when tracing: ``fn`` was rewritten under another policy, returns operations, or takes tensors of
            another graph.
    """
    chosen = make_policy(policy)
    check_format(chosen.compute)
    check_function(fn)
    options = options_of(fn) if isinstance(fn, FUNCTION) else {}
    if jit_compile is not None:
        options["jit_compile"] = jit_compile
    rewritten = Rewritten(_traced_by(fn, chosen), getattr(fn, "__name__", "function"), autograph=False, **options)
    functools.update_wrapper(rewritten, fn, updated=())
    if args or kwargs:
        rewritten.get_concrete_function(*args, **kwargs)
    return rewritten


def explain(fn: Any, *args: Any, policy: Policy | str | None = None, **kwargs: Any) -> Plan:
    """Return the plan of a function's graph: the format of every node, with the reason. Nothing is computed.

    >>> plan = explain(lambda x: tf.exp(x @ x), tf.ones((2, 2)), policy="mixed_float16")
    >>> [(op.name, op.format, op.reason) for op in plan.operations][:2]
    [('matmul', 'float16', 'table'), ('exp', 'float32', 'table')]

    Args:
        fn: as for `rewrite`, or a ``GraphDef``.
        *args: its arguments. A tensor may be a ``tf.TensorSpec``.
        policy: a policy or its name; None means the current policy.
        **kwargs: its keyword arguments.
    """
    chosen = make_policy(policy)
    check_format(chosen.compute)
    if not callable(fn):
        return plan_of(decided_graph(fn, chosen), _imported(fn))
    concrete = concrete_of(fn, args, kwargs)
    return plan_of(decided_for(concrete, chosen), concrete.graph)


def rewritten_graph(graph_def: Any, policy: Policy | str | None = None) -> Any:
    """Return a ``GraphDef`` that runs under a policy, to import instead of the original. Nodes keep their names.

    Outputs that no node takes, such as a loss, keep their types. If a session fetches another node that runs in 16
    bits, the result is in 16 bits.

    >>> with tf.Graph().as_default() as graph:
    ...     _ = tf.matmul(tf.ones((2, 2)), tf.ones((2, 2)), name="product")
    >>> [node.op for node in rewritten_graph(graph.as_graph_def(), "mixed_float16").node]
    ['Const', 'Const', 'Cast', 'Cast', 'MatMul', 'Cast']

    Args:
        graph_def: a ``GraphDef`` with the functions that it calls. It is not changed.
        policy: a policy or its name; None means the current policy.

    Raises:
        InvalidTypeError: it is not a ``GraphDef``.
        UnsupportedError: TensorFlow does not compute in the policy's format.
        UsageError: it was rewritten already.
    """
    chosen = make_policy(policy)
    check_format(chosen.compute)
    decisions = decided_graph(graph_def, chosen)
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
        check_scaling(*misscaled(decisions, concrete.graph))
        if not plans:
            plans.append(functools.cache(lambda: plan_of(decisions, concrete.graph)))
        return _called(concrete, decisions, args, kwargs, name_of(fn))

    functools.update_wrapper(traced, fn, updated=())
    setattr(traced, _PLANS, plans)
    return traced


def _called(concrete: Any, decisions: Pass, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Call the rewritten ``concrete`` while the graph is built that will contain the call."""
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
    rules = decisions.rules
    report_unused(rules.decider.unused, where=name, paths="a name scope or layer", of=rules.policy)
    for op, place in rules.not_entered.items():
        warn_once(
            f"the functions of {op} ({place}) run as written in {name}: a rewrite does not enter them, so their "
            "products stay in float32. Rewrite the function that this operation takes, or use polyamp.autocast.",
            stacklevel=2,
        )
    report_refused(rules.decider.refused, where=name, of=rules.policy)
    for operation, device in lowered_in(decisions):
        report_slow(operation, rules.compute, device)
    if format_of(rules.compute).is_low and not lowers(decisions) and not rules.not_entered:
        why = f"{NO_PRODUCTS}, that this device's kernels take"
        report_nothing_lowered("rewrite", rules.compute, where=name, why=why)


def _imported(graph_def: Any) -> Any:
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
    return graph


def rewritten_for(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    jit_compile: bool | None = None,
) -> Any:
    """Return a rewritten function, or a rewritten ``GraphDef``; see `polyamp.backends.tensorflow.rewrite`."""
    if callable(fn):
        return rewrite(fn, *args, policy=policy, jit_compile=jit_compile, **kwargs)
    if jit_compile is not None:
        check_options(rewritten_graph, {"jit_compile": jit_compile}, where="rewrite(graph_def)")
    return rewritten_graph(fn, policy)


def planned(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Plan:
    """Return the plan of a function or a ``GraphDef``; see `polyamp.backends.tensorflow.explain`."""
    return explain(fn, *args, policy=policy, **kwargs)
