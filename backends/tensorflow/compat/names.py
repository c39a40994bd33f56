"""The old places of removed functions in TensorFlow: ``tf.train.experimental``, ``tf.mixed_precision`` and others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

import tensorflow as tf

from polyamp.backends.tensorflow.compat import experimental
from polyamp.scripts.session import Session

# `from tensorflow.train.experimental import x` loads a second module from the same file as `tf.train.experimental`.
_ROOTS = ("tensorflow", "tensorflow._api.v2", "tensorflow.compat.v2", "tensorflow._api.v2.compat.v2")
_ROOTS_1 = ("tensorflow.compat.v1", "tensorflow._api.v2.compat.v1")
_EXISTING = (
    *(f"{root}.train.experimental" for root in (*_ROOTS, *_ROOTS_1)),
    *(f"{root}.mixed_precision{end}" for root in _ROOTS_1 for end in ("", ".experimental")),
)
_MISSING = "tensorflow.mixed_precision"  # nothing of it is left in TensorFlow 2
_OF_MIXED_PRECISION = ("LossScale", "FixedLossScale", "DynamicLossScale")


def install() -> Callable[[], None]:
    """Put the removed functions into TensorFlow, under their old names; return a function that takes them out.

    `polyamp run` does this for a script.

    >>> uninstall = install()
    >>> tf.train.experimental.FixedLossScale(8)
    FixedLossScale(8.0)
    >>> uninstall()
    >>> hasattr(tf.train.experimental, "FixedLossScale")
    False
    """
    session = Session()
    put_in_place(session)
    return session.close


def put_in_place(session: Session) -> None:
    """Put the removed functions into TensorFlow until the session ends."""
    for name in _EXISTING:
        try:
            module = import_module(name)
        except ImportError:  # a later TensorFlow has fewer
            continue
        for public in experimental.__all__:
            session.replace(module, public, getattr(experimental, public))
    _add_mixed_precision(session)


def _add_mixed_precision(session: Session) -> None:
    """Add ``tf.mixed_precision.experimental``, for attribute access and for imports."""
    if hasattr(tf, "mixed_precision"):
        return
    parent, child = ModuleType(_MISSING), ModuleType(f"{_MISSING}.experimental")
    for name in _OF_MIXED_PRECISION:
        setattr(child, name, getattr(experimental, name))
    vars(parent).update(experimental=child, __path__=[])
    for module in (parent, child):
        sys.modules[module.__name__] = module
        session.at_end(partial(sys.modules.pop, module.__name__, None))
    session.replace(tf, "mixed_precision", parent)
