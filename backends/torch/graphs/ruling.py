"""A policy while graphs are decided by it: the classes of operations, and what of a constant its format cannot hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polyamp.backends.torch.dtypes import DTYPES
from polyamp.backends.torch.graphs.values import Known, is_floating, known_value, magnitude
from polyamp.flow import Value, constant
from polyamp.policy import Policy
from polyamp.rules import Decision, Rule, decide, unused


class Rules:
    """A policy with what was found out under it; shared by all graphs of one program.

    Attributes:
        low: the dtype of the compute format.
        lowered: whether any operation ran in it.
        seen: pairs of operation and path that rules were asked about.
        refused: what a rule asked for and does not run, with the rule.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.low = DTYPES[policy.compute]
        self.lowered = False
        self.seen: dict[tuple[str, str], Decision] = {}
        self.refused: dict[str, str] = {}

    @property
    def unused(self) -> list[Rule]:
        """The policy's own rules that matched nothing so far."""
        return unused(self.policy.own_rules, self.seen)

    def decide(self, operation: str, path: str) -> Decision:
        """The class of an operation at a path."""
        key = (operation, path)
        if key not in self.seen:
            self.seen[key] = decide(self.policy.rules, *key)
        return self.seen[key]

    def constant(self, values: Iterable[Any]) -> Value:
        """What is known of constants: numbers and tensors of float32."""
        return constant([magnitude(value) for value in values], self.policy.compute)


def constant_of(node: Any, fake: Any, held: Tensor, rules: Rules) -> Known:
    """What is known of a tensor of the program's own, such as a buffer."""
    value = rules.constant([held]) if held.dtype == torch.float32 else known_value(fake)
    return Known(node, fake, fake, value, is_constant=is_floating(held))
