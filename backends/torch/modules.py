"""Facts about modules: which operation each implements, what authors keep in float32, names of parameters."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from polyamp.backends.torch.operations import MODULES


def operation_of(module: nn.Module) -> str:
    """Return the canonical operation of a module, by its class or bases; empty if there is none."""
    # Normalisations of other libraries are recognised by their names and parameters: see `is_norm`.
    known = next((MODULES[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in MODULES), "")
    return known or (_norm_of(module) if is_norm(module) else "")


_NORM = re.compile(r"norm(alization)?(act)?(gated|\d?d|fp32|layer)*$", re.IGNORECASE)
_NO_NORM = re.compile(r"(spectral|weight)_?norm", re.IGNORECASE)  # of weights


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalises its input."""
    # Its class, or a base of it, is named like a norm, and all its parameters and buffers are vectors.
    names = [kind.__name__ for kind in type(module).__mro__]
    if not any(_NORM.search(name) for name in names) or any(map(_NO_NORM.search, names)):
        return False
    held = [*module.parameters(), *module.buffers()]
    return all(sum(size != 1 for size in value.shape) <= 1 for value in held)


def _norm_of(module: nn.Module) -> str:
    name = next(kind.__name__ for kind in type(module).__mro__ if _NORM.search(kind.__name__)).lower()
    own = {key for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    if "batch" in name or "running_mean" in own:
        return "batch_norm"
    for kind, operation in _KINDS.items():
        if kind in name:
            return operation
    return "layer_norm" if "bias" in own else "rms_norm"


_KINDS = {"rms": "rms_norm", "group": "group_norm", "instance": "instance_norm", "layer": "layer_norm"}

# Names that Hugging Face's models use for the parts that float16 cannot hold; "strict" means bfloat16 too.
_KEPT = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def kept_by_authors(model: nn.Module) -> frozenset[nn.Module]:
    """Return the parts of a model that the model's code, or a part's code, keeps in float32."""
    kept = set()
    for owner in model.modules():
        names = [name for kind in _KEPT for name in getattr(owner, kind, None) or ()]
        wanted = [re.compile(rf"(^|\.){re.escape(name).replace(chr(92) + '*', '.*')}($|\.)") for name in names]
        for path, part in owner.named_modules() if wanted else ():
            if path and any(one.search(path) for one in wanted):
                kept.add(part)
    return frozenset(kept)


def names_of(
    param_groups: Sequence[Mapping[str, Any]],
    given: Mapping[str, Tensor] | None = None,
    masters: Mapping[Tensor, Tensor] | None = None,
) -> dict[Tensor, str]:
    """Return a name for each parameter of an optimizer's groups."""
    # Tried in order: the given names; the optimizer's own names, from ``named_parameters()``; the name in a module of
    # this process that has the parameter; its index.
    known = {param: name for name, param in (given or {}).items()}
    for group in param_groups:
        known.update(zip(group["params"], group.get("param_names", ()), strict=False))
    stored = {param: (masters or {}).get(param, param) for group in param_groups for param in group["params"]}
    if any(param not in known and own not in known for param, own in stored.items()):
        known = {**_names_in_modules(), **known}
    return {
        param: known.get(param)
        or known.get(stored[param])
        or f"group {place}, parameter {index} of shape {tuple(param.shape)}"
        for place, group in enumerate(param_groups)
        for index, param in enumerate(group["params"])
    }


def _names_in_modules() -> dict[Tensor, str]:
    """Return names from all live modules, since an optimizer only knows tensors. Takes tenths of a second."""
    modules = [obj for obj in gc.get_objects() if issubclass(type(obj), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inner]
    return {param: name for root in roots for name, param in root.named_parameters()}
