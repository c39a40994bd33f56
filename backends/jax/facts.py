"""The facts about a function that can be read without running it; `polyamp.lint` judges them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.casting import is_low, name_of, trainable
from polyamp.backends.jax.degrees import scaling_of
from polyamp.backends.jax.graphs.capture import Equation, Program, walk
from polyamp.backends.jax.modules import as_pure
from polyamp.backends.jax.operations import OPERATIONS
from polyamp.backends.jax.optimizer import Step
from polyamp.backends.jax.state import holds_state, is_of_optax, is_state, states_in
from polyamp.diagnosis.lint import ClassLoss, Facts, OptimizerState, Product, UserCast
from polyamp.errors import UsageError
from polyamp.flow import decide, parameter
from polyamp.policies import Policy

_CALLED = {"astype": "astype", "array": "jnp.asarray", "convert_element_type": "lax.convert_element_type"}
_LOW = ("float16", "bfloat16")


def facts(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any) -> Facts:
    """Return the facts about a function; see `polyamp.adapters.Adapter.facts`."""
    holder = (_state_of(optimizer, args), args, dict(kwargs))
    equations, scaling = _traced(target, args, dict(kwargs), policy)
    return Facts(
        "jax",
        policy,
        _optimizer(optimizer, holder),
        tuple(_low_parameters(args[0] if args else target)),
        _has_masters(optimizer, holder),
        (),
        tuple(_casts(equations)),
        tuple(_products(equations, policy)),
        tuple(_losses(equations)),
        **scaling,
        beyond=tuple(_beyond(args[0] if args else (), policy)),
    )


def _traced(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy
) -> tuple[list[Equation], dict[str, Any]]:
    """Return the equations as written, and how they scale; both empty if JAX cannot trace the function."""
    if not (callable(fn) and (args or kwargs)):
        return [], {}
    try:
        with policy:
            program = Program(*as_pure(fn, args, kwargs)[:4])
        settings = ((state.settings, state.scalars.scale) for state in states_in((args, kwargs)))
        scales = [scale for one, scale in settings if one.scales]
        places = [index for index, array in enumerate(program.arrays) if any(array is scale for scale in scales)]
        return list(walk(program.closed)), scaling_of(program.closed, places)
    except UsageError as error:
        if error.__cause__ is None:  # an error in the step itself
            raise
        return [], {}


def _casts(equations: list[Equation]) -> Iterator[UserCast]:
    for equation in equations:
        called = "" if equation.is_backward else unstable.users_cast(equation.own)
        dtypes = [unstable.dtype_in(var) for var in (*equation.own.invars, *equation.own.outvars)]
        if called and any(dtype.name in _LOW for dtype in dtypes):
            place = f"{equation.path} {unstable.source_line(equation.own)}".strip()
            yield UserCast(place, _CALLED[called], dtypes[-1].name)


def _products(equations: list[Equation], policy: Policy) -> Iterator[Product]:
    """Yield the products of the forward pass; those of the backward pass have the same sizes in another order."""
    is_whole_step = any(equation.is_backward for equation in equations)  # its regions have decided already
    for equation in equations:
        if equation.name in _PRODUCTS and not equation.is_backward:
            name, written = OPERATIONS[equation.name], unstable.dtype_in(equation.own.outvars[0]).name
            is_lowered = not is_whole_step and decide(policy.rules, name, equation.path).op_class == "lower"
            format_name = policy.compute if is_lowered and written == "float32" else written
            yield Product(equation.path, name, format_name, _sizes(equation))


def _sizes(equation: Equation) -> tuple[int, ...]:
    """Return the channels of a convolution; else the rows, the contracted dimension and the columns of a product."""
    left, right = equation.shapes[:2]
    if equation.name == "conv_general_dilated":
        out_channels, in_channels, *_ = equation.own.params["dimension_numbers"].rhs_spec
        return right[in_channels], right[out_channels]
    (contracting, _), (batched, _) = equation.own.params["dimension_numbers"]
    k, batch = (math.prod(left[axis] for axis in axes) for axes in (contracting, batched))
    return math.prod(left) // (k * batch), k, math.prod(right) // (k * batch)


def _losses(equations: list[Equation]) -> Iterator[ClassLoss]:
    """Yield the logarithms of sums of exponentials, as in a cross-entropy, ``log_softmax`` and ``logsumexp``."""
    divisor = _divisor(equations)
    for equation in equations:
        total = equation.source if equation.name == "log" and not equation.is_backward else None
        terms = total.source if total is not None and total.name == "reduce_sum" else None
        if total is not None and terms is not None and terms.name == "exp":
            (shape,) = terms.shapes
            classes = math.prod(shape[axis] for axis in total.own.params["axes"])
            yield ClassLoss(equation.path, classes, divisor or math.prod(shape) // classes)


def _divisor(equations: list[Equation]) -> int | None:
    """Return the divisor of the sums in the loss: 1 for a plain sum; None if it depends on data, such as a mask."""
    means = [equation for equation in equations if _is_mean(equation) and equation.own.outvars[0].aval.shape == ()]
    if not means:
        return 1
    divisor = 1.0
    equation: Equation | None = means[-1]
    while equation is not None and (equation.name == "reduce_sum" or _is_mean(equation)):
        if _is_mean(equation):
            if unstable.is_variable(equation.own.invars[1]):
                return None
            divisor *= float(equation.own.invars[1].val)
        equation = equation.source
    return round(divisor)


def _is_mean(equation: Equation) -> bool:
    source = equation.source
    return not equation.is_backward and equation.name == "div" and source is not None and source.name == "reduce_sum"


def _low_parameters(params: Any) -> Iterator[str]:
    """Yield the names of the 16-bit arrays that do not belong to an optimizer's state."""
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=lambda node: is_state(node) or is_of_optax(node)):
        if is_low(leaf):
            yield name_of(path)


