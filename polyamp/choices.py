"""Checks of names that a user chooses from: refuse an unknown name and suggest the nearest one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polyamp.errors import InvalidValueError, UnsupportedError


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """Return the known name nearest to a wrong one, as a sentence; empty if none is near.

    >>> did_you_mean("mixed_fp16", ["float32", "mixed_float16"])
    'did you mean mixed_float16? '
    >>> did_you_mean("cuda", ["float32", "mixed_float16"])
    ''
    """
    from difflib import get_close_matches  # only an error needs it

    by_lower = {name.lower(): name for name in known}
    nearest = get_close_matches(found.lower(), by_lower, n=1, cutoff=0.5)
    return f"did you mean {by_lower[nearest[0]]}? " if nearest else ""


def check_options(method: Callable[..., Any], given: Mapping[str, Any], *, where: str) -> None:
    """Refuse options that an adapter's method does not have as keyword-only parameters.

    >>> def rewrite(fn, *, engine=None): ...
    >>> check_options(rewrite, {"engin": 1}, where="rewrite(fn)")
    Traceback (most recent call last):
    polyamp.errors.UnsupportedError: an option that does not exist here
      where:   rewrite(fn)
      found:   engin
      allowed: engine
      to do:   did you mean engine? else leave it out; docs/frameworks.md lists what each framework has

    Args:
        method: the adapter's method. One that takes ``**options`` checks them itself.
        given: the user's options by name.
        where: the call, for the error.

    Raises:
        UnsupportedError: an option that ``method`` does not have; nothing is changed.
    """
    parameters = inspect.signature(method).parameters.values()
    known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    unknown = [name for name in given if name not in known]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise UnsupportedError(
            "an option that does not exist here",
            where=where,
            found=", ".join(unknown),
            allowed=", ".join(known) or "no options",
            fix=f"{hint}{'else ' if hint else ''}leave it out; docs/frameworks.md lists what each framework has",
        )


def check_choice(value: object, choices: Iterable[object], *, where: str, fix: str) -> None:
    """Refuse a value that is not one of the choices. True is not 1.

    >>> check_choice("remainder", (True, False), where="wrap_optimizer(master_weights=)", fix="give True or False")
    Traceback (most recent call last):
    polyamp.errors.InvalidValueError: not one of the choices
      where:   wrap_optimizer(master_weights=)
      found:   'remainder'
      allowed: True, False
      to do:   give True or False

    Raises:
        InvalidValueError: the value is not one of them.
    """
    known = list(choices)
    if not any(type(value) is type(choice) and value == choice for choice in known):
        raise InvalidValueError(
            "not one of the choices", where=where, found=repr(value), allowed=", ".join(map(repr, known)), fix=fix
        )


def check_master_weights(value: object) -> None:
    """Refuse a value that is not True, False or None, for frameworks with plain float32 master weights only.

    >>> check_master_weights(None), check_master_weights(False)
    (None, None)

    Raises:
        InvalidValueError: any other value, such as PyTorch's "remainder".
    """
    choices = (None, True, False)
    fix = 'give True or False; "remainder" and "stochastic" exist in PyTorch only'
    check_choice(value, choices, where="wrap_optimizer(master_weights=)", fix=fix)
