"""The decisions that one policy makes in one graph, remembered: shared by the rewriters of all frameworks.

A graph has thousands of operations and few different ones. A `Decider` answers each question once and remembers the
answer. What it was asked is also what can be reported at the end: the rules that matched nothing, whether anything was
lowered, and what a rule wanted but no kernel does.

>>> from polyamp.policy import policy
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
from polyamp.policy import Policy
from polyamp.rules import Decision, Rule, decide, unused


class Decider:
    """A policy, with all that it decided in one graph and in the functions that the graph calls.

    Attributes:
        policy: the policy.
        compute: its compute format.
        decisions: the class of each operation that was asked about, by operation and path.
        lowered: whether any operation runs in the compute format. The adapter sets it.
        not_lowered: why operations that the table lowers run in float32: each reason, with the first place.
        refused: what a rule wanted and no kernel does, with the rule.
    """

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
        """Return what is known of a constant in the policy's compute format; see `polyamp.values.constant`.

        >>> from polyamp.policy import policy
        >>> Decider(policy("mixed_float16")).constant(2.0, 3e38).unfit
        'constant 3e+38 is beyond float16'
        """
        if magnitudes not in self._constants:
            self._constants[magnitudes] = constant(magnitudes, self.compute)
        return self._constants[magnitudes]

    def refuse(self, missing: str, decision: Decision) -> None:
        """Record that no kernel does what a decision asks for. Only a rule's decision is recorded."""
        if decision.is_by_rule:
            self.refused[missing] = decision.reason

    @property
    def unused(self) -> list[Rule]:
        """The policy's own rules that have matched nothing so far."""
        return unused_in([self])

    def sibling(self) -> Decider:
        """Return a decider for the same policy that shares this one's memory but keeps its own record.

        It is for a function that is decided once and called from several graphs: each of them takes the record over.
        """
        other = Decider(self.policy)
        other._flows, other._constants = self._flows, self._constants
        return other

    def take_over(self, other: Decider) -> None:
        """Add what another decider recorded. Reasons that are known here already keep their place.

        >>> from polyamp.policy import policy
        >>> graph = Decider(policy("mixed_float16", rules={"exp": "lower"}))
        >>> function = graph.sibling()
        >>> _ = function.decide("exp")
        >>> graph.take_over(function)
        >>> graph.unused
        []
        """
        self.decisions.update(other.decisions)
        self.lowered = self.lowered or other.lowered
        self.not_lowered = other.not_lowered | self.not_lowered
        self.refused.update(other.refused)


def unused_in(parts: Sequence[Decider]) -> list[Rule]:
    """Return the policy's own rules that matched nothing in any part of a program.

    Args:
        parts: one decider for each part; all have the same policy.
    """
    return unused(parts[0].policy.own_rules, _asked(parts))


def _asked(parts: Iterable[Decider]) -> dict[tuple[str, str], Decision]:
    return {key: decision for part in parts for key, decision in part.decisions.items()}
