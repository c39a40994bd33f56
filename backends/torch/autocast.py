"""Policies as native autocast on every device type, with the operations overridden that the policy's rules change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch

from polyamp.backends.torch import overrides, positions, regions, unstable, weights
from polyamp.backends.torch.dtypes import DTYPES, SIXTEEN_BIT
from polyamp.backends.torch.regions import ACCELERATOR, DEVICE_TYPES
from polyamp.dialects import default_rules
from polyamp.errors import UnsupportedError, warn_once
from polyamp.policy import Policy
from polyamp.rules import Rule
from polyamp.verbs import compiled_by


@contextmanager
def autocast(policy: Policy) -> Iterator[None]:
    """Run operations as a policy says: by native autocast, whose lists hold wherever no rule says anything else.

    A region is the thread's that enters it, holds in functions that activation checkpointing runs again, and can be
    entered around and inside code under ``torch.compile(fullgraph=True)``. Enter a fresh one each time;
    `polyamp.autocast` gives one object that may be entered again and again. In float16 on the CPU, CUDA's list holds
    for what the CPU's leaves out (exponentials, sums, norms). Inputs in float16 and bfloat16 meet in float32. Regions
    of torch.autocast inside are theirs, and the outer one holds again after them.

    >>> from polyamp import policy
    >>> low, x = policy("mixed_bfloat16", rules={"softmax": "lower"}), torch.ones(2, 2)
    >>> with autocast(low):
    ...     print(torch.mm(x, x).dtype, torch.softmax(x, 0).dtype)
    torch.bfloat16 torch.bfloat16

    Args:
        policy: its ``compute`` format and its rules. A ``compute`` format of 32 bits turns autocast off.

    Raises:
        UnsupportedError: an 8-bit ``compute`` format.
    """
    if not torch.compiler.is_compiling():
        _check(policy.compute)
    dtype = DTYPES[policy.compute]
    low = dtype in SIXTEEN_BIT
    usable = dtype if low else torch.bfloat16  # a disabled region still wants a format that the device knows
    there = nullcontext() if ACCELERATOR is None else torch.autocast(ACCELERATOR, dtype=usable, enabled=low)
    ours = _traced(policy) if torch.compiler.is_compiling() else _entered(policy)
    with torch.autocast("cpu", dtype=usable, enabled=low), there, ours:
        yield


@unstable.never_compiled
@contextmanager
def _entered(policy: Policy) -> Iterator[None]:
    outermost = regions.casts_here() is None
    with unstable.backward_without_autocast() if outermost else nullcontext():
        region = _region_of(policy.param, policy.compute, policy.output, policy.rules)
        frame = regions.enter(region)
        try:
            yield
        finally:
            regions.leave(frame)
    if region is not None and region.rules:
        positions.report_unused(region)


@contextmanager
def _traced(policy: Policy) -> Iterator[None]:
    """The same in the graph that Dynamo captures, where only native autocast's own state is."""
    (first, second), marks = regions.MARKED, _traced_mark(*_autocast_fields(policy))
    with (
        torch.autocast(first, dtype=marks[0], enabled=False),  # enabled, it would refuse the dtype
        torch.autocast(second, dtype=marks[1], enabled=False),
    ):
        yield


@unstable.constant_when_compiled
def _traced_mark(
    param: str, compute: str, output: str, rules: tuple[tuple[str, str], ...]
) -> tuple[torch.dtype, torch.dtype]:
    _check(compute)
    return regions.mark_of(_region_of(param, compute, output, tuple(Rule(*rule) for rule in rules)), traced=True)


def _autocast_fields(policy: Policy) -> tuple[str, str, str, tuple[tuple[str, str], ...]]:
    """What autocast needs of a policy, in types that Dynamo compares by value."""
    return policy.param, policy.compute, policy.output, tuple((rule.pattern, rule.op_class) for rule in policy.rules)


@cache
def _region_of(param: str, compute: str, output: str, rules: tuple[Rule, ...]) -> regions.Region | None:
    """What operations have to know of a policy with these formats and rules, with all that it needs registered."""
    dtype = DTYPES[compute]
    if dtype not in SIXTEEN_BIT:
        return None
    defaults = default_rules(param, compute, output)
    region = regions.Region(dtype, tuple(rule for rule in rules if rule not in defaults))
    weights.watch_optimizers()
    if region.rules:
        positions.watch_modules()
    for device_type in DEVICE_TYPES:
        overrides.prepare(region, device_type)
        weights.watch(device_type)
    return region


def _check(compute: str) -> None:
    if compute.startswith("float8"):
        raise UnsupportedError(
            "torch.autocast has no 8-bit formats",
            where="autocast(policy)",
            found=compute,
            allowed="float16, bfloat16, float32",
            fix="choose one of those",
        )
    if compute == "tensorfloat32" and torch.get_float32_matmul_precision() == "highest":
        warn_once(
            "PyTorch sets TensorFloat-32 for the whole process, so autocast leaves it off. "
            'Call torch.set_float32_matmul_precision("high") to turn it on.'
        )


compiled_by(torch.compiler.is_compiling, autocast)
