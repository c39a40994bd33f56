"""The search for the operations that make two programs differ: each one runs in float32, and the rest is measured.

For example, if the mean difference is 0.02, and 0.005 when ``head/matmul`` runs in float32 in both programs, then
``head/matmul`` causes 75 % of it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from polyamp.diagnosis.evidence import pattern_of
from polyamp.diagnosis.programs import Program
from polyamp.errors import PolyampError, unreported, warn_once
from polyamp.formats import FORMATS, format_of
from polyamp.plan import PlannedOperation
from polyamp.rules import decide

MOST = 32
"""How many patterns are tried, at most: those of the most operations first."""

Programs = tuple[Program, Program]


class Cause(NamedTuple):
    """The part of a mismatch that disappears if some operations run in float32."""

    rule: str  # the pattern of these operations, for ``rules={rule: "full"}``
    programs: str  # "train", "infer" or "both": the programs that compute them in 16 bits
    left: float  # the mean difference with the rule in both programs
    share: float  # the part that disappears; negative if the difference grows

    def as_dict(self) -> dict[str, Any]:
        """Return the cause as JSON values."""
        return self._asdict()


def find_causes(programs: Programs, mean: float, measure: Callable[[Programs], float]) -> tuple[Cause, ...]:
    """Return the causes of a mismatch, the largest first; of equal ones, those that only one program computes."""
    if not mean > 0:
        return ()
    train, infer = programs
    found, causes = {one.name: _low_operations(one) for one in programs}, []
    with unreported():  # a trial's rule may match nothing in one program, or keep every product in float32
        for rule in _candidates(found.values()):
            left = measure((train.in_float32(rule), infer.in_float32(rule)))
            having = [name for name, operations in found.items() if any(rule in pair for pair in operations)]
            if math.isfinite(left):  # else the trial shows nothing
                causes.append(Cause(rule, "both" if len(having) == 2 else having[0], left, 1 - left / mean))
    return tuple(sorted(causes, key=lambda cause: (round(cause.share, 2), cause.programs != "both"), reverse=True))


def _candidates(found: Iterable[list[tuple[str, str]]]) -> list[str]:
    """Return the patterns to try: operations at their paths, and all operations of a name if it is at several paths."""
    # Products are not tried all together: in float32 they leave nothing in 16 bits.
    each = [pair for operations in found for pair in operations]
    at_several = {name for name, pattern in each if any(name == other and pattern != path for other, path in each)}
    together = {name for name in at_several if decide((), name).op_class != "lower"}
    counts = Counter(name for name, _ in each if name in together)
    counts.update(pattern for _, pattern in each)
    return [pattern for pattern, _ in counts.most_common(MOST)]


def _low_operations(program: Program) -> list[tuple[str, str]]:
    """Return the name and the pattern of each operation that a program computes in 16 bits."""
    try:
        operations = program.plan().operations
    except PolyampError as error:
        reason = str(error).partition("\n")[0]
        warn_once(f"mismatch tries no operation of the {program.name} program, because it has no plan: {reason}")
        return []
    return [(one.name, rule_for(one)) for one in operations if _is_low(one)]


def _is_low(one: PlannedOperation) -> bool:
    """Return whether an operation computes in 16 bits, and does not only move values that are in 16 bits."""
    return one.format in FORMATS and format_of(one.format).is_low and one.op_class not in ("neutral", "keep")


def rule_for(one: PlannedOperation) -> str:
    """Return the pattern for an operation at its path in all layers of a stack: numbers become ``*``."""
    path = re.sub(r"(^|\s)\S+:\d+( \(.*\))?$", "", one.where)  # without the source line
    parts = [part for part in re.split(r"[./]", path) if part]
    if parts and parts[-1].lower() in (one.name.lower(), one.native.lower()):
        parts.pop()  # TensorFlow's path ends with the operation's node
    return "/".join("*" if part.isdigit() else pattern_of(part) for part in (*parts, one.name))
