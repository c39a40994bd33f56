"""The checks of `polyamp.lint`: one small function each, applied to the facts an adapter collected, with its source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from polyamp.devices import FAST_SINCE
from polyamp.diagnosis.facts import Facts
from polyamp.flow import AS_WRITTEN
from polyamp.formats import format_of
from polyamp.layout import plural
from polyamp.operations import OPERATIONS
from polyamp.plan import PlannedOperation

Severity = Literal["error", "warning", "note"]

ALIGNMENT = 8
"""Elements that the dimensions of 16-bit products should be a multiple of.

Source: NVIDIA, Deep Learning Performance: Matrix Multiplication.
"""

STUCK_MASS = 0.3
"""The total probability on wrong classes that must not be stuck; see `stuck_mass`."""


class Fault(NamedTuple):
    """One fault that a check found; see `Finding`."""

    what: str
    where: str
    fix: str


class Check(NamedTuple):
    """One check: a pure function of facts, and the severity of its findings."""

    severity: Severity  # the severity of all its findings; see `Finding`
    title: str  # the fault that the check looks for
    source: str  # a reference that explains why the fault is wrong
    find: Callable[[Facts], Iterable[Fault]]  # returns its findings


def stuck_mass(classes: int, rows: int, scale: float = 1.0) -> float:
    """Return the probability that a softmax cannot remove from wrong classes, in float16 at a static loss scale."""
    # The gradient of a cross-entropy with respect to a wrong class's logit is that class's probability p, divided by
    # the number of rows over which the loss is averaged. Times the scale, it reaches the layers below in float16, where
    # values below half of the smallest subnormal, 2**-25, round to zero. So a probability under ``rows * 2**-25 /
    # scale`` is never reduced further, and each of the classes may keep that much. If the sum comes near 1, the model
    # cannot even learn how frequent the classes are.
    return classes * rows * 2.0**-25 / scale


def _not_wrapped(facts: Facts) -> Iterator[Fault]:
    if facts.optimizer == "plain" and _needs_scaling(facts) and not facts.layer_policies:
        yield Fault(
            "the optimizer is not wrapped: in float16, gradients below 2^-25 become zero, and nothing skips a step "
            "that overflowed",
            "",
            "polyamp.wrap_optimizer(optimizer, policy), and scale the loss with it",
        )


def _wrapped_twice(facts: Facts) -> Iterator[Fault]:
    if facts.optimizer == "wrapped twice":
        yield Fault(
            "two loss scalings around one optimizer: gradients are divided twice",
            "",
            "wrap the plain optimizer, once; leave the framework's own loss scaling out",
        )


def _policies_disagree(facts: Facts) -> Iterator[Fault]:
    if facts.disagreement is not None:
        yield Fault(facts.disagreement.what, "", facts.disagreement.fix)


def _unscaled_loss(facts: Facts) -> Iterator[Fault]:
    if facts.unscaled:
        yield Fault(
            "the loss of this step is not scaled, and the optimizer divides its gradients by the loss scale: updates "
            "are too small by that factor",
            _places(facts.unscaled),
            "scale the loss: opt.backward(loss), polyamp.value_and_grad or polyamp.scale_loss before the gradients",
        )


def _clipped_scaled(facts: Facts) -> Iterator[Fault]:
    if facts.clipped:
        yield Fault(
            "gradients are clipped while they are scaled: the limit does not include the loss scale",
            _places(facts.clipped),
            "leave the clipping out, and give polyamp.wrap_optimizer(..., max_grad_norm=); or clip unscaled gradients",
        )


def _layers_unscaled(facts: Facts) -> Iterator[Fault]:
    if facts.layer_policies and facts.optimizer == "plain":
        layers = [name for name, _ in facts.layer_policies]
        names = ", ".join(dict.fromkeys(policy for _, policy in facts.layer_policies))
        yield Fault(
            f"{plural(len(layers), 'layer')} with the policy {names}, and no loss scaling: compile() adds it only "
            "if the model's own policy is mixed_float16",
            _places(layers),
            "model.compile(optimizer=polyamp.wrap_optimizer(optimizer, policy), ...)",
        )


def _no_masters(facts: Facts) -> Iterator[Fault]:
    if facts.low_parameters and not facts.has_masters:
        known = "the optimizer keeps no float32 copies" if facts.optimizer else "no optimizer that keeps float32 copies"
        yield Fault(
            f"{plural(len(facts.low_parameters), 'parameter')} in 16 bits, and {known}: an update smaller than about "
            "1/2048 of a float16 weight (1/256 in bfloat16) is lost",
            _places(facts.low_parameters),
            "leave parameters in float32, or give lint the optimizer that polyamp.wrap_optimizer made, which keeps "
            "float32 masters",
        )


def _foreign_casts(facts: Facts) -> Iterator[Fault]:
    for native, target, where in _casts(facts, foreign=True):
        yield Fault(
            f"{native} to {target}, but the policy computes in {facts.policy.compute}",
            where,
            "remove the cast and let the policy decide, or name one 16-bit format in both",
        )


def _manual_casts(facts: Facts) -> Iterator[Fault]:
    for native, target, where in _casts(facts, foreign=False):
        yield Fault(
            f"{native} to {target} by hand: it stays whatever policy is chosen",
            where,
            "remove it if the policy does the same; else write it as a rule of the policy",
        )


def _narrow_operations(facts: Facts) -> Iterator[Fault]:
    narrow = [op for op in _planned(facts) if _is_full(op.name) and _is_low(op.format)]
    for reason in dict.fromkeys(op.reason for op in narrow):
        ops = [op for op in narrow if op.reason == reason]
        names = list(dict.fromkeys(op.name for op in ops))
        rules = ", ".join(f'"{name}": "full"' for name in names)
        yield Fault(
            f"in {ops[0].format} by {reason}, although the table keeps it in float32: {', '.join(names)}",
            _places(op.where for op in ops),
            f"remove that rule, or put rules={{{rules}}} before it",
        )


def _unaligned(facts: Facts) -> Iterator[Fault]:
    places: dict[tuple[str, str, str], list[str]] = {}
    for product in facts.products:
        odd = {key: size for key, size in product.sizes.items() if size > ALIGNMENT and size % ALIGNMENT}
        if odd and _is_low(product.format):
            sizes = ", ".join(f"{key} = {size}" for key, size in odd.items())
            padded = ", ".join(f"{size} -> {-(-size // ALIGNMENT) * ALIGNMENT}" for size in dict.fromkeys(odd.values()))
            places.setdefault((f"{product.name} in {product.format}", sizes, padded), []).append(product.where)
    for (name, sizes, padded), where in places.items():
        yield Fault(
            f"{name} with {sizes}: Tensor Cores are fastest where 16-bit sizes are multiples of {ALIGNMENT}",
            _places(where),
            f"pad {padded}",
        )


def _no_tensor_cores(facts: Facts) -> Iterator[Fault]:
    if _is_low(facts.policy.compute):
        yield from _older(
            facts, FAST_SINCE["float16"], "no Tensor Cores", "train in float32 there: 16 bits save only memory"
        )


def _no_bfloat16(facts: Facts) -> Iterator[Fault]:
    if facts.policy.compute == "bfloat16":
        yield from _older(
            facts, FAST_SINCE["bfloat16"], "no bfloat16 Tensor Cores", 'use polyamp.policy("mixed_float16") there'
        )


def _stuck_losses(facts: Facts) -> Iterator[Fault]:
    scale = _starting_scale(facts)
    for loss in facts.losses if facts.policy.compute == "float16" else ():
        mass = stuck_mass(loss.classes, loss.rows, scale)
        if mass > STUCK_MASS:
            needed = math.ceil(math.log2(mass * scale / STUCK_MASS))
            yield Fault(
                f"{loss.classes} classes, averaged over {loss.rows} rows, at a loss scale of {scale:g}: gradients of "
                f"probabilities under {loss.rows * 2.0**-25 / scale:.1e} round to zero, which leaves up to "
                f"{min(mass, 1.0):.0%} of the probability on wrong classes",
                loss.where,
                f"wrap the optimizer with a dynamic loss scale, or with LossScale.fixed(2.0**{needed}) or more",
            )


def _unused_rules(facts: Facts) -> Iterator[Fault]:
    for pattern in facts.plan.unused_rules if facts.plan else ():
        yield Fault(
            f"the rule {pattern!r} matches nothing",
            "",
            "polyamp.explain lists the operations and their paths: correct the pattern, or remove it",
        )


def _lowers_nothing(facts: Facts) -> Iterator[Fault]:
    if facts.plan and _is_low(facts.policy.compute) and not any(_is_low(op.format) for op in _planned(facts)):
        yield Fault(
            f"the policy computes in {facts.policy.compute}, and no operation of this step does",
            "",
            "print polyamp.explain of the same step: it shows the reason for every operation",
        )


def _needs_scaling(facts: Facts) -> bool:
    return facts.policy.compute == "float16" and facts.policy.loss_scale.check


def _starting_scale(facts: Facts) -> float:
    """Return the scale that training starts at. PyTorch's own scaler starts at 2**16 and Keras's at 2**15."""
    if facts.optimizer == "plain":
        return 1.0
    return 2.0**15 if facts.optimizer == "native scaler" else facts.policy.loss_scale.init


def _casts(facts: Facts, *, foreign: bool) -> Iterator[tuple[str, str, str]]:
    """Merge casts with the same wording. ``foreign`` selects casts to a 16-bit format that is not the policy's."""
    places: dict[tuple[str, str], list[str]] = {}
    for cast in facts.casts:
        if (_is_low(cast.format) and cast.format != facts.policy.compute) == foreign:
            places.setdefault((cast.native, cast.format), []).append(cast.where)
    return ((native, target, _places(where)) for (native, target), where in places.items())


