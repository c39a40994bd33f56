"""`polyamp run --policy` for scripts in JAX: loss functions that a script differentiates run under autocast.

A policy without a loss scale, such as ``mixed_bfloat16``, needs no place in the script's state, so that
``jax.grad(loss_fn)`` can become ``jax.grad(polyamp.autocast(loss_fn, policy))``. That covers ``jax.value_and_grad``,
and what flax, haiku, equinox and optax build on these two.

Only the outermost derivative is lowered. A derivative inside a differentiated function (the residual of a differential
equation, a gradient penalty, the rule of an implicit function) stays in float32, and so do Hessians, Jacobians,
``jax.vjp``, and functions that other installed packages differentiate, such as samplers. A dynamic loss scale belongs
in the state of the optimizer, which only the script can carry from step to step: such policies are refused.

JAX before 0.10 keeps one trace of a function under ``jax.jit``: if that function contains a gradient, it is lowered
everywhere or nowhere, as its first use was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.autocast.function import in_float32
from polyamp.backends.jax.devices import check_format
from polyamp.backends.jax.graphs import regions
from polyamp.backends.jax.graphs.cells import is_inexact
from polyamp.backends.jax.graphs.equations import walk
from polyamp.backends.jax.graphs.interpreter import Interpreter
from polyamp.backends.jax.graphs.planning import PlanBuilder
from polyamp.backends.jax.graphs.program import Program
from polyamp.backends.jax.graphs.rewrite import name_of, report_findings, run_rewritten
from polyamp.backends.jax.modules import as_pure
from polyamp.backends.jax.operations import canonical
from polyamp.errors import UsageError
from polyamp.operations import OPERATIONS
from polyamp.plan import Plan
from polyamp.policies import Policy
from polyamp.scripts.places import calling_package
from polyamp.scripts.session import Session

GRADIENTS = ("grad", "value_and_grad")
OTHER_DERIVATIVES = ("jacfwd", "jacrev", "hessian")
WITH_A_FUNCTION = ("vjp", "linearize")  # they return a function that computes the derivative later

BUILD_ON_GRAD = frozenset({"jax", "jaxlib", "flax", "haiku", "equinox", "optax", "chex", "jaxtyping", "typeguard"})
"""Packages that differentiate a function for the code that called them."""


def begin(session: Session) -> None:
    """Replace JAX's functions for gradients until the run ends, if the run has a policy that lowers anything.

    >>> from polyamp import policy
    >>> from polyamp.scripts.session import running
    >>> before = jax.grad
    >>> with running(Session(policy("mixed_bfloat16"))) as session:
    ...     begin(session)
    ...     jax.grad is before
    False
    >>> jax.grad is before
    True
    """
    if session.policy is None or session.policy.compute == "float32":
        return
    derivatives = _Derivatives(session, session.policy)
    for name in GRADIENTS:
        session.replace(jax, name, derivatives.of_losses(getattr(jax, name)))
    for name in OTHER_DERIVATIVES:
        session.replace(jax, name, _making_not_lowered(getattr(jax, name)))
    session.replace(jax, "jvp", _not_lowered(jax.jvp))
    for name in WITH_A_FUNCTION:
        session.replace(jax, name, _both_not_lowered(getattr(jax, name)))


class _Derivatives:
    """The gradients that one script computes."""

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._policy = session, policy
        self._has_plan = False
        self._has_ended = False  # modules that were imported meanwhile keep our functions
        session.at_end(self._end)

    def _end(self) -> None:
        self._has_ended = True

    def of_losses(self, transform: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``jax.grad`` or ``jax.value_and_grad`` for functions that run under the policy."""

        @functools.wraps(transform)
        def transformed(fun: Callable[..., Any], argnums: Any = 0, *args: Any, **kwargs: Any) -> Any:
            plain = transform(fun, argnums, *args, **kwargs)
            if self._has_ended:
                return plain
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not self._is_the_scripts(caller) or kwargs.get("holomorphic"):
                return plain if caller.startswith("polyamp.") else _not_lowered(plain)
            self._check_policy()
            places = tuple(argnums) if isinstance(argnums, list | tuple) else (argnums,)
            lowered = transform(self._lowered(fun, places), argnums, *args, **kwargs)

            @functools.wraps(plain)
            def differentiate(*own: Any, **named: Any) -> Any:
                if self._has_ended:
                    return plain(*own, **named)
                if _INSIDE.get():
                    return in_float32(plain, *own, **named)
                self._session.check()
                with _inside():
                    return lowered(*own, **named)

            return differentiate

        return transformed

    def _is_the_scripts(self, caller: str) -> bool:
        """Return whether the module that asks for a gradient is the script's, or does so for the script."""
        if caller in _OWN_MIXED_PRECISION:
            self._session.found(_OWN_MIXED_PRECISION[caller])
        if caller.partition(".")[0] in ("polyamp", "jax"):  # such as jax.scipy.optimize
            return False
        package = calling_package(BUILD_ON_GRAD)
        if package and package not in self._session.shared:  # another adapter lowers that package itself
            self._session.note(f"{package} differentiates functions by itself: these stay in float32")
        return not package

    def _check_policy(self) -> None:
        """Refuse a policy that needs more than casts."""
        policy = self._policy
        if policy.loss_scale.check:
            self._session.refuse(
                "a JAX script has no place for the state of a loss scale",
                found=f"the policy {policy}, which scales the loss or skips steps",
                fix="write tx = polyamp.wrap_optimizer(tx, policy) and loss, grads = polyamp.value_and_grad(loss_fn, "
                "policy)(opt_state, params, batch); or run it with --policy mixed_bfloat16",
            )
        if policy.param != "float32":
            self._session.refuse(
                "the parameters of a JAX script cannot be stored in another format",
                found=f"the policy {policy}, which stores them in {policy.param}",
                fix=f"run it with --policy mixed_{policy.compute}; or cast them by policy.cast_to_param(params)",
            )
        check_format(policy.compute)

    def _lowered(self, fun: Callable[..., Any], argnums: Sequence[int]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def lowered(*args: Any, **kwargs: Any) -> Any:
            if regions.current() is not None or regions.are_left_out():  # polyamp.explain looks at the script
                return run_rewritten(fun, self._policy, args, kwargs, name=name_of(fun), argnums=argnums)
            call = as_pure(fun, args, kwargs, argnums)
            program = self._traced(Program, *call[:4])
            self._check_formats(program)
            plan = None if self._has_plan else PlanBuilder()
            interpreter = Interpreter(self._policy, plan)
            results = call.accept(program.results(program.run(interpreter, program.arrays)))
            report_findings(interpreter.decider, name_of(fun))
            if plan is not None and interpreter.decider.lowered:
                self._has_plan = True
                unused = tuple(rule.pattern for rule in interpreter.decider.unused)
                self._session.ran(Plan(str(self._policy), tuple(plan.operations), unused_rules=unused))
            return results

        return lowered

    def _traced(self, build: Callable[..., Program], *parts: Any) -> Program:
        try:
            return build(*parts)
        except UsageError as error:
            what, *found = str(error).splitlines()
            self._session.refuse(
                f"a function that the script differentiates cannot run under autocast: {what}",
                found="; ".join(line.partition(":")[2].strip() for line in found[:2]),
                fix="leave out --policy, or change that line",
            )

    def _check_formats(self, program: Program) -> None:
        """Refuse a script that computes products in 16 bits by itself."""
        for equation in walk(program.closed):
            name = canonical(equation.name, equation.own.params)
            entry = OPERATIONS.get(name)
            if entry is None or entry.op_class != "lower":
                continue
            dtypes = filter(is_inexact, map(unstable.dtype_in, equation.own.invars))
            for low in [dtype for dtype in dtypes if dtype.itemsize <= 2][:1]:
                self._session.found(f"{name} in {low.name} at {unstable.users_line(equation.own)}")


_OWN_MIXED_PRECISION = {
    "flax.training.dynamic_scale": "flax.training.dynamic_scale.DynamicScale",
    "polyamp.backends.jax.steps.value_and_grad": "polyamp.value_and_grad",
}
"""The modules that ask for gradients of a scaled loss, and the interfaces that they belong to."""

_INSIDE: ContextVar[bool] = ContextVar("polyamp_jax_script_gradient", default=False)


@contextmanager
def _inside() -> Iterator[None]:
    """Mark everything in this context as part of a gradient; functions under ``jax.jit`` are traced apart for it."""
    token = _INSIDE.set(True)
    try:
        with unstable.traced_apart("a gradient of polyamp run"):
            yield
    finally:
        _INSIDE.reset(token)


def _not_lowered(derivative: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes a derivative as written; gradients inside it are not lowered either.

    Inside another gradient it runs in float32.
    """

    @functools.wraps(derivative)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _INSIDE.get():
            return in_float32(derivative, *args, **kwargs)
        with _inside():
            return derivative(*args, **kwargs)

    return run


def _making_not_lowered(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``jax.hessian`` or the like, whose functions are as by `_not_lowered`."""

    @functools.wraps(transform)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        return _not_lowered(transform(*args, **kwargs))

    return transformed


def _both_not_lowered(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``jax.vjp`` or the like: it and the function that it returns, a pytree, are as by `_not_lowered`."""

    @functools.wraps(transform)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_inside = _INSIDE.get()
        results = _not_lowered(transform)(*args, **kwargs)
        if not is_inside:
            return results
        value, function, *aux = results
        return value, jax.tree_util.Partial(in_float32, function), *aux  # type: ignore[no-untyped-call]

    return run
