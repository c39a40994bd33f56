"""All errors and warnings of polyamp: what happened, where, found versus allowed, and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


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
        lines = [f"  {label:<8} {text}" for label, text in parts if text is not None]
        super().__init__("\n".join([what, *lines]))


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


def warn_once(message: str, *, stacklevel: int = 3) -> None:
    """Issue ``message`` as a `PolyampWarning`, once per process."""
    if message not in _shown:
        _shown.add(message)
        warnings.warn(message, PolyampWarning, stacklevel=stacklevel)


def warn_deprecated(old: str, instead: str, *, stacklevel: int = 3) -> None:
    """Report once per process that an old interface was used, with the polyamp line that replaces it.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     warn_deprecated("apex.amp.scale_loss(loss, opt)", "opt.backward(loss)", stacklevel=2)
    >>> print(caught[0].message)
    apex.amp.scale_loss(loss, opt) is kept for old programs. Write instead: opt.backward(loss)
    """
    message = f"{old} is kept for old programs. Write instead: {instead}"
    if message not in _shown:
        _shown.add(message)
        warnings.warn(message, PolyampDeprecationWarning, stacklevel=stacklevel)


def forget_warnings() -> None:
    """Allow every message to be shown again (for tests, and for notebooks that start over)."""
    _shown.clear()


@contextmanager
def unreported() -> Iterator[None]:
    """Show no `PolyampWarning` of trial runs, and remember none of them as shown.

    >>> with unreported():
    ...     warn_once("a rule of a trial matched nothing")
    """
    before = set(_shown)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PolyampWarning)
            yield
    finally:
        _shown.intersection_update(before)
