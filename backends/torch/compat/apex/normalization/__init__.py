"""`apex.normalization`: layer and RMS norms with Apex's names, on `torch.nn.LayerNorm` and `torch.nn.RMSNorm`."""

from polyamp.backends.torch.compat.apex.normalization.fused_layer_norm import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
