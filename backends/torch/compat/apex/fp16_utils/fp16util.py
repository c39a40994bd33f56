"""Networks in half precision, and float32 copies of parameters that a training loop updates by hand."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyamp.backends.torch.casting import cast_tensor, store_parameter
from polyamp.errors import warn_deprecated

Module = TypeVar("Module", bound=nn.Module)

clip_grad_norm = nn.utils.clip_grad_norm_

_CONVERT = 'polyamp.convert(model, "O2")'
_WRAP = 'opt = polyamp.wrap_optimizer(opt, "O2"), which keeps float32 master weights'


class tofp16(nn.Module):
    """A module that returns its input in float16.

    >>> tofp16()(torch.ones(2)).dtype
    torch.float16
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the input in float16."""
        return input.half()


def BN_convert_float(module: Module) -> Module:
    """Store the batch norms with weights of a module in float32, and return the module.

    >>> BN_convert_float(nn.Sequential(nn.BatchNorm1d(2)).half())[0].weight.dtype
    torch.float32
    """
    for part in module.modules():
        if _keeps_float32(part):
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return a network that casts its input to float16, with float16 parameters except in batch norms with weights.

    >>> network = network_to_half(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    >>> [parameter.dtype for parameter in network.parameters()][1:3], network(torch.ones(3, 4)).dtype
    ([torch.float16, torch.float32], torch.float16)

    Args:
        network: the network, which is changed in place.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """
    warn_deprecated("apex.fp16_utils.network_to_half(model)", _CONVERT)
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Store the floating parameters and buffers of one module, without its children, in a type."""
    for parameter in module.parameters(recurse=False):
        store_parameter(parameter, dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: Module, dtype: torch.dtype) -> Module:
    """Store a network in a type, except its batch norms with weights, and return it.

    >>> convert_network(nn.Linear(2, 2), torch.float16).weight.dtype
    torch.float16

    Warns:
        PolyampDeprecationWarning: at the first use.
    """
    warn_deprecated("apex.fp16_utils.convert_network(model, dtype)", _CONVERT)
    return _converted(network, dtype)


def _converted(network: Module, dtype: torch.dtype) -> Module:
    for part in network.modules():
        if not _keeps_float32(part):
            convert_module(part, dtype)
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters()
    return network


def _keeps_float32(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine


class FP16Model(nn.Module):
    """A model in half precision, except its batch norms with weights, that casts its inputs to float16.

    >>> FP16Model(nn.Linear(4, 2))(torch.ones(3, 4)).dtype
    torch.float16

    Args:
        network: the model, which is changed in place.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """

    def __init__(self, network: nn.Module) -> None:
        warn_deprecated("apex.fp16_utils.FP16Model(model)", _CONVERT)
        super().__init__()
        self.network = _converted(network, torch.half)

    def forward(self, *inputs: Tensor) -> Any:
        """Call the network with the inputs in float16."""
        return self.network(*(cast_tensor(one, torch.half) for one in inputs))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return the trained parameters of a model, and float32 copies of them for an optimizer.

    >>> model_params, master_params = prep_param_lists(nn.Linear(2, 2).half())
    >>> [parameter.dtype for parameter in master_params]
    [torch.float32, torch.float32]

    Args:
        model: the model.
        flat_master: return one copy: the elements of all parameters, in one dimension.

    Warns:
        PolyampDeprecationWarning: at the first use.
    """
    warn_deprecated("apex.fp16_utils.prep_param_lists(model)", _WRAP)
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies = [parameter.detach().float().clone() for parameter in params]
    if not flat_master:
        return params, [copy.requires_grad_() for copy in copies]
    master = nn.Parameter(_flat(copies))
    master.grad = torch.zeros_like(master)
    return params, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: list[nn.Parameter], master_params: list[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of a model's parameters to their float32 copies.

    Args:
        model_params, master_params: results of `prep_param_lists`.
        flat_master: as it was there.
    """
    if flat_master:
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in model_params]
        master_params[0].grad = _flat([grad.float() for grad in grads])
        return
    for parameter, master in zip(model_params, master_params, strict=True):
        master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: list[nn.Parameter], master_params: list[Tensor], flat_master: bool = False
) -> None:
    """Round the float32 copies into a model's parameters.

    Args:
        model_params, master_params: results of `prep_param_lists`.
        flat_master: as it was there.
    """
    masters = master_params
    if flat_master:
        parts = torch.split(master_params[0], [parameter.numel() for parameter in model_params])
        masters = [part.view_as(parameter) for part, parameter in zip(parts, model_params, strict=True)]
    for parameter, master in zip(model_params, masters, strict=True):
        parameter.copy_(master)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def to_python_float(t: Any) -> Any:
    """Return a tensor of one element, or the first item of a list, as a number.

    >>> to_python_float(torch.tensor(2.5)), to_python_float([1.5])
    (2.5, 1.5)
    """
    return t.item() if hasattr(t, "item") else t[0]