def _older(facts: Facts, than: tuple[int, int], lacks: str, fix: str) -> Iterator[Fault]:
    for device in facts.devices:
        capability = device.get("capability")
        if capability and _version(capability) < than:
            needs = ".".join(map(str, than))
            yield Fault(f"compute capability {capability}: {lacks}, which need {needs}", str(device["name"]), fix)


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))


def _planned(facts: Facts) -> tuple[PlannedOperation, ...]:
    return facts.plan.operations if facts.plan else ()


def _is_full(operation: str) -> bool:
    return operation in OPERATIONS and OPERATIONS[operation].op_class == "full"


def _is_low(format_name: str) -> bool:
    return format_name != AS_WRITTEN and format_of(format_name).is_low


def _places(names: Iterable[str], shown: int = 3) -> str:
    """Return the first few names, each once, and the number of the others."""
    each = list(dict.fromkeys(filter(None, names)))
    more = f" and {len(each) - shown} more" if len(each) > shown else ""
    return ", ".join(each[:shown]) + more


CHECKS: dict[str, Check] = {
    "optimizer-not-wrapped": Check(
        "error",
        "float16 with an optimizer that does not scale the loss",
        "Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2",
        _not_wrapped,
    ),
    "wrapped-twice": Check("error", "loss scaling inside loss scaling", "the definition of unscaling", _wrapped_twice),
    "unscaled-loss": Check(
        "error",
        "a step that unscales the gradients of a loss that was not scaled",
        "the definition of unscaling",
        _unscaled_loss,
    ),
    "clipped-scaled": Check(
        "error",
        "gradients clipped between the scaled loss and unscaling",
        "PyTorch, Automatic Mixed Precision examples, gradient clipping",
        _clipped_scaled,
    ),
    "layers-not-scaled": Check(
        "error",
        "Keras layers that compute in float16 by their own policy, without loss scaling",
        "Keras 3, Trainer.compile(auto_scale_loss=): it looks at the model's policy alone",
        _layers_unscaled,
    ),
    "stuck-loss": Check(
        "error", "classes whose gradients must underflow", "the limits of float16; see stuck_mass", _stuck_losses
    ),
    "no-masters": Check(
        "warning",
        "16-bit parameters without float32 copies",
        "Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1",
        _no_masters,
    ),
    "policies-disagree": Check(
        "warning", "an optimizer that was wrapped for another policy", "polyamp.agreement", _policies_disagree
    ),
    "foreign-cast": Check(
        "warning", "a cast to another 16-bit format than the policy's", "the policy itself", _foreign_casts
    ),
    "narrow-operation": Check(
        "warning", "an operation that needs float32, in 16 bits", "polyamp.operations", _narrow_operations
    ),
    "unused-rule": Check("warning", "a rule of the policy that matches nothing", "the plan", _unused_rules),
    "lowers-nothing": Check("warning", "a 16-bit policy under which nothing is 16-bit", "the plan", _lowers_nothing),
    "no-tensor-cores": Check(
        "warning",
        "a GPU below compute capability 7.0",
        "NVIDIA, CUDA C++ Programming Guide, compute capabilities",
        _no_tensor_cores,
    ),
    "no-bfloat16": Check(
        "warning",
        "bfloat16 on a GPU below compute capability 8.0",
        "NVIDIA, CUDA C++ Programming Guide, compute capabilities",
        _no_bfloat16,
    ),
    "manual-cast": Check("note", "a cast that the user's code makes", "the policy itself", _manual_casts),
    "unaligned": Check(
        "note",
        "sizes of 16-bit products at which Tensor Cores are slower",
        "NVIDIA, Train With Mixed Precision, and Matrix Multiplication Background, of the Deep Learning Performance "
        "documentation",
        _unaligned,
    ),
}
"""All checks by code: first those for errors, then for warnings, then for notes."""
