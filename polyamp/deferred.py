"""A function that is rewritten at its first call, because only the arguments show its framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from polyamp import registry
from polyamp.dispatch import REWRITE, offering
from polyamp.plan import Plan
from polyamp.policies import Policy
from polyamp.refusals import not_traced
from polyamp.registry import Registered
from polyamp.reports import chosen_policy


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
            adapter = offering(REWRITE, None, (self._fn, args, kwargs), where="rewrite(fn)(*args)")
            self._rewrite(adapter, args, kwargs)
        return self._rewritten(*args, **kwargs)

    def _rewrite(self, adapter: Registered, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        rewrite = REWRITE.of(adapter, self._options)
        chosen = chosen_policy(self._policy, "rewrite(fn)", stacklevel=4)
        self._rewritten = rewrite(self._fn, args, kwargs, chosen, **self._options)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        adapter = registry.adapter_of(instance)  # the object whose method this is
        runs_on = getattr(adapter, "runs_on", None)
        adapter = registry.adapter_named(runs_on) if runs_on else adapter
        if adapter is None or not getattr(adapter, "rewrites_unseen", False):
            return MethodType(self, instance)
        if self._rewritten is None:
            self._rewrite(adapter, (), {})
        return self._rewritten.__get__(instance, owner)

    @property
    def plain(self) -> Callable[..., Any]:
        """The function as it was written."""
        return self._fn

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and self._rewritten is None:
            adapter = registry.adapter_named_in("rewrite", self._fn)
            if adapter is not None:
                self._rewrite(adapter, (), {})
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
