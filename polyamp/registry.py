"""The registry of adapters: finds an object's adapter from its type, and never imports a framework to find out."""

from __future__ import annotations

import inspect
import sys
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from polyamp.errors import InvalidTypeError, PolyampError, UnsupportedError
from polyamp.refusals import missing
from polyamp.validation import did_you_mean, kind_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Tree = TypeVar("Tree")


class Registered(Protocol):
    """The part of an adapter that finds, describes and casts objects; `polyamp.adapter.Adapter` is the whole."""

    name: str  # the framework's name, as in ``backend="torch"``
    # the framework's operation names, each with its canonical name in `polyamp.operations`
    operations: Mapping[str, str]

    def owns(self, obj: object) -> bool:
        """Return whether ``obj`` belongs to this framework although the module of its type does not show it."""

    def describe(self) -> dict[str, Any]:
        """Return what ``polyamp doctor`` prints, as JSON: ``version``, ``devices`` (name, fast formats), ``notes``."""

    def cast(self, tree: Tree, format_name: str, /) -> Tree:
        """Return ``tree`` with its floating-point arrays in ``format_name`` and everything else unchanged."""


GROUP = "polyamp.backends"
UNREGISTERED = "polyamp's adapters are found by entry points, and none is registered: polyamp is not installed"
INSTALL = "pip install -e . in polyamp's checkout, with --no-deps --no-build-isolation without a network"

# Plain dicts: functools.cache breaks torch.compile(fullgraph=True).
_entries: dict[str, EntryPoint] = {}
_adapters: dict[str, Registered] = {}


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
    return _entries


def names() -> list[str]:
    """Return the adapters' names: ``["jax", "keras", "tensorflow", "torch"]`` without third-party adapters."""
    return sorted({_backend_of(entry) for entry in entries().values()})


def adapter_named(name: str) -> Registered:
    """Load an adapter by its framework's name or one of its import roots."""
    entry = entries().get(name)
    if entry is None:
        raise InvalidTypeError(
            "no adapter of that name",
            where="backend=",
            found=repr(name),
            **_choice(
                names(),
                fix=f"{did_you_mean(str(name), names())}use one of the names above, or install the package that has "
                "the adapter",
            ),
        )
    return _load(entry)


def adapter_of(obj: object) -> Registered | None:
    """Return the adapter of ``obj``: by the import roots of its type's bases, else by asking the loaded adapters."""
    return _by_root(obj) or _by_asking(obj)


def adapter_within(*objects: object) -> Registered | None:
    """Return the adapter of the first object in or under ``objects`` that has one; None for plain values only."""
    return next(iter(adapters_within(*objects)), None)


def adapters_within(*objects: object) -> list[Registered]:
    """Return the adapters of all objects in or under ``objects``: by the types' modules, else by asking adapters."""
    leaves = list(_walk(objects))
    if found := _found(leaves):
        return found
    strangers = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
    if strangers:
        raise no_adapter(strangers[0], where="the tree")
    return []


def adapter_offering(name: str, *objects: object) -> Registered | None:
    """Find the adapter that offers the verb ``name`` for these objects."""
    # Plain values and NumPy arrays do not show their framework, although some frameworks accept them. Tried in order:
    # the objects' types; the framework that a function's code names; an adapter that owns one of the objects; the only
    # loaded adapter that offers the verb. If none of them offers it, return the first adapter found, or None.
    leaves = list(_walk(objects))
    typed, found = _found(leaves, _by_root), _found(leaves)
    named = next(filter(None, (adapter_named_in(name, leaf) for leaf in leaves)), None)
    candidates = [*typed, *filter(None, [named]), *found]
    if offering := [adapter for adapter in candidates if hasattr(adapter, name)]:
        return offering[0]
    others = [adapter for adapter in loaded() if hasattr(adapter, name)]
    return others[0] if len(others) == 1 else next(iter(found), None)


def adapter_named_in(name: str, fn: object) -> Registered | None:
    """Return the adapter with the verb ``name`` whose framework a function's code uses; None if there are several."""
    roots = {root for obj in _named_in(fn) for root in _roots_of(obj)}
    adapters = {_load(entries()[root]) for root in roots & entries().keys()}
    under = {getattr(adapter, "runs_on", None) for adapter in adapters}
    offering = [adapter for adapter in adapters if hasattr(adapter, name)]
    if len(offering) > 1:  # prefer the framework that another runs on: its code may name the other's models
        offering = [adapter for adapter in offering if adapter.name in under] or offering
    return offering[0] if len(offering) == 1 else None


