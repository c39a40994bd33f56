"""What goes wrong in training unseen: an adapter collects facts about a step, and the table `CHECKS` judges them.

The run time itself refuses or reports an optimizer that is wrapped twice or for another policy, a rule that matches
nothing, a policy under which nothing is lowered, and a device without units for a format. No check looks for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from polyamp.adapters import find_verb
from polyamp.diagnosis.probe import sixteen_bit
from polyamp.errors import check_count, refuses_unreadable
from polyamp.flow import AS_WRITTEN
from polyamp.formats import format_of
from polyamp.policies import Policy
from polyamp.report import Report, plural

Severity = Literal["error", "warning", "note"]

ALIGNMENT = 8
"""Elements that the dimensions of 16-bit products should be a multiple of.

Source: NVIDIA, Deep Learning Performance: Matrix Multiplication.
"""

STUCK_MASS = 0.3
"""The total probability on wrong classes that must not be stuck; see `stuck_mass`."""


OptimizerState = Literal["", "plain", "wrapped", "native scaler"]


class UserCast(NamedTuple):
    """A cast that the user's own code makes to or from 16 bits."""

    where: str  # module or scope path, or source line, if known
    native: str  # the cast in the framework's words: ``Tensor.half``, ``astype``, ``tf.cast``
    format: str  # the target format


class Product(NamedTuple):
    """A matrix product or a convolution."""

    where: str  # module or scope path
    name: str  # canonical operation
    format: str  # the format that the plan runs it in
    # its dimensions that should be a multiple of a Tensor Core tile: rows, columns and the contracted dimension of a
    # product; input and output channels of a convolution
    sizes: tuple[int, ...]


class ClassLoss(NamedTuple):
    """A softmax or cross-entropy over many classes."""

    where: str  # module or scope path
    classes: int  # number of classes, such as words of a vocabulary
    rows: int  # number of rows (tokens, examples) that the loss is divided by in one call


class Arithmetic(NamedTuple):
    """An addition, subtraction or product of the forward pass, from which `small_steps` finds chains."""

    name: str  # canonical operation
    inputs: Sequence[Hashable]  # names that tell the values of one program apart
    output: Hashable
    numbers: Sequence[float]  # the constants among its operands
    where: str  # scope and source line, if known


@dataclass(frozen=True)
class Facts:
    """The facts that an adapter knows about a step or model under a policy, without running it."""

    framework: str  # the adapter's name
    policy: Policy  # the policy in question
    # the kind of the optimizer: "" if none was passed, "plain", polyamp's ("wrapped"), or scaled by the framework
    # itself ("native scaler")
    optimizer: OptimizerState = ""
    low_parameters: tuple[str, ...] = ()  # names of parameters stored in 16 bits
    has_masters: bool = False  # whether the optimizer keeps float32 copies of those
    # for Keras, the layers whose own policy computes in float16, each with that policy's name
    layer_policies: tuple[tuple[str, str], ...] = ()
    casts: tuple[UserCast, ...] = ()  # the user's own casts to or from 16 bits
    products: tuple[Product, ...] = ()  # matrix products and convolutions
    losses: tuple[ClassLoss, ...] = ()  # softmaxes and cross-entropies, with their numbers of classes and rows
    unscaled: tuple[str, ...] = ()  # places of updates that unscale the gradients of a loss that was never scaled
    clipped: tuple[str, ...] = ()  # places where gradients are clipped while they are scaled
    divided: tuple[str, ...] = ()  # places where gradients are unscaled by hand before an update that unscales them
    mixed: tuple[str, ...] = ()  # places of updates that divide by another loss scale than that of the gradients
    # places of long chains of ``y = y + 0.005 * f(y)``, where the flow rule, which finds them, does not decide
    small_steps: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()  # names of float32 parameters that the compute format cannot hold, where no pass knows


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
        return {
            "framework": self.framework,
            "policy": self.policy,
            "findings": [finding._asdict() for finding in self.findings],
        }

    def heading(self) -> str:
        """Return how many findings there are of each severity."""
        kinds = (("error", self.errors), ("warning", self.warnings), ("note", self.notes))
        found = ", ".join(plural(len(each), name) for name, each in kinds if each)
        return f"{self.framework}, {self.policy}: {found or 'nothing found'}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the findings as a table; empty if there are none."""
        each = [(one.severity, one.code, one.what, one.where, one.fix) for one in self]
        return [("severity", "code", "what", "where", "to do"), *each] if each else []

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
    """Report what will go wrong in training under a policy and cannot be seen while it runs. Runs no step.

    >>> import torch
    >>> model = torch.nn.Linear(16, 16)
    >>> report = lint(model, torch.ones(8, 16), policy="mixed_float16", optimizer=torch.optim.SGD(model.parameters()))
    >>> [finding.code for finding in report.errors]
    ['optimizer-not-wrapped']

    Args:
        target: a step, a loss function or a model, as for `polyamp.probe`.
        *args: its arguments; without them, checks that need a traced step are left out.
        policy: a policy or its name; None is the current policy if that computes in 16 bits, else mixed_float16.
        optimizer: the optimizer that the step is trained with, wrapped or not.
        backend: the framework's name, if neither the target nor the arguments show it.
        rows: number of rows (tokens, examples) that one step's loss is divided by, over all calls and devices; None
            takes it from the target's own losses.
        **kwargs: the target's keyword arguments.

    Raises:
        InvalidTypeError: no adapter knows the target or its arguments; ``rows`` is not an integer.
        InvalidValueError: ``rows`` is less than 1.
        UnsupportedError: the framework's adapter cannot report facts.
    """
    denominator = None if rows is None else check_count("rows", rows, where="lint(rows=)")
    chosen = sixteen_bit(policy)
    found = find_verb("facts", backend, (target, args, kwargs, optimizer), where="lint(target, *args)")
    facts: Facts = found(target, args, kwargs, chosen, optimizer)
    losses = (loss._replace(rows=denominator or loss.rows) for loss in facts.losses)
    return judge(replace(facts, losses=tuple(losses)))


