"""Differentiates a loss function under a policy: 16-bit products inside, scaled gradients out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.agreement import report_disagreement
from polyamp.backends.jax.casting import check_tree, is_array, is_traced
from polyamp.backends.jax.gradients import all_finite, note_scale
from polyamp.backends.jax.graphs.rewrite import check_function, name_of, positions, run_rewritten
from polyamp.backends.jax.modules import NnxArguments, is_nnx_module, trained_in, with_trained
from polyamp.backends.jax.state import LossScaleOptState, check_single, find_state
from polyamp.errors import InvalidValueError, no_loss, wrong_type
from polyamp.policies import Policy, current_policy
from polyamp.policies import policy as make_policy
from polyamp.settings import LossScale
from polyamp.skips import report_nonfinite_loss
from polyamp.without_effect import chosen_policy


def value_and_grad(
    fun: Callable[..., Any],
    policy: Policy | str | None = None,
    has_aux: bool = False,
    *,
    argnums: int | Sequence[int] = 0,
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
        policy: a policy or its name, bound now; None is the current policy at each call.
        has_aux: whether ``fun`` returns ``(loss, aux)``.
        argnums: which of ``fun``'s positional arguments are differentiated, as in ``jax.value_and_grad``; for a tuple
            the gradients are a tuple. ``opt_state`` is not counted.

    Returns:
        A function from ``(opt_state, params, *args, **kwargs)`` to ``(loss, grads)`` or ``((loss, aux), grads)``.
        ``opt_state`` is any pytree that holds the state of one wrapped optimizer. ``params`` is any pytree: dicts,
        NamedTuples, equinox modules, or a flax ``nnx.Module``, whose other variables are updated in place, as are
        NNX objects among the other arguments (``nnx.Rngs``, metrics); statistics do not change if the gradients are not
        finite. ``loss`` is f32[] (f64[] if ``fun`` returns that); ``aux`` is what ``fun`` returned.
        ``grads`` has the structure of ``params`` and each parameter's dtype, with None for leaves without a gradient
        (integers, functions, Python numbers).

    Raises:
        InvalidTypeError: ``argnums`` are not integers, or ``has_aux`` is not a bool. When called: the loss is not a
            floating-point array.
        InvalidValueError: when called: the loss is not a scalar, or ``argnums`` names an argument that does not exist.
        NonFiniteLossError: when called: the loss is inf or NaN although it is not scaled yet, under
            ``LossScale(nonfinite_loss="raise")``. Inside ``jit`` the loss has no number yet: the step is then skipped,
            and the returned loss shows it.
        UsageError: when called: ``opt_state`` holds no loss scale, or several.

    Warns:
        PolyampWarning: nothing was lowered, or a rule matched nothing; the optimizer was wrapped for another format;
            the loss is not finite, and the step is skipped.
    """
    check_function(fun, where="value_and_grad(fun, policy)")
    return differentiate(
        fun, None if policy is None else make_policy(policy), has_aux, argnums=argnums, name=name_of(fun)
    )


def differentiate(
    fun: Callable[..., Any],
    bound: Policy | None,
    has_aux: bool = False,
    *,
    argnums: int | Sequence[int] = 0,
    name: str | None = None,
) -> Callable[..., Any]:
    """Do what `value_and_grad` does; unless ``name`` is None, report what had no effect, under this name."""
    wanted = positions(argnums, where="value_and_grad(fun, argnums=)", at_least=1)
    if not isinstance(has_aux, bool):
        raise wrong_type(
            has_aux,
            where="value_and_grad(fun, policy, has_aux)",
            allowed="a bool",
            fix="give True if fun returns (loss, aux), and what is differentiated as argnums=",
        )

    def transformed(opt_state: Any, /, *args: Any, **kwargs: Any) -> Any:
        check_tree((opt_state, args, kwargs), where="value_and_grad(fun, policy)(opt_state, *args)")
        state, places = find_state(opt_state, args), _positions_among(wanted, len(args))
        if name is None:
            chosen = bound or current_policy()
        else:
            chosen = chosen_policy(bound, "value_and_grad(fun)")
            report_disagreement(state.policy, chosen, state.settings)
        # NNX modules that are trained are among the objects too, as they may share variables with other arguments.
        others = [None if place in places and not is_nnx_module(arg) else arg for place, arg in enumerate(args)]
        objects = NnxArguments((others, kwargs))

        def program(trained: list[Any], held: Any, rest: Any) -> Any:
            (given, options), own = objects.build(held, rest)
            own_args = list(given)
            for place, params in zip(places, trained, strict=True):
                own_args[place] = with_trained(own_args[place] if is_nnx_module(args[place]) else args[place], params)
            before = objects.contents(own)
            loss, aux = _loss_and_aux(fun(*own_args, **options), has_aux)
            check_tree(aux, where="the aux of the function")
            return loss, aux, objects.changes(before, own)

        def scaled_loss(trained: list[Any]) -> tuple[jax.Array, Any]:
            parts = (trained, objects.state, objects.rest)
            loss, aux, changes = run_rewritten(program, bound, parts, {}, name=name, argnums=(0, 1))
            return _times_scale(loss, state), (loss, aux, changes)

        trained = [trained_in(args[place]) for place in places]
        (_, (loss, aux, changes)), grads = jax.value_and_grad(scaled_loss, has_aux=True)(trained)
        _report_non_finite(loss, state.settings, chosen.compute)
        note_scale(grads, state.scalars.scale)
        finite = all_finite(grads) if state.settings.check and jax.tree.leaves(changes) else True
        objects.accept(changes, finite)
        return ((loss, aux) if has_aux else loss), grads[0] if isinstance(argnums, int) else tuple(grads)

    return transformed


