"""Checks of the settings of a loss scale, one by one, and the errors for settings that do not exist."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.libraries import LARGEST_COUNT, OTHER_NAMES
from polyamp.validation import did_you_mean, is_integer, is_number, shown

Settings = TypeVar("Settings", bound=type[Any])


def named_settings(cls: Settings) -> Settings:
    """Decorate a dataclass so that an unknown keyword argument is polyamp's error, which names the setting to write."""
    made: Callable[..., None] = cls.__init__
    names = [field.name for field in fields(cls)]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **given: Any) -> None:
        unknown = [name for name in given if name not in names]
        if unknown:
            raise unknown_settings(unknown, names, where=f"{cls.__name__}({unknown[0]}=)")
        made(self, *args, **given)

    cls.__init__ = init
    return cls


def unknown_settings(unknown: list[str], known: Iterable[str], *, where: str) -> InvalidValueError:
    """Return the error for settings that do not exist, with a hint if other libraries have them."""
    hint = did_you_mean(OTHER_NAMES.get(unknown[0], unknown[0]), known)
    return InvalidValueError(
        "unknown loss-scale setting",
        where=where,
        found=", ".join(unknown),
        allowed=", ".join(known),
        fix=f"{hint}use one of the settings above",
    )


def invalid_setting(name: str, found: object, allowed: str) -> InvalidValueError:
    """Return the error for a setting outside its range."""
    return InvalidValueError(
        f"invalid loss-scale setting {name}",
        where=f"LossScale({name}=...)",
        found=repr(found),
        allowed=allowed,
        fix=f"give {name} a value in that range",
    )


def checked_real(name: str, value: object, *, above: float) -> float:
    """Return a setting that is a finite number greater than ``above``, as a float."""
    if not is_number(value):
        raise InvalidTypeError(
            f"loss-scale setting {name} is not a number",
            where=f"LossScale({name}=...)",
            found=shown(value),
            allowed="a Python int or float",
            fix="pass a plain number",
        )
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of float64, too long to print
        value = number = math.inf
    if not (math.isfinite(number) and number > above):
        raise invalid_setting(name, value, f"a finite number greater than {above:g}")
    return number


def checked_count(name: str, value: object) -> int:
    """Return a setting that is a number of steps."""
    if not is_integer(value):
        raise InvalidTypeError(
            f"loss-scale setting {name} is not an integer",
            where=f"LossScale({name}=...)",
            found=shown(value),
            allowed="a Python int",
            fix="pass a whole number of steps",
        )
    if not 1 <= value <= LARGEST_COUNT:
        raise invalid_setting(name, value, "an integer between 1 and 2**31 - 1: counters are int32")
    return value
