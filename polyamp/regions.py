"""Regions of ambient autocast, and functions that run in a region: `autocast`.

A region is the code in a ``with`` block. Entering it makes a policy the current one and enters the framework's ambient
autocast, which PyTorch alone has; leaving it undoes both. For example::

    with polyamp.autocast("mixed_bfloat16"):  # policy entered, torch autocast entered
        y = x @ w                             # bfloat16
    # both left, in reverse order
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

from polyamp import adapters
from polyamp.adapters import AnyAdapter, verb_of
from polyamp.errors import InvalidTypeError, UnsupportedError, brief
from polyamp.formats import name_of_dtype
from polyamp.policies import Policy, as_policy, enter, leave
from polyamp.policies import policy as make_policy
from polyamp.without_effect import chosen_policy

Fn = TypeVar("Fn", bound=Callable[..., Any])


@overload
def autocast(
    target: Policy | str | None = None,
    policy: Policy | str | None = None,
    *,
    backend: str | None = None,
) -> Autocast: ...
@overload
def autocast(
    target: Fn,
    policy: Policy | str | None = None,
    *,
    backend: str | None = None,
    argnums: int | Sequence[int] | None = None,
) -> Fn: ...
def autocast(
    target: Any = None,
    policy: Policy | str | None = None,
    *,
    backend: str | None = None,
    argnums: int | Sequence[int] | None = None,
    **mistaken: Any,
) -> Any:
    """Run operations in the formats of a policy: ``with autocast(policy):``, or as a decorator.

    >>> import torch
    >>> with autocast("mixed_bfloat16"):
    ...     print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
    torch.bfloat16

    Args:
        target: a policy or its name, for a context that enters PyTorch's ambient autocast; or a function or module to
            run under autocast.
        policy: the policy of a function; or, as a keyword, of a context or decorator. Bound now if given, else the
            current policy at each call.
        backend: the framework's name, if neither the function nor its arguments show it.
        argnums: for a function in JAX: the positions of its arguments that are parameters, the first by default. Other
            float32 arguments stay float32 next to 16-bit values.
        **mistaken: arguments of other libraries' autocast, such as ``dtype=``, ``device_type=`` and ``enabled=``:
            refused, with a hint at what to write instead.

    Returns:
        A context manager that can be entered again and in several threads, and used as a decorator; or the transformed
        function.

    Raises:
        InvalidTypeError: there are two policies, or an argument of another library's autocast.
        UnsupportedError: a context is entered where PyTorch is not loaded.
    """
    if mistaken:
        raise _another_autocast(mistaken)
    adapters.check_backend(backend)
    bound = None if policy is None else make_policy(policy)
    if callable(target) and not isinstance(target, Policy) and name_of_dtype(target) is None:
        return autocast_function(target, bound, backend, {} if argnums is None else {"argnums": argnums})
    if argnums is not None:
        raise InvalidTypeError(
            "argnums needs a function",
            where="autocast(policy, argnums=)",
            found=brief(argnums),
            allowed="autocast(function, policy, argnums=)",
            fix="pass the function too, or leave argnums out",
        )
    if target is not None and policy is not None:
        raise InvalidTypeError(
            "autocast takes one policy",
            where="autocast(target, policy)",
            found=f"{brief(target)} and {brief(policy)}",
            allowed="autocast(policy), or autocast(function, policy)",
            fix="leave one of the two out",
        )
    chosen = bound if target is None else as_policy(target)
    return _traced(chosen) or Autocast(chosen, backend)


def _another_autocast(mistaken: Mapping[str, Any]) -> InvalidTypeError:
    """Return the error for ``autocast(dtype=...)`` and the like, which torch's autocast takes."""
    name = name_of_dtype(mistaken.get("dtype"))
    instead = f"mixed_{name}" if name in ("float16", "bfloat16") else "mixed_float16"
    fix = f'write polyamp.autocast("{instead}"): a policy names the formats, and every device is covered'
    if mistaken.get("enabled") is False:
        fix = 'write polyamp.autocast("float32") for a region in float32'
    return InvalidTypeError(
        "autocast takes a policy",
        where="autocast(policy)",
        found=", ".join(f"{key}={brief(value)}" for key, value in mistaken.items()),
        allowed="autocast(policy), autocast(function, policy), and backend=",
        fix=fix,
    )


class Autocast:
    """The result of `autocast` for a policy: re-entrant, usable from several threads, and a decorator."""

    __slots__ = ("_backend", "_policy")

    def __init__(self, policy: Policy | None, backend: str | None) -> None:
        self._policy = policy
        self._backend = backend

    def __enter__(self) -> Policy:
        chosen = chosen_policy(None, "autocast()") if self._policy is None else self._policy
        context = _ambient(self._backend).autocast_context(chosen)
        context.__enter__()
        enter(chosen, self, context)
        return chosen

    def __exit__(self, *error: Any) -> None:
        context = leave(self)
        if context is not None:
            context.__exit__(*error)

    def __call__(self, fn: Fn) -> Fn:
        return autocast_function(fn, self._policy, self._backend)  # type: ignore[return-value]


def _traced(policy: Policy | None) -> AbstractContextManager[Any] | None:
    """Return the framework's own context if a compiler, which cannot follow context variables, traces this code."""
    if policy is None:
        return None
    adapter = adapters.tracing()
    return None if adapter is None else adapter.autocast_context(policy)


def autocast_function(
    fn: Callable[..., Any], policy: Policy | None, backend: str | None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a function that runs ``fn`` in a region, with the options that its framework's adapter has."""
    # The framework is that of the function's own type, or else of its arguments at each call.
    named = adapters.adapter_of(fn) if backend is None else adapters.adapter_named(backend)
    options = options or {}

    @functools.wraps(fn)
    def autocasted(*args: Any, **kwargs: Any) -> Any:
        if traced := _traced(policy):
            with traced:
                return fn(*args, **kwargs)
        adapter = named or _autocasting(adapters.adapters_within(args, kwargs))
        if adapter is not None and (options or hasattr(adapter, "autocast_function")):
            transform = verb_of(adapter, "autocast_function", options)
            return transform(fn, policy, **options)(*args, **kwargs)
        with Autocast(policy, None if adapter is None else adapter.name):
            return fn(*args, **kwargs)

    return autocasted


def _autocasting(adapters: list[AnyAdapter]) -> AnyAdapter | None:
    """Return the first adapter that has an autocast; else the first adapter, so that the error names this one."""
    kinds = ("autocast_function", "autocast_context")
    able = [one for one in adapters if any(hasattr(one, kind) for kind in kinds)]
    return next(iter(able or adapters), None)


_ambient_of: list[AnyAdapter] = []  # the loaded adapter with ambient autocast, once there is one


def _ambient(backend: str | None) -> AnyAdapter:
    """Return the adapter whose autocast is entered: the named one, or else the loaded one that has it."""
    if backend is None and _ambient_of:
        return _ambient_of[0]
    loaded = adapters.loaded() if backend is None else [adapters.adapter_named(backend)]
    found = next((adapter for adapter in loaded if hasattr(adapter, "autocast_context")), None)
    if found is None:
        raise UnsupportedError(
            "only PyTorch has an autocast to enter",
            where="autocast(policy)",
            found=", ".join(adapter.name for adapter in loaded) or "no framework",
            allowed="torch, imported before",
            fix="JAX functions are transformed: polyamp.autocast(function, policy); TensorFlow steps are rewritten: "
            "polyamp.rewrite(step, policy=policy); Keras models are converted: polyamp.convert(model, policy)",
        )
    if backend is None:
        _ambient_of.append(found)
    return found
