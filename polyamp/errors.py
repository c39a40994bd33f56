"""All errors and warnings of polyamp, the checks of arguments, and the errors that several adapters raise."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeGuard, TypeVar

_LONGEST = 3000  # characters of a part of an error, which can repeat what the user wrote, or a compiler


class PolyampError(Exception):
    """The base class of every polyamp error.

    >>> print(PolyampError("unknown colour", where="paint()", found="'bleu'", allowed="red, blue", fix="choose one"))
    unknown colour
      where:   paint()
      found:   'bleu'
      allowed: red, blue
      to do:   choose one
    """

    ag_pass_through = True  # tells TensorFlow's AutoGraph to raise these errors unchanged

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        found: object = None,
        allowed: object = None,
        fix: str | None = None,
    ) -> None:
        parts = (("where:", where), ("found:", found), ("allowed:", allowed), ("to do:", fix))
        lines = [f"  {label:<8} {_cut(text, _LONGEST)}" for label, text in parts if text is not None]
        super().__init__("\n".join([_cut(what, _LONGEST), *lines]))


class InvalidValueError(PolyampError, ValueError):
    """Raised for a value outside the allowed ones."""


class InvalidTypeError(PolyampError, TypeError):
    """Raised for an object of a kind that polyamp cannot handle here."""


class MissingFrameworkError(PolyampError, ImportError):
    """Raised if a framework, or a package that a command needs, is not installed."""


class UnsupportedError(PolyampError, TypeError):
    """Raised if the framework's adapter does not offer what was requested."""


class UnsupportedMethodError(UnsupportedError, AttributeError):
    """Raised for a method that wrapped optimizers of another framework have."""


class UsageError(PolyampError, RuntimeError):
    """Raised for a call in the wrong order, such as a step without a backward pass."""


class FormatError(PolyampError, RuntimeError):
    """Raised if a framework refused an operation for its operands' formats; ``__cause__`` is the framework's error."""


class StateError(PolyampError, ValueError):
    """Raised for a saved state that does not fit the object it is loaded into."""


class ExtensionError(PolyampError, RuntimeError):
    """Raised if required compiled code cannot be built or loaded."""


class NonFiniteLossError(PolyampError, FloatingPointError):
    """Raised if the loss was inf or NaN in float32 before scaling: no loss scale can help."""


class LossScaleError(PolyampError, FloatingPointError):
    """Raised if the loss scale reached its minimum, or too many steps in a row were skipped."""


class PolyampWarning(UserWarning):
    """The category of all polyamp warnings. Each message is shown once per process."""


class PolyampDeprecationWarning(PolyampWarning, DeprecationWarning):
    """The category of warnings about an old interface that polyamp keeps; the message shows what to write instead."""


_shown: set[str] = set()


def warn_once(message: str, *, category: type[PolyampWarning] = PolyampWarning) -> None:
    """Issue ``message`` as a `PolyampWarning` at the user's line, once per process."""
    if message not in _shown:
        _shown.add(message)
        warnings.warn(message, category, stacklevel=_users_level())


_INSTALLED = (os.path.dirname(warnings.__file__), "site-packages", "dist-packages")
_HERE = os.path.dirname(__file__)
_OWN = (os.path.join(_HERE, ""), os.path.join(os.path.realpath(os.path.join(_HERE, "backends")), ""))


def is_users(file: str) -> bool:
    """Return whether a file of code is neither polyamp's nor installed, nor frozen into Python."""
    return not (file.startswith((*_OWN, "<frozen ")) or any(part in file for part in _INSTALLED))


def _users_level() -> int:
    """Return the ``stacklevel``, for the caller, of the innermost line that is neither polyamp's nor installed."""
    # A trainer that was installed is passed over, so its user's script is shown.
    frame, level, outside = sys._getframe(1), 1, 0
    while frame.f_back is not None:
        frame, level = frame.f_back, level + 1
        if is_users(frame.f_code.co_filename):
            return level
        if not frame.f_code.co_filename.startswith(_OWN):
            outside = outside or level
    return outside or level