def _positions_among(wanted: tuple[int, ...], count: int) -> list[int]:
    """Return positions among ``count`` arguments, counted from 0 also if they were given from the end."""
    places = [place + count if place < 0 else place for place in wanted]
    is_repeated = len(set(places)) < len(places)
    if is_repeated or not all(0 <= place < count for place in places):
        raise InvalidValueError(
            "argnums name an argument twice" if is_repeated else "there is no such argument to differentiate",
            where="value_and_grad(fun, policy, argnums=)(opt_state, *args)",
            found=f"argnums {', '.join(map(str, wanted))}, and {count} positional argument{'' if count == 1 else 's'}",
            allowed="each position once, from 0 on; opt_state is not counted",
            fix="pass the parameters by position, after opt_state",
        )
    return places


def scale_loss(loss: Any, holder: Any) -> jax.Array:
    """Return the loss, in float32 or wider, times the current loss scale, for a loop that calls ``jax.grad`` itself.

    >>> import optax, polyamp
    >>> opt_state = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16").init(jnp.ones(2))
    >>> scale_loss(jnp.float16(0.5), opt_state)
    Array(32768., dtype=float32)

    Args:
        loss: a scalar of any floating-point dtype. If it is inf or NaN, its gradients are not finite, and the step is
            skipped.
        holder: a pytree that holds the state of one wrapped optimizer.

    Raises:
        InvalidTypeError: the loss is not a floating-point array.
        InvalidValueError: the loss is not a scalar.
        NonFiniteLossError: the loss is inf or NaN, under ``LossScale(nonfinite_loss="raise")``. Traced values (inside
            ``jit`` or ``grad``) have no number yet: their gradients are not finite, and the step is skipped.
        UsageError: ``holder`` holds no loss scale, or several.
    """
    state = find_state(holder)
    checked = _checked_loss(loss)
    _report_non_finite(checked, state.settings, None)
    return _times_scale(checked, state)


def _times_scale(loss: jax.Array, state: LossScaleOptState) -> jax.Array:
    """Return the loss times the scale; times inf if the loss is not finite, so that the gradients are not either."""
    check_single(state)
    scale = state.scalars.scale
    if state.settings.check:
        # As `computed_once` does it, but of the scale: what is scaled is left out of recordings.
        root = jnp.sqrt(jnp.where(jnp.isfinite(jax.lax.stop_gradient(loss)), scale, 0))
        scale = jnp.where(root > 0, scale, jnp.inf)
    scaled: jax.Array = loss * scale
    return scaled


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    if not has_aux:
        return _checked_loss(result), None
    if not (isinstance(result, tuple) and len(result) == 2):
        where, what = "value_and_grad(fun, has_aux=True)", "the function does not return (loss, aux)"
        fix = "return loss, aux; or leave out has_aux"
        raise wrong_type(type(result), where=where, allowed="a tuple of two", fix=fix, what=what)
    return _checked_loss(result[0]), result[1]


def _checked_loss(loss: Any) -> jax.Array:
    """Return the loss as f32[]; an f64[] stays f64[]."""
    if not (is_array(loss) and jnp.issubdtype(loss.dtype, jnp.floating)):
        raise no_loss(loss, allowed="a floating-point array of shape (); with other values under has_aux=True")
    if loss.shape != ():
        raise InvalidValueError(
            "the loss is not a scalar",
            where="the loss, before scaling",
            found=f"shape {loss.shape}",
            allowed="shape ()",
            fix="reduce it, for example with .mean()",
        )
    return jnp.asarray(loss, jnp.promote_types(loss.dtype, jnp.float32))


def _report_non_finite(loss: jax.Array, settings: LossScale, compute: str | None) -> None:
    if settings.check and not is_traced(loss) and not jnp.isfinite(loss):
        report_nonfinite_loss(settings, compute=compute, found=loss)
