"""The profile: where the time of a step goes, by kind of work and by place, with the plan's reasons.

An adapter runs the step under its framework's own profiler and returns a `Trace`: each operation with its place, the
formats of its inputs, and its time. Here each operation gets a kind, operations at one place are added up, and the
plan's reason for that place is set next to its time. For example, a float32 product of 40 ms at ``head`` is "other
compute", and the plan's reason may be a rule of the user.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from polyamp.adapters import find_verb
from polyamp.diagnosis.lint import odd_sizes
from polyamp.diagnosis.probe import sixteen_bit
from polyamp.errors import PolyampError, check_callable, check_count, refuses_unreadable
from polyamp.flow import AS_WRITTEN
from polyamp.formats import format_of
from polyamp.operations import OPERATIONS
from polyamp.plan import Plan, PlannedOperation
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.report import Report, aligned, plural, share, unwritable
from polyamp.rewriting import explain

if TYPE_CHECKING:
    from os import PathLike

Kind = Literal["16-bit products", "other compute", "casts", "memory-bound", "optimizer", "host"]

WARM_UP = 3
"""Runs of a step before its time is taken: the first ones compile, and make the optimizer's state."""

LISTED, LONGEST = 12, 30
"""Rows of the printed table, and characters of an operation's name."""

NOTABLE, OFTEN = 0.02, 0.1
"""Share of a step from which on a sentence is about it; and about the optimizer and the host, which every step has."""


class Timed(NamedTuple):
    """The time of an operation in all runs of a step."""

    name: str  # canonical name (`polyamp.operations`), else the framework's
    where: str  # scope or module path, joined by ``/``; empty if unknown. A gradient has the path of its forward pass
    formats: tuple[str, ...]  # formats of its floating-point inputs, each once
    seconds: float
    is_update: bool = False  # whether it is a part of the optimizer's step

    @property
    def kind(self) -> Kind:
        """Return what limits such an operation."""
        operation = OPERATIONS.get(self.name)
        if self.is_update:
            return "optimizer"
        if self.name == "cast":
            return "casts"
        if self.name in ("custom_call", "call") or (operation and "kernels" in operation.sources):
            return "other compute"
        if not _is_product(self.name):
            return "memory-bound"
        is_low = bool(self.formats) and all(format_of(one).is_low for one in self.formats)
        return "16-bit products" if is_low else "other compute"


def _pattern(path: str) -> str:
    """Return a path as in a rule, the same for all layers of a stack: ``encoder/*/attention``."""
    return re.sub(r"(?<![^/])([A-Za-z_]*)\d+(?=/)", r"\1*", path)


def _is_product(name: str) -> bool:
    """Return whether an operation is work of Tensor Cores."""
    return name in OPERATIONS and OPERATIONS[name].op_class == "lower"


