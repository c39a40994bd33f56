"""Autocast of functions: `autocast`, and the calls of it that other functions of the adapter make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.refusals import check_function, positions
from polyamp.backends.jax.graphs.rewrite import name_of, run_rewritten
from polyamp.policies import Policy, current_policy
from polyamp.policies import policy as make_policy


def autocast(
    fn: Callable[..., Any], policy: Policy | str | None = None, *, argnums: int | Sequence[int] = 0
) -> Callable[..., Any]:
    """Return a function that runs under a policy: products in 16 bits, and in float32 what needs it.

    >>> import jax.numpy as jnp
    >>> def model(w, x):
    ...     return jax.nn.softmax(x @ w)
    >>> w, x = jnp.ones((2, 3)), jnp.ones((4, 2))
    >>> print(jax.make_jaxpr(autocast(model, "mixed_bfloat16"))(w, x).eqns[0])  # doctest: +ELLIPSIS
    a:bf16[4,2] = convert_element_type[new_dtype=bfloat16 weak_type=False] b
    >>> autocast(model, "mixed_bfloat16")(w, x).dtype
    dtype('float32')

    Args:
        fn: any function of arrays and pytrees: a method ``apply`` of flax or haiku, an equinox or flax NNX module, a
            loss. Arguments that are not arrays (Python numbers, strings, functions) stay as they are. NNX modules among
            the arguments receive the changes that ``fn`` makes to them.
        policy: a policy or its name, bound now. None is the current policy at each call, or rather at each trace:
            ``jax.jit`` keeps what it traced.
        argnums: the positions of the arguments that are parameters. Parameters are cast when they meet 16-bit values;
            so are the arrays in modules of flax and equinox, at any position. All other float32 arguments are inputs,
            such as masks and labels, and so are traced arrays that ``fn`` takes from outside: a sum of an input and a
            16-bit value is computed in float32.

    Returns:
        A function with the same arguments and results; the results have the dtypes that ``fn`` gives them. It composes
        with ``jit``, ``grad``, ``vmap``, ``jax.checkpoint`` and other transformations in either order. Each call traces
        ``fn``: put ``jax.jit`` around it. Parameters are cast where they are used, inside loops too, so that their
        gradients are added up in float32.

    Raises, when called:
        UnsupportedError: JAX cannot compute in the policy's format.
        UsageError: ``fn`` branches on a traced value, or changes an NNX module that is not among its arguments.

    Warns:
        PolyampWarning: nothing was lowered, or a rule matched nothing.
    """
    bound = None if policy is None else make_policy(policy)
    check_function(fn, where="autocast(fn, policy)")
    places = positions(argnums, where="autocast(fn, argnums=)")

    @functools.wraps(fn)
    def autocasted(*args: Any, **kwargs: Any) -> Any:
        if bound is not None and bound.compute == "float32":
            return in_float32(fn, *args, **kwargs)
        return run_rewritten(fn, bound or current_policy(), args, kwargs, name=name_of(fn), argnums=places)

    return autocasted


def run_autocasted(
    fn: Callable[..., Any], policy: Policy, *args: Any, name: str | None = None, argnums: Sequence[int] = (0,)
) -> Any:
    """Run a function under autocast; report under this name what had no effect. None reports nothing."""
    return run_rewritten(fn, policy, args, {}, name=name, argnums=argnums)


def in_float32(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function in float32, even inside another autocast."""
    with jax.named_scope(unstable.ISLAND):
        return fn(*args, **kwargs)
