"""Apex for programs that still import it: `amp`, and a table of its other names, which PyTorch has by now.

    from polyamp.backends.torch.apex import amp

Under `polyamp run` a script imports all of them as before. A name of the table is PyTorch's own class, or a few lines
around it for Apex' arguments. A name without a twin can be imported, and is refused where it is used.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

import polyamp
from polyamp.backends.torch.compat import apex_amp as amp
from polyamp.errors import UnsupportedError

__all__ = ["TABLE", "Missing", "amp", "modules"]


def _adam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
    **others: bool,
) -> torch.optim.Optimizer:
    _refuse("FusedAdam", "torch.optim.AdamW(params)", bias_correction=not bias_correction, **others)
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, lr, betas, eps, weight_decay, amsgrad)


class _RMSNorm(nn.RMSNorm):
    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


class _DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """PyTorch's class; Apex' options for the moment of sending gradients have no effect."""

    def __init__(self, module: nn.Module, message_size: int = 0, delay_allreduce: bool = False, **options: Any) -> None:
        changes = {name: options.get(name, default) != default for name, default in _MEAN.items()}
        _refuse("DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel(model)", **changes)
        super().__init__(module, find_unused_parameters=delay_allreduce)


_MEAN = {"allreduce_always_fp32": False, "gradient_average": True, "gradient_predivide_factor": 1.0}


class Missing:
    """A name of Apex without a twin in PyTorch; a call raises with what to write instead."""

    available = False  # by which scripts ask whether Apex' kernels are here

    def __init__(self, instead: str) -> None:
        self.instead = instead

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError("PyTorch has no twin of this part of Apex", fix=self.instead)


def _refuse(name: str, instead: str, **changed: bool) -> None:
    """Refuse options that PyTorch's twin does not have, unless they have their defaults."""
    if found := ", ".join(option for option, is_changed in changed.items() if is_changed):
        what, fix = "PyTorch's twin does not have this option", f"leave it out, as in {instead}"
        raise UnsupportedError(what, where=f"apex: {name}", found=found, fix=fix)


TABLE: dict[str, dict[str, Any]] = {
    "apex.optimizers": {
        "FusedAdam": _adam,
        "FusedSGD": torch.optim.SGD,
        "FusedAdagrad": torch.optim.Adagrad,
        "FusedLAMB": Missing("torch.optim.AdamW(params)"),
        "FusedNovoGrad": Missing("torch.optim.AdamW(params)"),
    },
    "apex.normalization": {
        "FusedLayerNorm": nn.LayerNorm,
        "MixedFusedLayerNorm": nn.LayerNorm,
        "FusedRMSNorm": _RMSNorm,
        "MixedFusedRMSNorm": _RMSNorm,
    },
    "apex.parallel": {
        "DistributedDataParallel": _DistributedDataParallel,
        "SyncBatchNorm": nn.SyncBatchNorm,
        "convert_syncbn_model": nn.SyncBatchNorm.convert_sync_batchnorm,
        "Reducer": Missing("torch.nn.parallel.DistributedDataParallel(model)"),
    },
    "apex.parallel.LARC": {"LARC": Missing('polyamp.wrap_optimizer(opt, "O1", max_grad_norm=1.0)')},
    "apex.fp16_utils": {
        "network_to_half": lambda network: polyamp.convert(network, "O2"),
        "FP16_Optimizer": Missing('polyamp.wrap_optimizer(opt, "O2")'),
    },
    "apex.multi_tensor_apply": {"multi_tensor_applier": Missing("torch._foreach_mul_(tensors, number)")},
}


def modules() -> dict[str, ModuleType]:
    """Return the modules of Apex that a program may import, by their names there.

    >>> modules()["apex.amp"] is amp, modules()["apex.parallel"].SyncBatchNorm
    (True, <class 'torch.nn.modules.batchnorm.SyncBatchNorm'>)
    """
    return dict(_MODULES)


_MODULES = {"apex": ModuleType("apex", __doc__), "apex.amp": amp, "apex.amp._amp_state": amp._amp_state}
for _name, _names in TABLE.items():
    _MODULES[_name] = ModuleType(_name, f"The names of `{_name}`, which are PyTorch's.")
    vars(_MODULES[_name]).update(_names)
_MODULES["apex.normalization.fused_layer_norm"] = _MODULES["apex.normalization"]
for _name, _module in _MODULES.items():
    _parent, _, _last = _name.rpartition(".")
    if _parent:
        vars(_MODULES[_parent]).setdefault(_last, _module)
