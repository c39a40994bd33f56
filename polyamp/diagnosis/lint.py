"""Warnings before training: `lint` asks an adapter for facts, and `polyamp.diagnosis.lint_checks` judges them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from polyamp.diagnosis.facts import ClassLoss, Facts, Product, UserCast
from polyamp.diagnosis.lint_checks import CHECKS, Severity
from polyamp.diagnosis.verbs import sixteen_bit
from polyamp.dispatch import FACTS, offering
from polyamp.layout import plural
from polyamp.policies import Policy
from polyamp.validation import check_count

__all__ = ["ClassLoss", "Facts", "Finding", "Product", "Report", "UserCast", "judge", "lint"]


class Finding(NamedTuple):
    """One finding of `lint`.

    Attributes:
        code: the check that found it; a key of `polyamp.diagnosis.lint_checks.CHECKS`.
        severity: "error", training will fail or stall; "warning", it may; "note", it could be faster or clearer.
        what: what was found.
        where: scope, parameter or device; empty if it is about the step as a whole.
        fix: what to do.
    """

    code: str
    severity: Severity
    what: str
    where: str
    fix: str


@dataclass(frozen=True)
class Report:
    """The findings of `lint`, the worst first. It is iterable, true if there are any, and prints as text.

    >>> print(Report("torch", "mixed_float16", ()))
    torch, mixed_float16: nothing found

    Attributes:
        framework: the adapter's name.
        policy: the policy's text.
        findings: errors, then warnings, then notes.
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
        """Return the report as JSON values."""
        return {
            "framework": self.framework,
            "policy": self.policy,
            "findings": [finding._asdict() for finding in self.findings],
        }

    def __str__(self) -> str:
        counts = ((len(self._of(severity)), severity) for severity in _SEVERITIES)
        found = ", ".join(plural(count, name) for count, name in counts if count)
        heading = f"{self.framework}, {self.policy}: {found or 'nothing found'}"
        return f"{heading}\n\n{self.table()}" if self.findings else heading

    def rows(self) -> list[tuple[str, ...]]:
        """Return the findings as a table, the heading first; empty if there are none."""
        fields = ("severity", "code", "what", "where", "fix")
        each = [tuple(str(getattr(finding, name)) for name in fields) for finding in self]
        return [("severity", "code", "what", "where", "to do"), *each] if each else []

    def table(self) -> str:
        """Return the findings as text, one paragraph each, since they are long."""
        return "\n\n".join(map(_paragraph, self))


_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


def _paragraph(finding: Finding) -> str:
    parts = (("where:", finding.where), ("to do:", finding.fix))
    lines = [f"{finding.severity}: {finding.what} [{finding.code}]"]
    return "\n".join([*lines, *(f"  {label:<7}{text}" for label, text in parts if text)])


def lint(
    target: Any,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    optimizer: Any = None,
    backend: str | None = None,
    rows: int | None = None,
    accumulate: int = 1,
    **kwargs: Any,
) -> Report:
    """Report what will go wrong in training under a policy, as far as can be known without running a step.

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
        rows: number of rows (tokens, examples) that the loss is divided by; None takes it from the target's own losses.
        accumulate: number of calls, over all devices, that make one step, if the loss is divided by that number too.
        **kwargs: the target's keyword arguments.

    Raises:
        InvalidTypeError: no adapter knows the target or its arguments; ``rows`` or ``accumulate`` is not an integer.
        InvalidValueError: ``rows`` or ``accumulate`` is less than 1.
        UnsupportedError: the framework's adapter cannot report facts.
    """
    factor = check_count("accumulate", accumulate, where="lint(accumulate=)")
    denominator = None if rows is None else check_count("rows", rows, where="lint(rows=)")
    adapter = offering(FACTS, backend, (target, args, kwargs, optimizer), where="lint(target, *args)")
    facts = FACTS.of(adapter)(target, args, kwargs, sixteen_bit(policy), optimizer)
    if policy is None:  # the optimizer may have been wrapped for a policy that lint was not told
        facts = replace(facts, disagreement=None)
    losses = (loss._replace(rows=factor * (denominator or loss.rows)) for loss in facts.losses)
    return judge(replace(facts, losses=tuple(losses)))


def judge(facts: Facts) -> Report:
    """Apply every check to the facts about a step."""
    findings = (Finding(code, check.severity, *fault) for code, check in CHECKS.items() for fault in check.find(facts))
    return Report(facts.framework, str(facts.policy), tuple(findings))
