"""Finds what goes wrong unseen in training: the table `CHECKS` judges a step's plan, optimizer and parameters.

The run time itself refuses or reports an optimizer that is wrapped twice or for another policy, a loss that nobody
scaled (except in JAX), a rule that matches nothing, a policy under which nothing is lowered, and a device without units
for a format. No check looks for these.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from polyamp.adapters import find_verb
from polyamp.diagnosis.probe import sixteen_bit
from polyamp.errors import check_count, refuses_unreadable
from polyamp.flow import AS_WRITTEN
from polyamp.formats import FORMATS, format_of
from polyamp.operations import is_product
from polyamp.plan import BY_HAND, PlannedOperation
from polyamp.policies import Policy
from polyamp.report import Report, plural
from polyamp.rewriting import explain

Severity = Literal["error", "warning", "note"]

ALIGNMENT = 8
"""Elements that the dimensions of 16-bit products should be a multiple of.

Source: NVIDIA, Deep Learning Performance: Matrix Multiplication.
"""

STUCK_MASS = 0.3
"""The total probability on wrong classes that must not be stuck; see `stuck_mass`."""

Kind = Literal["", "plain", "wrapped", "native scaler"]
"""The kind of an optimizer: none was given; plain; wrapped by polyamp; or its framework scales the loss."""


class Holder(NamedTuple):
    """What an adapter knows about an optimizer and the parameters of a step."""

    framework: str  # the adapter's name
    kind: Kind = ""
    low: tuple[str, ...] = ()  # names of parameters stored in 16 bits
    has_masters: bool = False  # whether the optimizer keeps float32 copies of those
    beyond: tuple[str, ...] = ()  # names of float32 parameters that the compute format cannot hold, where no pass knows
    unscaled: tuple[str, ...] = ()  # in JAX, lines of updates that unscale the gradients of a loss that nobody scaled


class Finding(NamedTuple):
    """One finding of `lint`."""

    code: str  # the check that found it: a key of `CHECKS`
    severity: Severity  # "error", training will fail or stall; "warning", it may; "note", it could be faster or clearer
    what: str  # what was found
    where: str  # scope, parameter or device; empty if it is about the step as a whole
    fix: str  # what to do


@dataclass(frozen=True)
class Findings(Report):
    """The result of `lint`, the worst findings first. It is iterable, true if there are any, and prints as text.

    >>> print(Findings("torch", "mixed_float16", ()))
    torch, mixed_float16: nothing found
    """

    framework: str
    policy: str
    findings: tuple[Finding, ...]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Return the findings that make training fail or stall."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Return the findings that may make training fail or stall."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Return the findings that only cost speed or clarity."""
        return self._of("note")

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as JSON values."""
        return {**vars(self), "findings": [finding._asdict() for finding in self.findings]}

    def heading(self) -> str:
        """Return how many findings there are of each severity."""
        found = ", ".join(plural(count, severity) for severity, count in Counter(one.severity for one in self).items())
        return f"{self.framework}, {self.policy}: {found or 'nothing found'}"

    def table(self) -> str:
        """Return the findings as text, one paragraph each, since they are long."""
        paragraphs = []
        for one in self:
            parts = (("where:", one.where), ("to do:", one.fix))
            details = [f"  {label:<7}{text}" for label, text in parts if text]
            paragraphs.append("\n".join([f"{one.severity}: {one.what} [{one.code}]", *details]))
        return "\n\n".join(paragraphs)


@refuses_unreadable
def lint(
    target: Any,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    optimizer: Any = None,
    backend: str | None = None,
    rows: int | None = None,
    **kwargs: Any,
) -> Findings:
    """Report, from a step's plan, what will go wrong in training under a policy without being seen.

    >>> import torch
    >>> model = torch.nn.Linear(16, 16)
    >>> report = lint(model, torch.ones(8, 16), policy="mixed_float16", optimizer=torch.optim.SGD(model.parameters()))
    >>> [finding.code for finding in report.errors]
    ['optimizer-not-wrapped']

    Args:
        target: a step, a loss function or a model, as for `polyamp.explain`.
        *args: its arguments; without them, a target that takes some has no plan, and only the optimizer and the
            parameters are judged.
        policy: a policy or its name; None is the wrapped optimizer's, or else the current policy if that computes in 16
            bits, or else mixed_float16.
        optimizer: the optimizer that the step is trained with, wrapped or not.
        backend: the framework's name, if neither the target nor the arguments show it.
        rows: number of rows (tokens, examples) that one step's loss is divided by, over all calls and devices: 1 for a
            sum; None means the mean over the rows of one call.
        **kwargs: the target's keyword arguments.

    Raises:
        InvalidTypeError: no adapter knows the target or its arguments; ``rows`` is not an integer.
        InvalidValueError: ``rows`` is less than 1.
        UnsupportedError: the framework's adapter cannot judge steps.
        PolyampError: `polyamp.explain` cannot plan the target.
    """
    known = None if rows is None else check_count("rows", rows, where="lint(rows=)")
    own = getattr(optimizer, "policy", None)
    is_low = isinstance(own, Policy) and format_of(own.compute).is_low
    chosen = sixteen_bit(own if policy is None and is_low else policy)
    found = find_verb("holder", backend, (target, args, kwargs, optimizer), where="lint(target, *args)")
    holder: Holder = found(target, args, kwargs, chosen, optimizer)
    if hasattr(type(target), "plan"):  # a rewritten function
        operations = target.plan.operations
    elif takes(target, args, kwargs):
        operations = explain(target, *args, policy=chosen, backend=backend or holder.framework, **kwargs).operations
    else:
        operations = ()
    return judge(Case(chosen, holder, operations, known))


def takes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether to call a target: it got arguments, or it is a function that needs none."""
    if args or kwargs or not callable(target):
        return callable(target)
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(one.default is not one.empty for one in parameters)  # a model's call takes any arguments


