"""The way from a verb to the adapter that carries it out, with the options it accepts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from polyamp import registry
from polyamp.validation import check_options


def adapter_for(backend: str | None, obj: Any, *, where: str) -> Any:
    """Return the named adapter, or else the adapter of the first object in or under ``obj`` that has one.

    Raises:
        InvalidTypeError: no adapter knows the object.
    """
    if backend is not None:
        return registry.adapter_named(backend)
    adapter = registry.adapter_within(obj)
    if adapter is None:
        raise registry.no_adapter(obj, where=where)
    return adapter


def offering(verb: str, backend: str | None, objects: Any, *, where: str) -> Any:
    """Return the named adapter, or else one that has the verb: from the objects, or the only loaded one that has it."""
    if backend is not None:
        return registry.adapter_named(backend)
    return registry.adapter_offering(verb, objects) or adapter_for(None, objects, where=where)


def with_options(adapter: Any, verb: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the adapter's method ``verb`` with these options bound.

    Raises:
        UnsupportedError: the adapter does not have the method, or the method does not have these options.
    """
    method = registry.verb(adapter, verb)
    check_options(method, options, where=f"{verb}(function) of {adapter.name}")
    return functools.partial(method, **options)
