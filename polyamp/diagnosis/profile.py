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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from polyamp.adapters import find_verb
from polyamp.diagnosis.lint import ALIGNMENT, odd_sizes
from polyamp.errors import PolyampError, check_callable, check_count, refuses_unreadable
from polyamp.flow import AS_WRITTEN
from polyamp.formats import format_of
from polyamp.operations import OPERATIONS, is_product
from polyamp.plan import Plan, PlannedOperation
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.report import Report, aligned, plural, share, unwritable
from polyamp.rewriting import explain

if TYPE_CHECKING:
    from os import PathLike

Kind = Literal["16-bit products", "other compute", "casts", "memory-bound", "optimizer", "host"]

WARM_UP = 2
"""Runs before the time is taken, after the first one, which compiles the step and makes the optimizer's state."""

LISTED, LONGEST = 12, 30
"""Rows of the printed table, and characters of an operation's name."""

NOTABLE, OFTEN = 0.02, 0.1
"""Share of a step from which on a sentence is about it; and about the optimizer and the host, which every step has."""


class Timed(NamedTuple):
    """One run of an operation, with its time."""

    name: str  # canonical name (`polyamp.operations`), else the framework's
    where: str = ""  # scope or module path, joined by ``/``; that of the forward pass for a gradient. Empty if unknown
    formats: tuple[str, ...] = ()  # formats of its floating-point inputs, each once
    seconds: float = 0.0
    is_update: bool = False  # whether it is a part of the optimizer's step

    @property
    def kind(self) -> Kind:
        """The operation's kind of work."""
        operation = OPERATIONS.get(self.name)
        if self.is_update:
            return "optimizer"
        if self.name == "cast":
            return "casts"
        if self.name in ("custom_call", "call") or (operation and "kernels" in operation.sources):
            return "other compute"
        if not is_product(self.name):
            return "memory-bound"
        is_low = bool(self.formats) and all(format_of(one).is_low for one in self.formats)
        return "16-bit products" if is_low else "other compute"


class Trace(NamedTuple):
    """What a framework's profiler saw of some runs of a step."""

    file: str  # the profiler's own file
    device: str  # its name
    operations: tuple[Timed, ...]
    busy: float  # seconds in which the device computed
    waits: Mapping[str, float]  # seconds that the host waited for the device, by the operation that waited


