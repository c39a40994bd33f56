"""A policy's own rules, and how rules and the operation table decide the class of an operation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.operations import CLASSES, OPERATIONS
from polyamp.validation import did_you_mean

TABLE = "table"  # the reason if none of the policy's own rules decided
_BY_RULE = "rule "


class Rule(NamedTuple):
    """One rule of a policy: operations that match ``pattern`` get the class ``op_class``."""

    pattern: str
    op_class: str

    def matches(self, operation: str, path: str = "") -> bool:
        """Return whether this rule matches an operation, by its canonical name or by its path."""
        # A pattern of several components, joined by ``/`` or ``.``, matches consecutive components anywhere in the path
        # followed by the operation's own name. ``*`` stays within one component, as in a shell. So ``head/*`` matches
        # every operation in ``head``, at any depth.
        wanted = _components(self.pattern)
        here = [*(_components(path) if path else ()), operation]
        windows = (here[start : start + len(wanted)] for start in range(len(here) - len(wanted) + 1))
        return any(all(map(fnmatchcase, window, wanted)) for window in windows)


class Decision(NamedTuple):
    """The class of an operation, and the rule or table entry that decided it."""

    op_class: str
    reason: str

    @property
    def is_by_rule(self) -> bool:
        """Whether a rule of the policy decided, and not the table."""
        return self.reason.startswith(_BY_RULE)


def decide(rules: Iterable[Rule], operation: str, path: str = "") -> Decision:
    """Return the class of a canonical operation at a path, from the first matching rule or else the table."""
    # Rules do not apply to operations of class ``keep``, such as integer operations and casts.
    entry = OPERATIONS.get(operation)
    matched = None if _untouched(operation) else next((rule for rule in rules if rule.matches(operation, path)), None)
    if matched is not None:
        return Decision(matched.op_class, f"{_BY_RULE}{matched.pattern!r}")
    if entry is None:
        return Decision("keep", "unknown operation: runs as written")
    return Decision(entry.op_class, TABLE)


def is_wide(operation: str, decision: Decision) -> bool:
    """Return whether an operation is ``inner`` by a rule alone: no kernel of it promises float32 inside."""
    entry = OPERATIONS.get(operation)
    return decision.op_class == "inner" and (entry is None or entry.op_class != "inner")


def unused(rules: Iterable[Rule], seen: Iterable[tuple[str, str]]) -> list[Rule]:
    """Return the rules that match none of the (operation, path) pairs. Such rules have no effect and are reported."""
    pairs = [pair for pair in seen if not _untouched(pair[0])]
    return [rule for rule in rules if not any(rule.matches(*pair) for pair in pairs)]


def _untouched(operation: str) -> bool:
    entry = OPERATIONS.get(operation)
    return entry is not None and entry.op_class == "keep"


def parse_rules(
    spec: Mapping[str, str] | Iterable[tuple[str, str]], *, where: str = "policy(rules=)"
) -> tuple[Rule, ...]:
    """Check the rules that a user wrote and return them as `Rule` objects, in the same order."""
    for pattern, op_class in (pairs := _pairs(spec, where)):
        if not all(_components(pattern)):
            raise _bad_rule(
                "a rule's pattern has a blank component", where, pattern, "an operation's name or a path glob"
            )
        if op_class not in CLASSES:
            hint = did_you_mean(op_class, CLASSES)
            raise _bad_rule("unknown class of operations", where, op_class, ", ".join(CLASSES), hint)
    patterns = [pattern for pattern, _ in pairs]
    repeated = sorted({pattern for pattern in patterns if patterns.count(pattern) > 1})
    if repeated:
        raise _bad_rule("a pattern appears twice in the rules", where, ", ".join(repeated), "each pattern once")
    return tuple(Rule(pattern, op_class) for pattern, op_class in pairs)


def _pairs(spec: Mapping[str, str] | Iterable[tuple[str, str]], where: str) -> list[tuple[str, str]]:
    try:
        pairs = [(pattern, op_class) for pattern, op_class in (spec.items() if isinstance(spec, Mapping) else spec)]
    except (TypeError, ValueError):
        pairs = None
    if pairs is None or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise InvalidTypeError(
            "the rules must be a mapping from patterns to classes, all strings",
            where=where,
            found=repr(spec),
            allowed='a mapping such as {"softmax": "full"}',
            fix="write the rules as a mapping",
        )
    return pairs


def _bad_rule(what: str, where: str, found: str, allowed: str, hint: str = "") -> InvalidValueError:
    fix = f"{hint}correct or remove that rule"
    return InvalidValueError(what, where=where, found=repr(found), allowed=allowed, fix=fix)


def _components(path: str) -> list[str]:
    return re.split(r"[./]", path)
