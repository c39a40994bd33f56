"""`rewrite`: a module as a graph with explicit casts, which trains the module's own parameters."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import Graph, GraphModule

from polyamp.backends.torch import unstable
from polyamp.backends.torch.graphs.attributes import HOLDER
from polyamp.backends.torch.graphs.capture import root_of
from polyamp.backends.torch.graphs.program import Program, check_no_autocast, mode_of
from polyamp.backends.torch.user_code import users_level
from polyamp.deciding import Decider
from polyamp.errors import InvalidTypeError, InvalidValueError, PolyampError, UnsupportedError, UsageError, warn_once
from polyamp.formats import format_of
from polyamp.plan import Plan
from polyamp.policy import Policy
from polyamp.policy import policy as make_policy
from polyamp.refusals import not_traced
from polyamp.reports import report_nothing_lowered, report_refused, report_unused
from polyamp.rules import Rule


def rewrite(
    module: Callable[..., Any], *example_inputs: Any, policy: Policy | str | None = None, **kwargs: Any
) -> Rewritten:
    """A module whose operations run as a policy says, as a graph in which every cast is written down.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Softmax(-1))
    >>> fast = rewrite(model, torch.ones(3, 4), policy="mixed_bfloat16")
    >>> [(op.name, op.format, op.where.split()[0]) for op in fast.plan.operations]
    [('matmul', 'bfloat16', '0'), ('softmax', 'float32', '1')]
    >>> fast(torch.ones(5, 4)).dtype, fast.get_parameter("0.weight") is model[0].weight
    (torch.float32, True)

    Args:
        module: a ``torch.nn.Module``, one of its methods, or a function of tensors.
        *example_inputs: arguments, to capture it now; else the first call does. Sizes that the code does not look at
            may be others in later calls. Nothing is computed: meta and fake tensors will do.
        policy: a policy or its name, bound now; None is the current policy.
        **kwargs: example keyword arguments.

    Returns:
        A `Rewritten`: a ``torch.fx.GraphModule`` with an attribute ``plan``. Its parameters and buffers are the
        module's, and so are the names in its ``state_dict``; results have the dtypes that the module gives. What the
        module's code finds in its own attributes, other than training modes, is taken as it is at the capture.

    Raises:
        InvalidTypeError: not a module or function, or arguments or results that hide tensors.
        InvalidValueError: the module does not take these arguments.
        UnsupportedError: a format that torch functions do not compute in.
        UsageError: the code cannot be captured whole, assigns attributes, or stands under `torch.autocast`.

    Warns:
        PolyampWarning: nothing was lowered, or a rule matched nothing.
    """
    rewritten = Rewritten(_checked(module), usable(policy))
    if example_inputs or kwargs:
        rewritten.trace(example_inputs, kwargs)
    return rewritten


def explain(
    module: Callable[..., Any],
    *inputs: Any,
    policy: Policy | str | None = None,
    engine: str | None = None,
    **kwargs: Any,
) -> Plan:
    """What every operation of a module runs in, where and why.

    >>> plan = explain(lambda x: torch.exp(x @ x), torch.ones(2, 2, device="meta"), policy="mixed_float16")
    >>> [(op.name, op.format, op.reason) for op in plan.operations]
    [('matmul', 'float16', 'table'), ('exp', 'float32', 'table')]

    Args:
        module: as for `rewrite`.
        *inputs: its arguments; meta and fake tensors will do.
        policy: a policy or its name; None is the current policy.
        engine: ``"rewrite"``, the default, plans what `rewrite` gives, and computes nothing. ``"autocast"`` records one
            run under `polyamp.autocast`, of the forward pass, on tensors without data where the module's code allows
            that, else a real one which leaves nothing changed. A module that cannot be rewritten is recorded too; the
            plan's ``engine`` says so, and why.
        **kwargs: its keyword arguments.

    Returns:
        A `Plan`. ``bytes_saved`` are what autograd keeps, parameters and arguments included; None where an operator
        of the user's has no fake kernel.

    Raises:
        InvalidTypeError: not a module or function.
        InvalidValueError: another engine, or the module does not take these arguments.
        UnsupportedError: a format that torch functions do not compute in.
        UsageError: the call stands under `torch.autocast`.
    """
    chosen, fn = usable(policy), _checked(module)
    if engine not in (None, *ENGINES):
        raise _no_engine(engine)
    if engine == "autocast":
        return _recorded(fn, inputs, kwargs, chosen)
    check_no_autocast()
    try:
        return captured_plan(fn, inputs, kwargs, chosen)
    except PolyampError as error:
        refusal = error  # handled outside: what is kept of the run would keep it too
    return _recorded_instead(fn, inputs, kwargs, chosen, refusal)


ENGINES = ("rewrite", "autocast")


def captured_plan(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy) -> Plan:
    """The plan of what `rewrite` gives.

    Raises:
        PolyampError: it gives nothing; see there.
    """
    return Program(fn, policy, args, kwargs, root=root_of(fn)).plan


def _recorded(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy, why: str = "") -> Plan:
    from polyamp.backends.torch.recording.explained import recorded  # nothing of it is needed to train

    return recorded(fn, args, kwargs, policy, why=why)


def _recorded_instead(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy, error: PolyampError
) -> Plan:
    """The plan of one run, where there is no graph; the first error where it does not run either."""
    try:
        plan = _recorded(fn, args, kwargs, policy, why=str(error).partition("\n")[0])
    except InvalidValueError:
        raise error from None
    if not plan.operations:
        raise error
    return plan


def _no_engine(engine: object) -> InvalidValueError:
    return InvalidValueError(
        "unknown engine",
        where="explain(module, engine=)",
        found=repr(engine),
        allowed=", ".join(ENGINES),
        fix='leave it out, or give engine="autocast" for what polyamp.autocast does',
    )


class Rewritten(GraphModule):
    """What `rewrite` gives: a graph over the original's own submodules, parameters and buffers.

    Training, saving and moving it is training, saving and moving the original. ``graph`` is made for the first
    arguments. Others that it does not fit (another rank or dtype, a size for which the code takes another way), and
    another training mode, get graphs of their own when they come.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout())
    >>> fast = rewrite(model, torch.ones(3, 4), policy="mixed_bfloat16")
    >>> fast.eval()(torch.ones(5, 4)).shape, model.training, len(fast.programs)
    (torch.Size([5, 2]), False, 2)

    Attributes:
        programs: what was decided, for each graph.
    """

    _first: Any  # what runs ``graph``: as a method of a class that this object has to itself

    def __init__(self, fn: Callable[..., Any], policy: Policy) -> None:
        root, graph = root_of(fn), Graph()
        graph.output(())
        super().__init__(nn.Module(), graph, "Rewritten")
        self._source = (fn, root, policy)  # a tuple, so that the original does not become a submodule
        self.programs: list[Program] = []
        self._views: list[Any] = []
        self._modules.update({**root._modules, HOLDER: nn.Module()})
        self._parameters, self._buffers = root._parameters, root._buffers
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self.training = root.training

    @property
    def plan(self) -> Plan:
        """The plan for the arguments that were seen first.

        Raises:
            UsageError: none were seen yet.
        """
        if not self.programs:
            raise not_traced(where="rewrite(module).plan")
        return self.programs[0].plan

    def train(self, mode: bool = True) -> Rewritten:
        """Set the mode of the original and of all its parts."""
        self._source[1].train(mode)
        super().train(mode)
        return self

    def recompile(self) -> Any:
        """Make code of ``graph`` as it is now; see `torch.fx.GraphModule.recompile`."""
        code = super().recompile()
        kind = type(self)
        kind._first = kind.forward
        kind.forward = Rewritten._run
        weakref.finalize(self, unstable.drop_source, kind._first.__code__.co_filename).atexit = False
        return code

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make a graph for these arguments too."""
        fn, root, policy = self._source
        program = Program(fn, policy, args, kwargs, root=root, name=str(len(self.programs)))
        name = getattr(fn, "__name__", type(fn).__name__)
        self.get_submodule(HOLDER).add_module(program.name, program.attributes.as_module())
        if self.programs:
            self._views.append(_view(self, program.graph))
        else:
            self.graph = program.graph
            report(program.decider, name)
        self.programs.append(program)
        if len(self.programs) > _MANY:
            warn_once(_TOO_MANY.format(name=name, count=_MANY), stacklevel=users_level())

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The graph that fits the arguments."""
        check_no_autocast()
        found = self._fitting(args, kwargs)
        if found is None:
            return _without_compiling(self, args, kwargs)
        run: Any = self._views[found - 1] if found else self._first
        return run(*args, **kwargs)

    def _fitting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The number of the program for such arguments in this mode; while compiling, of the first in this mode."""
        mode = mode_of(self._source[1])
        there = [number for number, program in enumerate(self.programs) if program.mode == mode]
        if torch.compiler.is_compiling():
            return there[0] if there else None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return next((number for number in there if self.programs[number].fits(leaves, spec)), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewritten:
        """A copy over a copy of the original; it captures that when it is called."""
        fn, _, policy = self._source
        return Rewritten(copy.deepcopy(fn, memo), policy)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a rewritten module is not pickled: it has the original's Python code in it",
            where="pickle, torch.save",
            fix="save its state_dict(), which is the original's, and rewrite the loaded model",
        )


