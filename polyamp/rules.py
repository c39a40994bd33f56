"""A policy's own rules: which operations they match, and how they are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from polyamp.errors import InvalidTypeError, InvalidValueError, did_you_mean, shown
from polyamp.operations import CLASSES, OPERATIONS


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


def unused(rules: Iterable[Rule], seen: Iterable[tuple[str, str]]) -> list[Rule]:
    """Return the rules that match none of the (operation, path) pairs. Such rules have no effect and are reported."""
    pairs = [pair for pair in seen if not is_untouched(pair[0])]
    return [rule for rule in rules if not any(rule.matches(*pair) for pair in pairs)]


def is_untouched(operation: str) -> bool:
    """Return whether no rule applies to an operation, such as a cast or one on integers."""
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
    except Exception:  # the user's own object may raise anything
        pairs = None
    if pairs is None or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise InvalidTypeError(
            "the rules must be a mapping from patterns to classes, all strings",
            where=where,
            found=shown(spec),
            allowed='a mapping such as {"softmax": "full"}',
            fix="write the rules as a mapping",
        )
    return pairs


def _bad_rule(what: str, where: str, found: str, allowed: str, hint: str = "") -> InvalidValueError:
    fix = f"{hint}correct or remove that rule"
    return InvalidValueError(what, where=where, found=shown(found), allowed=allowed, fix=fix)


def _components(path: str) -> list[str]:
    return re.split(r"[./]", path)
