"""The public verbs. Each looks at what it was given and hands it to that framework's adapter."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polyamp import registry
from polyamp.choices import check_options
from polyamp.deferred import RewrittenAtFirstCall
from polyamp.dispatch import adapter_for, offering, with_options
from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.formats import name_of_dtype
from polyamp.loss_scale import LossScale
from polyamp.plan import Plan
from polyamp.policy import Policy
from polyamp.policy import policy as make_policy
from polyamp.regions import Autocast, autocast_function


def wrap_optimizer(
    optimizer: Any,
    policy: Policy | str | None = None,
    *,
    loss_scale: LossScale | float | None = None,
    max_grad_norm: float | None = None,
    backend: str | None = None,
    **options: Any,
) -> Any:
    """An optimizer of the same kind that owns the order of a mixed-precision step.

    Unscale in float32, test the raw gradients for inf and NaN, clip by the global norm, then update or skip, then
    advance the loss scale. A skipped step leaves parameters, optimizer state and counters bit-identical.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> opt = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "mixed_float16")
    >>> opt.backward(model(torch.ones(3, 4)).mean())
    >>> opt.step()
    >>> bool(opt.last_step), opt.loss_scale
    (True, 65536.0)

    Args:
        optimizer: a ``torch.optim.Optimizer``, an optax ``GradientTransformation``, a Keras 3 optimizer or a
            ``tf.compat.v1.train.Optimizer``.
        policy: a policy or its name; None is the current policy.
        loss_scale: overrides the policy's; a number is a scale that never moves.
        max_grad_norm: clip unscaled gradients to this global L2 norm (> 0); None does not clip.
        backend: the framework's name, where the object does not tell.
        **options: what that framework has besides; docs/frameworks.md lists them. PyTorch: ``master_weights``,
            ``skip_on_device``, ``fused_step``, ``process_group``, ``named_parameters``, ``share``. JAX: ``axis_name``,
            ``master_weights``, ``skip``. TensorFlow and Keras: ``master_weights``.

    Raises:
        InvalidTypeError: no optimizer, or one of a framework without an adapter; or no loss scale.
        UnsupportedError: an option that this framework does not have.
        InvalidValueError: ``max_grad_norm``, or a number as ``loss_scale``, is not positive and finite.
        UsageError: the optimizer is wrapped already.
    """
    chosen, limit = make_policy(policy), norm_limit(max_grad_norm)
    scale = chosen.loss_scale if loss_scale is None else LossScale.of(loss_scale, where="wrap_optimizer(loss_scale=)")
    _check_made(optimizer)
    adapter = adapter_for(backend, optimizer, where="wrap_optimizer(optimizer)")
    check_options(adapter.wrap_optimizer, options, where=f"wrap_optimizer(optimizer) of {adapter.name}")
    return adapter.wrap_optimizer(
        optimizer,
        chosen,
        loss_scale=scale,
        max_grad_norm=limit,
        **options,
    )


def _check_made(optimizer: object) -> None:
    """Refuse what an optimizer is made of or by: a class, a function, parameters; an optax schedule is a function."""
    if isinstance(optimizer, type):
        what = "no adapter knows this object: it is a class, not an optimizer"
        fix = f"make one first: {optimizer.__name__}(...); then wrap it"
    elif inspect.isroutine(optimizer) or isinstance(optimizer, functools.partial):
        what = "no adapter knows this object: it is a function, not an optimizer"
        fix = f"call it first: {getattr(optimizer, '__name__', 'it')}(...); then wrap what it returns"
    elif isinstance(optimizer, Iterator):
        what = "no adapter knows this object: it is an iterator, of parameters perhaps, not an optimizer"
        fix = "make an optimizer of them first, as in torch.optim.AdamW(model.parameters(), lr=1e-3); then wrap it"
    else:
        return
    raise InvalidTypeError(
        what,
        where="wrap_optimizer(optimizer)",
        found=_shown(optimizer),
        allowed="a torch.optim.Optimizer, an optax GradientTransformation, a Keras 3 or tf.compat.v1.train optimizer",
        fix=fix,
    )


def convert(model: Any, policy: Policy | str | None = None, *, backend: str | None = None) -> Any:
    """Set a model to a policy: a torch module's stored parameters, or a built Keras model's layer policies.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
    >>> _ = convert(model, "O2")
    >>> model[0].weight.dtype, model[1].weight.dtype
    (torch.float16, torch.float32)

    Args:
        model: a ``torch.nn.Module`` or a built Keras model; it is changed in place.
        policy: a policy or its name; None is the current policy.
        backend: the framework's name, where the object does not tell.

    Returns:
        The same model.

    Raises:
        InvalidTypeError: an object that no adapter knows.
        UnsupportedError: the framework's models hold no precision (JAX: cast the parameters instead).
    """
    adapter = adapter_for(backend, model, where="convert(model)")
    return registry.verb(adapter, "convert")(model, make_policy(policy))


def scale_loss(loss: Any, holder: Any) -> Any:
    """The loss in float32 times the current loss scale.

    >>> import torch
    >>> opt = wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), "mixed_float16")
    >>> scale_loss(torch.tensor(0.5), opt)
    tensor(32768.)

    Args:
        loss: a floating scalar.
        holder: a wrapped optimizer, or in JAX the optimizer state that has its ``loss_scale``.
    """
    return adapter_for(None, holder, where="scale_loss(holder)").scale_loss(loss, holder)


def save_loss_scale(holder: Any) -> dict[str, Any]:
    """The loss-scale state of a wrapped optimizer (in JAX: of its state), in the form all frameworks share; JSON.

    >>> import torch
    >>> opt = wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), "mixed_float16")
    >>> save_loss_scale(opt)["scale"]
    65536.0
    """
    saved: dict[str, Any] = adapter_for(None, holder, where="save_loss_scale(holder)").save_loss_scale(holder)
    return saved


def load_loss_scale(holder: Any, saved: Mapping[str, Any]) -> Any:
    """Continue from a loss-scale state that `save_loss_scale` gave, in this framework or another.

    Returns:
        The same object where it is mutable; in JAX, a new optimizer state.

    Raises:
        StateError: a state of another kind, with missing fields, or outside the settings; nothing is changed.
    """
    return adapter_for(None, holder, where="load_loss_scale(holder)").load_loss_scale(holder, saved)


def value_and_grad(
    fun: Callable[..., Any],
    policy: Policy | str | None = None,
    has_aux: bool = False,
    *,
    argnums: int | Sequence[int] = 0,
    backend: str | None = None,
) -> Callable[..., Any]:
    """Differentiate a loss function under a policy: the loss comes back unscaled, the gradients still scaled.

    The function sees parameters and arguments in the compute format; gradients come in the parameters' own.

    >>> import jax, optax
    >>> tx = wrap_optimizer(optax.sgd(0.1), "mixed_float16")
    >>> params = {"w": jax.numpy.ones(4)}
    >>> opt_state = tx.init(params)
    >>> def loss_fn(p, x):
    ...     return (x @ p["w"]).mean()
    >>> loss, grads = value_and_grad(loss_fn, "mixed_float16")(opt_state, params, jax.numpy.full((8, 4), 0.5))
    >>> float(loss), float(grads["w"][0]) / 65536
    (2.0, 0.5)

    Args:
        fun: ``fun(params, *args, **kwargs) -> loss``, or ``(loss, aux)`` where ``has_aux``.
        policy: bound now where given; None is the current policy at each call.
        has_aux: whether ``fun`` returns more than the loss.
        argnums: which of ``fun``'s arguments are differentiated, as in ``jax.value_and_grad``: an integer, or several,
            whose gradients come in a tuple.
        backend: the framework's name, where the arguments do not tell.

    Returns:
        A function of ``(opt_state, params, *args, **kwargs)``.
    """
    bound = None if policy is None else make_policy(policy)
    options = {} if argnums == 0 else {"argnums": argnums}

    @functools.wraps(fun)
    def differentiated(opt_state: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = adapter_for(backend, (opt_state, params), where="value_and_grad(fun)(opt_state, params)")
        transformed = with_options(adapter, "value_and_grad", options)(fun, bound, has_aux)
        return transformed(opt_state, params, *args, **kwargs)

    return differentiated


def autocast(
    target: Any = None, policy: Policy | str | None = None, *, backend: str | None = None, **mistaken: Any
) -> Any:
    """Run operations in the formats of a policy: ``with autocast(policy):``, or as a decorator.

    >>> import torch
    >>> with autocast("mixed_bfloat16"):
    ...     print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
    torch.bfloat16

    Args:
        target: a policy or its name, for a context that every loaded framework with ambient autocast enters; or the
            function or module to run so.
        policy: of a function, or by keyword of a context or decorator; bound now where given, else the current policy
            at each call.
        backend: one framework's name, where it should be only that one.
        **mistaken: ``dtype=``, ``device_type=``, ``enabled=`` and what else other libraries' autocast takes: refused,
            with what to write instead.

    Returns:
        A context manager that may be entered again and in several threads, and that decorates functions; or the
        function, transformed.

    Raises:
        InvalidTypeError: two policies, or an argument of another library's autocast.
        UnsupportedError: no loaded framework has what was asked for.
    """
    if mistaken:
        raise _another_autocast(mistaken)
    bound = None if policy is None else make_policy(policy)
    if callable(target) and not isinstance(target, Policy) and name_of_dtype(target) is None:
        return autocast_function(target, bound, backend)
    if target is not None and policy is not None:
        raise InvalidTypeError(
            "autocast takes one policy",
            where="autocast(target, policy)",
            found=f"{_shown(target)} and {_shown(policy)}",
            allowed="autocast(policy), or autocast(function, policy)",
            fix="leave one of the two out",
        )
    region = Autocast(bound if target is None else make_policy(target), backend)
    return region.traced() or region


def _another_autocast(mistaken: Mapping[str, Any]) -> InvalidTypeError:
    """The error for ``autocast(dtype=...)`` and the like, which torch's takes."""
    name = name_of_dtype(mistaken.get("dtype"))
    instead = f"mixed_{name}" if name in ("float16", "bfloat16") else "mixed_float16"
    fix = f'write polyamp.autocast("{instead}"): a policy names the formats, and every device is covered'
    if mistaken.get("enabled") is False:
        fix = 'write polyamp.autocast("float32") for a region in float32'
    return InvalidTypeError(
        "autocast takes a policy",
        where="autocast(policy)",
        found=", ".join(f"{key}={_shown(value)}" for key, value in mistaken.items()),
        allowed="autocast(policy), autocast(function, policy), and backend=",
        fix=fix,
    )


