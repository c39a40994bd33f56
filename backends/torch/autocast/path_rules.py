"""Applies rules to the paths of modules: a module whose path a rule matches runs in another region.

Inside that module the rule names operations instead of the module, so that everything else (marks for compiled code,
functions that run again) is as in any region. With ``rules={"decoder": "full", "head/softmax": "lower"}``:

- inside ``decoder`` the region has the rules ``*: full`` and ``head/softmax: lower``: every operation runs in float32;
- inside ``head`` it has ``decoder: full`` and ``softmax: lower``;
- elsewhere the region of the policy holds.

Paths start inside the outermost module that was called in a region. From the first region with rules on, hooks on
all modules enter and leave these regions; Dynamo inlines the hooks.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter
from typing import Any

import torch
from torch import nn

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast import overrides, regions
from polyamp.backends.torch.autocast.regions import DEVICE_TYPES, MARKED, Marks, Region, mark_of, marks_here, set_marks
from polyamp.backends.torch.dtypes import name_of
from polyamp.backends.torch.tracking import ModuleHooks, paths_in
from polyamp.errors import UnsupportedError
from polyamp.operations import OPERATIONS
from polyamp.rules import Rule
from polyamp.without_effect import report_unused as report_rules

# Which region holds in which module.

_regions: dict[Region, dict[int, Region]] = {}  # by a policy's region and a module's id
_prepared: set[Region] = set()
_used: dict[Region, set[Rule]] = {}
_roots: Counter[Region] = Counter()  # how often the modules of a root were named


def _region_in(module: nn.Module, region: Region, root: nn.Module) -> Region | None:
    """Return the region to enter when a module is called in a region; None to stay in that region."""
    whole = region.whole
    if not whole.rules:
        return None
    found = _regions.setdefault(whole, {})
    if id(module) not in found:
        for outermost in (module, root):
            _find_regions(outermost, whole, found)
    inside = found[id(module)]
    return None if inside == region else inside


def _find_regions(root: nn.Module, whole: Region, regions: dict[int, Region]) -> None:
    _roots[whole] += 1
    matched: dict[int, dict[Rule, Rule]] = {}
    modules = list(paths_in(root))
    for path, module in modules:
        matched.setdefault(id(module), {}).update(_rules_at(whole, path) if path else {})
    for _, module in modules:
        if id(module) not in regions:
            weakref.finalize(module, regions.pop, id(module), None)
        regions[id(module)] = _region_with(whole, matched[id(module)])
    _used.setdefault(whole, set()).update(*matched.values())


def _rules_at(whole: Region, path: str) -> dict[Rule, Rule]:
    """Return the policy's rules that match a path, each with the rule that replaces it there."""
    here: dict[Rule, Rule] = {}
    for rule in whole.rules:
        *outer, last = re.split(r"[./]", rule.pattern)
        if rule.matches("", path):
            here[rule] = Rule("*", rule.op_class)
        elif outer and rule.matches(last, path):
            here[rule] = Rule(last, rule.op_class)
    return here


def _region_with(whole: Region, matched: dict[Rule, Rule]) -> Region:
    """Return a policy's region with ``matched`` rules replaced."""
    if not matched:
        return whole
    region = Region(whole.dtype, tuple(matched.get(rule, rule) for rule in whole.rules), rules_outside=whole.rules)
    if region not in _prepared:
        _prepared.add(region)
        for device_type in DEVICE_TYPES:
            overrides.prepare(region, device_type)
    return region


# Rules that match nothing.

_reported: dict[Region, int] = {}  # the count of roots when a policy's region was last checked


def report_unused(region: Region) -> None:
    """Warn of a policy's rules that match neither an operation nor a module that ran in the region."""
    seen = _roots[region]
    if not region.rules or _reported.get(region) == seen:
        return
    _reported[region] = seen
    rulable = [name for name, operation in OPERATIONS.items() if operation.op_class != "keep"]
    unused = [
        rule
        for rule in region.rules
        if rule not in _used.get(region, ())
        and (seen or not re.search(r"[./]", rule.pattern))  # a path can only match once modules have run
        and not any(rule.matches(name) for name in rulable)
    ]
    report_rules(unused, where=f"autocast to {name_of(region.dtype)}", paths="a module")


# The hooks.


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[tuple[nn.Module, regions.Frame | None]] = []  # outermost first, with the region entered
        self.traced: list[tuple[int, Marks]] = []


_here = _Thread()


@unstable.never_compiled
def _before(module: nn.Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        _enter(module)
        return
    _trace(_marks_within(id(module)) if _may_change_regions() else None)


@unstable.never_compiled
def _after(module: nn.Module, inputs: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        if _here.running and _here.running[-1][0] is module:  # else it began before the hooks did
            _, frame = _here.running.pop()
            if frame is not None:
                regions.leave(frame)
        return
    _trace(_marks_behind(id(module)) if _may_change_regions() else None)


def _trace(marks: Marks | None) -> None:
    """Put marks into the graph that Dynamo traces."""
    if marks is not None:
        torch.set_autocast_dtype(MARKED[0], marks[0])
        torch.set_autocast_dtype(MARKED[1], marks[1])


HOOKS = ModuleHooks(_before, _after)


def _enter(module: nn.Module) -> None:
    region = regions.current()
    if region is not None and region.rules:
        _stay_for_another_run()
    root = _here.running[0][0] if _here.running else module
    inside = None if region is None else _region_in(module, region, root)
    _here.running.append((module, None if inside is None else regions.enter(inside)))


def _stay_for_another_run() -> None:
    """Keep the hooks while a checkpointed function can run again in a backward pass."""
    graph = unstable.checkpointing()
    if graph is not None:
        HOOKS.stay_for(graph)
    elif regions.lost_gradients():  # reentrant checkpointing, whose graph is not known here
        HOOKS.stay()


# The hooks in code that Dynamo traces. There, checkpointed functions may not change Python's state. So the functions
# below run while Dynamo traces, and leave constants in the graph. They know a module by its id, which becomes a guard
# of the compiled code; so they are only asked if some rule is about modules.


@unstable.constant_when_compiled
def _may_change_regions() -> bool:
    region = regions.current()
    whole = None if region is None else region.whole
    if whole is None or not whole.rules:
        return False
    found = _regions.get(whole)
    return not found or any(inside != whole for inside in list(found.values()))


@unstable.constant_when_compiled
def _marks_within(module_id: int) -> Marks | None:
    """Return the marks to set before a module; None if no other region begins there."""
    region, module = regions.current(), unstable.object_with_id(module_id)
    inside = None if region is None else _region_in(module, region, module)
    if inside is None:
        return None
    if not unstable.traces_dtype_of_autocast():
        raise UnsupportedError(
            "rules by the path of a module need a newer torch in compiled code",
            where=f"the call of a {type(module).__name__} that such a rule matches, under torch.compile",
            found=f"torch {torch.__version__}",
            allowed="torch 2.13",
            fix="compile polyamp.rewrite(model, *inputs), which applies them in the graph",
        )
    outside = marks_here()
    _here.traced.append((module_id, outside))
    unstable.when_tracing_ends(lambda: set_marks(outside))
    return mark_of(inside, traced=True)


@unstable.constant_when_compiled
def _marks_behind(module_id: int) -> Marks | None:
    """Return the marks to restore after a module, and drop newer entries, which abandoned traces have left."""
    found = [index for index, (entered, _) in enumerate(_here.traced) if entered == module_id]
    if not found:
        return None
    outside = _here.traced[found[-1]][1]
    del _here.traced[found[-1] :]
    return outside