class Case(NamedTuple):
    """The facts that checks judge."""

    policy: Policy
    holder: Holder
    operations: Sequence[PlannedOperation] = ()  # of the step's plan
    rows: int | None = None  # that the loss is divided by; None is those of one call


Fault = tuple[str, dict[str, Any]]
"""The place of something that a check found, empty for the whole step, and the values for the texts of the check."""


class Check(NamedTuple):
    """One check: what it looks for, and the texts of a finding, with fields for `str.format`."""

    severity: Severity
    find: Callable[[Case], Iterable[Fault]]
    what: str
    fix: str


def judge(case: Case) -> Findings:
    """Apply every check, and merge faults that differ only in their places."""
    found: list[Finding] = []
    for code, (severity, find, what, fix) in CHECKS.items():
        faults = list(find(case))
        for text, remedy in dict.fromkeys((what.format(**values), fix.format(**values)) for _, values in faults):
            places = (place for place, values in faults if what.format(**values) == text)
            found.append(Finding(code, severity, text, _first_few(places), remedy))
    return Findings(case.holder.framework, str(case.policy), tuple(found))


def _not_wrapped(case: Case) -> Iterator[Fault]:
    if case.holder.kind == "plain" and case.policy.compute == "float16" and case.policy.loss_scale.scales:
        yield "", {}


def stuck_mass(classes: int, rows: int, scale: float = 1.0) -> float:
    """Return the probability that a softmax cannot remove from wrong classes, in float16 at a static loss scale."""
    # The gradient of a cross-entropy with respect to a wrong class's logit is that class's probability p, divided by
    # the number of rows over which the loss is averaged. Times the scale, it reaches the layers below in float16, where
    # values below half of the smallest subnormal, 2**-25, round to zero. So a probability under ``rows * 2**-25 /
    # scale`` is never reduced further, and each of the classes may keep that much. If the sum comes near 1, the model
    # cannot even learn how frequent the classes are.
    return classes * rows * 2.0**-25 / scale


def _stuck_losses(case: Case) -> Iterator[Fault]:
    # The scale that training starts at. PyTorch's own scaler starts at 2**16, and Keras' at 2**15.
    scale = {"plain": 1.0, "native scaler": 2.0**15}.get(case.holder.kind, case.policy.loss_scale.init)
    losses = (one for one in case.operations if one.sizes and not is_product(one.name))
    for loss in losses if case.policy.compute == "float16" else ():
        classes, rows = loss.sizes[0], case.rows or loss.sizes[1]
        mass, least = stuck_mass(classes, rows, scale), stuck_mass(1, rows, scale)
        if mass > STUCK_MASS:
            values = {"classes": classes, "rows": rows, "scale": scale, "least": least, "mass": min(mass, 1.0)}
            yield loss.where, {**values, "needed": math.ceil(math.log2(mass * scale / STUCK_MASS))}


