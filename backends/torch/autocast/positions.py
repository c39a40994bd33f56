"""Rules by the path of a module: while a module runs whose path a rule matches, a region of its own is entered.

In that region the rule is about every operation, so that all else (marks for compiled code, functions that run again)
is as in any region. Global hooks say which modules run, from the first region with rules on; Dynamo inlines them. Paths
are those within the outermost module that was called in a region.
"""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from polyamp import reports
from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast import overrides, regions
from polyamp.backends.torch.autocast.regions import DEVICE_TYPES, MARKED, Marks, Region
from polyamp.errors import UnsupportedError, warn_once
from polyamp.operations import OPERATIONS
from polyamp.rules import Rule


class ModuleHooks:
    """The hooks, which are there while any region with rules is entered: a context to enter again and again.

    A backward pass outside of the region calls the modules of checkpointed functions again. So they stay as long as the
    graph of such a function, and for good where that is not to be known: after reentrant checkpointing, and once
    compiled code has a region with rules inside.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a graph may end anywhere
        self._users = 0
        self._handles: list[Any] = []
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stays = False

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if not self._handles:
                # What it warns of is known: the hooks take no notice of the wrapper that torch.compile(module) gives.
                warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
                before = register_module_forward_pre_hook(_before)
                self._handles = [before, register_module_forward_hook(_after, always_call=True)]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for handle in self._handles:
                    handle.remove()
                self._handles = []

    def stay(self) -> None:
        """Leave them there for good."""
        if not self._stays:
            self._stays = True
            self.__enter__()

    def stay_for(self, graph: Any) -> None:
        """Leave them there as long as a graph lives."""
        if graph not in self._graphs:
            self._graphs.add(graph)
            self.__enter__()
            weakref.finalize(graph, self.__exit__).atexit = False


HOOKS = ModuleHooks()


def report_unused(region: Region) -> None:
    """Name the rules of a policy's region that are about no operation and no module that has run in it."""
    seen = _roots[region]
    if not region.rules or _reported.get(region) == seen:
        return
    _reported[region] = seen
    unused = [
        rule
        for rule in region.rules
        if rule not in _used.get(region, ())
        and (seen or not re.search(r"[./]", rule.pattern))  # paths have to wait for modules
        and not any(rule.matches(name) for name in _rulable())
    ]
    format_name = str(region.dtype).removeprefix("torch.")
    reports.report_unused(unused, where=f"autocast to {format_name}", paths="a module")


_reported: dict[Region, int] = {}  # with how many roots a policy's region was looked at


def _rulable() -> Iterator[str]:
    yield from (name for name, operation in OPERATIONS.items() if operation.op_class != "keep")
    yield from overrides.CUSTOM


# Which region holds in which module.

_places: dict[Region, dict[int, Region]] = {}  # by a policy's region and a module's id
_prepared: set[Region] = set()
_used: dict[Region, set[Rule]] = {}
_roots: Counter[Region] = Counter()  # how often modules were named


def _place_of(module: nn.Module, region: Region, root: nn.Module) -> Region | None:
    """The region of a module's own that begins where it is called in a region; None where nothing changes."""
    policy = region.policy
    if not policy.rules:
        return None
    places = _places.setdefault(policy, {})
    if id(module) not in places:
        for outermost in (module, root):
            _find_places(outermost, policy, places)
    place = places[id(module)]
    return None if place == region else place


def name_modules(root: nn.Module, region: Region) -> None:
    """Let paths in a region be those within a module, also of parts of it that are called by themselves."""
    policy = region.policy
    places = _places.setdefault(policy, {})
    if policy.rules and id(root) not in places:
        _find_places(root, policy, places)


def _find_places(root: nn.Module, policy: Region, places: dict[int, Region]) -> None:
    _roots[policy] += 1
    found: dict[int, dict[Rule, Rule]] = {}
    modules = list(root.named_modules(remove_duplicate=False))
    for name, module in modules:
        path = name.removeprefix("_orig_mod").removeprefix(".")  # what torch.compile(module) puts around it
        found.setdefault(id(module), {}).update(_rules_at(policy, path) if path else {})
    for _, module in modules:
        if id(module) not in places:
            weakref.finalize(module, places.pop, id(module), None)
        places[id(module)] = _at(policy, found[id(module)])
    _used.setdefault(policy, set()).update(*found.values())


