"""`convert`: stores a module's parameters in the format of a policy, except those that its rules keep in float32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from polyamp.backends.torch.casting import cast_tensor, cast_to, store_parameter
from polyamp.backends.torch.dtypes import DTYPES, SIXTEEN_BIT
from polyamp.backends.torch.modules import kept_by_authors, operation_of
from polyamp.errors import InvalidTypeError, kind_of, warn_once
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.rules import unused
from polyamp.without_effect import report_unused

# Their kernels take 16-bit data with float32 parameters and statistics, on every device.
_TAKING_MIXED = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

_HOOKS = "_polyamp_hooks"  # attribute of a module: the handles of the hooks that `convert` registered


class _Part(NamedTuple):
    """One module of a model, with its path, its operation and its class."""

    path: str
    module: nn.Module
    operation: str
    op_class: str


def convert(model: nn.Module, policy: Policy | str) -> nn.Module:
    """Store floating parameters and buffers in ``policy.param``, except in modules that the rules keep in float32.

    A module is kept in float32 by the table (norms), by a rule for its path, or by its authors
    (``_keep_in_fp32_modules``) if the policy keeps norms. Its inputs are cast to float32 (those of batch norms stay in
    16 bits) and its outputs to ``policy.compute``. The model's inputs are cast to ``policy.compute`` and its outputs to
    ``policy.output``. The `torch.nn.Parameter` objects stay the same. Converting again replaces all of this.

    >>> from polyamp import policy
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> _ = convert(model, policy("O2", rules={"2": "full"}))
    >>> [part.weight.dtype for part in model], model(torch.ones(1, 4)).dtype
    ([torch.float16, torch.float32, torch.float32], torch.float32)

    Args:
        model: the model, which is changed in place. Convert it before its optimizer is wrapped, which then gets master
            weights.
        policy: a policy or its name. One that stores parameters in float32 changes nothing; if it is a mixed one, a
            warning points to autocast.

    Raises:
        InvalidTypeError: ``model`` is not a `torch.nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            "the model is not a torch module",
            where="convert(model)",
            found=kind_of(model),
            allowed="an instance of torch.nn.Module",
            fix="pass the model itself; policy.cast_to_param(tree) casts arrays",
        )
    policy = make_policy(policy)
    parts = list(_parts(model, policy))
    for module in model.modules():
        for handle in module.__dict__.pop(_HOOKS, ()):
            handle.remove()
    kept = _store(parts, DTYPES[policy.param])
    if DTYPES[policy.param] in SIXTEEN_BIT:
        _add_hooks(model, parts, kept, policy)
        matched = [(part.operation, part.path) for part in parts]
        unmatched, name = unused(policy.own_rules, matched), type(model).__name__
        report_unused(unmatched, where=name, paths="a module", of=policy)
    elif policy.casts:
        warn_once(
            f"policy {policy} stores parameters in {policy.param}: convert changes no module. "
            "Run the model in polyamp.autocast(policy)."
        )
    return model


def _parts(model: nn.Module, policy: Policy) -> Iterator[_Part]:
    kept = kept_by_authors(model) if policy.decide("layer_norm").op_class != "lower" else frozenset()
    own_rules = policy.own_rules
    for path, module in model.named_modules():
        operation = operation_of(module)
        matching = [rule for rule in policy.rules if rule.matches(operation, path)]
        op_class = policy.decide(operation, path).op_class
        if module in kept and not any(rule in own_rules for rule in matching):
            op_class = "full"
        elif not matching and not operation:
            op_class = "follow"
        yield _Part(path, module, operation, op_class)


def _store(parts: list[_Part], dtype: torch.dtype) -> set[nn.Module]:
    """Cast parameters and buffers, and return the modules that stay in float32."""
    full = {own for part in parts if _is_full(part) for own in part.module.parameters(recurse=False)}
    kept = set()
    for part in parts:
        own = list(part.module.parameters(recurse=False))
        is_full = _is_full(part) or not full.isdisjoint(own)  # or tied to a parameter that is
        if is_full:
            kept.add(part.module)
        if part.op_class != "keep":
            own_dtype = torch.float32 if is_full and dtype in SIXTEEN_BIT else dtype
            for parameter in own:
                store_parameter(parameter, own_dtype)
            for name, buffer in part.module.named_buffers(recurse=False):
                setattr(part.module, name, cast_tensor(buffer, own_dtype))
    return kept


def _is_full(part: _Part) -> bool:
    """Return whether a module computes in float32, at least inside, as norms do, and so needs float32 parameters."""
    return part.op_class in ("full", "inner")


def _add_hooks(model: nn.Module, parts: list[_Part], kept: set[nn.Module], policy: Policy) -> None:
    modules = {part.path: part.module for part in parts}
    compute, output = DTYPES[policy.compute], DTYPES[policy.output]
    for part in parts:
        is_root = part.module is model
        if part.module in kept and (is_root or _holds_values(part.module)):
            inside = not is_root and _caller(modules, part.path) in kept
            takes_mixed = part.op_class == "inner" and isinstance(part.module, _TAKING_MIXED)
            _hook(part.module, None if takes_mixed else torch.float32, None if inside or is_root else compute)
        elif is_root:
            _hook(model, compute, None)
    _hook(model, None, output)


def _holds_values(module: nn.Module) -> bool:
    """Return whether a module has floating parameters or buffers; without them it computes in its inputs' type."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(value.is_floating_point() for value in own) and not isinstance(module, nn.modules.loss._Loss)


def _caller(modules: dict[str, nn.Module], path: str) -> nn.Module:
    """Return the module that calls the one at ``path``: the nearest above it that is not a list or dict."""
    above = path.rpartition(".")[0]
    while isinstance(modules[above], nn.ModuleList | nn.ModuleDict) and above:
        above = above.rpartition(".")[0]
    return modules[above]


def _hook(module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
    handles = module.__dict__.setdefault(_HOOKS, [])
    if inputs is not None:
        handles.append(module.register_forward_pre_hook(partial(_cast_inputs, dtype=inputs), with_kwargs=True))
    if outputs is not None:
        handles.append(module.register_forward_hook(partial(_cast_outputs, dtype=outputs)))


def _cast_inputs(_: nn.Module, args: Any, kwargs: Any, *, dtype: torch.dtype) -> Any:
    return cast_to(args, dtype, modules=False), cast_to(kwargs, dtype, modules=False)


def _cast_outputs(_: nn.Module, __: Any, outputs: Any, *, dtype: torch.dtype) -> Any:
    return cast_to(outputs, dtype, modules=False)
