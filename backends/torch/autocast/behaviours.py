"""The behaviour of autocast for each operator in a region, and the operators that must be overridden for it.

Native autocast has a list of operators per device type (`category`). An operator is overridden where a policy's
rule asks for something else, and in a few cases without a rule:

>>> lower_softmax = Region(torch.bfloat16, (Rule("softmax", "lower"),))
>>> behaviour("aten::softmax.int", lower_softmax, "cpu")  # the rule
'lower'
>>> behaviour("aten::mm", lower_softmax, "cpu") is None  # native autocast does it
True
>>> behaviour("aten::var", lower_softmax, "cpu")  # it squares its inputs, and no list has it
'full'
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.regions import Region
from polyamp.backends.torch.operations import canonical
from polyamp.backends.torch.unstable import all_operators, registered_operators
from polyamp.errors import warn_once
from polyamp.flow import decide
from polyamp.operations import OPERATIONS
from polyamp.rules import Rule

# The native category that already does what a class asks for; then nothing is overridden. None does what ``inner`` asks
# for, nor ``promote``: native kernels refuse float16 next to bfloat16.
_DOES = {"lower": "lower", "full": "full", "follow": "unlisted", "neutral": "unlisted", "keep": "unlisted"}

_CASTING = frozenset({"lower", "full", "promote"})

# These promote their inputs themselves. Native autocast's kernels do so first, and refuse what the operators accept.
PROMOTING = frozenset({"aten::cat", "aten::stack", "aten::addcmul", "aten::addcdiv", "aten::atan2"})

# Not in native lists, so these run in the type of their input, and square it: 300 overflows.
_FULL_HERE = frozenset({"variance"})

# PyTorch refuses operands of different formats in these, on every device that does not list them: to promote them
# changes no program that runs.
_REFUSE_MIXED = """
index_put _unsafe_index_put index_add index_copy index_reduce masked_scatter put scatter.src scatter.reduce
scatter_reduce.two scatter_add lerp.Scalar lerp.Tensor embedding_bag embedding_bag.padding_idx dot vdot cross
linalg_cross bilinear tensordot mv addmv linalg_multi_dot complex
"""

# It has no 16-bit kernels for these: LAPACK and cuSOLVER have none, nor has the CPU for three that are in CUDA's list.
# That of the matrix exponential computes NaN in bfloat16.
_REFUSE_LOW = """
det linalg_det logdet slogdet linalg_slogdet linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve
linalg_solve_triangular pdist _upsample_bilinear2d_aa _upsample_bicubic2d_aa matrix_exp linalg_matrix_exp
"""

# Their CPU kernels take 16-bit data with float32 parameters, which batching and forward derivatives do not, and refuse
# float32 data with 16-bit parameters. CUDA's list has those of layers and groups: in float16 they are ``full``.
_NORMS = """
layer_norm native_layer_norm group_norm batch_norm instance_norm
native_layer_norm_backward native_group_norm_backward native_batch_norm_backward
"""

_NO_KERNEL = ("aten::complex", torch.bfloat16)  # complex32 is of two float16

_REFUSED = {
    f"aten::{name}": kind
    for kind, names in (("mixed", _REFUSE_MIXED), ("low", _REFUSE_LOW), ("norm", _NORMS))
    for name in names.split()
}

_ONLY_ON_CUDA = {
    "aten::_cudnn_rnn",
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_lstm_cell",
}


def behaviour(operator: str, region: Region, device_type: str) -> str | None:
    """Return the class that an operator gets in a region; None leaves the operator to native autocast.

    Some are not classes of a policy: ``lower mixed`` and ``full mixed`` cast operands of different formats, and leave
    other calls to native autocast. ``norm`` brings data and parameters to float32 if a norm's kernels refuse them.
    """
    native = category(operator, device_type)
    decision = decide(region.rules, class_name(operator))
    if not decision.rule or operator.endswith("_backward"):
        return _without_rule(operator, native, region, device_type)
    if native == "unknown":
        warn_once(
            f"{operator} is in native autocast's list of torch {torch.__version__}, which is newer than polyamp's "
            f"table: {decision.rule} has no effect on it. Update polyamp."
        )
        return None
    return None if native == _DOES.get(decision.op_class) else decision.op_class


def _without_rule(operator: str, native: str, region: Region, device_type: str) -> str | None:
    if native == "promote":
        return None if operator in PROMOTING else "promote"
    if native != "unlisted":
        return None
    refused = _REFUSED.get(operator)
    if class_name(operator) in _FULL_HERE or refused == "low" or (operator, region.dtype) == _NO_KERNEL:
        return "full"
    on_cuda = _as_on_cuda(operator) if device_type == "cpu" else None
    if on_cuda is not None and region.dtype is torch.float16:
        return on_cuda
    if refused == "mixed":
        return "lower mixed" if on_cuda == "lower" else "full mixed"
    return refused if device_type == "cpu" else None


def _as_on_cuda(operator: str) -> str | None:
    """Return an operator's class in CUDA's list, if the CPU's list does not have it and the CPU can run it."""
    if category(operator, "cpu") != "unlisted" or operator in _ONLY_ON_CUDA or _has_named_dimensions(operator):
        return None
    listed = category(operator, "cuda")
    return listed if listed in _CASTING else None


