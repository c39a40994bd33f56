"""`rewrite` and `explain`, and functions that are rewritten at their first call, when arguments show the framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from polyamp import adapters
from polyamp.adapters import AnyAdapter, find_verb, verb_of
from polyamp.errors import check_arguments, check_callable, not_traced, refuses_unreadable
from polyamp.nesting import too_deep
from polyamp.plan import Plan
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.without_effect import chosen_policy

if TYPE_CHECKING:
    from polyamp.backends.torch.graphs.rewrite import Rewritten as RewrittenModule

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _ModuleLike(Protocol):
    # A type of torch would be `Any` without torch, and match every function.
    @property
    def named_parameters(self) -> Any: ...


class Rewritten(Protocol[P, T_co]):
    """What `rewrite` returns for a function."""

    @property
    def plan(self) -> Plan:
        """The format of every operation."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...


@overload
def rewrite(
    *,
    policy: Policy | str | None = None,
    backend: str | None = None,
    jit_compile: bool | None = None,
    argnums: int | Sequence[int] | None = None,
) -> Callable[[Callable[P, T]], Rewritten[P, T]]: ...
@overload
def rewrite(
    fn: _ModuleLike,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    backend: str | None = None,
    jit_compile: bool | None = None,
    argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> RewrittenModule: ...
@overload
def rewrite(
    fn: Callable[P, T],
    /,
    *args: Any,
    policy: Policy | str | None = None,
    backend: str | None = None,
    jit_compile: bool | None = None,
    argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Rewritten[P, T]: ...
@overload
def rewrite(
    fn: object,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    backend: str | None = None,
    jit_compile: bool | None = None,
    argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Any: ...
@refuses_unreadable
def rewrite(
    fn: Any = None,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    backend: str | None = None,
    jit_compile: bool | None = None,
    argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Any:
    """Rewrite a function or model so that its operations run in the formats of a policy, and report what was decided.

    >>> import jax
    >>> fast = rewrite(lambda w, x: x @ w, jax.numpy.ones((2, 3)), jax.numpy.ones((4, 2)), policy="mixed_float16")
    >>> fast.plan.totals["by_format"]
    {'float16': 1}

    Args:
        fn: the function or model; without it, a decorator: ``@rewrite(policy="mixed_bfloat16")``.
        *args: example arguments. Without them, ``fn`` is rewritten at its first call if it does not show its framework
            itself.
        policy: a policy or its name; None is the current policy when ``fn`` is rewritten.
        backend: the framework's name, if neither the function nor the arguments show it and several are loaded.
        jit_compile: for TensorFlow: as in ``tf.function``.
        argnums: for JAX: the positions of the arguments that are parameters, the first by default.
        **kwargs: example keyword arguments.

    Returns:
        The replacement for ``fn``, with an attribute ``plan``; see the framework's own ``rewrite``.

    Raises:
        InvalidTypeError: ``fn`` is neither callable nor a graph, or no adapter knows the arguments.
        UnsupportedError: the framework's adapter has no rewrite, or does not have these options.
    """
    chosen = None if policy is None else make_policy(policy)
    options = {"jit_compile": jit_compile, "argnums": argnums}
    options = {name: value for name, value in options.items() if value is not None}
    adapters.check_backend(backend)
    if fn is None and not (args or kwargs):
        return functools.partial(rewrite, policy=chosen, backend=backend, **options)
    own = adapters.adapter_of(fn)
    _check_rewritable(fn, own, where="rewrite(fn)")
    if args or kwargs or backend is not None or own is not None:
        found = find_verb("rewrite", backend, (fn, args, kwargs), options, where="rewrite(fn, *args)")
        chosen = chosen_policy(chosen, "rewrite(fn)")
        try:
            return found(fn, args, kwargs, chosen, **options)
        except RecursionError as error:
            raise too_deep("rewrite(fn, *args)") from error
    named = adapters.adapter_named_in("rewrite", fn)
    if named and getattr(named, "rewrites_unseen", False):  # rewrite now, so that a SavedModel finds the function
        chosen = chosen_policy(chosen, "rewrite(fn)")
        return verb_of(named, "rewrite", options)(fn, (), {}, chosen, **options)
    return RewrittenAtFirstCall(fn, chosen, options)


@refuses_unreadable
def explain(
    fn: Any,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    backend: str | None = None,
    engine: str | None = None,
    examples: int | None = None,
    **kwargs: Any,
) -> Plan:
    """List the format of every operation of a function or model under a policy, with its place and the reason.

    The result prints as a table.

    >>> import jax
    >>> print(explain(lambda w, x: x @ w, jax.numpy.ones((2, 3)), jax.numpy.ones((4, 2)), policy="O1").policy)
    mixed_float16

    Args:
        fn: the function or model.
        *args: its arguments.
        policy: a policy or its name; None is the current policy.
        backend: the framework's name, if neither the function nor the arguments show it and several are loaded.
        engine: what will run it: "rewrite", the default, or in PyTorch "autocast", which records one run under
            `autocast`. A PyTorch model that is not a single graph is recorded too; the plan's ``engine`` reports that.
        examples: how many examples the arguments hold, for `Plan.largest_batch` in PyTorch and JAX. The batch axis of
            an argument is the first one of this length. A forward and backward pass then runs for two batches: in
            PyTorch on tensors without data, in JAX in the compiler alone.
        **kwargs: its keyword arguments.

    Raises:
        InvalidTypeError: ``fn`` is neither callable nor a graph, or no adapter knows the arguments.
        InvalidValueError: no argument has an axis of so many examples.
        UnsupportedError: the framework's adapter has no explain, or does not have this engine or ``examples``.
    """
    _check_rewritable(fn, adapters.adapter_of(fn), where="explain(fn)")
    check_arguments("explain", [("engine", engine, isinstance(engine, str | None), '"rewrite", "autocast" or None')])
    options: dict[str, Any] = {} if engine in (None, "rewrite") else {"engine": engine}
    if examples is not None:
        options["examples"] = examples
    found = find_verb("explain", backend, (fn, args, kwargs), options, where="explain(fn, *args)")
    try:
        plan: Plan = found(fn, args, kwargs, make_policy(policy), **options)
    except RecursionError as error:
        raise too_deep("explain(fn, *args)") from error
    return plan


def _check_rewritable(fn: object, adapter: AnyAdapter | None, *, where: str) -> None:
    if not hasattr(adapter, "rewrite") or hasattr(fn, "dtype"):  # an array is not a graph
        allowed = "a function, a model or a framework's graph"
        check_callable(fn, where=where, allowed=allowed, fix="pass the function itself, then its arguments")


class RewrittenAtFirstCall:
    """The result of `rewrite` if only the first call's arguments show the framework. Also works as a method."""

    def __init__(self, fn: Callable[..., Any], policy: Policy | None, options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._policy = policy
        self._options = options
        self._rewritten: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._rewritten is None:
            call = (self._fn, args, kwargs)
            self._rewrite(find_verb("rewrite", None, call, self._options, where="rewrite(fn)(*args)"), args, kwargs)
        return self._rewritten(*args, **kwargs)

    def _rewrite(self, rewrite: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        chosen = chosen_policy(self._policy, "rewrite(fn)")
        self._rewritten = rewrite(self._fn, args, kwargs, chosen, **self._options)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        adapter = adapters.adapter_of(instance)  # the object whose method this is
        runs_on = getattr(adapter, "runs_on", None)
        adapter = adapters.adapter_named(runs_on) if runs_on else adapter
        if adapter is None or not getattr(adapter, "rewrites_unseen", False):
            return MethodType(self, instance)
        if self._rewritten is None:
            self._rewrite(verb_of(adapter, "rewrite", self._options), (), {})
        return self._rewritten.__get__(instance, owner)

    @property
    def plain(self) -> Callable[..., Any]:
        """The function as it was written."""
        return self._fn

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and self._rewritten is None:
            adapter = adapters.adapter_named_in("rewrite", self._fn)
            if adapter is not None:
                self._rewrite(verb_of(adapter, "rewrite", self._options), (), {})
        if name.startswith("_") or self._rewritten is None:
            before = " before its first call" if self.__dict__.get("_rewritten") is None else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{before}")
        return getattr(self._rewritten, name)

    @property
    def plan(self) -> Plan:
        """The plan."""
        if self._rewritten is None:
            raise not_traced(where="rewrite(fn).plan")
        plan: Plan = self._rewritten.plan
        return plan