def _no_masters(case: Case) -> Iterator[Fault]:
    known = "the optimizer keeps no" if case.holder.kind else "no optimizer that keeps"
    for name in () if case.holder.has_masters else case.holder.low:
        yield name, {"parameters": plural(len(case.holder.low), "parameter"), "known": known}


def _casts(case: Case, *, is_foreign: bool) -> Iterator[Fault]:
    """Yield the code's own casts to the policy's format, or if ``is_foreign`` to another."""
    for op in case.operations:
        _, is_one, target = op.reason.partition(BY_HAND)
        if is_one and (target != case.policy.compute) == is_foreign:
            yield op.where, {"native": op.native, "target": target, "compute": case.policy.compute}


def odd_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of a product that should be a multiple of `ALIGNMENT` and are not."""
    return tuple(dict.fromkeys(size for size in sizes if size > ALIGNMENT and size % ALIGNMENT))


def _unaligned(case: Case) -> Iterator[Fault]:
    for op in case.operations:
        found = op.format if op.format != AS_WRITTEN else op.reason.rpartition(" ")[2]  # an input is float16
        odd = odd_sizes(op.sizes) if is_product(op.name) and found in FORMATS and FORMATS[found].is_low else ()
        if odd:
            padded = ", ".join(f"{size} -> {-(-size // ALIGNMENT) * ALIGNMENT}" for size in odd)
            yield op.where, {"name": op.name, "format": found, "sizes": ", ".join(map(str, odd)), "padded": padded}


def _first_few(names: Iterable[str], shown: int = 3) -> str:
    """Return the first few names, each once, and the number of the others."""
    each = list(dict.fromkeys(filter(None, names)))
    more = f" and {len(each) - shown} more" if len(each) > shown else ""
    return ", ".join(each[:shown]) + more


CHECKS = {
    "optimizer-not-wrapped": Check(  # source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2
        "error",
        _not_wrapped,
        "the optimizer is not wrapped: in float16, gradients below 2^-25 become zero, and nothing skips a step that "
        "overflowed",
        "polyamp.wrap_optimizer(optimizer, policy), and scale the loss with it",
    ),
    "unscaled-loss": Check(
        "error",
        lambda case: ((line, {}) for line in case.holder.unscaled),
        "the loss of this step is not scaled, and the optimizer divides its gradients by the loss scale: updates are "
        "too small by that factor",
        "scale the loss: polyamp.value_and_grad, or polyamp.scale_loss before the gradients",
    ),
    "stuck-loss": Check(
        "error",
        _stuck_losses,
        "{classes} classes, averaged over {rows} rows, at a loss scale of {scale:g}: gradients of probabilities under "
        "{least:.1e} round to zero, which leaves up to {mass:.0%} of the probability on wrong classes",
        "wrap the optimizer with a dynamic loss scale, or with LossScale.fixed(2.0**{needed}) or more",
    ),
    "beyond-format": Check(
        "error",
        lambda case: ((name, {"compute": case.policy.compute}) for name in case.holder.beyond),
        "parameters have numbers beyond {compute}, in which they become inf unless they only scale values",
        "store them in other units, or give what reads them a rule of class full",
    ),
    "no-masters": Check(  # source: Micikevicius et al., section 3.1
        "warning",
        _no_masters,
        "{parameters} in 16 bits, and {known} float32 copies: an update smaller than about 1/2048 of a float16 weight "
        "(1/256 in bfloat16) is lost",
        "leave parameters in float32, or give lint the optimizer that polyamp.wrap_optimizer made, which keeps float32 "
        "masters",
    ),
    "foreign-cast": Check(
        "warning",
        partial(_casts, is_foreign=True),
        "{native} to {target}, but the policy computes in {compute}",
        "remove the cast and let the policy decide, or name one 16-bit format in both",
    ),
    "manual-cast": Check(
        "note",
        partial(_casts, is_foreign=False),
        "{native} to {target} by hand: it stays whatever policy is chosen",
        "remove it if the policy does the same; else write it as a rule of the policy",
    ),
    "unaligned": Check(
        "note",
        _unaligned,
        "{name} in {format} with sizes of {sizes}: Tensor Cores are fastest where 16-bit sizes are multiples of "
        f"{ALIGNMENT}",
        "pad {padded}",
    ),
}
"""All checks by code: first those for errors, then for warnings, then for notes."""
