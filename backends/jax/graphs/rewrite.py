"""`autocast`, `rewrite` and `explain`: a function traced, run again under a policy, and its plan.

For example, ``run_rewritten(jnp.dot, policy, (x, w), {}, name="dot")`` traces ``dot`` for these arguments, and runs the
trace with an `Interpreter`: the product in float16, and its result in float32 as the function returns it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.devices import check_format
from polyamp.backends.jax.graphs import control_flow, derivatives, interpreter, planning
from polyamp.backends.jax.graphs.batch import footprints
from polyamp.backends.jax.graphs.capture import Program, Run, walk
from polyamp.backends.jax.graphs.decisions import IN_FLOAT32
from polyamp.backends.jax.graphs.interpreter import Handler, Interpreter
from polyamp.backends.jax.graphs.planning import PlanBuilder, Region
from polyamp.backends.jax.modules import as_pure
from polyamp.errors import is_integer, not_traced, wrong_type
from polyamp.plan import Decider, Plan
from polyamp.policies import Policy, current_policy
from polyamp.policies import policy as make_policy
from polyamp.without_effect import NO_PRODUCTS, report_nothing_lowered, report_unused

HANDLERS: dict[str, Handler] = {
    "optimization_barrier": interpreter.barrier,
    "convert_element_type": interpreter.convert,
    "jit": control_flow.jit,
    "closed_call": control_flow.in_place("call_jaxpr"),
    "remat_opt": control_flow.in_place("fwd_jaxpr"),
    "remat2": control_flow.remat,
    "shard_map": control_flow.shard_map,
    "scan": control_flow.scan,
    "while": control_flow.while_loop,
    "cond": control_flow.cond,
    "custom_jvp_call": derivatives.custom_jvp,
    "custom_vjp_call": derivatives.custom_vjp,
}
"""What runs a primitive, if it is not bound as an operation."""


class Rewritten:
    """The result of `rewrite`: the function of `autocast`, with its plan."""

    def __init__(self, fn: Callable[..., Any], policy: Policy, argnums: Sequence[int]) -> None:
        functools.update_wrapper(self, fn)
        self._argnums = argnums
        self._fn = fn
        self._policy = policy
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan for the arguments of the first call, or for the example arguments."""
        if self._plan is None:
            raise not_traced(where="rewrite(fn).plan")
        return self._plan

    def explain_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for these arguments, unless there is one."""
        if self._plan is None:
            self._plan = planned(self._fn, args, kwargs, self._policy, self._argnums)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.explain_for(args, kwargs)
        return run_rewritten(self._fn, self._policy, args, kwargs, name=name_of(self._fn), argnums=self._argnums)


def rewritten_for(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy,
    *,
    argnums: int | Sequence[int] = 0,
) -> Rewritten:
    """Rewrite a function whose parameters are at ``argnums``; see `polyamp.rewrite`."""
    rewritten = Rewritten(fn, policy, positions(argnums, where="rewrite(fn, argnums=)"))
    if args or kwargs:
        rewritten.explain_for(args, kwargs)
    return rewritten


def planned(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chosen: Policy,
    argnums: int | Sequence[int] = 0,
    *,
    examples: int | None = None,
) -> Plan:
    """Return the plan of a function whose parameters are at ``argnums``."""
    check_format(chosen.compute)
    places = positions(argnums, where="explain(fn, *args)")
    call = as_pure(fn, args, kwargs, places)
    with planning.recorded() as own:
        program = Program(*call[:4])
    if own.found and any(equation.is_backward for equation in walk(program.closed)):
        return planning.plan_of_step(program.closed, own)
    plan = PlanBuilder(own)
    run = Interpreter(chosen, HANDLERS, plan)
    jax.eval_shape(lambda arrays: run.run_program(program, arrays), program.arrays)
    plain = program
    if own.found:
        with planning.recorded(left_out=True):
            plain = Program(*as_pure(fn, args, kwargs, places)[:4])
    ways = [_under(chosen), Program.as_traced]
    grown = [None, None] if examples is None else footprints(call, examples, ways)
    return Plan(
        str(chosen),
        tuple(plan.operations),
        program.bytes_saved(ways[0]),
        plain.bytes_saved(ways[1]),
        tuple(own.unused_rules(chosen, [run.decider])),
        footprint=grown[0],
        footprint_float32=grown[1],
    )


def _under(policy: Policy) -> Run:
    return lambda program, arrays: Interpreter(policy, HANDLERS).run_program(program, arrays)


def run_rewritten(
    fn: Callable[..., Any],
    bound: Policy | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str | None,
    argnums: Sequence[int] = (0,),
) -> Any:
    """Run a function under a policy, or the current one; report under this name what had no effect."""
    policy = bound or current_policy()
    check_format(policy.compute)
    shown = planning.RECORDED.get()
    if policy.compute == "float32" or (shown is not None and shown.left_out):
        with jax.named_scope(unstable.ISLAND) if bound and policy.compute == "float32" else nullcontext():
            return fn(*args, **kwargs)
    call = as_pure(fn, args, kwargs, argnums)
    program = Program(*call[:4])
    if shown is not None:
        plan = PlanBuilder(shown)
        run = Interpreter(policy, HANDLERS, plan)
        saved = program.bytes_saved(_under(policy)), program.bytes_saved(Program.as_traced)
        with shown.add(Region(policy, plan.operations, run.decider, saved)):
            arrays = run.run_program(program, program.arrays)
        return call.accept(program.results(arrays))
    run = Interpreter(policy, HANDLERS)
    results = call.accept(program.results(run.run_program(program, program.arrays)))
    if name is not None:
        _report(run.decider, name)
    return results


def name_of(fn: Any) -> str:
    """Return the name of a function, or of the class of a callable."""
    name: str = getattr(fn, "__name__", type(fn).__name__)
    return name


def _report(decider: Decider, name: str) -> None:
    """Warn, under a function's name, that nothing was lowered, or that rules matched nothing."""
    policy = decider.policy
    report_unused(decider.unused, where=name, paths="a named scope or module", of=policy)
    if not decider.lowered and set(decider.not_lowered) != {IN_FLOAT32}:
        why = _why_nothing(decider.not_lowered)
        report_nothing_lowered("autocast", policy.compute, where=name, why=why)


