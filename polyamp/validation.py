"""Checks of arguments: numbers, counts, functions, names to choose from and options.

A check raises polyamp's own error, or returns the value. `shown`, `kind_of` and `wrong_type` are for all other checks:
every error then describes a wrong value in the same way.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from polyamp.errors import InvalidTypeError, InvalidValueError, UnsupportedError


def shown(value: object, longest: int = 200) -> str:
    """Describe a wrong value in an error: the value, cut where it is long, and its type."""
    return f"{repr(value)[:longest]} ({type(value).__name__})"


def kind_of(value: object) -> str:
    """Return the full name of a value's class, for a value that is long to print."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def brief(value: object) -> str:
    """Return a value's text for an error; for an array, its type alone."""
    text = repr(value)
    return text if len(text) < 80 and "\n" not in text else f"a {kind_of(value)}"


def wrong_type(
    found: object, *, where: str, allowed: str, fix: str, what: str = "argument of the wrong type"
) -> InvalidTypeError:
    """Return the error for an argument of the wrong type."""
    return InvalidTypeError(what, where=where, found=shown(found), allowed=allowed, fix=fix)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a Python int or float. A bool is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is a Python int. A bool is not an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_number(value: Any) -> float:
    """Return a number, or a scalar array of any framework, as a float."""
    if isinstance(value, str | bool):
        raise TypeError(f"{kind_of(value)} is not a number")
    return float(value.item() if hasattr(value, "item") else value)  # float() of a tensor that has a gradient warns


def check_count(name: str, value: object, *, where: str) -> int:
    """Return a value that counts something, such as steps."""
    allowed, fix = "an integer of at least 1", f"give {name} a whole number"
    if not is_integer(value):
        raise wrong_type(value, where=where, allowed=allowed, fix=fix, what=f"{name} must be an integer")
    if value < 1:
        raise InvalidValueError(f"invalid {name}", where=where, found=value, allowed=allowed, fix=fix)
    return value


def check_range(name: str, value: object, least: float, most: float, *, where: str) -> None:
    """Refuse a value that is not a number within its limits."""
    if not (is_number(value) and math.isfinite(value) and least <= value <= most):
        raise InvalidValueError(
            f"invalid {name}",
            where=where,
            found=shown(value),
            allowed=f"a number from {least:g} to {most:g}",
            fix=f"give {name} a value in that range",
        )


def check_arguments(
    verb: str,
    checks: Iterable[tuple[str, object, object, str]],
    error: type[InvalidTypeError | InvalidValueError] = InvalidValueError,
) -> None:
    """Refuse the first argument of a verb that does not fit."""
    for name, value, fits, allowed in checks:
        if not fits:
            found, fix = shown(value), f"see help(polyamp.{verb})"
            raise error(f"invalid {name}", where=f"{verb}({name}=)", found=found, allowed=allowed, fix=fix)


def norm_limit(value: object, *, where: str = "wrap_optimizer(max_grad_norm=)") -> float | None:
    """Return a limit for the global norm of gradients; None for no limit."""
    if value is None:
        return None
    if not (is_number(value) and 0 < value <= sys.float_info.max):
        raise InvalidValueError(
            "invalid gradient-norm limit",
            where=where,
            found=shown(value),
            allowed="a finite number greater than 0, or None",
            fix="give the largest global L2 norm that gradients may have",
        )
    return float(value)


def check_compute(compute: str, *, framework: str, where: str, instead: Mapping[str, str]) -> None:
    """Refuse a compute format that a framework's operations cannot be cast to."""
    castable = ("float16", "bfloat16", "float32")
    if compute not in castable:
        raise UnsupportedError(
            f"{framework}'s operations cannot be cast to this format",
            where=where,
            found=compute,
            allowed=", ".join(castable),
            fix=instead.get(compute, "choose one of these formats"),
        )


def check_callable(value: object, *, where: str, allowed: str, fix: str) -> None:
    """Refuse a value that cannot be called."""
    if not callable(value):
        raise wrong_type(value, where=where, allowed=allowed, fix=fix, what="this cannot be called")


def did_you_mean(found: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the known name nearest to a wrong one, as a sentence; empty if none is near."""
    from difflib import get_close_matches  # only an error needs it

    by_lower = {name.lower(): name for name in known}
    nearest = get_close_matches(found.lower(), by_lower, n=1, cutoff=cutoff)
    return f"did you mean {by_lower[nearest[0]]}? " if nearest else ""


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


def unknown_options(
    unknown: Sequence[str],
    known: Sequence[str],
    *,
    where: str,
    fix: str = "leave it out",
    elsewhere: Mapping[str, str] | None = None,
) -> UnsupportedError:
    """Return the error for options that do not exist, with the one that was meant, or a sentence from ``elsewhere``."""
    meant = (elsewhere or {}).get(unknown[0], unknown[0])
    if " " in meant:
        hint, fix = "", meant
    else:
        hint = did_you_mean(meant, known)
    return UnsupportedError(
        "an option that does not exist here",
        where=where,
        found=", ".join(unknown),
        allowed=", ".join(known) or "no options",
        fix=f"{hint}{'else ' if hint else ''}{fix}",
    )


def check_choice(value: object, choices: Iterable[object], *, where: str, fix: str) -> None:
    """Refuse a value that is not one of the choices. True is not 1."""
    known = list(choices)
    if not any(type(value) is type(choice) and value == choice for choice in known):
        raise InvalidValueError(
            "not one of the choices", where=where, found=repr(value), allowed=", ".join(map(repr, known)), fix=fix
        )


def check_master_weights(value: object) -> None:
    """Refuse a value that is not True, False or None."""
    fix = "give True for float32 masters of 16-bit parameters, False for none, or leave it out"
    check_choice(value, (None, True, False), where="wrap_optimizer(master_weights=)", fix=fix)
