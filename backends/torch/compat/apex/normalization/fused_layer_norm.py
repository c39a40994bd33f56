"""Layer and RMS norms with Apex's names and options, by PyTorch's own kernels, on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyamp.errors import InvalidValueError, warn_deprecated

Shape = int | Sequence[int]


class FusedLayerNorm(nn.LayerNorm):
    """A `torch.nn.LayerNorm`.

    >>> FusedLayerNorm(2)(torch.tensor([1.0, 3.0])).detach()
    tensor([-1.0000,  1.0000])

    Args:
        normalized_shape, eps, elementwise_affine: as in `torch.nn.LayerNorm`.
        memory_efficient: has no effect on numbers, and is not used.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        warn_deprecated(f"apex.normalization.{type(self).__name__}(shape)", "torch.nn.LayerNorm(shape)")
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedRMSNorm(nn.RMSNorm):
    """A `torch.nn.RMSNorm`, with an ``eps`` of 1e-5.

    >>> FusedRMSNorm(2)(torch.tensor([1.0, 7.0])).detach()
    tensor([0.2000, 1.4000])

    Args:
        normalized_shape, eps, elementwise_affine: as in `torch.nn.RMSNorm`.
        memory_efficient: has no effect on numbers, and is not used.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        warn_deprecated(f"apex.normalization.{type(self).__name__}(shape)", "torch.nn.RMSNorm(shape, eps=1e-5)")
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class MixedFusedLayerNorm(FusedLayerNorm):
    """A layer norm whose output has the type of its weight.

    >>> MixedFusedLayerNorm(2)(torch.ones(2).half()).dtype
    torch.float32

    Args:
        normalized_shape, eps, memory_efficient: see `FusedLayerNorm`.
        elementwise_affine: must be True.

    Raises:
        InvalidValueError: ``elementwise_affine=False``.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        _need_weight("MixedFusedLayerNorm", elementwise_affine)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, in the type of the weight."""
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """An RMS norm whose output has the type of its weight.

    >>> MixedFusedRMSNorm(2)(torch.ones(2).half()).dtype
    torch.float32

    Args:
        normalized_shape, eps, memory_efficient: see `FusedRMSNorm`.
        elementwise_affine: must be True.

    Raises:
        InvalidValueError: ``elementwise_affine=False``.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        _need_weight("MixedFusedRMSNorm", elementwise_affine)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input, in the type of the weight."""
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.normalized_shape, self.eps or 0.0)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return `torch.nn.functional.layer_norm` with weight and bias."""
    return functional.layer_norm(input, _shape(normalized_shape), weight, bias, eps)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `torch.nn.functional.layer_norm` without weight and bias."""
    return functional.layer_norm(input, _shape(normalized_shape), eps=eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return `torch.nn.functional.layer_norm`, in the type of the weight."""
    wide = _wider(input, weight)
    out = functional.layer_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), bias.to(wide), eps)
    return out.to(weight.dtype)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `torch.nn.functional.rms_norm` with a weight."""
    return functional.rms_norm(input, _shape(normalized_shape), weight, eps)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Return `torch.nn.functional.rms_norm` without a weight."""
    return functional.rms_norm(input, _shape(normalized_shape), eps=eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `torch.nn.functional.rms_norm`, in the type of the weight."""
    wide = _wider(input, weight)
    out = functional.rms_norm(input.to(wide), _shape(normalized_shape), weight.to(wide), eps)
    return out.to(weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Return an RMS norm; see `mixed_dtype_fused_rms_norm_affine`, which has the output's type of a 16-bit weight."""
    if weight is None:
        return fused_rms_norm(input, normalized_shape, eps)
    return mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps)


def _shape(normalized_shape: Shape) -> list[int]:
    return [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)


def _wider(input: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, weight.dtype)


def _need_weight(name: str, elementwise_affine: bool) -> None:
    if not elementwise_affine:
        raise InvalidValueError(
            "this norm has the type of its weight, so it needs one",
            where=f"{name}(elementwise_affine=)",
            found=elementwise_affine,
            allowed="True",
            fix="use torch.nn.LayerNorm or torch.nn.RMSNorm with elementwise_affine=False",
        )
