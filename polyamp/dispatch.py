"""The way from a verb to the adapter that carries it out, with the options it accepts.

A verb that every adapter must have is a method: ``adapter_for(None, holder, where=...).scale_loss(loss, holder)``. An
optional verb is a method of `polyamp.adapter.FullAdapter`, to be asked for first. For example, to record a step::

    adapter = offering("record", backend, (step, args, kwargs), where="the step and its arguments")
    recording = adapter.record(step, args, kwargs, policy, widened=True)
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, TypeGuard

from polyamp import registry
from polyamp.adapter import Adapter, FullAdapter
from polyamp.errors import UnsupportedError
from polyamp.registry import Registered
from polyamp.validation import check_options

OPTIONAL = tuple(name for name in vars(FullAdapter) if not name.startswith("_"))
"""The names of the optional verbs."""


def offers(adapter: object, verb: str) -> TypeGuard[FullAdapter]:
    """Return whether an adapter has an optional verb."""
    return hasattr(adapter, verb)


def having(adapter: Registered, verb: str, options: Mapping[str, Any] | None = None) -> FullAdapter:
    """Return an adapter as one that has an optional verb with these options; refuse one that does not."""
    if not offers(adapter, verb):
        others = sorted({other.name for other in registry.loaded() if offers(other, verb)})
        raise UnsupportedError(
            f"the {adapter.name} adapter has no {verb}",
            where=f"polyamp on {adapter.name} objects",
            found=adapter.name,
            allowed=f"among the loaded frameworks: {', '.join(others) or 'none'}",
            fix=getattr(adapter, "instead", {}).get(verb, "see docs/frameworks.md for what each framework offers"),
        )
    if options:
        check_options(getattr(adapter, verb), options, where=f"{verb}(function) of {adapter.name}")
    return adapter


def adapter_for(backend: str | None, obj: Any, *, where: str) -> Adapter:
    """Return the named adapter, or else the adapter of the first object in or under ``obj`` that has one."""
    found = registry.adapter_within(obj) if backend is None else registry.adapter_named(backend)
    if found is None:
        raise registry.no_adapter(obj, where=where)
    return typing.cast(Adapter, found)  # Conformance tests that what is registered has the rest


def offering(
    verb: str, backend: str | None, objects: Any, options: Mapping[str, Any] | None = None, *, where: str
) -> FullAdapter:
    """Return the named adapter, or else one that has the verb: from the objects, or the only loaded one that has it."""
    found = registry.adapter_offering(verb, objects) if backend is None else None
    return having(adapter_for(backend, objects, where=where) if found is None else found, verb, options)
