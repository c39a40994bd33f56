"""Apex for programs that still import it: `amp`, and its other names, which PyTorch has by now.

    from polyamp.backends.torch.apex import FusedAdam, amp

A name of the table is PyTorch's own class, or a few lines around it for Apex' arguments. A name that PyTorch does not
have can be imported, and is refused where it is used, with what to write instead.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

import polyamp
from polyamp.backends.torch import apex_amp as amp
from polyamp.errors import UnsupportedError, warn_deprecated

__all__ = ["TABLE", "amp", "modules"]

TABLE = {
    "apex.optimizers": {
        "FusedAdam": "torch.optim.AdamW(params, weight_decay=0.0); with adam_w_mode=False, torch.optim.Adam(params)",
        "FusedSGD": "torch.optim.SGD(params, lr)",
        "FusedAdagrad": "torch.optim.Adagrad(params)",
        "FusedLAMB": "torch.optim.AdamW(params): PyTorch has no LAMB",
        "FusedNovoGrad": "torch.optim.AdamW(params): PyTorch has no NovoGrad",
    },
    "apex.normalization": {
        "FusedLayerNorm": "torch.nn.LayerNorm(shape)",
        "MixedFusedLayerNorm": "torch.nn.LayerNorm(shape)",
        "FusedRMSNorm": "torch.nn.RMSNorm(shape, eps=1e-5)",
        "MixedFusedRMSNorm": "torch.nn.RMSNorm(shape, eps=1e-5)",
    },
    "apex.parallel": {
        "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel(model)",
        "SyncBatchNorm": "torch.nn.SyncBatchNorm(features)",
        "convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
        "create_syncbn_process_group": "torch.distributed.new_subgroups(group_size)[0]",
        "Reducer": "torch.nn.parallel.DistributedDataParallel(model)",
    },
    "apex.parallel.LARC": {"LARC": "wrap_optimizer(opt, policy, max_grad_norm=1.0): PyTorch has no LARC"},
    "apex.fp16_utils": {
        "network_to_half": 'polyamp.convert(model, "O2")',
        "FP16_Optimizer": 'polyamp.wrap_optimizer(opt, "O2"), then opt.backward(loss) and opt.step()',
    },
    "apex.multi_tensor_apply": {"multi_tensor_applier": "functions of PyTorch such as torch._foreach_mul_"},
}
"""What to write instead of Apex' names, by their modules. What is not defined below is refused where it is used."""


def FusedAdam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
    **others: Any,
) -> torch.optim.Optimizer:
    """Return torch's Adam or AdamW."""
    _old("apex.optimizers", "FusedAdam", bias_correction=not bias_correction, **others)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr, betas, eps, weight_decay, amsgrad)


def FusedSGD(
    params: Any, lr: float, *positional: Any, wd_after_momentum: bool = False, **options: Any
) -> torch.optim.Optimizer:
    """Return torch's SGD."""
    _old("apex.optimizers", "FusedSGD", wd_after_momentum=wd_after_momentum)
    for without_effect in ("materialize_master_grads", "set_grad_none"):
        options.pop(without_effect, None)
    return torch.optim.SGD(params, lr, *positional, **options)


def FusedAdagrad(
    params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, **others: Any
) -> torch.optim.Optimizer:
    """Return torch's Adagrad."""
    _old("apex.optimizers", "FusedAdagrad", **others)
    return torch.optim.Adagrad(params, lr, eps=eps, weight_decay=weight_decay)


class FusedLayerNorm(nn.LayerNorm):
    """Normalise as torch's layer does."""

    def __init__(
        self, shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        _old("apex.normalization", "FusedLayerNorm")
        super().__init__(shape, eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    """Normalise as torch's layer does, with Apex' ``eps``."""

    def __init__(
        self, shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        _old("apex.normalization", "FusedRMSNorm")
        super().__init__(shape, eps, elementwise_affine)


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Average gradients as torch's module does. Options that only change when gradients are sent have no effect."""

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_always_fp32: bool = False,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        **without_effect: Any,
    ) -> None:
        changes = {"shared_param": shared_param, "allreduce_always_fp32": allreduce_always_fp32}
        changes |= {"gradient_average": not gradient_average}
        changes |= {"gradient_predivide_factor": gradient_predivide_factor != 1}
        _old("apex.parallel", "DistributedDataParallel", **changes)
        super().__init__(module, find_unused_parameters=delay_allreduce)


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace batch norms by torch's `SyncBatchNorm`."""
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)  # type: ignore[no-untyped-call]
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Return the group of this rank; None, which is all ranks, for 0."""
    return torch.distributed.new_subgroups(group_size)[0] if group_size else None  # type: ignore[no-untyped-call]


def network_to_half(network: nn.Module) -> nn.Module:
    """Convert a model to float16, except its norms."""
    _old("apex.fp16_utils", "network_to_half")
    return polyamp.convert(network, "O2")


MixedFusedLayerNorm, MixedFusedRMSNorm, SyncBatchNorm = FusedLayerNorm, FusedRMSNorm, nn.SyncBatchNorm


def _old(module: str, name: str, **changed: Any) -> None:
    """Warn once about an old name, and refuse options that torch's twin does not have, unless they are the defaults."""
    instead = TABLE[module][name]
    warn_deprecated(f"{module}.{name}", instead, stacklevel=4)
    if refused := [option for option, is_changed in changed.items() if is_changed]:
        raise UnsupportedError(
            "PyTorch's twin does not have this option",
            where=f"{module}.{name}",
            found=", ".join(refused),
            fix=f"leave it out, as in {instead}",
        )


class _Missing:
    """A name that PyTorch has no twin of."""

    available = False  # by which scripts ask whether Apex' kernels are here

    def __init__(self, module: str, name: str) -> None:
        self._where, self._instead = f"{module}.{name}", TABLE[module][name]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError("polyamp does not have this part of Apex", where=self._where, fix=self._instead)


def modules() -> dict[str, ModuleType]:
    """Return the modules of Apex that a program may import, by their names there.

    >>> modules()["apex.amp"] is amp, modules()["apex.parallel"].SyncBatchNorm
    (True, <class 'torch.nn.modules.batchnorm.SyncBatchNorm'>)
    """
    return dict(_MODULES)


def _made(name: str, names: dict[str, str]) -> ModuleType:
    module = ModuleType(name, f"The names of `{name}` on PyTorch.")
    for one in names:
        setattr(module, one, globals().get(one, _Missing(name, one)))
    return module


_MODULES = {
    "apex": ModuleType("apex", __doc__),
    "apex.amp": amp,
    "apex.amp._amp_state": amp._amp_state,
    **{name: _made(name, names) for name, names in TABLE.items()},
}
_MODULES["apex.normalization.fused_layer_norm"] = _MODULES["apex.normalization"]
for _name, _module in _MODULES.items():
    _parent, _, _last = _name.rpartition(".")
    if _parent and _last not in vars(_MODULES[_parent]):
        setattr(_MODULES[_parent], _last, _module)
