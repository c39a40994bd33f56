"""The decisions of one policy about one graph. The rewriters of all frameworks share this code.

A graph has thousands of operations, but few different ones. A `Decider` decides each different operation once and
stores the decision. At the end, it can report the rules that matched nothing, whether any operation was lowered, and
the rules that no kernel can follow.

>>> from polyamp.policies import policy
>>> decider = Decider(policy("mixed_float16", rules={"softmax": "lower", "head/*": "full"}))
>>> softmax = decider.decide("softmax", "model/tail")
>>> softmax
Decision(op_class='lower', reason="rule 'softmax'")
>>> decider.flow("softmax", softmax, [Value("strong", "exp")]).format
'float16'
>>> decider.unused
[Rule(pattern='head/*', op_class='full')]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from polyamp.flow import Flow, Value, constant, flow
from polyamp.policies import Policy
from polyamp.rules import Decision, Rule, decide, unused


class Decider:
    """A policy, and its decisions about one graph and the functions that the graph calls."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.compute = policy.compute
        self.decisions: dict[tuple[str, str], Decision] = {}
        self.lowered = False
        self.not_lowered: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._flows: dict[Any, Flow] = {}
        self._constants: dict[tuple[float, ...], Value] = {}

    def decide(self, operation: str, path: str = "") -> Decision:
        """Return the class of an operation at a path. A policy without rules does not look at the path."""
        key = (operation, path if self.policy.rules else "")
        if key not in self.decisions:
            self.decisions[key] = decide(self.policy.rules, *key)
        return self.decisions[key]

    def flow(self, operation: str, decision: Decision, inputs: Sequence[Value], *, gradient: bool = False) -> Flow:
        """Apply `polyamp.flow.flow` in the policy's compute format."""
        key = (operation, decision, tuple(inputs), gradient)
        if key not in self._flows:
            self._flows[key] = flow(operation, decision, key[2], self.compute, gradient=gradient)
        return self._flows[key]

    def constant(self, *magnitudes: float) -> Value:
        """Return the facts about a constant in the policy's compute format; see `polyamp.flow.constant`."""
        if magnitudes not in self._constants:
            self._constants[magnitudes] = constant(magnitudes, self.compute)
        return self._constants[magnitudes]

    def refuse(self, missing: str, decision: Decision) -> None:
        """Record that no kernel can follow a decision. A decision that did not come from a rule is not recorded."""
        if decision.is_by_rule:
            self.refused[missing] = decision.reason

    @property
    def unused(self) -> list[Rule]:
        """The policy's own rules that have matched nothing so far."""
        return unused_in([self])

    def sibling(self) -> Decider:
        """Return a decider for the same policy that shares the stored answers but keeps a separate record."""
        # Use it for a function that is decided once and called from several graphs. Each graph then adds the function's
        # record to its own record with `take_over`.
        other = Decider(self.policy)
        other._flows, other._constants = self._flows, self._constants
        return other

    def take_over(self, other: Decider) -> None:
        """Add the record of another decider. A reason that both have keeps the place in this one."""
        self.decisions.update(other.decisions)
        self.lowered = self.lowered or other.lowered
        self.not_lowered = other.not_lowered | self.not_lowered
        self.refused.update(other.refused)


def unused_in(parts: Sequence[Decider]) -> list[Rule]:
    """Return the policy's own rules that matched nothing in any part of a program."""
    return unused(parts[0].policy.own_rules, _asked(parts))


def _asked(parts: Iterable[Decider]) -> dict[tuple[str, str], Decision]:
    return {key: decision for part in parts for key, decision in part.decisions.items()}
