"""Policies as native autocast: one `torch.autocast` for every device type that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from polyamp.backends.torch.dtypes import DTYPES, SIXTEEN_BIT
from polyamp.dialects import default_rules
from polyamp.errors import UnsupportedError, warn_once
from polyamp.operations import OPERATIONS
from polyamp.policy import Policy
from polyamp.rules import Rule


def _accelerator() -> str | None:
    """The device type beside the CPU that has autocast here: cuda, xpu, mps, ..."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None and torch.amp.is_autocast_available(device.type) else None


ACCELERATOR = _accelerator()


@contextmanager
def autocast(policy: Policy) -> Iterator[None]:
    """Run matrix work in the policy's ``compute`` format by native autocast; off where that is not a 16-bit format.

    Works inside ``torch.compile(fullgraph=True)``. Enter a fresh one each time; `polyamp.autocast` gives one object
    that may be entered again and again.

    >>> from polyamp import policy
    >>> with autocast(policy("mixed_bfloat16")):
    ...     print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
    torch.bfloat16

    Args:
        policy: its ``compute`` format decides. Rules that native autocast cannot follow are named in a warning.

    Raises:
        UnsupportedError: an 8-bit ``compute`` format.
    """
    if not torch.compiler.is_compiling():
        _check(policy)
    dtype = DTYPES[policy.compute]
    low = dtype in SIXTEEN_BIT
    usable = dtype if low else torch.bfloat16  # a disabled region still wants a format that the device knows
    there = nullcontext() if ACCELERATOR is None else torch.autocast(ACCELERATOR, dtype=usable, enabled=low)
    with torch.autocast("cpu", dtype=usable, enabled=low), there:
        yield


def _check(policy: Policy) -> None:
    if policy.compute.startswith("float8"):
        raise UnsupportedError(
            "torch.autocast has no 8-bit formats",
            where="autocast(policy)",
            found=policy.compute,
            allowed="float16, bfloat16, float32",
            fix="choose one of those",
        )
    if policy.compute == "tensorfloat32" and torch.get_float32_matmul_precision() == "highest":
        warn_once(
            "PyTorch sets TensorFloat-32 for the whole process, so autocast leaves it off. "
            'Call torch.set_float32_matmul_precision("high") to turn it on.'
        )
    ignored = [rule.pattern for rule in _own_rules(policy) if _changes_the_table(rule)]
    if ignored and DTYPES[policy.compute] in SIXTEEN_BIT:
        warn_once(
            f"native autocast has lists of its own and does not apply these rules: {', '.join(ignored)}. "
            "For a module, polyamp.convert(model, policy) applies them under policies that store 16-bit parameters; "
            "for a region, enter polyamp.autocast of another policy there."
        )


def _own_rules(policy: Policy) -> list[Rule]:
    defaults = default_rules(policy.param, policy.compute, policy.output)
    return [rule for rule in policy.rules if rule not in defaults]


def _changes_the_table(rule: Rule) -> bool:
    classes = [operation.op_class for name, operation in OPERATIONS.items() if rule.matches(name)]
    return not classes or any(op_class != rule.op_class for op_class in classes)
