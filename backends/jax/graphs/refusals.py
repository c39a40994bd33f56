"""Errors for functions that cannot be traced. They name the user's line and the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax

from polyamp.errors import UsageError, is_integer, wrong_type

BRANCHES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@contextmanager
def refusals() -> Iterator[None]:
    """Replace errors of JAX and flax during tracing by errors that name the remedy."""
    try:
        yield
    except BRANCHES as error:
        raise UsageError(
            "the function reads the value of a traced array",
            where=_user_line(error),
            found=str(error).partition("\n")[0],
            allowed="control flow by jax.lax.cond, jax.lax.while_loop or jnp.where; arguments that are not arrays",
            fix="rewrite that line with one of these, or pass the value that it reads as a Python number",
        ) from error
    except Exception as error:
        if type(error).__name__ != "TraceContextError":  # of flax.errors, which is not imported just for this test
            raise
        raise UsageError(
            "the function changes an NNX module that is not among its arguments",
            where=_user_line(error),
            found=str(error).partition("\n")[0],
            allowed="modules among the arguments of the function",
            fix="pass the module as an argument: autocast(lambda model, x: model(x), policy)(model, x)",
        ) from error


def check_function(fn: object, *, where: str) -> None:
    """Raise if ``fn`` is not callable, for example an array."""
    if not callable(fn):
        allowed = "a function of arrays and pytrees: a model's apply, a loss"
        fix = "pass the function, and call the result with arrays; to cast arrays, call policy.cast_to_compute(tree)"
        raise wrong_type(type(fn), where=where, allowed=allowed, fix=fix, what="the argument is not a function")


def _user_line(error: BaseException) -> str:
    """Return the innermost line of the traceback outside libraries: not polyamp, JAX or a package such as flax."""
    frame, found = error.__traceback__, ""
    while frame is not None:
        if _is_users(frame.tb_frame):
            found = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno} ({frame.tb_frame.f_code.co_name})"
        frame = frame.tb_next
    return found or "the traced function"


def users_level() -> int:
    """Return the ``stacklevel`` that makes `warn_once`, called by the calling function, point at the user's line."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and not _is_users(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_users(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES


_LIBRARIES = {"polyamp", "jax", "flax", "equinox", "haiku", "optax", "contextlib", "functools"}


def positions(argnums: Any, *, where: str, at_least: int = 0) -> tuple[int, ...]:
    """Return the positions of arguments, in their order."""
    wanted = tuple(argnums) if isinstance(argnums, list | tuple) else (argnums,)
    if len(wanted) >= at_least and all(map(is_integer, wanted)):
        return wanted
    allowed = "an integer, or a tuple of integers; 0 is the function's first argument"
    fix, what = "count the function's own arguments from 0", "argnums are not positions of arguments"
    raise wrong_type(argnums, where=where, allowed=allowed, fix=fix, what=what)
