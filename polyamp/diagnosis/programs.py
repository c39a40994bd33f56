"""A program that runs under a policy, the same in every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from polyamp.dispatch import EXPLAIN, offering
from polyamp.errors import UnsupportedError
from polyamp.plan import Plan
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.verbs import autocast, explain, rewrite


class Program(NamedTuple):
    """A function with its arguments and its policy."""

    name: str  # for messages
    fn: Callable[..., Any]  # the function
    args: tuple[Any, ...]  # its arguments
    policy: Policy | None  # its policy; None runs it as it is
    backend: str | None = None  # the framework's name, if neither the function nor the arguments show it

    def run(self) -> Any:
        """Run the program and return its result."""
        # TensorFlow's programs are rewritten, since its autocast leaves everything but products in float32.
        if self.policy is None:
            return self.fn(*self.args)
        adapter = offering(EXPLAIN, self.backend, (self.fn, self.args), where=f"{self.name} and its arguments")
        if getattr(adapter, "rewrites_unseen", False):
            return rewrite(self.fn, *self.args, policy=self.policy, backend=adapter.name)(*self.args)
        return autocast(self.fn, self.policy, backend=adapter.name)(*self.args)

    def plan(self) -> Plan:
        """Return the plan of that run."""
        try:
            return explain(self.fn, *self.args, policy=self.policy, backend=self.backend, engine="autocast")
        except UnsupportedError:  # only PyTorch has several engines
            return explain(self.fn, *self.args, policy=self.policy, backend=self.backend)

    def in_float32(self, rule: str) -> Program:
        """Return the same program with the operations that match a pattern in float32."""
        return self._replace(policy=make_policy(self.policy, rules={rule: "full"}))
