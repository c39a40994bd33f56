"""Differentiates a loss function under a policy: formats inside, scaled gradients out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.backends.jax.autocast import run_autocasted
from polyamp.backends.jax.dtypes import is_array, is_traced
from polyamp.backends.jax.modules import model_of
from polyamp.backends.jax.state import find_state
from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.policy import Policy, current_policy
from polyamp.policy import policy as make_policy
from polyamp.refusals import no_loss, non_finite_loss


def value_and_grad(
    fun: Callable[..., Any], policy: Policy | str | None = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Differentiate a loss function under a policy: the loss comes back unscaled, the gradients still scaled.

    >>> import optax, polyamp
    >>> tx = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16")
    >>> params = {"w": jnp.ones(4), "name": "dense"}
    >>> def loss_fn(p, x):
    ...     return (x @ p["w"]).mean()
    >>> loss, grads = value_and_grad(loss_fn, "mixed_float16")(tx.init(params), params, jnp.full((8, 4), 0.25))
    >>> float(loss), grads["w"] / 65536, grads["name"]
    (1.0, Array([0.25, 0.25, 0.25, 0.25], dtype=float32), None)

    Args:
        fun: ``fun(params, *args, **kwargs) -> loss``, or ``(loss, aux)`` where ``has_aux``. It is written for float32,
            and runs under `polyamp.backends.jax.autocast`. The loss is a floating scalar.
        policy: bound now where given; None is the current policy at each call.
        has_aux: whether ``fun`` returns more than the loss.

    Returns:
        A function of ``(opt_state, params, *args, **kwargs)`` that gives ``(loss, grads)`` or ``((loss, aux), grads)``.
        ``opt_state`` is any pytree that holds the state of one wrapped optimizer. ``params`` is any pytree: dicts,
        NamedTuples, equinox modules, or a flax ``nnx.Module``, whose other variables are updated in place. ``loss``
        is f32[]; ``aux`` is as ``fun`` gives it. ``grads`` has the structure of ``params``
        and each parameter's dtype, and None where a leaf has no gradient (integers, functions, Python numbers).

    Raises, when called:
        InvalidTypeError: the loss is not floating, or not an array.
        InvalidValueError: the loss is not a scalar.
        NonFiniteLossError: the loss is inf or NaN although it is not scaled yet. Inside ``jit`` the loss has no number
            yet: the step is then skipped, and the returned loss shows it.
        UsageError: ``opt_state`` holds no loss scale, or several.
    """
    bound = None if policy is None else make_policy(policy)

    def transformed(opt_state: Any, params: Any, /, *args: Any, **kwargs: Any) -> Any:
        chosen, state, model = bound or current_policy(), find_state(opt_state), model_of(params)

        def program(trained: Any, args: Any, kwargs: Any) -> Any:
            built = model.build(trained)
            return *_loss_and_aux(fun(built, *args, **kwargs), has_aux), model.changes(built)

        def scaled_loss(trained: Any) -> tuple[jax.Array, Any]:
            loss, aux, changes = run_autocasted(program, chosen, trained, args, kwargs)
            return loss * state.scalars.scale, (loss, aux, changes)

        (_, (loss, aux, changes)), grads = jax.value_and_grad(scaled_loss, has_aux=True)(model.trained)
        if state.config.check:
            _refuse_non_finite(loss)
        model.accept(changes)
        return ((loss, aux) if has_aux else loss), grads

    return transformed


def scale_loss(loss: Any, holder: Any) -> jax.Array:
    """The loss in float32 times the current loss scale: for a loop that differentiates by itself.

    >>> import optax, polyamp
    >>> opt_state = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16").init(jnp.ones(2))
    >>> scale_loss(jnp.float16(0.5), opt_state)
    Array(32768., dtype=float32)

    Args:
        loss: floating scalar, of any floating dtype.
        holder: a pytree that holds the state of one wrapped optimizer.

    Raises:
        InvalidTypeError: the loss is not floating, or not an array.
        InvalidValueError: the loss is not a scalar.
        NonFiniteLossError: the loss is inf or NaN. Traced values (inside ``jit`` or ``grad``) have no number yet: their
            gradients are not finite, and the step is skipped.
        UsageError: ``holder`` holds no loss scale, or several.
    """
    state = find_state(holder)
    checked = _checked_loss(loss)
    if state.config.check:
        _refuse_non_finite(checked)
    scaled: jax.Array = checked * state.scalars.scale
    return scaled


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    if not has_aux:
        return _checked_loss(result), None
    if not (isinstance(result, tuple) and len(result) == 2):
        raise InvalidTypeError(
            "the function does not return (loss, aux)",
            where="value_and_grad(fun, has_aux=True)",
            found=type(result).__name__,
            allowed="a tuple of two",
            fix="return loss, aux; or leave has_aux out",
        )
    return _checked_loss(result[0]), result[1]


def _checked_loss(loss: Any) -> jax.Array:
    """The loss as f32[]."""
    if isinstance(loss, float):
        loss = jnp.float32(loss)
    if not (is_array(loss) and jnp.issubdtype(loss.dtype, jnp.floating)):
        found = f"an array of {loss.dtype}" if is_array(loss) else type(loss).__name__
        raise no_loss(found, allowed="a floating array of shape (); beside other values under has_aux=True")
    if loss.shape != ():
        raise InvalidValueError(
            "the loss is not a scalar",
            where="the loss, before scaling",
            found=f"shape {loss.shape}",
            allowed="shape ()",
            fix="reduce it, for example with .mean()",
        )
    return jnp.asarray(loss, jnp.float32)


def _refuse_non_finite(loss: jax.Array) -> None:
    if is_traced(loss) or jnp.isfinite(loss):
        return
    raise non_finite_loss(loss)