Fault = tuple[Iterable[str], Mapping[str, Any]]
"""The places of one thing that a check found, and the values for the texts of the check."""


class Check(NamedTuple):
    """One check: what it looks for, and the texts of a finding, with fields for `str.format`."""

    severity: Severity
    find: Callable[[Facts], Iterable[Fault]]
    what: str
    fix: str


def judge(facts: Facts) -> Findings:
    """Apply every check to the facts about a step."""
    found = (
        Finding(code, check.severity, check.what.format(**values), _first_few(places), check.fix.format(**values))
        for code, check in CHECKS.items()
        for places, values in check.find(facts)
    )
    return Findings(facts.framework, str(facts.policy), tuple(found))


def small_steps(operations: Iterable[Arithmetic]) -> Iterator[str]:
    """Yield the places where many small multiples have been added to one value, as an integrator's steps are."""
    small: set[Hashable] = set()
    steps: dict[Hashable, int] = {}
    for one in operations:
        if one.name == "mul" and any(abs(number) <= 2.0**-5 for number in one.numbers):
            small.add(one.output)
        elif one.name in ("add", "sub") and not small.isdisjoint(one.inputs):
            steps[one.output] = 1 + max(steps.get(value, 0) for value in one.inputs)
            if steps[one.output] == _MANY:
                yield one.where


_MANY = 8  # steps in a chain


def _at(places: Iterable[str], **values: Any) -> Fault:
    return places, values


def _listed(fact: str) -> Callable[[Facts], Iterable[Fault]]:
    """Return a search that finds the places in a field of `Facts`, if there are any."""

    def find(facts: Facts) -> Iterator[Fault]:
        if places := getattr(facts, fact):
            yield _at(places, compute=facts.policy.compute)

    return find


def _not_wrapped(facts: Facts) -> Iterator[Fault]:
    needs = facts.policy.compute == "float16" and facts.policy.loss_scale.scales
    if facts.optimizer == "plain" and needs and not facts.layer_policies:
        yield _at([])


def _layers_unscaled(facts: Facts) -> Iterator[Fault]:
    if facts.layer_policies and facts.optimizer == "plain":
        layers, policies = zip(*facts.layer_policies, strict=True)
        yield _at(layers, layers=plural(len(layers), "layer"), policies=", ".join(dict.fromkeys(policies)))


def stuck_mass(classes: int, rows: int, scale: float = 1.0) -> float:
    """Return the probability that a softmax cannot remove from wrong classes, in float16 at a static loss scale."""
    # The gradient of a cross-entropy with respect to a wrong class's logit is that class's probability p, divided by
    # the number of rows over which the loss is averaged. Times the scale, it reaches the layers below in float16, where
    # values below half of the smallest subnormal, 2**-25, round to zero. So a probability under ``rows * 2**-25 /
    # scale`` is never reduced further, and each of the classes may keep that much. If the sum comes near 1, the model
    # cannot even learn how frequent the classes are.
    return classes * rows * 2.0**-25 / scale


def _stuck_losses(facts: Facts) -> Iterator[Fault]:
    # The scale that training starts at. PyTorch's own scaler starts at 2**16, and Keras' at 2**15.
    scale = {"plain": 1.0, "native scaler": 2.0**15}.get(facts.optimizer, facts.policy.loss_scale.init)
    for loss in facts.losses if facts.policy.compute == "float16" else ():
        mass = stuck_mass(loss.classes, loss.rows, scale)
        if mass > STUCK_MASS:
            needed = math.ceil(math.log2(mass * scale / STUCK_MASS))
            least = stuck_mass(1, loss.rows, scale)
            yield _at([loss.where], loss=loss, scale=scale, least=least, mass=min(mass, 1.0), needed=needed)