def warn_deprecated(old: str, instead: str) -> None:
    """Report once per process that an old interface was used, with the polyamp line that replaces it."""
    message = f"{old} is kept for old programs. Write instead: {instead}"
    warn_once(message, category=PolyampDeprecationWarning)


def forget_warnings() -> None:
    """Allow every message to be shown again (for tests, and for notebooks that start over)."""
    _shown.clear()


@contextmanager
def unreported() -> Iterator[None]:
    """Hide each `PolyampWarning` from inside, and do not count it as shown."""
    before = set(_shown)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PolyampWarning)
            yield
    finally:
        _shown.intersection_update(before)


# --- checks of arguments ----------------------------------------------------------------------------------------------


def shown(value: object, longest: int = 200) -> str:
    """Describe a wrong value in an error: the start of its text, and its type."""
    return f"{_cut(value, longest, quoted=True)} ({type(value).__name__})"


def _cut(value: object, longest: int, *, quoted: bool = False, depth: int = 3) -> str:
    """Return the start of a value's text; in place of texts that can raise, take long or hold secrets, the class."""
    try:
        if isinstance(value, str):
            text = repr(value[:longest]) if quoted else value
        elif isinstance(value, list | tuple | set | frozenset | deque):
            first = [_cut(one, longest, quoted=True, depth=depth - 1) for one in islice(value, 8 if depth else 0)]
            opening, closing = "()" if isinstance(value, tuple) else "{}" if isinstance(value, Set) else "[]"
            text = f"{opening}{', '.join(first + ['...'] * (len(value) > len(first)))}{closing}"
        elif isinstance(value, Mapping):  # it may hold passwords
            text = f"a mapping of {len(value)}"
        elif isinstance(value, type):
            text = type.__repr__(value)
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in ("builtins", "polyamp"):
            text = f"a {kind_of(value)}"  # its text may take long
        else:
            text = repr(value) if quoted else str(value)
    except Exception:
        text = f"a {kind_of(value)}"
    return text if len(text) <= longest else f"{text[:longest]}..."


def kind_of(value: object) -> str:
    """Return the full name of a value's class, for a value that is long to print."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def brief(value: object) -> str:
    """Return a value's text for an error; for an array, its type alone."""
    text = _cut(value, 80, quoted=True)
    return text if len(text) < 80 and "\n" not in text else f"a {kind_of(value)}"


def wrong_type(
    found: object, *, where: str, allowed: str, fix: str, what: str = "argument of the wrong type"
) -> InvalidTypeError:
    """Return the error for an argument of the wrong type."""
    return InvalidTypeError(what, where=where, found=shown(found), allowed=allowed, fix=fix)


@contextmanager
def reading(value: object, *, where: str) -> Iterator[None]:
    """Refuse a value whose own methods raise when it is looked at, such as a proxy of an object that is gone."""
    try:
        yield
    except (PolyampError, RecursionError):
        raise
    except Exception as error:
        raise InvalidTypeError(
            "the object's own methods raise an error when it is looked at",
            where=where,
            found=f"a {kind_of(value)}: {type(error).__name__}",
            allowed="objects whose attributes and contents can be read",
            fix="pass plain values, or containers of Python",
        ) from error


Function = TypeVar("Function", bound=Callable[..., Any])