def _has_named_dimensions(operator: str) -> bool:
    return "dimname" in operator.lower() or ".names" in operator


def overridden_without_rule(region: Region, device_type: str) -> Iterator[str]:
    """Yield the operators that every region overrides, independent of its rules; see `_without_rule`."""
    listed = registered("cpu") | registered("cuda") | _REFUSED.keys()
    candidates = [*listed - PROMOTING, *(name for operation in _FULL_HERE for name in _index()[operation])]
    for name in candidates:
        if not _has_named_dimensions(name) and _without_rule(name, category(name, device_type), region, device_type):
            yield name


def overridden_by_rules(region: Region, device_type: str) -> Iterator[str]:
    """Yield the operators that a region's rules override."""
    for rule in region.rules:
        for name in operators_of(rule.pattern):
            if behaviour(name, region, device_type) is not None:
                yield name


def native_class(operation: str, device_type: str, dtype: torch.dtype) -> str:
    """Return an operation's class under autocast without rules; empty if no list has the operation."""
    sources = OPERATIONS[operation].sources if operation in OPERATIONS else {}
    listed = "full" if operation in _FULL_HERE else sources.get(_list_of(device_type))
    if listed is None and device_type == "cpu" and dtype is torch.float16:
        listed = sources.get("cuda")
    return listed if listed in _CASTING else ""


# Names of operators.


def class_name(operator: str) -> str:
    """Return the name by which rules know an operator: the canonical one; for users' operators their own."""
    return canonical(operator) or operator.partition(".")[0]


def operators_of(pattern: str) -> list[str]:
    """Return the operators that a rule's pattern names and that can be overridden."""
    rule = Rule(pattern, "keep")
    return [name for operation, names in _index().items() if rule.matches(operation) for name in names]


@cache
def _index() -> dict[str, list[str]]:
    """Return every operator that can be overridden, by canonical name."""
    index: dict[str, list[str]] = {}
    for name in all_operators():
        operation = canonical(name) if name.startswith("aten::") else None
        if operation is not None and OPERATIONS[operation].op_class != "keep" and _can_be_overridden(name):
            index.setdefault(operation, []).append(name)
    return index


_LEFT_OUT = {"_scaled_mm", "_grouped_mm"}  # their inputs have 8 bits, and scales


def _can_be_overridden(name: str) -> bool:
    """Return whether an operator runs forward, takes tensors, and neither changes nor aliases its arguments."""
    # A view of a 16-bit value has to stay a 16-bit value.
    base, _, overload = name.removeprefix("aten::").partition(".")
    if base.endswith("_") or "backward" in base or base in _LEFT_OUT:
        return False
    if "out" in overload or _has_named_dimensions(name):
        return False
    arguments = unstable.schema_arguments(overload_named(name))
    types = [str(argument.type) for argument in arguments]
    return (
        not any(argument.alias_info is not None for argument in arguments)
        and any("Tensor" in one for one in types)
        and not any("Generator" in one for one in types)
    )


def overload_named(name: str) -> Any:
    """Return an operator's overload by its name."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


# Native autocast's own lists. The running torch's dispatcher knows *which* operators are in the list of a device type.
# *What* autocast does with them is in C++ only, and is a source of polyamp's table.


@cache
def registered(device_type: str) -> frozenset[str]:
    """Return the operators for which the running torch's autocast has kernels on a device type."""
    return frozenset(name for name in registered_operators(device_type) if name.startswith("aten::"))


def category(operator: str, device_type: str) -> str:
    """Return native autocast's class of an operator, ``banned``, ``unlisted``, or ``unknown`` to polyamp."""
    if operator not in registered(device_type):
        return "unlisted"
    if (operator, device_type) == ("aten::batch_norm", "mps"):  # in addition to the CUDA list
        return "full"
    entry = OPERATIONS.get(canonical(operator) or "")
    return "unknown" if entry is None else entry.sources.get(_list_of(device_type), "unknown")


def _list_of(device_type: str) -> str:
    # XPU, MPS, MTIA and MAIA register operators of the CUDA list, with the same macros
    return "cpu" if device_type == "cpu" else "cuda"
