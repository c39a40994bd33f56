"""Choose the optimizers of models as they are compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from polyamp.backends.keras.unstable import choose_optimizers


@functools.cache
def wrap_by_policy(chosen: Callable[[Any, Any], Any]) -> None:
    """Let a function choose the optimizer of every model that is compiled from now on; once for each function."""
    choose_optimizers(chosen)