def _beyond(params: Any, policy: Policy) -> Iterator[str]:
    """Yield the names of the float32 arrays with numbers that the compute format cannot hold."""
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=lambda node: is_state(node) or is_of_optax(node)):
        is_known = isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, jax.core.Tracer)
        largest = float(abs(leaf).max()) if is_known and leaf.size and leaf.dtype == np.float32 else 0.0
        if parameter(largest, policy.compute).unfit:
            yield name_of(path)


def _optimizer(optimizer: Any, holder: Any) -> OptimizerState:
    """Return the tool that scales the loss: polyamp (even if only the arguments show it) or the framework's own."""
    if isinstance(getattr(optimizer, "step", None), Step) or holds_state(holder):
        return "wrapped"
    if any(map(_is_native_scaler, jax.tree.leaves(holder, is_leaf=_is_native_scaler))):
        return "native scaler"
    return "plain" if optimizer is not None else ""


def _state_of(optimizer: Any, args: tuple[Any, ...]) -> Any:
    """Return the first state of an optax optimizer, which shows its parts; for any other object, the object."""
    init = getattr(optimizer, "init", None)
    if not (callable(init) and args):
        return optimizer
    try:
        return jax.eval_shape(init, trainable(args[0]))
    except (TypeError, ValueError, AttributeError, UsageError):  # the first argument does not hold its parameters
        return optimizer


def _has_masters(optimizer: Any, holder: Any) -> bool:
    """Return whether master weights are kept, by the state or by the settings of the optimizer."""
    step = getattr(optimizer, "step", None)
    kept = any(state.master_weights is not None for state in states_in(holder))
    return kept or (isinstance(step, Step) and step.master_weights)


def _is_native_scaler(node: object) -> bool:
    """Return whether this is a loss scale of flax or jmp, by its name: neither package is imported."""
    names = {(base.__module__.partition(".")[0], base.__name__) for base in type(node).__mro__}
    return not names.isdisjoint(_NATIVE_SCALERS)


_NATIVE_SCALERS = {("flax", "DynamicScale"), ("jmp", "DynamicLossScale"), ("jmp", "StaticLossScale")}
_PRODUCTS = ("dot_general", "conv_general_dilated")
