"""A plan: the format of every operation of a graph and the reason, with totals, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from polyamp.batch import Footprint
from polyamp.errors import UnsupportedError, check_arguments, is_integer, is_number, refuses_unreadable
from polyamp.flow import Decision, Value, constant, decide, flow, integers, parameter, table
from polyamp.policies import Policy
from polyamp.report import Report, aligned, in_bytes, plural
from polyamp.rules import Rule, unused


class PlannedOperation(NamedTuple):
    """One operation of a plan.

    Attributes:
        name: its canonical name in `polyamp.operations`, or else the framework's name.
        native: the framework's name.
        where: scope or module path, and source line, if known.
        op_class: its class.
        format: the format it runs in, or ``as written``.
        reason: the rule, the neighbouring operation or the guard that decided.
        times: how often it runs in one call, if known: the length of the loops it is in.
        casts: number of casts that its inputs need.
        bytes_cast: bytes of those inputs before the cast.
        bytes_moved: bytes of its inputs and outputs in the formats it runs in, plus the bytes that the casts read and
            write.
        bytes_moved_float32: the same if nothing is cast.
        sizes: of a product in the forward pass, those that should be a multiple of a tile of Tensor Cores: rows, terms
            and columns, or the channels of a convolution. Of a softmax in a loss, its classes and rows.
    """

    name: str
    native: str
    where: str
    op_class: str
    format: str
    reason: str
    times: int = 1
    casts: int = 0
    bytes_cast: int = 0
    bytes_moved: int = 0
    bytes_moved_float32: int = 0
    sizes: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, str]:
        """Return the decision as JSON values."""
        return {
            "name": self.name,
            "native": self.native,
            "where": self.where,
            "class": self.op_class,
            "format": self.format,
            "reason": self.reason,
        }


def planned(
    decision: Decision,
    native: str,
    where: str,
    *,
    casts: Sequence[tuple[int, int]] = (),
    moved: int = 0,
    moved_float32: int = 0,
    times: int = 1,
    sizes: tuple[int, ...] = (),
) -> PlannedOperation:
    """Return a plan's entry; ``casts`` are the bytes before and after each cast, ``moved`` those of the operation."""
    return PlannedOperation(
        decision.operation,
        native,
        where.strip(),
        decision.op_class,
        decision.format,
        decision.reason,
        times,
        casts=len(casts),
        bytes_cast=sum(before for before, _ in casts),
        bytes_moved=moved + sum(map(sum, casts)),
        bytes_moved_float32=moved_float32,
        sizes=sizes,
    )


BY_HAND = "the code casts to "
"""How the reason for a cast to 16 bits begins that the step's own code makes; the format follows."""


class LargestBatch(NamedTuple):
    """The largest batches that fit in some memory."""

    float32: int
    policy: int


