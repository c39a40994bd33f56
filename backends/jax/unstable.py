"""Everything that uses parts of JAX which can change in any release: jaxprs, their equations, primitives' parameters.

Tested from JAX 0.9 on. JAX does not promise that ``jax.extend`` (JEP 15856) and the parameters of primitives stay the
same. Differences between releases are handled here and nowhere else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.extend.backend
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.extend.source_info_util import current_name_stack, summarize, user_context
from jax.tree_util import default_registry

from polyamp.errors import is_users
from polyamp.operations import OPERATIONS

DEFAULT = lax.Precision.DEFAULT


def opened(closed: Any) -> tuple[Any, Sequence[Any]]:
    """Return a jaxpr and its constants. JAX 0.11 made the closed and the open jaxpr one class."""
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def without_constants(closed: Any) -> tuple[Any, Sequence[Any]]:
    """Return an open jaxpr that takes its constants as its first arguments, and the constants."""
    jaxpr, constants = opened(closed)
    if not constants:
        return jaxpr, ()
    count = len(constants)
    specs = [var.aval.update(weak_type=False) for var in jaxpr.invars]
    again = jax.make_jaxpr(lambda *args: jax.core.eval_jaxpr(jaxpr, args[:count], *args[count:]))(*constants, *specs)
    return opened(again)[0], constants


def dtype_in(variable: Any) -> Any:
    """Return the dtype of a variable in a jaxpr; None if it is not an array (a token, a reference to mutable state)."""
    aval = variable.aval
    return aval.dtype if isinstance(aval, jax.core.ShapedArray) else None


def varying_axes(array: Any) -> frozenset[Any]:
    """Return the axes of ``shard_map`` along which an array can differ; none are known under ``check_vma=False``."""
    aval = jax.typeof(array)
    own = getattr(aval, "manual_axis_type", None)  # from JAX 0.10 on
    axes: frozenset[Any] = aval.vma if own is None else own.varying
    return axes


def converted(array: Any, dtype: Any, *, weak_type: bool = False) -> Any:
    """Return an array in another dtype. For a NumPy array the traced program gets no operation."""
    if isinstance(array, jax.Array):
        return lax.convert_element_type_p.bind(array, new_dtype=dtype, weak_type=weak_type, sharding=None)
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(dtype)


def place_of(equation: Any) -> AbstractContextManager[None]:
    """Return a context that gives all operations bound in it the scope and source line of an equation."""
    info = equation.source_info
    place: AbstractContextManager[None] = user_context(
        info.traceback, name_stack=current_name_stack() + info.name_stack
    )
    return place


def settings_of(equation: Any) -> AbstractContextManager[None]:
    """Return a context with the settings that an equation was traced under, such as its device."""
    settings: AbstractContextManager[None] = equation.ctx.manager
    return settings


def bound(equation: Any, arrays: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Bind an equation to other arrays, with its own or other parameters; return the results."""
    primitive = equation.primitive
    results = primitive.bind(*arrays, **(equation.params if params is None else params))
    return list(results) if primitive.multiple_results else [results]


def _call_parts(equation: Any) -> tuple[dict[str, Any], Sequence[Any]]:
    """Return the parameters of a call, and functions to pass before its arguments: none since JAX 0.10."""
    parts = equation.primitive.get_bind_params(equation.params)
    return parts if isinstance(parts, dict) else parts[1], () if isinstance(parts, dict) else parts[0]


def custom_functions(equation: Any) -> Sequence[Callable[..., Any]]:
    """Return the user's functions of a custom derivative: primal and jvp; or primal, forward and backward."""
    params, functions = _call_parts(equation)
    return [function.call_wrapped for function in functions or params["subfuns"]]


