"""Everything that polyamp raises or warns with: what happened, where, found versus allowed, and what to do."""

from __future__ import annotations

import warnings


class PolyampError(Exception):
    """The base of every polyamp error.

    >>> print(PolyampError("unknown colour", where="paint()", found="'bleu'", allowed="red, blue", fix="choose one"))
    unknown colour
      where:   paint()
      found:   'bleu'
      allowed: red, blue
      to do:   choose one
    """

    ag_pass_through = True  # TensorFlow's AutoGraph hands such errors on as they are, not as errors of its own

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
    """A value that is outside what is allowed."""


class InvalidTypeError(PolyampError, TypeError):
    """An object of a kind that polyamp cannot handle here."""


class MissingFrameworkError(PolyampError, ImportError):
    """A framework, or a package that a command needs, is not installed."""


class UnsupportedError(PolyampError, TypeError):
    """The framework's adapter does not offer what was asked for."""


class UsageError(PolyampError, RuntimeError):
    """A call in the wrong order, such as a step without a backward pass."""


class StateError(PolyampError, ValueError):
    """A saved state that does not fit what it is loaded into."""


class ExtensionError(PolyampError, RuntimeError):
    """Compiled code that is required is not there: it cannot be built, or not be loaded."""


class NonFiniteLossError(PolyampError, FloatingPointError):
    """The loss was inf or NaN in float32 before it was scaled: no loss scale can help."""


class LossScaleError(PolyampError, FloatingPointError):
    """The loss scale reached its minimum, or too many steps in a row were skipped."""


class PolyampWarning(UserWarning):
    """Everything that polyamp only reports. Each message is given once in a process."""


_already_said: set[str] = set()


def warn_once(message: str, *, stacklevel: int = 3) -> None:
    """Give ``message`` as a `PolyampWarning` unless this process has been given it already."""
    if message not in _already_said:
        _already_said.add(message)
        warnings.warn(message, PolyampWarning, stacklevel=stacklevel)


def forget_warnings() -> None:
    """Let every message be given again (for tests, and for notebooks that start over)."""
    _already_said.clear()
