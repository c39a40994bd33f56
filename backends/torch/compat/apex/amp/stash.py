"""``optimizer._amp_stash``, where Apex keeps the parameters of an optimizer by their types, and programs read them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.backends.torch.steps.wrapped import WrappedOptimizer

Lists = list[list[Tensor]]


class Stash:
    """The parameters of an optimizer: the model's own 16-bit ones, their masters, and all others.

    Args:
        wrapper: the optimizer's wrapper, which is held weakly.
    """

    lazy_init_called = True
    already_patched = params_have_scaled_gradients = False

    def __init__(self, wrapper: WrappedOptimizer) -> None:
        self._wrapper: Any = weakref.ref(wrapper)

    def __getstate__(self) -> dict[str, Any]:
        return {"_wrapper": lambda: None}

    def _pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return for each group the model's parameters, each with the one that the optimizer trains."""
        wrapper = self._wrapper()
        models = wrapper.model_parameters()
        return [[(next(models), param) for param in group["params"]] for group in wrapper.param_groups]

    @property
    def fp16_groups(self) -> Lists:
        """The model's 16-bit parameters, by group."""
        return [[model for model, _ in group if model.dtype in SIXTEEN_BIT] for group in self._pairs()]

    @property
    def fp32_from_fp16_groups(self) -> Lists:
        """Their masters, by group."""
        return [[own for model, own in group if own is not model] for group in self._pairs()]

    @property
    def fp32_from_fp32_groups(self) -> Lists:
        """The parameters that have 32 bits in the model, by group."""
        return [[model for model, _ in group if model.dtype not in SIXTEEN_BIT] for group in self._pairs()]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The model's 16-bit parameters."""
        return [param for group in self.fp16_groups for param in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """Their masters."""
        return [param for group in self.fp32_from_fp16_groups for param in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters that have 32 bits in the model."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The same, under the name that Apex has without masters."""
        return self.all_fp32_from_fp32_params
