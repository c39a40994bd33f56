"""Facts about a training step before it runs: collected by an adapter, judged by `polyamp.diagnosis.lint`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from polyamp.plan import Plan
from polyamp.policies import Policy

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


@dataclass(frozen=True)
class Facts:
    """The facts that an adapter knows about a step or model under a policy, without running it."""

    framework: str  # the adapter's name
    policy: Policy  # the policy in question
    plan: Plan | None = None  # the plan of the step under the policy; None if it cannot be traced
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