class Trace(NamedTuple):
    """What a framework's profiler saw of some runs of a step."""

    framework: str  # the adapter's name
    device: str  # its name
    seconds: float  # of all runs, without the profiler
    busy: float  # the share of the time in which the device computed
    operations: tuple[Timed, ...]
    file: str  # the profiler's own file
    waits: Mapping[str, float]  # seconds that the host waited for the device, by the operation that waited


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the time that is in at least one of these spans."""
    total, last = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, last), 0.0)
        last = max(last, end)
    return total


class Work(NamedTuple):
    """All operations of one kind, name, format and place."""

    kind: Kind
    name: str
    format: str
    where: str
    times: float  # in one step
    share: float  # of a step
    why: str  # the plan's reason

    @property
    def place(self) -> str:
        """Return the operation with its path, as in a rule; of casts, the path."""
        if self.kind == "casts":
            return self.where or "no known path"
        return f"{self.where}/{self.name}" if self.where else self.name


@dataclass(frozen=True)
class Profile(Report):
    """The result of `polyamp.profile`. Prints the share of each kind of work, then the places that take longest."""

    RIGHT = (0, 1, 5)

    policy: str  # the policy's text
    runs: int  # how often the step ran under the profiler
    trace: Trace
    plan: Plan | None = None  # None if the step cannot be planned
    unplanned: str = ""  # why not
    odd: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)  # sizes that are not multiples of 8

    @property
    def file(self) -> str:
        """Return the file of the framework's profiler."""
        return self.trace.file

    @property
    def seconds(self) -> float:
        """Return the seconds of one step, without the profiler."""
        return self.trace.seconds / self.runs

    @cached_property
    def shares(self) -> dict[Kind, float]:
        """Return the share of a step by kind of work; the sum is 1. ``host`` is when the device does not compute."""
        shares: dict[Kind, float] = dict.fromkeys(get_args(Kind), 0.0)
        for one in self.trace.operations:
            shares[one.kind] += one.seconds * self._part
        shares["host"] = max(1.0 - sum(shares.values()), 0.0)
        return shares

    @cached_property
    def _part(self) -> float:
        """Return the share of a step per second of an operation. Operations that ran side by side share their time."""
        total = sum(one.seconds for one in self.trace.operations)
        return min(self.trace.busy, 1.0) / total if total else 0.0

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """Return the operations by kind, name, format and place, those that take longest first."""
        groups: dict[tuple[Kind, str, str, str], list[float]] = {}
        for one in self.trace.operations:
            formats = "" if one.kind == "casts" else ", ".join(one.formats)
            key = (one.kind, one.name, formats, _pattern(one.where))
            if one.is_update:
                key = (one.kind, "update", "", "")
            groups.setdefault(key, []).append(one.seconds)
        found = (
            Work(*key, len(each) / self.runs, sum(each) * self._part, self._why(*key)) for key, each in groups.items()
        )
        return tuple(sorted(found, key=lambda one: -one.share))

    def _why(self, kind: Kind, name: str, formats: str, where: str) -> str:
        here = self._planned.get(where, ())
        if kind == "casts":
            borders = (
                f"{op.name} in {op.format}" for op in here if op.casts and op.op_class not in ("neutral", "keep")
            )
            return next(borders, "")
        same = [op for op in here if op.name == name or (_is_product(name) and _is_product(op.name))]
        if not same or kind == "optimizer":
            return ""
        ran = [op for op in same if op.format in (*formats.split(", "), AS_WRITTEN) and op.name == name]
        return ran[0].reason if ran else f"{_PLANNED} {same[0].format}"

    @cached_property
    def _planned(self) -> dict[str, list[PlannedOperation]]:
        """Return the plan's operations by path: the first word of their place, unless it is a source line."""
        found: dict[str, list[PlannedOperation]] = {}
        for op in self.plan.operations if self.plan else ():
            path = op.where.partition(" ")[0]
            if op.native[:1].isupper():  # a node of TensorFlow, whose place ends with its name
                path = path.rpartition("/")[0]
            path = "" if ":" in path else path
            for known in {path, path.replace(".", "/")}:  # PyTorch's recorded plans join paths by dots
                found.setdefault(_pattern(known), []).append(op)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "framework": self.trace.framework,
            "policy": self.policy,
            "device": self.trace.device,
            "runs": self.runs,
            "seconds": self.seconds,
            "file": self.file,
            "shares": dict(self.shares),
            "work": [{**one._asdict(), "seconds": one.share * self.seconds} for one in self.work],
            "waits": {place: seconds / self.runs for place, seconds in self.trace.waits.items()},
            "unaligned": [
                {"name": name, "where": where, "sizes": list(sizes)} for (name, where), sizes in self.odd.items()
            ],
            "plan": self.plan and self.plan.as_dict(),
        }

    @refuses_unreadable
    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the shares of a step, by kind and by place, into an image file."""
        from polyamp.diagnosis.pictures import draw_profile

        draw_profile(path, self.heading().partition("\n")[0], self.shares, self._host, self.work[:20])

    @property
    def _host(self) -> str:
        """Return what the time without operations is."""
        return "between operations" if self.trace.device == "cpu" else "waiting for the host"

    def heading(self) -> str:
        """Return how long a step takes, where the profiler's file is, and the share of each kind of work."""
        kinds = [
            (share(part), f"{1000 * part * self.seconds:.2f} ms", self._host if kind == "host" else kind)
            for kind, part in self.shares.items()
        ]
        return (
            f"{self.trace.framework} on {self.trace.device}, {self.policy}: {1000 * self.seconds:.2f} ms a step, "
            f"over {plural(self.runs, 'run')}\ntrace: {self.file}\n\n{aligned(kinds, right=(0, 1))}"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return the work that takes longest."""
        header = ("share", "ms", "kind", "operation", "format", "count", "where", "plan")
        return [header, *map(self._row, self.work[:LISTED])]

    def _row(self, one: Work) -> tuple[str, ...]:
        seconds, count = f"{1000 * one.share * self.seconds:.2f}", f"{one.times:.4g}"
        name = one.name if len(one.name) <= LONGEST else f"{one.name[: LONGEST - 1]}…"  # of a compiled kernel
        return (share(one.share), seconds, one.kind, name, one.format, count, one.where, one.why)

    def sentences(self) -> list[str]:
        """Return what to act on, with the place and its share of the step."""
        about = (self._about_products(), self._about_casts(), self._about_update(), self._about_host())
        lines = [line for line in chain(*about) if line]
        if self.unplanned:
            lines.append(f"The step has no plan, so no reasons: {self.unplanned}")
        return lines

    def _about_products(self) -> Iterator[str]:
        products = [one for one in self.work if _is_product(one.name)]
        odd = [one for one in products if one.kind == "16-bit products" and (one.name, one.where) in self.odd]
        yield _about(odd, "in products with sizes not divisible by 8; pad them", self._sizes)
        wide = [one for one in products if one.kind == "other compute"]
        for planned in (True, False):
            why = "planned in 16 bits, but computed in another format here" if planned else "not in 16 bits"
            some = [one for one in wide if one.why.startswith(_PLANNED) == planned]
            yield _about(some, f"in products {why}", lambda one: one.format)

    def _sizes(self, one: Work) -> str:
        return ", ".join(map(str, self.odd[one.name, one.where]))

    def _about_casts(self) -> Iterator[str]:
        casts = [one for one in self.work if one.kind == "casts"]
        yield _about(casts, "in casts, at the border of", lambda one: one.why)

    def _about_update(self) -> Iterator[str]:
        update = [one for one in self.work if one.kind == "optimizer"]
        if self.shares["optimizer"] >= OFTEN:
            yield _about(update, "in the optimizer", lambda one: f"{one.times:.4g} operations a step")

    def _about_host(self) -> Iterator[str]:
        idle = self.shares["host"]
        if idle < OFTEN:
            return
        if self.trace.device == "cpu":
            yield f"{share(idle)} is between operations, in Python and the framework: larger batches have less of it."
            return
        yield f"The device waits for the host, {share(idle)} of the step."
        for place, seconds in sorted(self.trace.waits.items(), key=lambda item: -item[1])[:3]:
            yield f"{place} makes the host wait for the device, {1000 * seconds / self.runs:.2f} ms a step."


_PLANNED = "planned in"


def _about(works: Sequence[Work], what: str, detail: Callable[[Work], str]) -> str:
    """Return a sentence about some work, with the places that take longest; empty if its share is not notable."""
    total = sum(one.share for one in works)
    if total < NOTABLE:
        return ""
    told = ((one.place, detail(one)) for one in works[:3])
    places = ", ".join(f"{place} ({words})" if words else place for place, words in told)
    return f"{share(total)} {what}: {places}{f' and {len(works) - 3} more' if len(works) > 3 else ''}."


@refuses_unreadable
def profile(
    step: Any,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    runs: int = 5,
    folder: str | PathLike[str] = "polyamp_profile",
    backend: str | None = None,
    **kwargs: Any,
) -> Profile:
    """Report where the time of a step goes: 16-bit products, casts, memory-bound work, the optimizer, the host.

    The step runs under its framework's own profiler, whose file is kept: Perfetto and TensorBoard open it. It runs
    ``2 * runs + 3`` times as in a training loop, three times to warm up and ``runs`` times without the profiler, and
    what it changes stays changed: a training step trains its model. In JAX, nothing is changed.

    >>> import tempfile, jax.numpy as jnp
    >>> x = jnp.ones((64, 64))
    >>> report = profile(lambda x: x @ x, x, folder=tempfile.mkdtemp())
    >>> round(sum(report.shares.values()), 6), report.work[0].name
    (1.0, 'matmul')

    Args:
        step: the step of a training loop, compiled or not; or any other function of a framework.
        *args: its arguments: a real batch, and in JAX the parameters.
        policy: run the step under this policy; None runs it as it is, under the current policy.
        runs: how often the step runs under the profiler.
        folder: the profiler's file is written into a new folder in this one, which is made if it is absent.
        backend: the framework's name, if neither the function nor the arguments show it and several are loaded.
        **kwargs: the step's keyword arguments.

    Raises:
        InvalidTypeError: ``step`` is not callable, or ``runs`` is not an integer.
        InvalidValueError: ``runs`` is less than 1, or ``folder`` cannot be written.
        UnsupportedError: the framework's adapter has no profiler.
    """
    check_callable(
        step,
        where="profile(step)",
        allowed="a step of a training loop, or another function",
        fix="give the function itself, then its arguments: polyamp.profile(step, batch)",
    )
    check_count("runs", runs, where="profile(runs=)")
    chosen = None if policy is None else make_policy(policy)
    call = (step, args, kwargs)
    timed = find_verb("time_step", backend, call, where="the step and its arguments")
    made, is_rewritten = _new_folder(folder), chosen is None and hasattr(type(step), "plan")
    odd, plan, unplanned = {}, None, ""
    try:  # before the step runs: JAX may delete its arguments
        with nullcontext() if chosen is None else chosen:
            plan = None if is_rewritten else _plan_of(step, args, kwargs, chosen, backend)
            plain = getattr(step, "plain", step)  # of a rewritten function
            facts = find_verb("facts", backend, call, where="profile(step)")(
                plain, args, kwargs, sixteen_bit(chosen), None
            )
            products = ((one, odd_sizes(one.sizes)) for one in facts.products)
            odd = {(one.name, _pattern(one.where)): sizes for one, sizes in products if sizes}
    except PolyampError as error:
        unplanned = str(error).partition("\n")[0]
    trace: Trace = timed(*call, chosen, runs=runs, folder=made)
    plan = step.plan if is_rewritten else plan
    return Profile(str(chosen or "its own policy"), runs, trace, plan, unplanned, odd)


def _plan_of(
    step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy | None, backend: str | None
) -> Plan:
    """Return the plan of a step as it runs: under ambient autocast, if the framework has that."""
    explains = find_verb("explain", backend, (step, args, kwargs), where="profile(step)")
    engine = "autocast" if "engine" in signature(explains).parameters else None
    return explain(step, *args, policy=policy, backend=backend, engine=engine, **kwargs)


def _new_folder(parent: str | PathLike[str]) -> Path:
    """Make a folder that was not there, named after the time."""
    try:
        made = Path(parent, f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{time.perf_counter_ns()}")
        made.mkdir(parents=True)
        return made
    except (OSError, TypeError, ValueError) as error:
        raise unwritable(parent, error) from error