def _rules_at(policy: Region, path: str) -> dict[Rule, Rule]:
    """The policy's rules that a path matches, each with what it comes to there: a rule about all operations, or about
    the one in which its pattern ends.

    >>> rules = Rule("decoder", "full"), Rule("decoder/0/exp", "lower")
    >>> _rules_at(Region(torch.float16, rules), "decoder.0")[rules[1]]
    Rule(pattern='exp', op_class='lower')
    """
    here: dict[Rule, Rule] = {}
    for rule in policy.rules:
        *outer, last = re.split(r"[./]", rule.pattern)
        if rule.matches("", path):
            here[rule] = Rule("*", rule.op_class)
        elif outer and rule.matches(last, path):
            here[rule] = Rule(last, rule.op_class)
    return here


def _at(policy: Region, matched: dict[Rule, Rule]) -> Region:
    """A policy's region where some of its rules come to others."""
    if not matched:
        return policy
    place = Region(policy.dtype, tuple(matched.get(rule, rule) for rule in policy.rules), of=policy.rules)
    if place not in _prepared:
        _prepared.add(place)
        for device_type in DEVICE_TYPES:
            overrides.prepare(place, device_type)
    return place


@contextmanager
def around_graphs(root: nn.Module | None) -> Iterator[None]:
    """Stand around a call of code whose graphs follow rules without the hooks: these are for what runs between them.

    Args:
        root: what is called; paths are those within it, also of parts that are called by themselves.
    """
    region = regions.current()
    if root is not None and region is not None:
        name_modules(root, region)
    _here.parts += 1
    try:
        yield
    finally:
        _here.parts -= 1


# The hooks.


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[tuple[nn.Module, regions.Frame | None]] = []
        self.traced: list[tuple[int, Marks]] = []
        self.parts = 0  # calls of compiled code whose graphs have such rules without these hooks


_here = _Thread()


@unstable.never_compiled
def _before(module: nn.Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        _enter(module)
        return
    marks = _marks_within(id(module)) if _may_have_places() else None
    if marks is not None:
        torch.set_autocast_dtype(MARKED[0], marks[0])
        torch.set_autocast_dtype(MARKED[1], marks[1])


@unstable.never_compiled
def _after(module: nn.Module, inputs: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        _leave(module)
        return
    marks = _marks_behind(id(module)) if _may_have_places() else None
    if marks is not None:
        torch.set_autocast_dtype(MARKED[0], marks[0])
        torch.set_autocast_dtype(MARKED[1], marks[1])


def _enter(module: nn.Module) -> None:
    region = regions.current()
    if region is not None and region.rules:
        _stay_for_another_run()
    root = _here.running[0][0] if _here.running else module
    place = None if region is None else _place_of(module, region, root)
    _here.running.append((module, None if place is None else regions.enter(place)))


def _stay_for_another_run() -> None:
    graph = unstable.checkpointing()
    if graph is not None:
        HOOKS.stay_for(graph)
    elif regions.lost_gradients():
        HOOKS.stay()


def _leave(module: nn.Module) -> None:
    if _here.running and _here.running[-1][0] is module:
        frame = _here.running.pop()[1]
        if frame is not None:
            regions.leave(frame)


# In code that Dynamo traces, checkpointed functions may not change Python state: these functions run while it traces. A
# module is known there by its id, which guards what is compiled, and only where some rule is about modules.


@unstable.constant_when_compiled
def _may_have_places() -> bool:
    region = regions.current()
    policy = None if region is None else region.policy
    if policy is None or not policy.rules:
        return False
    places = _places.get(policy)
    return not places or any(place != policy for place in list(places.values()))


@unstable.constant_when_compiled
def _marks_within(module_id: int) -> Marks | None:
    region, module = regions.current(), unstable.object_with_id(module_id)
    place = None if region is None else _place_of(module, region, module)
    if place is None:
        return None
    if not unstable.traces_dtype_of_autocast():
        if not _here.parts:
            raise _untraceable(module)
        warn_once(
            f"before torch 2.11 rules by the path of a module do not hold in a {type(module).__name__} that is given "
            "16-bit values between two graphs of compiled code."
        )
        return None
    outside = regions.marks_here()
    _here.traced.append((module_id, outside))
    unstable.when_tracing_ends(lambda: regions.set_marks(outside))
    return regions.mark_of(place, traced=True)


@unstable.constant_when_compiled
def _marks_behind(module_id: int) -> Marks | None:
    """What `_marks_within` found; entries above it are of a trace that was given up."""
    found = [index for index, (entered, _) in enumerate(_here.traced) if entered == module_id]
    if not found:
        return None
    outside = _here.traced[found[-1]][1]
    del _here.traced[found[-1] :]
    return outside


def _untraceable(module: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        "rules by the path of a module need a newer torch in compiled code",
        where=f"the call of a {type(module).__name__} that such a rule matches, under torch.compile",
        found=f"torch {torch.__version__}",
        allowed="torch 2.13",
        fix='use torch.compile(model, backend="polyamp"), which applies them in the graph',
    )