def refuses_unreadable(function: Function) -> Function:
    """Decorate a public function: an argument whose own methods raise is refused; other errors are raised unchanged."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PolyampError:
            raise
        except Exception:
            for value in (*args, *kwargs.values()):
                with reading(value, where=f"{function.__qualname__}()"):
                    _read_once(value)
            raise

    return checked  # type: ignore[return-value]


def _read_once(value: Any) -> None:
    """Call the methods of a value that the checks of arguments can call later."""
    hasattr(value, "polyamp")
    if isinstance(value, str):
        hash((value == "", value.strip().lower(), str(value), value.partition("{"), value))
    elif isinstance(value, int | float):
        hash((value > 0, value <= 0, value == 0, float(value)))
    elif isinstance(value, Mapping):
        dict(value.items())
    elif isinstance(value, list | tuple | Set):
        hash((len(value), *map(id, value)))


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a Python int or float. A bool is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is a Python int. A bool is not an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(name: str, value: object, *, where: str) -> int:
    """Return a value that is a count, such as of steps; refuse any other value."""
    allowed, fix = "an integer of at least 1", f"give {name} a whole number"
    if not is_integer(value):
        raise wrong_type(value, where=where, allowed=allowed, fix=fix, what=f"{name} must be an integer")
    if value < 1:
        raise InvalidValueError(f"invalid {name}", where=where, found=value, allowed=allowed, fix=fix)
    return value


def check_range(name: str, value: object, least: float, most: float, *, where: str) -> None:
    """Refuse a value that is not a number within its limits."""
    if not (is_number(value) and least <= value <= most):
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
    *,
    what: str = "",
) -> None:
    """Refuse the first argument of a verb that does not fit."""
    for name, value, fits, allowed in checks:
        if not fits:
            found, fix = shown(value), f"give {name} such a value; help(polyamp.{verb}) describes it"
            raise error(what or f"invalid {name}", where=f"{verb}({name}=)", found=found, allowed=allowed, fix=fix)


def norm_limit(value: Any, verb: str = "wrap_optimizer") -> float | None:
    """Return a limit for the global norm of gradients; None for no limit."""
    fits = value is None or (is_number(value) and 0 < value <= sys.float_info.max)
    check_arguments(verb, [("max_grad_norm", value, fits, "a gradient-norm limit: a number greater than 0, or None")])
    return None if value is None else float(value)


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


def did_you_mean(found: object, known: Iterable[str]) -> str:
    """Return the known name nearest to a wrong one, as a sentence; empty if none is near."""
    from difflib import get_close_matches  # only an error needs it

    if type(found) is not str:
        return ""
    by_lower = {name.lower(): name for name in known}
    nearest = get_close_matches(found[:80].lower(), by_lower, n=1, cutoff=0.5)
    return f"did you mean {by_lower[nearest[0]]}? " if nearest else ""


def unknown_options(
    unknown: Sequence[str],
    known: Sequence[str],
    *,
    where: str,
    fix: str = "leave it out",
    elsewhere: Mapping[str, str] | None = None,
) -> UnsupportedError:
    """Return the error for options that do not exist; it names the one meant, or has a sentence of ``elsewhere``."""
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


def check_master_weights(value: object) -> None:
    """Refuse a value that is not True, False or None."""
    allowed = "True for float32 masters of 16-bit parameters, False for none, or None"
    check_arguments("wrap_optimizer", [("master_weights", value, isinstance(value, bool | None), allowed)])


# --- errors that several adapters raise -------------------------------------------------------------------------------


def missing(package: str, *, extra: str) -> MissingFrameworkError:
    """Return the error for a package that is not installed, with the extra that installs it."""
    return MissingFrameworkError(
        f"{package} is not installed",
        where=f"polyamp's {extra} support",
        found=f"no module named {package!r}",
        fix=f'pip install "polyamp[{extra}]"',
    )


@contextmanager
def importing(package: str, *, extra: str) -> Iterator[None]:
    """Raise an error that names the extra if a package is missing; let other errors pass, even from its imports."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise missing(package, extra=extra) from error


def missing_trainer(error: ModuleNotFoundError, *, where: str) -> MissingFrameworkError:
    """Return the error for a plugin whose trainer is not installed."""
    package = str(error.name).partition(".")[0]
    return MissingFrameworkError(
        f"{package} is not installed",
        where=where,
        found=f"no module named {error.name!r}",
        fix=f"pip install {package}",
    )


