"""`explain`: the plan of a rewritten module, or of one run under autocast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyamp.backends.torch.graphs.capture import root_of
from polyamp.backends.torch.graphs.program import Program, check_no_autocast
from polyamp.backends.torch.graphs.rewrite import checked, usable
from polyamp.errors import InvalidValueError, PolyampError
from polyamp.plan import Plan
from polyamp.policies import Policy


def explain(
    module: Callable[..., Any],
    *inputs: Any,
    policy: Policy | str | None = None,
    engine: str | None = None,
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
    chosen, fn = usable(policy), checked(module)
    if engine not in (None, *ENGINES):
        raise _no_engine(engine)
    if engine == "autocast":
        return _recorded(fn, inputs, kwargs, chosen)
    check_no_autocast()
    try:
        return captured_plan(fn, inputs, kwargs, chosen)
    except PolyampError as error:
        refusal = error  # handled outside, because what the run keeps would keep the error too
    return _recorded_instead(fn, inputs, kwargs, chosen, refusal)


ENGINES = ("rewrite", "autocast")


def captured_plan(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy) -> Plan:
    """Return the plan of `rewrite`."""
    return Program(fn, policy, args, kwargs, root=root_of(fn)).plan


def _recorded(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy, why: str = "") -> Plan:
    from polyamp.backends.torch.graphs.recorded import recorded  # training does not need it

    return recorded(fn, args, kwargs, policy, why=why)


def _recorded_instead(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy, error: PolyampError
) -> Plan:
    """Return the plan of a recorded run, or raise the error of the capture if it does not run either."""
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
        fix='leave it out, or use engine="autocast" for a plan of polyamp.autocast',
    )
