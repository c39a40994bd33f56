"""Facts about a training step before it runs: collected by an adapter, judged by `polyamp.diagnosis.lint`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from polyamp.agreement import Disagreement
from polyamp.plan import Plan
from polyamp.policy import Policy

OptimizerState = Literal["", "plain", "wrapped", "wrapped twice", "native scaler"]


class UserCast(NamedTuple):
    """A cast that the user's own code makes to or from 16 bits.

    Attributes:
        where: module or scope path, or source line, if known.
        native: the cast in the framework's words: ``Tensor.half``, ``astype``, ``tf.cast``.
        format: the target format.
    """

    where: str
    native: str
    format: str


class Product(NamedTuple):
    """A matrix product or a convolution.

    Attributes:
        where: module or scope path.
        name: canonical operation.
        format: the format that the plan runs it in.
        sizes: elements of each dimension that should be a multiple of a Tensor Core tile: ``m``, ``n`` and ``k`` of a
            product, ``in_channels`` and ``out_channels`` of a convolution.
    """

    where: str
    name: str
    format: str
    sizes: Mapping[str, int]


class ClassLoss(NamedTuple):
    """A softmax or cross-entropy over many classes.

    Attributes:
        where: module or scope path.
        classes: number of classes, such as words of a vocabulary.
        rows: number of rows (tokens, examples) that the loss is divided by in one call.
    """

    where: str
    classes: int
    rows: int


@dataclass(frozen=True)
class Facts:
    """The facts that an adapter knows about a step or model under a policy, without running it.

    >>> from polyamp import policy
    >>> Facts("torch", policy("mixed_float16"), optimizer="plain").low_parameters
    ()

    Attributes:
        framework: the adapter's name.
        policy: the policy in question.
        plan: the plan of the step under the policy; None if it cannot be traced.
        optimizer: the kind of the optimizer: "" if none was passed, "plain", polyamp's ("wrapped"), polyamp's around
            polyamp's or around the framework's own loss scaling ("wrapped twice"), or scaled by the framework itself
            ("native scaler").
        low_parameters: names of parameters stored in 16 bits.
        has_masters: whether the optimizer keeps float32 copies of those.
        layer_policies: for Keras, the layers whose own policy computes in float16, each with that policy's name.
        casts: the user's own casts to or from 16 bits.
        products: matrix products and convolutions.
        losses: softmaxes and cross-entropies, with their numbers of classes and rows.
        devices: as in the adapter's ``describe()["devices"]``.
        unscaled: places of updates that unscale the gradients of a loss that was never scaled.
        clipped: places where gradients are clipped while they are scaled.
        disagreement: how the optimizer, which was wrapped for another policy, disagrees with this one.
    """

    framework: str
    policy: Policy
    plan: Plan | None = None
    optimizer: OptimizerState = ""
    low_parameters: tuple[str, ...] = ()
    has_masters: bool = False
    layer_policies: tuple[tuple[str, str], ...] = ()
    casts: tuple[UserCast, ...] = ()
    products: tuple[Product, ...] = ()
    losses: tuple[ClassLoss, ...] = ()
    devices: tuple[Mapping[str, Any], ...] = ()
    unscaled: tuple[str, ...] = ()
    clipped: tuple[str, ...] = ()
    disagreement: Disagreement | None = None
