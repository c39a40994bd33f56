"""The way from an object to its framework's adapter, and from a verb to the function that does it.

`polyamp.interface` has what an adapter is. Those of polyamp are tables of verbs::

    adapter = AdapterTable(
        "torch",
        OPERATIONS,
        owns=(torch.Tensor, torch.nn.Module),
        verbs={"cast": cast, "record": "polyamp.backends.torch.recording.record:record", ...},
    )

An object's adapter is found by its type, and no framework is imported to find out. To record a step, for example::

    record = find_verb("record", backend, (step, args, kwargs), where="the step and its arguments")
    recording = record(step, args, kwargs, policy, widened=True)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from polyamp.errors import (
    InvalidTypeError,
    PolyampError,
    UnsupportedError,
    did_you_mean,
    kind_of,
    missing,
    reading,
    shown,
    unknown_options,
)
from polyamp.nesting import named_in, walk

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class AnyAdapter(Protocol):
    """An adapter as the search for one sees it; `polyamp.interface.Adapter` has the types of the verbs."""

    name: str

    def owns(self, obj: object) -> bool:
        """Return whether ``obj`` belongs to this framework, for a type whose module does not tell."""

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        """Return a verb."""


class AdapterTable:
    """An adapter as a table: the name of each verb, and the function that does it.

    >>> table = AdapterTable("mine", {}, owns=complex, verbs={"describe": dict, "record": "polyamp.report:plural"})
    >>> table.owns(1j), table.describe(), table.record(2, "step"), hasattr(table, "rewrite")
    (True, {}, '2 steps', False)

    Args:
        name: the framework's name, as in ``backend="torch"``.
        operations: the framework's operation names, each with its canonical name in `polyamp.operations`.
        owns: the types of the framework's objects, or a function that returns whether an object is the framework's.
        verbs: for each verb the function; or, if training does not need it, ``"module:function"``, which is imported
            when it is first called.
        instead: for verbs that the framework does not have, the advice in the error.
        runs_on: the name of the framework that this one runs on.
        rewrites_unseen: whether ``rewrite`` needs no example arguments.
    """

    def __init__(
        self,
        name: str,
        operations: Mapping[str, str],
        *,
        owns: type | tuple[type, ...] | Callable[[object], bool],
        verbs: Mapping[str, Callable[..., Any] | str],
        instead: Mapping[str, str] | None = None,
        runs_on: str | None = None,
        rewrites_unseen: bool = False,
    ) -> None:
        self.name = name
        self.operations = operations
        self.owns = (lambda obj: isinstance(obj, owns)) if isinstance(owns, type | tuple) else owns
        self.instead = instead or {}
        self.runs_on = runs_on
        self.rewrites_unseen = rewrites_unseen
        for verb, function in verbs.items():
            setattr(self, verb, Later(function) if isinstance(function, str) else function)

    def __repr__(self) -> str:
        return f"<polyamp adapter {self.name}>"


class Later:
    """A function that is imported when it is first called or inspected."""

    def __init__(self, place: str) -> None:
        self.place = place  # as in an entry point: ``"package.module:function"``

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the function itself; `inspect.signature` reads it here."""
        module, _, name = self.place.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


# --- how an object finds its adapter ----------------------------------------------------------------------------------

GROUP = "polyamp.backends"

# Plain dicts: functools.cache breaks torch.compile(fullgraph=True).
_entries: dict[str, EntryPoint] = {}
_adapters: dict[str, AnyAdapter] = {}
_tracing: list[tuple[AnyAdapter, Callable[[], bool]]] = []  # with a question: is the compiler tracing?


def entries() -> dict[str, EntryPoint]:
    """Return the entry points by import root (``torch``, ``jax``, ``optax``, ...), scanned at first use."""
    if not _entries:
        from importlib.metadata import entry_points

        for entry in entry_points(group=GROUP):
            claimed = _entries.setdefault(entry.name, entry)
            if claimed.value != entry.value:
                _entries.clear()
                raise PolyampError(
                    "two adapters for the same framework",
                    where=f"entry-point group {GROUP!r}, name {entry.name!r}",
                    found=f"{claimed.value} and {entry.value}",
                    allowed="one",
                    fix="uninstall one of the two packages",
                )
        if not _entries:
            raise UnsupportedError(
                "polyamp is not installed: its adapters are found by entry points, and none is registered",
                where=f"entry-point group {GROUP!r}",
                fix="pip install -e . in polyamp's checkout, with --no-deps --no-build-isolation without a network",
            )
    return _entries