def _named_in(fn: object) -> Iterator[object]:
    """Yield the globals and captured values that a function's code, and functions inside it, use."""
    plain = inspect.unwrap(getattr(fn, "__func__", fn)) if callable(fn) else fn
    if not isinstance(plain, FunctionType):
        return
    for cell in plain.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            yield cell.cell_contents
    codes = [plain.__code__]
    for code in codes:
        codes.extend(inner for inner in code.co_consts if isinstance(inner, CodeType))
        yield from (plain.__globals__[used] for used in code.co_names if used in plain.__globals__)


def _roots_of(obj: object) -> Iterator[str]:
    """Yield the import roots of a module, of the module that defines an object, and of the object's type."""
    defined = obj.__name__ if isinstance(obj, ModuleType) else getattr(obj, "__module__", None)
    if isinstance(defined, str):
        yield defined.partition(".")[0]
    yield from _roots(type(obj))


def _found(leaves: list[object], *ways: Callable[[object], Registered | None]) -> list[Registered]:
    """Return the adapters of these objects, from the first way that finds any."""
    for find in ways or (_by_root, _by_asking):
        found = {adapter.name: adapter for adapter in map(find, leaves) if adapter is not None}
        if found:
            return list(found.values())
    return []


def _by_root(obj: object) -> Registered | None:
    return next((_load(entries()[root]) for root in _roots(type(obj)) if root in entries()), None)


def _by_asking(obj: object) -> Registered | None:
    return next((adapter for adapter in loaded() if adapter.owns(obj)), None)


def loaded() -> list[Registered]:
    """Return the adapters of the frameworks that this process has imported."""
    present = {entry.value: entry for root, entry in entries().items() if sys.modules.get(root) is not None}
    return [_adapters.get(value) or _load(entry) for value, entry in present.items()]


def in_use() -> Iterable[Registered]:
    """Return the adapters that were loaded so far. Loads none, so that a compiler can trace it."""
    return _adapters.values()


def no_adapter(obj: object, *, where: str) -> InvalidTypeError:
    """Return the error for an object that no adapter knows."""
    return InvalidTypeError(
        "no adapter knows this object",
        where=where,
        found=kind_of(obj),
        **_choice(
            sorted(entries()), kind="objects of ", fix='pass one of those, or name the framework: backend="torch"'
        ),
    )


def unregistered(*, where: str) -> UnsupportedError:
    """Return the error for a polyamp that is imported but not installed, and so would silently do nothing."""
    return UnsupportedError("no adapter is registered", where=where, found="no entry points", **_choice([], fix=""))


def _choice(known: list[str], *, kind: str = "", fix: str) -> dict[str, str]:
    """Return the ``allowed`` and ``fix`` of an error: the known names, or how to install polyamp if there are none."""
    return {"allowed": kind + ", ".join(known), "fix": fix} if known else {"allowed": UNREGISTERED, "fix": INSTALL}


def _load(entry: EntryPoint) -> Registered:
    if entry.value not in _adapters:
        backend = _backend_of(entry)
        try:
            _adapters[entry.value] = entry.load()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("polyamp"):
                raise
            raise missing(error.name, extra=backend) from error
    return _adapters[entry.value]


def _backend_of(entry: EntryPoint) -> str:
    module = entry.value.partition(":")[0]
    return module.removeprefix("polyamp.backends.") if module.startswith("polyamp.backends.") else entry.name


def _roots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        parts = base.__module__.split(".")
        yield parts[2] if parts[:2] == ["polyamp", "backends"] and len(parts) > 2 else parts[0]


def _walk(objects: Iterable[object], within: tuple[int, ...] = ()) -> Iterator[object]:
    """Yield each object, then the contents of containers; never the same object twice on one path down."""
    for obj in objects:
        yield obj
        if id(obj) not in within:
            yield from _walk(_parts_of(obj), (*within, id(obj)))


def _parts_of(obj: object) -> Iterable[object]:
    """Return the contents of a container, or the fields of a dataclass or an attrs class."""
    if isinstance(obj, str | bytes | type):
        return ()
    if isinstance(obj, Mapping):
        return tuple(obj.values())
    if isinstance(obj, list | tuple | set | frozenset | deque | UserList):
        return tuple(obj)
    fields: Any = getattr(type(obj), "__dataclass_fields__", ()) or getattr(type(obj), "__attrs_attrs__", ())
    names = [field if isinstance(field, str) else field.name for field in fields]
    held = {**getattr(obj, "__dict__", {}), **{name: getattr(obj, name, None) for name in names}}
    return tuple(held.values()) if names or isinstance(obj, SimpleNamespace) else ()