def _shown(value: object) -> str:
    """A value in an error, or for an array its type alone."""
    text = repr(value)
    return text if len(text) < 80 and "\n" not in text else f"a {type(value).__module__}.{type(value).__qualname__}"


def rewrite(
    fn: Any = None,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    backend: str | None = None,
    engine: str | None = None,
    jit_compile: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Rewrite a function or model so that its operations run in the formats of a policy, and say what was decided.

    >>> import jax
    >>> fast = rewrite(lambda w, x: x @ w, jax.numpy.ones((2, 3)), jax.numpy.ones((4, 2)), policy="mixed_float16")
    >>> fast.plan.totals["by_format"]
    {'float16': 1}

    Args:
        fn: what to rewrite; without it, a decorator: ``@rewrite(policy="mixed_bfloat16")``.
        *args: example arguments. Without them, and where ``fn`` itself does not tell its framework, it is rewritten at
            its first call.
        policy: a policy or its name; None is the current policy when it is rewritten.
        backend: the framework's name, where neither the function nor the arguments tell and several are loaded.
        engine: TensorFlow's: ``"grappler"`` has its own pass do it; see ``polyamp.backends.tensorflow.grappler``.
        jit_compile: TensorFlow's: as of ``tf.function``.
        **kwargs: example keyword arguments.

    Returns:
        What is called in the place of ``fn``, with an attribute ``plan``; see the framework's own ``rewrite``.

    Raises:
        InvalidTypeError: ``fn`` cannot be called and is no graph, or no adapter knows the arguments.
        UnsupportedError: the framework's adapter has no rewrite, or not these options.
    """
    chosen = None if policy is None else make_policy(policy)
    given = {"engine": engine, "jit_compile": jit_compile}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if fn is None and not (args or kwargs):
        return functools.partial(rewrite, policy=chosen, backend=backend, **options)
    own = registry.adapter_of(fn)
    _check_rewritable(fn, own, where="rewrite(fn)")
    if args or kwargs or backend is not None or own is not None:
        adapter = offering("rewrite", backend, (fn, args, kwargs), where="rewrite(fn, *args)")
        return with_options(adapter, "rewrite", options)(fn, args, kwargs, make_policy(chosen))
    named = registry.adapter_named_in("rewrite", fn)
    if getattr(named, "rewrites_unseen", False):  # before it sees arguments: so a SavedModel finds the function
        return with_options(named, "rewrite", options)(fn, (), {}, make_policy(chosen))
    return RewrittenAtFirstCall(fn, chosen, options)


def explain(
    fn: Any,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    backend: str | None = None,
    engine: str | None = None,
    **kwargs: Any,
) -> Plan:
    """What every operation of a function or model runs in under a policy, where and why. It prints as a table.

    >>> import jax
    >>> print(explain(lambda w, x: x @ w, jax.numpy.ones((2, 3)), jax.numpy.ones((4, 2)), policy="O1").policy)
    mixed_float16

    Args:
        fn: the function or model.
        *args: its arguments.
        policy: a policy or its name; None is the current policy.
        backend: the framework's name, where neither the function nor the arguments tell and several are loaded.
        engine: what is to run it: "rewrite", which is the default, or in PyTorch "autocast", which records one run
            under `autocast`. A PyTorch model that is no single graph is recorded too; the plan's ``engine`` says so.
        **kwargs: its keyword arguments.

    Raises:
        InvalidTypeError: ``fn`` cannot be called and is no graph, or no adapter knows the arguments.
        UnsupportedError: the framework's adapter has no explain, or not this engine.
    """
    _check_rewritable(fn, registry.adapter_of(fn), where="explain(fn)")
    adapter = offering("explain", backend, (fn, args, kwargs), where="explain(fn, *args)")
    options = {} if engine in (None, "rewrite") else {"engine": engine}
    plan: Plan = with_options(adapter, "explain", options)(fn, args, kwargs, make_policy(policy))
    return plan


def _check_rewritable(fn: object, adapter: Any, *, where: str) -> None:
    if not callable(fn) and not hasattr(adapter, "rewrite"):
        raise InvalidTypeError(
            "this cannot be called",
            where=where,
            found=f"{fn!r} ({type(fn).__name__})",
            allowed="a function, a model or a framework's graph",
            fix="give the function itself, then its arguments",
        )


def norm_limit(value: float | None, *, where: str = "wrap_optimizer(max_grad_norm=)") -> float | None:
    """Check a limit for the global norm of gradients.

    >>> norm_limit(1)
    1.0

    Raises:
        InvalidValueError: not a positive finite number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise InvalidValueError(
            "invalid gradient-norm limit",
            where=where,
            found=repr(value),
            allowed="a finite number greater than 0, or None",
            fix="give the largest global L2 norm that gradients may have",
        )
    return float(value)
