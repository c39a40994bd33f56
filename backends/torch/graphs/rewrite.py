"""`rewrite` and `explain`: a module as a graph with explicit casts, over the module's own parameters, and its plan."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from polyamp.backends.torch import unstable
from polyamp.backends.torch.autocast.plan import plan_of_run
from polyamp.backends.torch.graphs.batch import footprint_of, rewritten
from polyamp.backends.torch.graphs.capture import root_of
from polyamp.backends.torch.graphs.program import Program, check_no_autocast, mode_of
from polyamp.backends.torch.graphs.writing import HOLDER
from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    PolyampError,
    UsageError,
    check_compute,
    not_traced,
    warn_once,
)
from polyamp.formats import format_of
from polyamp.nesting import check_tree
from polyamp.plan import Decider, Plan
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.without_effect import report_nothing_lowered, report_refused, report_unused


def rewrite(
    module: Callable[..., Any], *example_inputs: Any, policy: Policy | str | None = None, **kwargs: Any
) -> Rewritten:
    """Return a module as a graph whose operations run in the formats of a policy, with explicit casts.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Softmax(-1))
    >>> fast = rewrite(model, torch.ones(3, 4), policy="mixed_bfloat16")
    >>> [(op.name, op.format, op.where.split()[0]) for op in fast.plan.operations]
    [('matmul', 'bfloat16', '0'), ('softmax', 'float32', '1')]
    >>> fast(torch.ones(5, 4)).dtype, fast.get_parameter("0.weight") is model[0].weight
    (torch.float32, True)

    Args:
        module: a ``torch.nn.Module``, one of its methods, or a function of tensors.
        *example_inputs: example arguments, to capture the module now; without them the first call captures it. Later
            calls may have other sizes, unless the code depends on a size. Nothing is computed, so meta and fake tensors
            work too.
        policy: a policy or its name, bound now; None is the current policy.
        **kwargs: example keyword arguments.

    Returns:
        A `Rewritten`, which is a ``torch.fx.GraphModule`` with an attribute ``plan``. It shares the module's parameters
        and buffers, and the names in its ``state_dict``; its results have the module's dtypes. Buffers that the code
        assigns are assigned after each call. Except for these and training modes, attributes that the module's code
        reads keep their values from the capture.

    Raises:
        InvalidTypeError: ``module`` is not a module or function, or arguments or results hide tensors.
        InvalidValueError: the module does not accept these arguments.
        UnsupportedError: torch functions do not compute in the format.
        UsageError: the code cannot be captured as one graph, assigns attributes that are not tensors, or is in a
            `torch.autocast` region.

    Warns:
        PolyampWarning: nothing was lowered, or a rule matched nothing.
    """
    rewritten = Rewritten(check_module(module), check_policy(policy))
    if example_inputs or kwargs:
        rewritten.trace(example_inputs, kwargs)
    return rewritten


def explain(
    module: Callable[..., Any],
    *inputs: Any,
    policy: Policy | str | None = None,
    engine: str | None = None,
    examples: int | None = None,
    **kwargs: Any,
) -> Plan:
    """Return the format of every operation of a module, with its place and the reason.

    >>> import torch
    >>> plan = explain(lambda x: (x @ x).exp(), torch.ones(2, 2, device="meta"), policy="mixed_float16")
    >>> [(op.name, op.format, op.reason) for op in plan.operations]
    [('matmul', 'float16', 'table'), ('exp', 'float32', 'table')]

    Args:
        module: as for `rewrite`.
        *inputs: its arguments; meta and fake tensors work too.
        policy: a policy or its name; None is the current policy.
        engine: ``"rewrite"``, the default, returns the plan of `rewrite`, and computes nothing. ``"autocast"`` records
            one forward pass under `polyamp.autocast`: on tensors without data if the module's code allows that, else a
            real one, whose changes are undone. A module that cannot be rewritten is recorded too; then the plan's
            ``engine`` has the reason.
        examples: as for `polyamp.explain`.
        **kwargs: its keyword arguments.

    Returns:
        A `Plan`. Its ``bytes_saved`` counts what autograd keeps, including parameters and arguments; None if one of the
        user's operators has no fake kernel.

    Raises:
        InvalidTypeError: ``module`` is not a module or function.
        InvalidValueError: the engine is unknown, or the module does not accept these arguments.
        UnsupportedError: torch functions do not compute in the format.
        UsageError: the call is in a `torch.autocast` region.
    """
    chosen, fn = check_policy(policy), check_module(module)
    if engine not in (None, "rewrite", "autocast"):
        raise InvalidValueError(
            "unknown engine",
            where="explain(module, engine=)",
            found=repr(engine),
            allowed="rewrite, autocast",
            fix='leave it out, or use engine="autocast" for a plan of polyamp.autocast',
        )
    check_tree((inputs, kwargs), "explain(fn, *args)", deepest=200)

    def measured(plan: Plan, ran: Callable[..., Any], under: Policy = chosen) -> Plan:
        if examples is None:
            return plan
        footprint = footprint_of(ran, inputs, kwargs, under, examples)
        plain = footprint_of(fn, inputs, kwargs, _FLOAT32, examples)
        return replace(plan, footprint=footprint, footprint_float32=plain)

    if engine == "autocast":
        return measured(plan_of_run(fn, inputs, kwargs, chosen), fn)
    check_no_autocast()
    try:
        program = Program(fn, chosen, inputs, kwargs, root=root_of(fn))
    except PolyampError as error:
        refusal = error  # handled outside, because what the run keeps would keep the error too
    else:
        return measured(program.plan, rewritten(program, fn), _FLOAT32)
    try:
        plan = plan_of_run(fn, inputs, kwargs, chosen, why=str(refusal).partition("\n")[0])
    except InvalidValueError:
        raise refusal from None  # it does not run either
    if not plan.operations:
        raise refusal
    return measured(plan, fn)


def rewritten_for(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Any:
    """Return a module as a graph with explicit casts; see `polyamp.backends.torch.rewrite`."""
    return rewrite(fn, *args, policy=policy, **kwargs)


def planned(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    engine: str | None = None,
    examples: int | None = None,
) -> Plan:
    """Return the plan of a module; see `polyamp.backends.torch.explain`."""
    return explain(fn, *args, policy=policy, engine=engine, examples=examples, **kwargs)


_FLOAT32 = make_policy("float32")


class Rewritten(GraphModule):
    """A rewritten module: a graph over the original's own submodules, parameters and buffers."""

    # To train, save or move it is to train, save or move the original. ``graph`` is for the first arguments. Arguments
    # that it does not fit (another rank or dtype, a size for which the code behaves differently) and the other training
    # mode get further graphs when they come.

    _first: Any  # runs ``graph``: a method of the class, which GraphModule makes for each object

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
        """The plan for the first arguments."""
        if not self.programs:
            raise not_traced(where="rewrite(module).plan")
        return self.programs[0].plan

    def train(self, mode: bool = True) -> Rewritten:
        """Set training mode here and in the module that was rewritten."""
        self._source[1].train(mode)
        super().train(mode)
        return self

    def recompile(self) -> Any:
        """Generate the code of ``graph`` again; see `torch.fx.GraphModule.recompile`."""
        code = super().recompile()
        kind = type(self)
        kind._first = kind.forward
        kind.forward = Rewritten._run
        weakref.finalize(self, unstable.drop_source, kind._first.__code__.co_filename).atexit = False
        return code

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Add a graph for these arguments."""
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
            warn_once(_TOO_MANY.format(name=name, count=_MANY))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph that fits the arguments."""
        check_no_autocast()
        found = self._fitting(args, kwargs)
        if found is None:
            return _without_compiling(self, args, kwargs)
        run: Any = self._views[found - 1] if found else self._first
        results = run(*args, **kwargs)
        names = self.programs[found].assigned
        return _assign(self._source[1], names, *results) if names else results

    def _fitting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the index of the program for these arguments and modes; in compiled code, for the modes alone."""
        mode = mode_of(self._source[1])
        there = [number for number, program in enumerate(self.programs) if program.mode == mode]
        if torch.compiler.is_compiling():
            return there[0] if there else None
        if not all(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
            check_tree((args, kwargs), "a rewritten function", deepest=200)  # the next line goes along every path
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return next((number for number in there if self.programs[number].fits(leaves, spec)), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewritten:
        """Return a rewritten copy of the original; the copy is captured when it is called."""
        fn, _, policy = self._source
        return Rewritten(copy.deepcopy(fn, memo), policy)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a rewritten module cannot be pickled, because it holds the original's Python code",
            where="pickle, torch.save",
            fix="save its state_dict(), which is that of the original, and rewrite the loaded model",
        )


def _assign(root: nn.Module, names: Sequence[str], results: Any, values: Sequence[Any]) -> Any:
    """Set the module's attributes of these names to values; return ``results``."""
    for name, value in zip(names, values, strict=True):
        path, _, attribute = name.rpartition(".")
        setattr(root.get_submodule(path), attribute, value)
    return results