def names() -> list[str]:
    """Return the adapters' names: ``["jax", "keras", "tensorflow", "torch"]`` without third-party adapters."""
    return sorted({_backend_of(entry) for entry in entries().values()})


def adapter_named(name: str) -> AnyAdapter:
    """Load an adapter by its framework's name or one of its import roots."""
    return _load(entry_named(name))


def entry_named(name: object) -> EntryPoint:
    """Return the entry point of a framework's name; refuse any other word."""
    entry = entries().get(name) if type(name) is str else None
    if entry is None:
        raise InvalidTypeError(
            "no adapter of that name",
            where="backend=",
            found=shown(name),
            allowed=", ".join(names()),
            fix=f"{did_you_mean(name, names())}use one of the names above, or install the package that has the adapter",
        )
    return entry


def check_backend(name: object) -> None:
    """Refuse a word that names no framework, for a verb that looks for its adapter later."""
    if name is not None:
        entry_named(name)


def adapter_of(obj: object) -> AnyAdapter | None:
    """Return the adapter of ``obj``: by the import roots of its type's bases, else by asking the loaded adapters."""
    return _by_root(obj) or _by_asking(obj)


def adapter_within(*objects: object) -> AnyAdapter | None:
    """Return the adapter of the first object in or under ``objects`` that has one; None for plain values only."""
    return next(iter(adapters_within(*objects)), None)


def adapters_within(*objects: object) -> list[AnyAdapter]:
    """Return the adapters of all objects in or under ``objects``: by the types' modules, else by asking adapters."""
    leaves = list(walk(objects))
    if found := _found(leaves):
        return found
    for leaf in leaves:
        with reading(leaf, where="the arguments"):
            if hasattr(leaf, "dtype"):
                raise no_adapter(leaf, where="the tree")
    return []


def adapter_named_in(name: str, fn: object) -> AnyAdapter | None:
    """Return the adapter with the verb ``name`` whose framework a function's code uses; None if not exactly one."""
    roots = {root for obj in named_in(fn) for root in _roots_of(obj)}
    adapters = {_load(entries()[root]) for root in roots & entries().keys()}
    under = {getattr(adapter, "runs_on", None) for adapter in adapters}
    offering = [adapter for adapter in adapters if hasattr(adapter, name)]
    if len(offering) > 1:  # prefer the framework that another runs on: its code may name the other's models
        offering = [adapter for adapter in offering if adapter.name in under] or offering
    return offering[0] if len(offering) == 1 else None


def _roots_of(obj: object) -> Iterator[str]:
    """Yield the import roots of a module, of the module that defines an object, and of the object's type."""
    defined = obj.__name__ if isinstance(obj, ModuleType) else getattr(obj, "__module__", None)
    if isinstance(defined, str):
        yield defined.partition(".")[0]
    yield from _roots(type(obj))


def _found(leaves: list[object], *ways: Callable[[object], AnyAdapter | None]) -> list[AnyAdapter]:
    """Return the objects' adapters, by the first of ``ways`` that finds any."""
    for find in ways or (_by_root, _by_asking):
        found = {adapter.name: adapter for adapter in map(find, leaves) if adapter is not None}
        if found:
            return list(found.values())
    return []


def _by_root(obj: object) -> AnyAdapter | None:
    return next((_load(entries()[root]) for root in _roots(type(obj)) if root in entries()), None)


def _by_asking(obj: object) -> AnyAdapter | None:
    return next((adapter for adapter in loaded() if adapter.owns(obj)), None)


def loaded() -> list[AnyAdapter]:
    """Return the adapters of the frameworks that this process has imported."""
    present = {entry.value: entry for root, entry in entries().items() if sys.modules.get(root) is not None}
    return [_adapters.get(value) or _load(entry) for value, entry in present.items()]


def tracing() -> AnyAdapter | None:
    """Return the adapter whose compiler traces this code, and so cannot follow a search for adapters; or None."""
    if not _adapters:
        _load_first()
    for adapter, is_tracing in _tracing:
        if is_tracing():
            return adapter
    return None


