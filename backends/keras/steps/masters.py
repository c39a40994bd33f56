"""Float32 master weights: the inner optimizer trains them, while the model's own variables have 16 bits.

In 16 bits, an update that is small compared to its weight is lost in rounding; in float32 it accumulates (Micikevicius
et al., "Mixed Precision Training", ICLR 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from polyamp.backends.keras.backend import value_of
from polyamp.backends.keras.dtypes import is_sixteen_bit
from polyamp.backends.keras.unstable import layout_of


class MasterWeights:
    """The variables of a model, with a float32 master weight for each 16-bit one."""

    def __init__(self, variables: Sequence[Any], add_variable: Callable[..., Any]) -> None:
        self._masters = {
            index: _master(variable, add_variable)
            for index, variable in enumerate(variables)
            if is_sixteen_bit(variable)
        }

    @property
    def variables(self) -> list[Any]:
        """The master weights."""
        return list(self._masters.values())

    def trained(self, variables: Sequence[Any], indices: Sequence[int] | None = None) -> list[Any]:
        """Return the variables that the inner optimizer trains in place of ``variables``."""
        places = range(len(variables)) if indices is None else indices
        return [self._masters.get(place, variable) for place, variable in zip(places, variables, strict=True)]

    @staticmethod
    def follow(variables: Sequence[Any], trained: Sequence[Any]) -> None:
        """Copy a value assigned to a model's variable since the last rounding into its master weight."""
        for variable, master in _pairs(variables, trained):
            value = value_of(variable)
            rounded = ops.cast(value_of(master), value.dtype)
            master.assign(ops.where(rounded == value, value_of(master), ops.cast(value, "float32")))

    @staticmethod
    def round_into(variables: Sequence[Any], trained: Sequence[Any]) -> None:
        """Round the master weights into the model's variables."""
        for variable, master in _pairs(variables, trained):
            variable.assign(ops.cast(value_of(master), variable.dtype))


def _master(variable: Any, add_variable: Callable[..., Any]) -> Any:
    master = add_variable(
        shape=variable.shape,
        dtype="float32",
        initializer=lambda shape, dtype: ops.cast(value_of(variable), dtype),
        layout=layout_of(variable),
        name=f"{variable.name.replace(':', '_')}_master",
    )
    master.constraint = getattr(variable, "constraint", None)
    return master


def _pairs(variables: Sequence[Any], trained: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(one, other) for one, other in zip(variables, trained, strict=True) if one is not other]