_MANY = 16
_TOO_MANY = (
    "{name} was rewritten for more than {count} kinds of arguments, each of which stays in memory: every number is "
    "another kind, and so is a rank, a dtype, and a size that the code depends on. Pass numbers as tensors."
)


@unstable.not_traced
def _without_compiling(rewritten: Rewritten, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a graph for these arguments and run it; `torch.compile` makes a graph break here."""
    rewritten.trace(args, kwargs)
    return rewritten(*args, **kwargs)


def _view(rewritten: Rewritten, graph: Graph) -> GraphModule:
    """Return another graph over the same submodules, parameters and buffers."""
    view = GraphModule(rewritten, graph, "Rewritten")
    view._modules, view._parameters, view._buffers = rewritten._modules, rewritten._parameters, rewritten._buffers
    return view


def check_module(module: Any) -> Any:
    """Return ``module``; refuse what cannot be rewritten."""
    if callable(module) and not isinstance(module, type | Rewritten):
        return module
    raise InvalidTypeError(
        "the argument is not a module or function of tensors"
        if not isinstance(module, Rewritten)
        else "the module is rewritten already",
        where="rewrite(module)",
        found=f"{module!r}" if isinstance(module, type) else type(module).__qualname__,
        allowed="a torch.nn.Module, one of its methods, or a function of tensors",
        fix="pass the model itself, then its arguments",
    )


def check_policy(policy: Policy | str | None) -> Policy:
    """Return a policy, the current one for None; refuse compute formats that torch functions lack."""
    chosen = make_policy(policy)
    check_compute(chosen.compute, framework="PyTorch", where="rewrite(module, policy=)", instead=_INSTEAD)
    return chosen


_INSTEAD = {
    "tensorfloat32": 'it is a way to multiply float32: torch.set_float32_matmul_precision("high")',
    "float64": "compute in float64 throughout: model.double()",
}


def report(decider: Decider, name: str) -> None:
    """Report once what had no effect in the graph of a function with this name."""
    policy = decider.policy
    report_unused(decider.unused, where=name, paths="a module", of=policy)
    report_refused(decider.refused, where=name, of=policy)
    if format_of(policy.compute).is_low and not decider.lowered:
        report_nothing_lowered("rewrite", policy.compute, where=name)