def _load_first() -> None:
    with suppress(Exception):  # it is raised again where it matters
        loaded()


# torch.compile runs this function while it traces the caller, and does not trace the imports.
_load_first._dynamo_marked_constant = True  # type: ignore[attr-defined]


def no_adapter(obj: object, *, where: str) -> InvalidTypeError:
    """Return the error for an object that no adapter knows."""
    return InvalidTypeError(
        "no adapter knows this object",
        where=where,
        found=kind_of(obj),
        allowed=f"objects of {', '.join(sorted(entries()))}",
        fix='pass one of those, or name the framework: backend="torch"',
    )


def _load(entry: EntryPoint) -> AnyAdapter:
    if entry.value not in _adapters:
        backend = _backend_of(entry)
        try:
            adapter = _adapters[entry.value] = entry.load()
        except ModuleNotFoundError as error:
            if error.name not in entries():
                raise  # something inside of a framework, or of polyamp
            raise missing(error.name, extra=backend) from error
        if hasattr(adapter, "is_tracing"):
            _tracing.append((adapter, adapter.is_tracing))
    return _adapters[entry.value]


def _backend_of(entry: EntryPoint) -> str:
    module = entry.value.partition(":")[0]
    return module.removeprefix("polyamp.backends.") if module.startswith("polyamp.backends.") else entry.name


def _roots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        parts = str(base.__module__).split(".")
        yield parts[2] if parts[:2] == ["polyamp", "backends"] and len(parts) > 2 else parts[0]


# --- the way from a verb to an adapter --------------------------------------------------------------------------------


def verb_of(adapter: AnyAdapter, verb: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return an optional verb of an adapter; refuse an adapter that lacks it, or lacks one of these options."""
    if not hasattr(adapter, verb):
        others = sorted({other.name for other in loaded() if hasattr(other, verb)})
        raise UnsupportedError(
            f"the {adapter.name} adapter has no {verb}",
            where=f"polyamp on {adapter.name} objects",
            found=adapter.name,
            allowed=f"among the loaded frameworks: {', '.join(others) or 'none'}",
            fix=getattr(adapter, "instead", {}).get(verb, "see docs/frameworks.md for what each framework offers"),
        )
    method: Callable[..., Any] = getattr(adapter, verb)
    if options:
        check_options(method, options, where=f"{verb}(function) of {adapter.name}")
    return method


def check_options(
    method: Callable[..., Any], given: Mapping[str, Any], *, where: str, elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuse options that an adapter's method does not have as keyword-only parameters."""
    parameters = inspect.signature(method).parameters.values()
    known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    unknown = [name for name in given if name not in known]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    if unknown:
        rest = "leave it out; docs/frameworks.md lists what each framework has"
        raise unknown_options(unknown, known, where=where, fix=rest, elsewhere=elsewhere)


def adapter_for(backend: str | None, obj: Any, *, where: str) -> AnyAdapter:
    """Return the named adapter, or else the adapter of the first object in or under ``obj`` that has one."""
    found = adapter_within(obj) if backend is None else adapter_named(backend)
    if found is None:
        raise no_adapter(obj, where=where)
    return found


def find_verb(
    verb: str, backend: str | None, objects: Any, options: Mapping[str, Any] | None = None, *, where: str
) -> Callable[..., Any]:
    """Return a verb of the named adapter, or else of one that has the verb: the objects', or the only loaded one."""
    if backend is not None:
        return verb_of(adapter_named(backend), verb, options)
    # Plain values and NumPy arrays do not show their framework, although some frameworks accept them. Tried in order:
    # the objects' types; the framework that a function's code names; an adapter that owns one of the objects; the only
    # loaded adapter that offers the verb. If none of them offers it, the first adapter found is refused.
    leaves = list(walk([objects]))
    typed, found = _found(leaves, _by_root), _found(leaves)
    named = next(filter(None, (adapter_named_in(verb, leaf) for leaf in leaves)), None)
    able = [one for one in (*typed, named, *found) if hasattr(one, verb)]
    if not able and len(others := [one for one in loaded() if hasattr(one, verb)]) == 1:
        able += others
    return verb_of(next(iter([*able, *found]), None) or adapter_for(None, objects, where=where), verb, options)
