"""Trees of containers: a walk through them that always ends, and the refusal of those that a framework cannot walk.

For example, ``a = []; a = [a, a]``, and so on thirty times, is a small object with a thousand million leaves. Python's
walk visits each object once; a framework's walk goes along every path, and would not finish.
"""

from __future__ import annotations

import inspect
import sys
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from polyamp.errors import InvalidTypeError, reading


def walk(objects: Iterable[object]) -> Iterator[object]:
    """Yield these objects and all that is in their containers, each object once."""
    seen: dict[int, object] = {}  # what is seen lives on, so that no other object gets its id
    rest = [*objects][::-1]
    while rest:
        obj = rest.pop()
        if id(obj) not in seen:
            seen[id(obj)] = obj
            yield obj
            rest += [*_parts_of(obj)][::-1]


_MOST = 10_000_000  # objects in a tree, with one that is shared counted wherever it is


def check_tree(
    tree: object, where: str, *, children: Callable[[Any], Iterable[object] | None] | None = None, deepest: float = inf
) -> None:
    """Refuse shared and cyclic containers that a framework, which walks along every path, would not finish."""
    # ``children`` returns a container's contents, and nothing for a leaf; by default those of Python's containers,
    # dataclasses and attrs classes. ``deepest`` is the number of levels that the framework can walk.
    sizes: dict[int, float] = {}
    containers: list[object] = []  # they live on, so that no other object gets their ids
    rest: list[tuple[object, int, list[object] | None]] = [(tree, 0, None)]
    while rest:
        obj, depth, parts = rest.pop()
        if parts is not None:
            sizes[id(obj)] = 1 + sum(sizes[id(part)] for part in parts)
        elif id(obj) not in sizes:
            if depth > deepest:
                raise too_deep(where)
            sizes[id(obj)] = inf  # until its parts are counted; a cycle finds it
            parts = [*((children or _parts_of)(obj) or ())]
            containers.append(obj)
            rest += [(obj, depth, parts), *((part, depth + 1, None) for part in parts)]
    if sizes[id(tree)] > _MOST:
        raise InvalidTypeError(
            "containers that contain each other, or share parts many times over",
            where=where,
            found=f"more than {_MOST:,} containers and leaves",
            allowed="trees",
            fix="put each part into the tree once",
        )


def _parts_of(obj: object) -> Iterable[object]:
    """Return the contents of a container, or the fields of a dataclass or an attrs class."""
    if isinstance(obj, str | bytes | type):
        return ()
    with reading(obj, where="the arguments"):
        return _contents(obj)


def _contents(obj: Any) -> Iterable[object]:
    if isinstance(obj, Mapping):
        return tuple(obj.values())
    if isinstance(obj, list | tuple | set | frozenset | deque | UserList):
        return tuple(obj)
    fields: Any = getattr(type(obj), "__dataclass_fields__", ()) or getattr(type(obj), "__attrs_attrs__", ())
    if not fields and not isinstance(obj, SimpleNamespace):
        return ()
    names = [field if isinstance(field, str) else field.name for field in fields]
    held = {**getattr(obj, "__dict__", {}), **{name: getattr(obj, name, None) for name in names}}
    return tuple(held.values())


def named_in(fn: object) -> Iterator[object]:
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


def too_deep(where: str) -> InvalidTypeError:
    """Return the error for arguments that are nested too deeply for a framework's own walk."""
    return InvalidTypeError(
        "Python's limit of recursion is exceeded",
        where=where,
        found="containers that are nested too deeply, or a function that calls itself without end",
        allowed=f"{sys.getrecursionlimit()} calls",
        fix="give the parts one by one",
    )
