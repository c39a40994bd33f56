"""The way from a verb to the adapter that carries it out, with the options it accepts.

A verb that every adapter must have is a method: ``adapter_for(None, holder, where=...).scale_loss(loss, holder)``. An
optional verb is a `Verb`, whose type is the signature in `polyamp.adapter`. For example, to record a step::

    adapter = offering(RECORD, backend, (step, args, kwargs), where="the step and its arguments")
    recording = RECORD.of(adapter)(step, args, kwargs, policy, widened=True)
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from polyamp import adapter as interface
from polyamp import registry
from polyamp.adapter import Adapter
from polyamp.errors import UnsupportedError
from polyamp.registry import Registered
from polyamp.validation import check_options

Signature = TypeVar("Signature", bound=Callable[..., Any])


class Verb(Generic[Signature]):
    """An optional verb of an adapter."""

    def __init__(self, name: str, signature: Any) -> None:
        self.name = name
        self.signature = signature

    def offered_by(self, adapter: object) -> bool:
        """Return whether an adapter has this verb."""
        return hasattr(adapter, self.name)

    def find(self, adapter: object) -> Signature | None:
        """Return the adapter's function; None if it does not have this verb."""
        found: Signature | None = getattr(adapter, self.name, None)
        return found

    def of(self, adapter: Registered, options: Mapping[str, Any] | None = None) -> Signature:
        """Return the adapter's function, which takes these options."""
        found = self.find(adapter)
        if found is None:
            raise self._missing(adapter)
        if options:
            check_options(found, options, where=f"{self.name}(function) of {adapter.name}")
        return found

    def _missing(self, adapter: Registered) -> UnsupportedError:
        having = sorted({other.name for other in registry.loaded() if self.offered_by(other)})
        return UnsupportedError(
            f"the {adapter.name} adapter has no {self.name}",
            where=f"polyamp on {adapter.name} objects",
            found=adapter.name,
            allowed=f"among the loaded frameworks: {', '.join(having) or 'none'}",
            fix=getattr(adapter, "instead", {}).get(self.name, "see docs/frameworks.md for what each framework offers"),
        )


AUTOCAST_CONTEXT: Verb[interface.AutocastContext] = Verb("autocast_context", interface.AutocastContext)
TRACED_CONTEXT: Verb[interface.TracedContext] = Verb("traced_context", interface.TracedContext)
AUTOCAST_FUNCTION: Verb[interface.AutocastFunction] = Verb("autocast_function", interface.AutocastFunction)
REWRITE: Verb[interface.Rewrite] = Verb("rewrite", interface.Rewrite)
EXPLAIN: Verb[interface.Explain] = Verb("explain", interface.Explain)
CONVERT: Verb[interface.Convert] = Verb("convert", interface.Convert)
VALUE_AND_GRAD: Verb[interface.ValueAndGrad] = Verb("value_and_grad", interface.ValueAndGrad)
SAVE_LOSS_SCALE: Verb[interface.SaveLossScale] = Verb("save_loss_scale", interface.SaveLossScale)
HOLDS_LOSS_SCALE: Verb[interface.HoldsLossScale] = Verb("holds_loss_scale", interface.HoldsLossScale)
FSDP_POLICY: Verb[interface.FsdpPolicy] = Verb("fsdp_policy", interface.FsdpPolicy)
IS_LOWERING: Verb[interface.IsLowering] = Verb("is_lowering", interface.IsLowering)
RECORD: Verb[interface.Record] = Verb("record", interface.Record)
FACTS: Verb[interface.CollectFacts] = Verb("facts", interface.CollectFacts)

OPTIONAL: tuple[Verb[Any], ...] = (
    AUTOCAST_CONTEXT,
    TRACED_CONTEXT,
    AUTOCAST_FUNCTION,
    REWRITE,
    EXPLAIN,
    CONVERT,
    VALUE_AND_GRAD,
    SAVE_LOSS_SCALE,
    HOLDS_LOSS_SCALE,
    FSDP_POLICY,
    IS_LOWERING,
    RECORD,
    FACTS,
)


def adapter_for(backend: str | None, obj: Any, *, where: str) -> Adapter:
    """Return the named adapter, or else the adapter of the first object in or under ``obj`` that has one."""
    found = registry.adapter_within(obj) if backend is None else registry.adapter_named(backend)
    if found is None:
        raise registry.no_adapter(obj, where=where)
    return typing.cast(Adapter, found)  # Conformance tests that what is registered has the rest


def offering(verb: Verb[Any], backend: str | None, objects: Any, *, where: str) -> Adapter:
    """Return the named adapter, or else one that has the verb: from the objects, or the only loaded one that has it."""
    found = registry.adapter_offering(verb.name, objects) if backend is None else None
    return adapter_for(backend, objects, where=where) if found is None else typing.cast(Adapter, found)
