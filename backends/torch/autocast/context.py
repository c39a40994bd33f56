"""`autocast(policy)`: native autocast on every device type, with overrides for operations that the rules change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast import overrides, path_rules, regions, weights
from polyamp.backends.torch.autocast.regions import (
    ACCELERATOR,
    DEVICE_TYPES,
    HERE,
    Marks,
    Region,
    mark_of,
    with_marks,
)
from polyamp.backends.torch.devices import REPORTED, report_slow
from polyamp.backends.torch.dtypes import DTYPES, SIXTEEN_BIT
from polyamp.errors import UnsupportedError, warn_once
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.policy_words import default_rules
from polyamp.rules import Rule


@unstable.never_compiled
def autocast(policy: Policy | str) -> Entered | AbstractContextManager[None]:
    """Run operations in the formats of a policy. Native autocast's lists apply wherever no rule matches.

    A region belongs to the thread that enters it, also holds in functions that activation checkpointing runs again, and
    can be entered around and inside code under ``torch.compile(fullgraph=True)``. Enter a new one each time;
    `polyamp.autocast` returns an object that can be entered many times. In float16 on the CPU, CUDA's list applies to
    operations that the CPU's list leaves out (exponentials, sums, norms); in bfloat16, only if PyTorch would raise.
    Out-of-place operations on inputs of different formats run in float32. A torch.autocast region inside has its own
    settings; the outer region holds again after it.

    >>> from polyamp import policy
    >>> low, x = policy("mixed_bfloat16", rules={"softmax": "lower"}), torch.ones(2, 2)
    >>> with autocast(low):
    ...     print(torch.mm(x, x).dtype, torch.softmax(x, 0).dtype)
    torch.bfloat16 torch.bfloat16

    Args:
        policy: a policy or its name; its ``compute`` format and rules are used. A 32-bit format turns autocast off.

    Raises:
        UnsupportedError: the ``compute`` format has 8 bits.
        FormatError: in the region, PyTorch refused operands because of their formats.
    """
    if torch.compiler.is_compiling() and isinstance(policy, Policy):
        return _traced(policy)
    return Entered(make_policy(policy))


class Entered(ContextDecorator):
    """The context manager that `autocast` returns outside of compiled code."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entered: list[regions.Frame] = []

    def _recreate_cm(self) -> Entered:
        return Entered(self._policy)

    @unstable.never_compiled
    def __enter__(self) -> None:
        policy = self._policy
        region = _region_of(policy.param, policy.compute, policy.output, policy.rules)
        if region is None:
            _report_tensorfloat32(policy.compute)
        elif region.rules:
            path_rules.HOOKS.__enter__()
        frame = regions.enter(region, DEVICE_TYPES)
        self._entered.append(frame)
        if frame.outer is None and frame.grad:
            HERE.thread.policy = policy

    @unstable.never_compiled
    def __exit__(self, *error: Any) -> None:
        frame = self._entered.pop()
        regions.leave(frame)
        if frame.region is not None and frame.region.rules:
            path_rules.HOOKS.__exit__()
            if error[0] is None:
                path_rules.report_unused(frame.region)
        if error[1] is not None:
            from polyamp.backends.torch.autocast.format_errors import raise_explained  # no region that runs needs it

            raise_explained(error[1])


def _native(device_type: str, compute: str) -> torch.autocast:
    dtype = DTYPES[compute]
    low = dtype in SIXTEEN_BIT
    usable = dtype if low else torch.bfloat16  # a disabled region still needs a format that the device supports
    return torch.autocast(device_type, dtype=usable, enabled=low)


@contextmanager
def _traced(policy: Policy) -> Iterator[None]:
    """Enter a region in a graph that Dynamo captures, as marks in native autocast's state: a graph has no other."""
    # the fields of the policy that autocast needs, in types that Dynamo compares by value
    rules = tuple((rule.pattern, rule.op_class) for rule in policy.rules)
    marks = _traced_mark(policy.param, policy.compute, policy.output, rules)
    there = nullcontext() if ACCELERATOR is None else _native(ACCELERATOR, policy.compute)
    with _native("cpu", policy.compute), there, with_marks(marks):
        yield


@unstable.constant_when_compiled
def _traced_mark(param: str, compute: str, output: str, rules: tuple[tuple[str, str], ...]) -> Marks:
    region = _region_of(param, compute, output, tuple(Rule(*rule) for rule in rules))
    if region is None:
        _report_tensorfloat32(compute)
    elif region.rules:
        path_rules.HOOKS.stay()
    return mark_of(region, traced=True)


@cache
def _region_of(param: str, compute: str, output: str, rules: tuple[Rule, ...]) -> Region | None:
    """Return the region of a policy, with its kernels registered; None if the policy computes in 32 bits."""
    if compute.startswith("float8"):
        raise UnsupportedError(
            "torch.autocast has no 8-bit formats",
            where="autocast(policy)",
            found=compute,
            allowed="float16, bfloat16, float32",
            fix="choose one of these formats",
        )
    dtype = DTYPES[compute]
    if dtype not in SIXTEEN_BIT:
        return None
    defaults = default_rules(param, compute, output)
    region = Region(dtype, tuple(rule for rule in rules if rule not in defaults))
    regions.watch()
    for device_type in DEVICE_TYPES:
        torch.autocast(device_type, dtype)  # refuses what the device cannot do
        overrides.prepare(region, device_type)
        weights.watch(device_type)
    return region


def _report_tensorfloat32(compute: str) -> None:
    if compute == "tensorfloat32" and torch.get_float32_matmul_precision() == "highest":
        warn_once(
            "PyTorch sets TensorFloat-32 for the whole process, so autocast leaves it off. "
            'Call torch.set_float32_matmul_precision("high") to turn it on.'
        )


def autocast_context(policy: Policy) -> AbstractContextManager[None]:
    """Return a new `autocast`; warn at the first use of a format if a device here is slow in it."""
    if torch.compiler.is_compiling():
        return _traced(policy)
    if policy.compute not in REPORTED:
        report_slow(policy.compute)
    return Entered(policy)
