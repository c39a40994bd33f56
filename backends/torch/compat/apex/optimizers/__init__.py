"""`apex.optimizers`: optimizers with Apex's names, options and saved states, on `torch.optim` and lists of tensors.

They are plain optimizers, for the CPU and every accelerator: `polyamp.wrap_optimizer` and ``apex.amp`` take them.
"""

from polyamp.backends.torch.compat.apex.optimizers.fused_adagrad import FusedAdagrad
from polyamp.backends.torch.compat.apex.optimizers.fused_adam import FusedAdam
from polyamp.backends.torch.compat.apex.optimizers.fused_lamb import FusedLAMB
from polyamp.backends.torch.compat.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from polyamp.backends.torch.compat.apex.optimizers.fused_novograd import FusedNovoGrad
from polyamp.backends.torch.compat.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