def forward_results(equation: Any, results: Sequence[Any], primals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return outputs and residuals of a custom forward rule, whose results leave out residuals that are inputs."""
    _, residual_tree, forwarded = equation.params["out_trees"]()
    count = residual_tree.num_leaves - sum(index is not None for index in forwarded)
    own = iter(results[:count])
    residuals = [next(own) if index is None else primals[index] for index in forwarded]
    return list(results[count:]), residuals


def cotangents(results: Any) -> list[Any]:
    """Return the results of a custom backward rule, with None for symbolic zeros; since 0.12 they come with a log."""
    found = results[0] if isinstance(results, tuple) else results
    return [leaf if isinstance(leaf, jax.Array | np.ndarray | np.generic) else None for leaf in found]


def scopes(equation: Any) -> str:
    """Return the named scopes of an equation, joined by ``/``, without transformations such as ``jvp``."""
    # A transformation inside another may repeat the same scopes: ``transpose(jvp(a))/jvp(a)`` is ``a``. `ISLAND` is not
    # a scope of the user, and is left out.
    path: list[str] = []
    group: list[str] = []
    for entry in (*equation.source_info.name_stack.stack, None):
        if type(entry).__name__ == "Scope":
            group += [entry.name] if entry.name != ISLAND else []
        else:
            path = group if path == group[: len(path)] else path + group
            group = []
    return "/".join(path)


ISLAND = "polyamp_float32"  # the scope of an autocast to float32, which keeps its operations out of any other


def island(equation: Any) -> str:
    """Return `ISLAND` if it is among the named scopes of an equation, else an empty string."""
    stack = equation.source_info.name_stack.stack
    return ISLAND if any(entry.name == ISLAND for entry in stack) else ""


def without_island(path: str) -> str:
    """Return a path of scopes without `ISLAND`, as the user knows it."""
    return "/".join(part for part in path.split("/") if part not in ("", ISLAND))


_TRACED = getattr(jax, "make_user_context", lambda default: lambda value: nullcontext())(None)  # not in JAX 0.9


def traced_apart(number: int) -> AbstractContextManager[None]:
    """Return a context in which ``jax.jit`` uses only traces that were made under the same number."""
    context: AbstractContextManager[None] = _TRACED(number)
    return context


def users_line(equation: Any) -> str:
    """Return the innermost line of the user's own program that made an equation, such as ``train.py:12``."""
    # Unlike `source_line` it skips optax, flax and polyamp.
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if is_users(frame.file_name):
            return f"{frame.file_name.replace(chr(92), '/').rpartition('/')[2]}:{frame.line_num}"
    return source_line(equation)


def library_function(equation: Any) -> str:
    """Return the function of ``jax.nn`` or ``jax.scipy.special`` that made an equation, such as ``softmax``."""
    traceback = equation.source_info.traceback
    frames = reversed(traceback.frames) if traceback else ()
    made = (frame.function_name.strip("_") for frame in frames if frame.file_name.endswith(_LIBRARY))
    return next((name for name in made if name in OPERATIONS), "")


_LIBRARY = ("jax/_src/nn/functions.py", "jax/_src/ops/special.py")


def source_line(equation: Any) -> str:
    """Return the line of the program that made an equation, such as ``model.py:12``."""
    file, line, *_ = [*summarize(equation.source_info).rpartition("/")[2].split(":"), ""]
    return f"{file}:{line}" if line else file


def loop_parts(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a scan; 0.11 replaced the numbers by trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)


def manual_axes(params: dict[str, Any]) -> frozenset[Any]:
    """Return the axes that a shard_map maps over; 0.10 renamed them."""
    axes: frozenset[Any] = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    return axes


def mapped_again(params: dict[str, Any], body: Callable[..., Any], out_specs: tuple[Any, ...]) -> Callable[..., Any]:
    """Return ``body`` mapped over the axes of a shard_map with these parameters."""
    settings = {"mesh": params["mesh"], "in_specs": tuple(params["in_specs"]), "check_vma": params["check_vma"]}
    mapped: Callable[..., Any] = jax.shard_map(body, out_specs=out_specs, axis_names=manual_axes(params), **settings)
    return mapped


def is_plain_jit(params: dict[str, Any]) -> bool:
    """Return whether a jit has only a function and no settings, so that its equations can replace it."""
    shardings = (*params["in_shardings"], *params["out_shardings"])
    placed = any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
    return not (placed or any(params["donated_invars"]) or params["compiler_options_kvs"])


def transformations(equation: Any) -> set[str]:
    """Return the transformations that made an equation: ``jvp`` in a derivative, also ``transpose`` going backward."""
    # The name stack is the only trace that ``jax.grad`` leaves in a jaxpr.
    stack = equation.source_info.name_stack.stack
    return {entry.name for entry in stack if type(entry).__name__ == "Transform"}


def live(closed: Any, wanted: Sequence[bool]) -> list[tuple[Any, list[bool]]]:
    """Return the equations that have or feed effects, or feed wanted outputs, each with flags for its needed outputs.

    JAX's own function for this is private, and rewrites the jaxpr.
    """
    jaxpr, _ = opened(closed)
    needed = {var for var, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted and is_variable(var)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        uses = [var in needed for var in equation.outvars]
        if any(uses) or equation.effects:
            kept.append((equation, uses))
            needed.update(filter(is_variable, equation.invars))
    return kept[::-1]


def quick_options() -> dict[str, Any] | None:
    """Return the options for programs that run once or twice: on CPUs, XLA compiles in half the time to slower code."""
    if jax.default_backend() != "cpu":
        return None
    emitters = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True, **emitters}


def children_of(node: Any) -> Any:
    """Return the children of a node of a pytree; None for a leaf."""
    parts = default_registry.flatten_one_level(node)
    return None if parts is None else parts[0]


def is_variable(atom: Any) -> bool:
    """Return whether an input of an equation is an argument or the result of another equation, not a number."""
    return not isinstance(atom, Literal)


def inner_programs(equation: Any) -> list[Any]:
    """Return the jaxprs that an equation runs: a loop's body, the branches of a ``cond``, a call's function."""
    parts = (part for value in equation.params.values() for part in (value if isinstance(value, tuple) else (value,)))
    held = [part for part in parts if hasattr(part, "eqns") or hasattr(part, "jaxpr")]
    return [] if "update_jaxpr" in equation.params else held  # how a scatter combines two elements


def fingerprint(closed: Any) -> str:
    """Return a text that is equal for jaxprs that compute the same in the same scopes and lines."""
    jaxpr, _ = opened(closed)
    text: str = jaxpr.pretty_print(source_info=True, name_stack=True, use_color=False)
    return text


def specs_of_results(closed: Any) -> list[Any]:
    """Return the shape and dtype of each result of a jaxpr."""
    jaxpr, _ = opened(closed)
    return [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.outvars]  # type: ignore[no-untyped-call]


def conditional_of_optax() -> str:
    """Return the name of optax's conditional, as ``apply_if_finite``, that called the caller; empty for none."""
    code = sys._getframe(2).f_code
    is_branch = code.co_name.strip("_") == "do_update" and f"{os.sep}optax{os.sep}" in code.co_filename
    return code.co_qualname.partition(".")[0] if is_branch else ""


def compiled_programs() -> Iterator[Any]:
    """Yield the HLO module of every compiled program that is loaded."""
    for executable in jax.extend.backend.get_backend().live_executables():
        yield from executable.hlo_modules()