def _no_masters(facts: Facts) -> Iterator[Fault]:
    if facts.low_parameters and not facts.has_masters:
        known = "the optimizer keeps no float32 copies" if facts.optimizer else "no optimizer that keeps float32 copies"
        yield _at(facts.low_parameters, parameters=plural(len(facts.low_parameters), "parameter"), known=known)


def _casts(facts: Facts, *, is_foreign: bool) -> Iterator[Fault]:
    """Group equal casts. A foreign one is to a 16-bit format that is not the policy's."""
    places: dict[tuple[str, str], list[str]] = {}
    for cast in facts.casts:
        if (_is_low(cast.format) and cast.format != facts.policy.compute) == is_foreign:
            places.setdefault((cast.native, cast.format), []).append(cast.where)
    for (native, target), where in places.items():
        yield _at(where, native=native, target=target, compute=facts.policy.compute)


def odd_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of a product that should be a multiple of `ALIGNMENT` and are not."""
    return tuple(dict.fromkeys(size for size in sizes if size > ALIGNMENT and size % ALIGNMENT))


def _unaligned(facts: Facts) -> Iterator[Fault]:
    places: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for product in facts.products:
        odd = odd_sizes(product.sizes)
        if odd and _is_low(product.format):
            places.setdefault((product.name, product.format, odd), []).append(product.where)
    for (name, format_name, odd), where in places.items():
        padded = ", ".join(f"{size} -> {-(-size // ALIGNMENT) * ALIGNMENT}" for size in odd)
        yield _at(where, name=name, format=format_name, sizes=", ".join(map(str, odd)), padded=padded)


def _is_low(format_name: str) -> bool:
    return format_name != AS_WRITTEN and format_of(format_name).is_low


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
        _listed("unscaled"),
        "the loss of this step is not scaled, and the optimizer divides its gradients by the loss scale: updates are "
        "too small by that factor",
        "scale the loss: opt.backward(loss), polyamp.value_and_grad or polyamp.scale_loss before the gradients",
    ),
    "clipped-scaled": Check(
        "error",
        _listed("clipped"),
        "gradients are clipped while they are scaled: the limit does not include the loss scale",
        "leave the clipping out, and give polyamp.wrap_optimizer(..., max_grad_norm=); or clip unscaled gradients",
    ),
    "unscaled-twice": Check(
        "error",
        _listed("divided"),
        "gradients are divided by the loss scale, and the wrapped optimizer divides them again: updates are too small "
        "by that factor",
        "leave the division out: the wrapped optimizer unscales",
    ),
    "other-scale": Check(
        "error",
        _listed("mixed"),
        "gradients are divided by another loss scale than the one that they were made at: the scale can change in "
        "every update, and each optimizer has its own",
        "update before the next gradients are made; differentiate each loss with the state of the optimizer that "
        "steps; multiply gradients that are kept by the new scale over their own",
    ),
    "layers-not-scaled": Check(  # source: Keras 3, Trainer.compile(auto_scale_loss=), looks at the model's policy alone
        "error",
        _layers_unscaled,
        "{layers} with the policy {policies}, and no loss scaling: compile() adds it only if the model's own policy is "
        "mixed_float16",
        "model.compile(optimizer=polyamp.wrap_optimizer(optimizer, policy), ...)",
    ),
    "stuck-loss": Check(
        "error",
        _stuck_losses,
        "{loss.classes} classes, averaged over {loss.rows} rows, at a loss scale of {scale:g}: gradients of "
        "probabilities under {least:.1e} round to zero, which leaves up to {mass:.0%} of the probability on wrong "
        "classes",
        "wrap the optimizer with a dynamic loss scale, or with LossScale.fixed(2.0**{needed}) or more",
    ),
    "beyond-format": Check(
        "error",
        _listed("beyond"),
        "parameters have numbers beyond {compute}, in which they become inf unless they only scale values",
        "store them in other units, or give what reads them a rule of class full",
    ),
    "no-masters": Check(  # source: Micikevicius et al., section 3.1
        "warning",
        _no_masters,
        "{parameters} in 16 bits, and {known}: an update smaller than about 1/2048 of a float16 weight (1/256 in "
        "bfloat16) is lost",
        "leave parameters in float32, or give lint the optimizer that polyamp.wrap_optimizer made, which keeps float32 "
        "masters",
    ),
    "small-steps": Check(
        "warning",
        _listed("small_steps"),
        "many small steps are added to one value; in {compute} each is lost beside it",
        "rewrite the model, which adds them up in float32, or add to a float32 value",
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