def unscaled_loss(*, where: str, fix: str) -> UsageError:
    """Return the error for a step that would unscale the gradients of a loss that was never scaled."""
    return UsageError(
        "the loss of this step was not scaled",
        where=where,
        found="gradients of a loss that was not multiplied by the loss scale",
        allowed="gradients of a scaled loss: the step divides them by the loss scale",
        fix=fix,
    )


def no_loss(loss: object, *, allowed: str) -> InvalidTypeError:
    """Return the error for scaling an object that is not a floating-point tensor."""
    dtype, shape = getattr(loss, "dtype", None), getattr(loss, "shape", "")
    found = shown(loss) if dtype is None else f"a tensor of {getattr(dtype, 'name', dtype)} with shape {shape}"
    return InvalidTypeError(
        "the loss must be a floating-point tensor",
        where="scaling the loss",
        found=found,
        allowed=allowed,
        fix="give the loss itself, for example the mean of the model's errors",
    )


def no_optimizer(found: object, *, allowed: str) -> InvalidTypeError:
    """Return the error for wrapping an object that is not an optimizer of the framework."""
    return InvalidTypeError(
        "not an optimizer of this framework",
        where="wrap_optimizer(optimizer)",
        found=kind_of(found),
        allowed=allowed,
        fix="give the optimizer itself, not its class, its state or a function that makes it",
    )


def wrapped_already(found: object, *, fix: str = "use it as it is, or wrap the plain optimizer") -> UsageError:
    """Return the error for wrapping an object that already scales the loss."""
    return UsageError(
        "the optimizer is wrapped already",
        where="wrap_optimizer(optimizer)",
        found=found,
        allowed="one loss scale",
        fix=fix,
    )


def no_loss_scale(found: object, *, where: str, allowed: str) -> InvalidTypeError:
    """Return the error for an object without a loss scale where one is needed."""
    return InvalidTypeError(
        "this object holds no loss scale",
        where=where,
        found=kind_of(found),
        allowed=allowed,
        fix="wrap the optimizer, and pass the wrapped optimizer",
    )


INSTEAD = {
    "backward": "compute gradients of opt.scale_loss(loss), and give them to opt.apply_gradients",
    "scale": "scale_loss(loss) scales a loss",
    "unscale_": "apply_gradients unscales, tests and clips",
    "clip_grad_norm_": "give max_grad_norm= to polyamp.wrap_optimizer",
    "zero_grad": "leave it out: gradients are values here",
    "step": "call opt.apply_gradients(zip(gradients, variables))",
    "get_scaled_loss": "call opt.scale_loss(loss); docs/migrate/keras.md has the other names of Keras 2",
    "get_unscaled_gradients": "leave it out: opt.apply_gradients unscales the gradients of opt.scale_loss(loss), and "
    "max_grad_norm= of polyamp.wrap_optimizer clips them; see docs/migrate/keras.md",
}
"""What to call in place of methods of PyTorch's optimizers and Keras 2's, in TensorFlow and Keras."""


def no_method(owner: object, name: str, instead: Mapping[str, str] = INSTEAD) -> AttributeError:
    """Return the error for a missing attribute; it names the call to make instead, if another framework has it."""
    kind = type(owner).__name__
    if name not in instead:
        return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)
    return UnsupportedMethodError(
        "this framework's wrapped optimizer has no such method",
        where=f"{kind}.{name}",
        found="a method of polyamp's optimizers in PyTorch, of a GradScaler or of Keras 2",
        fix=instead[name],
    )


def not_traced(*, where: str) -> UsageError:
    """Return the error for asking for a plan before there is a graph."""
    return UsageError(
        "the function was not traced yet",
        where=where,
        allowed="a function that was called, or rewritten with example arguments",
        fix="call it once, or give example arguments: rewrite(fn, *args)",
    )