@dataclass(frozen=True)
class Plan(Report):
    """The result of `polyamp.explain`: every operation with its format and reason, and totals. Prints as a table.

    >>> plan = Plan("mixed_float16", (PlannedOperation("matmul", "dot", "model", "lower", "float16", "table"),))
    >>> plan.totals["by_format"]
    {'float16': 1}
    >>> print(plan)
    mixed_float16: 1 operation (1 float16), 0 casts of 0 B
    moved: 0 B (float32: 0 B)
    <BLANKLINE>
    operation  class  format   count  moved  why    where
    matmul     lower  float16      1    0 B  table  model

    Attributes:
        policy: the policy's text.
        operations: in execution order; the body of a loop is listed once.
        bytes_saved: bytes that the forward pass keeps for the backward pass; None if unknown, as for a graph that
            contains both.
        bytes_saved_float32: the same if nothing is cast.
        unused_rules: patterns of the policy's own rules that matched nothing.
        engine: how the plan is carried out: "rewrite" is a rewritten graph, "autocast" the framework's ambient
            autocast, "layers" the formats of a model's layers. Text after a comma describes how the plan was made.
        footprint: how the memory of a training step grows with the batch; None if unknown.
        footprint_float32: the same if nothing is cast.
    """

    policy: str
    operations: tuple[PlannedOperation, ...]
    bytes_saved: int | None = None
    bytes_saved_float32: int | None = None
    unused_rules: tuple[str, ...] = ()
    engine: str = "rewrite"
    footprint: Footprint | None = None
    footprint_float32: Footprint | None = None

    def largest_batch(self, memory: int, *, optimizer_bytes: float = 8) -> LargestBatch:
        """Return the largest batch whose training step fits in so many bytes, in float32 and under the policy.

        It counts parameters, what the optimizer keeps, and what the forward and backward pass have in use at their
        fullest moment; in JAX, on this device, as XLA compiles them. Other memory comes on top: the framework's own,
        workspaces of kernels, gaps between tensors. So name less than the device has, such as 0.9 of what is free.

        >>> from polyamp.batch import Footprint, Pass
        >>> once, twice = Pass(1000, 2048, [4000 + 4 * 1024]), Pass(1000, 4096, [4000 + 8 * 1024])
        >>> held = Footprint(4, once, twice)
        >>> plan = Plan("mixed_float16", (), footprint=held, footprint_float32=held)
        >>> plan.largest_batch(2**20)  # 2**20 bytes less 1000 * 8 and 4000, by 1024 for each example
        LargestBatch(float32=1012, policy=1012)

        Args:
            memory: bytes, such as ``16 * 2**30``.
            optimizer_bytes: what the optimizer keeps for each parameter: 8 for Adam and AdamW in float32, 4 for
                momentum, 0 for plain SGD; 4 more for float32 masters of 16-bit parameters.

        Returns:
            The number of examples for ``float32`` and ``policy``; 0 if one example does not fit.

        Raises:
            InvalidValueError: a number is not positive (``optimizer_bytes``: negative), or is not finite.
            UnsupportedError: it is unknown how the memory grows with the batch.
        """
        check_arguments(
            "Plan.largest_batch",
            [
                ("memory", memory, is_integer(memory) and memory > 0, "a positive number of bytes"),
                (
                    "optimizer_bytes",
                    optimizer_bytes,
                    is_number(optimizer_bytes) and 0 <= optimizer_bytes < 1000,
                    "bytes for each parameter, from 0 to 1000",
                ),
            ],
        )
        if not (self.footprint and self.footprint_float32):
            raise UnsupportedError(
                "it is unknown how the memory of this step grows with the batch",
                where="Plan.largest_batch(memory)",
                allowed="explain(fn, *args, examples=N) in PyTorch or JAX, of code that also runs with 2 * N examples",
                fix="name the number of examples that the arguments hold, more than 1; leave out what fixes it",
            )
        one, other = self.footprint_float32, self.footprint
        return LargestBatch(*(each.largest_batch(memory, optimizer_bytes) for each in (one, other)))

    @property
    def totals(self) -> dict[str, Any]:
        """The operations by format, and totals of casts and bytes; JSON values.

        Each operation counts once by format; casts and bytes in a loop's body count as often as it runs. The keys with
        ``float32`` are the totals of the same graph if nothing is cast.
        """
        return {
            "by_format": dict(Counter(op.format for op in self.operations)),
            "casts": sum(op.casts * op.times for op in self.operations),
            "bytes_cast": sum(op.bytes_cast * op.times for op in self.operations),
            "bytes_moved": sum(op.bytes_moved * op.times for op in self.operations),
            "bytes_moved_float32": sum(op.bytes_moved_float32 * op.times for op in self.operations),
            "bytes_saved": self.bytes_saved,
            "bytes_saved_float32": self.bytes_saved_float32,
        }

    @property
    def batch(self) -> dict[str, int]:
        """The number of examples, and the bytes kept for the backward pass of each; JSON values. Empty if unknown."""
        if self.footprint is None or self.footprint_float32 is None:
            return {}
        return {
            "examples": self.footprint.examples,
            "bytes_saved_each": self.footprint.saved_each,
            "bytes_saved_each_float32": self.footprint_float32.saved_each,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the whole plan as JSON values. ``engine`` is left out if it is "rewrite", ``batch`` if unknown."""
        return {
            "policy": self.policy,
            "operations": [op.as_dict() for op in self.operations],
            "totals": self.totals,
            "unused_rules": list(self.unused_rules),
            **({} if self.engine == "rewrite" else {"engine": self.engine}),
            **({"batch": self.batch} if self.batch else {}),
        }

    def heading(self) -> str:
        """Return the totals: operations by format, casts, and bytes."""
        totals, count = self.totals, plural(len(self.operations), "operation")
        formats = ", ".join(f"{number} {name}" for name, number in totals["by_format"].items())
        casts = f"{plural(totals['casts'], 'cast')} of {in_bytes(totals['bytes_cast'])}"
        engine = "" if self.engine == "rewrite" else f" ({self.engine})"
        lines = [f"{self.policy}{engine}: {count} ({formats or 'none'}), {casts}"]
        lines.append(_bytes_line("moved", totals, "bytes_moved"))
        if self.bytes_saved is not None:
            lines.append(_bytes_line("saved for the backward pass", totals, "bytes_saved"))
        if batch := self.batch:
            each, each_float32 = in_bytes(batch["bytes_saved_each"]), in_bytes(batch["bytes_saved_each_float32"])
            lines[-1] += f"; {each} for each of {plural(batch['examples'], 'example')} (float32: {each_float32})"
        if self.unused_rules:
            lines.append(f"rules that matched nothing: {', '.join(self.unused_rules)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.heading()}\n\n{self.table(rows=20)}"

    @refuses_unreadable
    def table(self, *, rows: int | None = None) -> str:
        """Return an aligned table of so many rows; None shows all."""
        fits = rows is None or (is_integer(rows) and rows >= 0)
        check_arguments("Plan.table", [("rows", rows, fits, "a number of rows, or None for all")])
        head, *operations = self.rows()
        text = aligned([head, *operations[:rows]], right=(3, 4))
        left_out = len(operations) - len(operations[:rows])
        return f"{text}\n{left_out} more rows: print(plan.table())" if left_out else text

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, the heading first: similar operations together, most bytes moved first."""
        groups: dict[tuple[str, ...], list[PlannedOperation]] = {}
        for op in self.operations:
            groups.setdefault((op.name, op.op_class, op.format, op.reason), []).append(op)
        ordered = sorted(groups.values(), key=lambda group: -sum(op.bytes_moved * op.times for op in group))
        return [("operation", "class", "format", "count", "moved", "why", "where"), *map(_row, ordered)]


def _bytes_line(label: str, totals: dict[str, Any], key: str) -> str:
    own, full = totals[key], totals[f"{key}_float32"]
    if full is None:
        return f"{label}: {in_bytes(own)}"
    share = f", {own / full:.0%} of it" if full else ""
    return f"{label}: {in_bytes(own)} (float32: {in_bytes(full)}{share})"


def _row(group: list[PlannedOperation]) -> tuple[str, ...]:
    first, others = group[0], len({op.where for op in group}) - 1
    moved = in_bytes(sum(op.bytes_moved * op.times for op in group))
    where = f"{first.where} and {others} more" if others else first.where
    return (first.name, first.op_class, first.format, str(len(group)), moved, first.reason, where)


# --- the decisions that a plan lists ----------------------------------------------------------------------------------


_flow, _constant = lru_cache(maxsize=4096)(flow), lru_cache(maxsize=4096)(constant)


class Decider:
    """A policy, and its decisions about one graph and the functions that the graph calls."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.compute = policy.compute
        self.decisions: dict[tuple[str, str], Decision] = {}
        self.lowered = False
        self.not_lowered: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def decide(self, operation: str, path: str = "") -> Decision:
        """Decide the class of an operation at a path. A policy without rules does not look at the path."""
        key = (operation, path if self.policy.rules else "")
        if key not in self.decisions:
            self.decisions[key] = decide(self.policy.rules, *key)
        return self.decisions[key]

    def flow(self, decision: Decision, inputs: Sequence[Value], *, gradient: bool = False, asked: str = "") -> Decision:
        """Apply `polyamp.flow.flow` in the policy's compute format."""
        return _flow(decision, tuple(inputs), self.compute, gradient=gradient, asked=asked)

    def constant(self, *magnitudes: float) -> Value:
        """Return the facts about a constant in the policy's compute format; see `polyamp.flow.constant`."""
        return _constant(magnitudes, self.compute)

    def integers(self, value: Value, largest: float) -> Value:
        """Return the facts about integers that become floating values; see `polyamp.flow.integers`."""
        return integers(value, largest, self.compute)

    def parameter(self, largest: float | None) -> Value:
        """Return the facts about a parameter in the policy's compute format; see `polyamp.flow.parameter`."""
        return parameter(largest, self.compute)

    def table(self, values: Any, *, divides: bool = False) -> Value:
        """Return the facts about a constant array in the policy's compute format; see `polyamp.flow.table`."""
        return table(values, self.compute, divides=divides)

    def refuse(self, missing: str, decision: Decision) -> None:
        """Record that no kernel can follow a decision, if a rule of the policy made the decision."""
        if decision.rule:
            self.refused[missing] = decision.rule

    @property
    def unused(self) -> list[Rule]:
        """The policy's own rules that have matched nothing so far."""
        return unused_in([self])

    def take_over(self, other: Decider) -> None:
        """Add the record of another decider, of a function that is decided once and called from several graphs."""
        # A reason that both have keeps the place in this one.
        self.decisions.update(other.decisions)
        self.lowered = self.lowered or other.lowered
        self.not_lowered = other.not_lowered | self.not_lowered
        self.refused.update(other.refused)


def unused_in(parts: Sequence[Decider]) -> list[Rule]:
    """Return the policy's own rules that matched nothing in any part of a program."""
    return unused(parts[0].policy.own_rules, {key for part in parts for key in part.decisions})