_MANY = 16
_TOO_MANY = (
    "{name} was rewritten for more than {count} kinds of arguments, each of which stays in memory: numbers among the "
    "arguments make a kind each, and so do ranks, dtypes and sizes that the code looks at. Give numbers as tensors."
)


@unstable.not_traced
def _without_compiling(rewritten: Rewritten, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a graph for these arguments, in this mode, and run it; `torch.compile` breaks its own graph here."""
    rewritten.trace(args, kwargs)
    return rewritten(*args, **kwargs)


def _view(rewritten: Rewritten, graph: Graph) -> GraphModule:
    """Another graph over the same submodules, parameters and buffers."""
    view = GraphModule(rewritten, graph, "Rewritten")
    view._modules, view._parameters, view._buffers = rewritten._modules, rewritten._parameters, rewritten._buffers
    return view


def _checked(module: Any) -> Any:
    if callable(module) and not isinstance(module, type | Rewritten):
        return module
    raise InvalidTypeError(
        "no module or function of tensors" if not isinstance(module, Rewritten) else "the module is rewritten already",
        where="rewrite(module)",
        found=f"{module!r}" if isinstance(module, type) else type(module).__qualname__,
        allowed="a torch.nn.Module, one of its methods, or a function of tensors",
        fix="give the model itself, then its arguments",
    )


def usable(policy: Policy | str | None) -> Policy:
    """The policy, in whose format a graph of torch functions can run; None is the current one.

    Raises:
        UnsupportedError: it computes in another format.
    """
    chosen = make_policy(policy)
    _check_format(chosen.compute)
    return chosen


def _check_format(compute: str) -> None:
    if compute in ("float32", "float16", "bfloat16"):
        return
    ways = {
        "tensorfloat32": 'it is a way to multiply float32: torch.set_float32_matmul_precision("high")',
        "float64": "compute in float64 throughout: model.double()",
    }
    raise UnsupportedError(
        "PyTorch's operations cannot be cast to this format",
        where="rewrite(module, policy=)",
        found=compute,
        allowed="float16, bfloat16, float32",
        fix=ways.get(compute, "choose one of these formats"),
    )


def report(decider: Decider, name: str) -> None:
    """Report once what had no effect in the graph of a function with this name."""
    policy, level = decider.policy, users_level()
    report_rules(decider.unused, policy, name)
    report_refused(decider.refused, where=name, of=policy, stacklevel=level)
    if format_of(policy.compute).is_low and not decider.lowered:
        report_nothing_lowered("rewrite", policy.compute, where=name, stacklevel=level)


def report_rules(rules: Iterable[Rule], policy: Policy, name: str) -> None:
    """Report once each rule that matched nothing in what has this name."""
    report_unused(rules, where=name, paths="a module", of=policy, stacklevel=users_level())