class Profiler(NamedTuple):
    """An adapter's functions to profile a step that has run."""

    framework: str  # the adapter's name
    call: Callable[..., object]  # the step under its policy
    wait: Callable[[Any], object]  # waits for the result of a run
    tracing: Callable[[Path], AbstractContextManager[object]]  # writes the profiler's file into a folder
    read: Callable[[Path, int], Trace]  # reads it, of so many runs
    fresh: Callable[[Any], Any] = lambda arguments: arguments  # copies what a run deletes

    def seconds(self, batch: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> float:
        """Run the step on all arguments in ``batch``, and return the seconds."""
        start, result = time.perf_counter(), None
        for args, kwargs in batch:
            result = self.call(*args, **kwargs)
        self.wait(result)
        return time.perf_counter() - start


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total length of these spans, with overlaps counted once."""
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
    seconds: float  # of one step
    why: str  # the plan's reason
    odd: tuple[int, ...]  # sizes of a product that are not multiples of 8

    @property
    def place(self) -> str:
        """Return the path and the operation, as in a rule; for casts, the path."""
        if self.kind == "casts":
            return self.where or "no known path"
        return f"{self.where}/{self.name}" if self.where else self.name


@dataclass(frozen=True)
class Profile(Report):
    """The result of `polyamp.profile`. Prints the share of each kind of work, then the places that take longest."""

    RIGHT = (0, 1, 5)

    framework: str
    policy: str  # the policy's text
    device: str
    runs: int  # how often the step ran under the profiler
    seconds: float  # of one step, without the profiler
    file: str  # of the framework's profiler
    shares: dict[Kind, float]  # of a step; the sum is 1. ``host`` is when the device does not compute
    work: tuple[Work, ...]  # those that take longest first
    waits: dict[str, float]  # seconds that the host waits for the device in a step, by the operation that waits
    plan: Plan | None  # None if the step cannot be planned
    unplanned: str  # why not

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        work, plan = [one._asdict() for one in self.work], self.plan and self.plan.as_dict()
        return {**vars(self), "work": work, "plan": plan}

    @refuses_unreadable
    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the shares of a step, by kind and by place, into an image file."""
        from polyamp.diagnosis.pictures import Bar, draw_profile

        kinds = [Bar(self._named(kind), kind, part) for kind, part in self.shares.items()]
        places = [Bar(f"{one.place} {one.format}", one.kind, one.share) for one in self.work]
        draw_profile(path, self.heading().partition("\n")[0], kinds, places)

    def _named(self, kind: Kind) -> str:
        """Return the name of a kind of work; for time without operations the device decides the name."""
        host = "between operations" if self.device == "cpu" else "waiting for the host"
        return host if kind == "host" else kind

    def heading(self) -> str:
        """Return how long a step takes, where the profiler's file is, and the share of each kind of work."""
        kinds = [
            (share(part), f"{1000 * part * self.seconds:.2f} ms", self._named(kind))
            for kind, part in self.shares.items()
        ]
        return (
            f"{self.framework} on {self.device}, {self.policy}: {1000 * self.seconds:.2f} ms a step, "
            f"over {plural(self.runs, 'run')}\ntrace: {self.file}\n\n{aligned(kinds, right=(0, 1))}"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return the work that takes longest."""
        rows: list[tuple[str, ...]] = [("share", "ms", "kind", "operation", "format", "count", "where", "plan")]
        for one in self.work[:LISTED]:
            name = one.name if len(one.name) <= LONGEST else f"{one.name[: LONGEST - 1]}…"  # of a compiled kernel
            milliseconds, times = f"{1000 * one.seconds:.2f}", f"{one.times:.4g}"
            rows.append((share(one.share), milliseconds, one.kind, name, one.format, times, one.where, one.why))
        return rows

    def sentences(self) -> list[str]:
        """Return what to act on, with the place and its share of the step."""
        low = [one for one in self.work if one.kind == "16-bit products"]
        odd = [(one, ", ".join(map(str, one.odd))) for one in low if one.odd]
        wide = [one for one in self.work if one.kind == "other compute" and is_product(one.name)]
        casts = [(one, one.why) for one in self.work if one.kind == "casts"]
        update = [(one, f"{one.times:.4g} operations a step") for one in self.work if one.kind == "optimizer"]
        lines = [
            _about(odd, f"in products with sizes not divisible by {ALIGNMENT}; pad them"),
            _about([(one, f"{one.format}: {one.why}".rstrip(": ")) for one in wide], "in products not in 16 bits"),
            _about(casts, "in casts, at the border of"),
            _about(update, "in the optimizer", least=OFTEN),
            *self._about_host(),
            "" if self.work else "The profiler saw no operation: TensorFlow's sees those of a tf.function alone.",
            "" if self.plan else f"The step has no plan, so no reasons: {self.unplanned}",
        ]
        return [line for line in lines if line]

    def _about_host(self) -> Iterator[str]:
        idle = self.shares["host"]
        if idle >= OFTEN and self.device == "cpu":
            yield f"{share(idle)} is between operations, in Python and the framework: larger batches have less of it."
        elif idle >= OFTEN:
            yield f"The device waits for the host, {share(idle)} of the step."
            for place, seconds in sorted(self.waits.items(), key=lambda item: -item[1])[:3]:
                yield f"{place} makes the host wait for the device, {1000 * seconds:.2f} ms a step."


def _about(works: Sequence[tuple[Work, str]], what: str, least: float = NOTABLE) -> str:
    """Return a sentence about work, each place with its words; empty if the share of a step is below ``least``."""
    total = sum(one.share for one, _ in works)
    if total < least:
        return ""
    places = ", ".join(f"{one.place} ({words})" if words else one.place for one, words in works[:3])
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
    ``2 * runs + 3`` times as in a training loop (in PyTorch once more): a few times to warm up, ``runs`` times without
    the profiler, and ``runs`` times with it. What it changes stays changed: a training step trains its model. In JAX,
    nothing is changed.

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
    verb = find_verb("profiler", backend, call, where="the step and its arguments")
    made = _new_folder(folder)
    with nullcontext() if chosen is None else chosen:
        profiler: Profiler = verb(*call, chosen)
        profiler.seconds([profiler.fresh(call[1:]) for _ in range(WARM_UP)])
        seconds = profiler.seconds([profiler.fresh(call[1:]) for _ in range(runs)])
        batch = [profiler.fresh(call[1:]) for _ in range(runs)]
        with profiler.tracing(made):
            slower = profiler.seconds(batch)
        trace = profiler.read(made, runs)
        plan, unplanned = _plan_of(step, args, kwargs, chosen, backend)
    busy = trace.busy / (slower if trace.device == "cpu" else seconds)
    work = add_up(trace.operations, runs, seconds / runs, min(busy, 1.0), plan)
    return Profile(
        framework=profiler.framework,
        policy=str(chosen or "its own policy"),
        device=trace.device,
        runs=runs,
        seconds=seconds / runs,
        file=trace.file,
        shares=shares_of(work),
        work=work,
        waits={place: waited / runs for place, waited in trace.waits.items()},
        plan=plan,
        unplanned=unplanned,
    )


def add_up(operations: Iterable[Timed], runs: int, seconds: float, busy: float, plan: Plan | None) -> tuple[Work, ...]:
    """Add up operations by kind, name, format and place, with shares of a step whose sum is ``busy``."""
    groups = defaultdict[tuple[Kind, str, str, str], list[float]](list)
    for one in operations:
        formats = "" if one.kind == "casts" else ", ".join(one.formats)
        key = (one.kind, one.name, formats, _pattern(one.where))
        groups[(one.kind, "update", "", "") if one.is_update else key].append(one.seconds)
    total, planned, found = math.fsum(chain(*groups.values())), _by_place(plan), list[Work]()
    for (kind, name, formats, where), each in groups.items():
        part = busy * (math.fsum(each) / total) if total else 0.0
        here = planned.get(where, [])
        odd = next((odd_sizes(op.sizes) for op in here if op.name == name and is_product(name)), ())
        why = _why(kind, name, formats, here)
        found.append(Work(kind, name, formats, where, len(each) / runs, part, part * seconds, why, odd))
    return tuple(sorted(found, key=lambda one: (-one.share, one)))


def shares_of(work: Iterable[Work]) -> dict[Kind, float]:
    """Return the share of a step by kind of work; the host has what is left of 1."""
    shares: dict[Kind, float] = dict.fromkeys(get_args(Kind), 0.0)
    for one in work:
        shares[one.kind] += one.share
    return {**shares, "host": max(1.0 - sum(shares.values()), 0.0)}


def _pattern(path: str) -> str:
    """Return a path with ``*`` for the numbers of layers in a stack: ``encoder/*/attention``."""
    return re.sub(r"(?<![^/])([A-Za-z_]*)\d+(?=/)", r"\1*", path)


def _by_place(plan: Plan | None) -> dict[str, list[PlannedOperation]]:
    """Return the plan's operations by path, the first word of their place; source lines have none."""
    found = defaultdict[str, list[PlannedOperation]](list)
    for op in plan.operations if plan else ():
        path = op.where.partition(" ")[0]
        if op.native[:1].isupper():  # a node of TensorFlow, whose place ends with its name
            path = path.rpartition("/")[0]
        path = "" if ":" in path else path
        for known in {path, path.replace(".", "/")}:  # PyTorch's recorded plans join paths by dots
            found[_pattern(known)].append(op)
    return found


def _why(kind: Kind, name: str, formats: str, here: Sequence[PlannedOperation]) -> str:
    """Return the reason in the plan for some work, from the operations at its place."""
    if kind == "casts":
        borders = (op for op in here if op.casts and op.op_class not in ("neutral", "keep"))
        return next((f"{op.name} in {op.format}" for op in borders), "")
    same = [op for op in here if op.name == name or (is_product(name) and is_product(op.name))]
    ran = [op.reason for op in same if op.name == name and op.format in (*formats.split(", "), AS_WRITTEN)]
    return next(iter(ran), f"planned in {same[0].format}" if same else "")


def _plan_of(
    step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy | None, backend: str | None
) -> tuple[Plan | None, str]:
    """Return a step's plan with "", or None with why there is no plan."""
    try:
        if policy is None and hasattr(type(step), "plan"):  # a rewritten function
            return step.plan, ""
        explains = find_verb("explain", backend, (step, args, kwargs), where="profile(step)")
        engine = "autocast" if "engine" in signature(explains).parameters else None  # where that is ambient
        return explain(step, *args, policy=policy, backend=backend, engine=engine, **kwargs), ""
    except PolyampError as error:
        return None, str(error).partition("\n")[0]


def _new_folder(parent: str | PathLike[str]) -> Path:
    """Make a folder that was not there, named after the time."""
    try:
        made = Path(parent, f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{time.perf_counter_ns()}")
        made.mkdir(parents=True)
        return made
    except (OSError, TypeError, ValueError) as error:
        raise unwritable(parent, error) from error