def _why_nothing(not_lowered: dict[str, str]) -> str:
    if not not_lowered:
        return NO_PRODUCTS
    reasons = "; ".join(f"{place} stays as it is: {reason}" for reason, place in list(not_lowered.items())[:3])
    setting = getattr(jax.config, "jax_default_matmul_precision", None)
    if setting is None or not any(reason.startswith("precision=") for reason in not_lowered):
        return reasons
    return (
        f"{reasons}. jax_default_matmul_precision, which is {setting!r} here, asks for it in every product, so that "
        "none is lowered: set it to None, and pass precision= to the products that need it"
    )


def has_own_policy(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a step differentiates under a policy of its own, as with `polyamp.value_and_grad`."""
    with planning.recorded() as own:
        program = Program(*as_pure(fn, args, kwargs)[:4])
    return bool(own.found) and any(equation.is_backward for equation in walk(program.closed))


def autocast(
    fn: Callable[..., Any], policy: Policy | str | None = None, *, argnums: int | Sequence[int] = 0
) -> Callable[..., Any]:
    """Return a function that runs under a policy: products in 16 bits, and in float32 what needs it.

    >>> import jax.numpy as jnp
    >>> def model(w, x):
    ...     return jax.nn.softmax(x @ w)
    >>> w, x = jnp.ones((2, 3)), jnp.ones((4, 2))
    >>> print(jax.make_jaxpr(autocast(model, "mixed_bfloat16"))(w, x).eqns[0])  # doctest: +ELLIPSIS
    a:bf16[4,2] = convert_element_type[new_dtype=bfloat16 weak_type=False] b
    >>> autocast(model, "mixed_bfloat16")(w, x).dtype
    dtype('float32')

    Args:
        fn: any function of arrays and pytrees: a method ``apply`` of flax or haiku, an equinox or flax NNX module, a
            loss. Arguments that are not arrays (Python numbers, strings, functions) stay as they are. NNX modules among
            the arguments receive the changes that ``fn`` makes to them.
        policy: a policy or its name, bound now. None is the current policy at each call, or rather at each trace:
            ``jax.jit`` keeps what it traced.
        argnums: the positions of the arguments that are parameters. Parameters are cast when they meet 16-bit values;
            so are the arrays in modules of flax and equinox, at any position. All other float32 arguments are inputs,
            such as masks and labels, and so are traced arrays that ``fn`` takes from outside: a sum of an input and a
            16-bit value is computed in float32.

    Returns:
        A function with the same arguments and results; the results have the dtypes that ``fn`` gives them. It composes
        with ``jit``, ``grad``, ``vmap``, ``jax.checkpoint`` and other transformations in either order. Each call traces
        ``fn``: put ``jax.jit`` around it. Parameters are cast where they are used, inside loops too, so that their
        gradients are added up in float32.

    Raises, when called:
        UnsupportedError: JAX cannot compute in the policy's format.
        UsageError: ``fn`` branches on a traced value, or changes an NNX module that is not among its arguments.

    Warns:
        PolyampWarning: nothing was lowered, or a rule matched nothing.
    """
    bound = None if policy is None else make_policy(policy)
    check_function(fn, where="autocast(fn, policy)")
    places = positions(argnums, where="autocast(fn, argnums=)")

    @functools.wraps(fn)
    def autocasted(*args: Any, **kwargs: Any) -> Any:
        return run_rewritten(fn, bound, args, kwargs, name=name_of(fn), argnums=places)

    return autocasted


def check_function(fn: object, *, where: str) -> None:
    """Raise if ``fn`` is not callable, for example an array."""
    if not callable(fn):
        allowed = "a function of arrays and pytrees: a model's apply, a loss"
        fix = "pass the function, and call the result with arrays; to cast arrays, call policy.cast_to_compute(tree)"
        raise wrong_type(type(fn), where=where, allowed=allowed, fix=fix, what="the argument is not a function")


def positions(argnums: Any, *, where: str, at_least: int = 0) -> tuple[int, ...]:
    """Return ``argnums`` as a tuple; raise unless it has integers, at least so many."""
    wanted = tuple(argnums) if isinstance(argnums, list | tuple) else (argnums,)
    if len(wanted) >= at_least and all(map(is_integer, wanted)):
        return wanted
    allowed = "an integer, or a tuple of integers; 0 is the function's first argument"
    fix, what = "count the function's own arguments from 0", "argnums are not positions of arguments"
    raise wrong_type(argnums, where=where, allowed=allowed, fix=fix, what=what)
