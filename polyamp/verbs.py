"""The public verbs. Each one finds the adapter of its arguments and calls it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polyamp import registry
from polyamp.deferred import RewrittenAtFirstCall
from polyamp.dispatch import CONVERT, EXPLAIN, REWRITE, SAVE_LOSS_SCALE, VALUE_AND_GRAD, adapter_for, offering
from polyamp.errors import InvalidTypeError
from polyamp.formats import name_of_dtype
from polyamp.loss_scale import LossScale
from polyamp.plan import Plan
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.regions import Autocast, autocast_function
from polyamp.registry import Registered
from polyamp.reports import chosen_policy
from polyamp.validation import check_callable, check_options, kind_of, norm_limit


def wrap_optimizer(
    optimizer: Any,
    policy: Policy | str | None = None,
    *,
    loss_scale: LossScale | float | str | None = None,
    max_grad_norm: float | None = None,
    backend: str | None = None,
    **options: Any,
) -> Any:
    """Wrap an optimizer so that it runs a whole mixed-precision step in the right order.

    The result is of the same kind. A step unscales in float32, tests the gradients for inf and NaN, clips by the global
    norm, updates or skips, and advances the loss scale. A skipped step leaves parameters, optimizer state and counters
    bit-identical.

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
        loss_scale: overrides the policy's; a number is a fixed scale, and "dynamic" means ``LossScale()``.
        max_grad_norm: clip unscaled gradients to this global L2 norm (> 0); None does not clip.
        backend: the framework's name, if the object does not show it.
        **options: further options of that framework; docs/frameworks.md lists them. PyTorch: ``master_weights``,
            ``skip_on_device``, ``fused_step``, ``process_group``, ``named_parameters``, ``share``. JAX: ``axis_name``,
            ``master_weights``, ``skip``. TensorFlow and Keras: ``master_weights``.

    Raises:
        InvalidTypeError: ``optimizer`` is not an optimizer, or its framework has no adapter; or ``loss_scale`` is not a
            loss scale.
        UnsupportedError: an option does not exist in this framework.
        InvalidValueError: ``max_grad_norm``, or a number as ``loss_scale``, is not positive and finite.
        UsageError: the optimizer is wrapped already.
    """
    chosen, limit = make_policy(policy), norm_limit(max_grad_norm)
    scale = chosen.loss_scale if loss_scale is None else LossScale.of(loss_scale, where="wrap_optimizer(loss_scale=)")
    _check_made(optimizer)
    adapter = adapter_for(backend, optimizer, where="wrap_optimizer(optimizer)")
    where = f"wrap_optimizer(optimizer) of {adapter.name}"
    check_options(adapter.wrap_optimizer, options, where=where, elsewhere=_CLIPPING)
    return adapter.wrap_optimizer(
        optimizer,
        chosen,
        loss_scale=scale,
        max_grad_norm=limit,
        **options,
    )


_CLIPPING = dict.fromkeys(
    ("clipnorm", "global_clipnorm", "max_norm", "clip_grad_norm", "clip_norm", "grad_clip", "gradient_clip_val"),
    "max_grad_norm",
)
"""Other libraries' names for clipping by the global norm, for errors."""


def _check_made(optimizer: object) -> None:
    """Refuse objects that are not optimizers yet: a class, a function (such as an optax schedule), parameters."""
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
        model: a ``torch.nn.Module`` or a built Keras model, changed in place.
        policy: a policy or its name; None is the current policy.
        backend: the framework's name, if the object does not show it.

    Returns:
        The same model.

    Raises:
        InvalidTypeError: no adapter knows the object.
        UnsupportedError: the framework's models store no precision (JAX: cast the parameters instead).
    """
    adapter = adapter_for(backend, model, where="convert(model)")
    return CONVERT.of(adapter)(model, make_policy(policy))


def scale_loss(loss: Any, holder: Any) -> Any:
    """Return the loss in float32 times the current loss scale.

    >>> import torch
    >>> opt = wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), "mixed_float16")
    >>> scale_loss(torch.tensor(0.5), opt)
    tensor(32768.)

    Args:
        loss: a floating-point scalar.
        holder: a wrapped optimizer, or in JAX the optimizer state that contains its ``loss_scale``.
    """
    return adapter_for(None, holder, where="scale_loss(holder)").scale_loss(loss, holder)


def save_loss_scale(holder: Any, *, like: str | None = None) -> dict[str, Any]:
    """Return the loss-scale state of a wrapped optimizer (JAX: of its state) as JSON, the same in all frameworks.

    >>> import torch
    >>> keras_rule = LossScale.like("keras", init=2.0**16)
    >>> weight = torch.ones(2, requires_grad=True)
    >>> opt = wrap_optimizer(torch.optim.SGD([weight], lr=0.1), "mixed_float16", loss_scale=keras_rule)
    >>> save_loss_scale(opt)["scale"]
    65536.0
    >>> save_loss_scale(opt, like="keras")
    {'dynamic_scale': 65536.0, 'step_counter': 0}

    Args:
        holder: a wrapped optimizer, or in JAX the optimizer state that contains its ``loss_scale``.
        like: another library, to return the form that this library loads: torch, apex, keras, tensorflow, deepspeed,
            megatron, flax, jmp or fairseq. A warning lists what that form cannot express.

    Raises:
        InvalidValueError: the library is unknown.
    """
    adapter = adapter_for(None, holder, where="save_loss_scale(holder)")
    if SAVE_LOSS_SCALE.offered_by(adapter):
        return SAVE_LOSS_SCALE.of(adapter)(holder, like=like)
    settings, state = adapter.loss_scale_of(holder)
    return settings.to_state_dict(state, like=like)


def load_loss_scale(holder: Any, saved: Mapping[str, Any]) -> Any:
    """Continue from a loss-scale state saved by `save_loss_scale` or by another library, in this framework or another.

    Returns:
        The same object if it is mutable; in JAX, a new optimizer state.

    Raises:
        StateError: the state is of another kind, has missing fields, or is outside the settings; nothing is changed.
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
    """Differentiate a loss function under a policy. The loss is returned unscaled, the gradients still scaled.

    The function receives parameters and arguments in the compute format. Gradients have the parameters' own format.

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
        fun: ``fun(params, *args, **kwargs) -> loss``, or ``(loss, aux)`` with ``has_aux``.
        policy: bound now if given; None is the current policy at each call.
        has_aux: whether ``fun`` returns more than the loss.
        argnums: the arguments of ``fun`` to differentiate, as in ``jax.value_and_grad``: an integer, or several, whose
            gradients are returned in a tuple.
        backend: the framework's name, if the arguments do not show it.

    Returns:
        A function of ``(opt_state, params, *args, **kwargs)``.
    """
    bound = None if policy is None else make_policy(policy)
    options = {} if argnums == 0 else {"argnums": argnums}

    @functools.wraps(fun)
    def differentiated(opt_state: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = adapter_for(backend, (opt_state, params), where="value_and_grad(fun)(opt_state, params)")
        transformed = VALUE_AND_GRAD.of(adapter, options)(fun, bound, has_aux, **options)
        return transformed(opt_state, params, *args, **kwargs)

    return differentiated


def autocast(
    target: Any = None,
    policy: Policy | str | None = None,
    *,
    backend: str | None = None,
    argnums: int | Sequence[int] | None = None,
    **mistaken: Any,
) -> Any:
    """Run operations in the formats of a policy: ``with autocast(policy):``, or as a decorator.

    >>> import torch
    >>> with autocast("mixed_bfloat16"):
    ...     print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
    torch.bfloat16

    Args:
        target: a policy or its name, for a context that every loaded framework with ambient autocast enters; or a
            function or module to run under autocast.
        policy: the policy of a function; or, as a keyword, of a context or decorator. Bound now if given, else the
            current policy at each call.
        backend: one framework's name, to affect only that one.
        argnums: for a function in JAX: the positions of its arguments that are parameters, the first by default. Other
            float32 arguments stay float32 next to 16-bit values.
        **mistaken: arguments of other libraries' autocast, such as ``dtype=``, ``device_type=`` and ``enabled=``:
            refused, with a hint at what to write instead.

    Returns:
        A context manager that can be entered again and in several threads, and used as a decorator; or the transformed
        function.

    Raises:
        InvalidTypeError: there are two policies, or an argument of another library's autocast.
        UnsupportedError: no loaded framework has this kind of autocast.
    """
    if mistaken:
        raise _another_autocast(mistaken)
    bound = None if policy is None else make_policy(policy)
    if callable(target) and not isinstance(target, Policy) and name_of_dtype(target) is None:
        return autocast_function(target, bound, backend, _given(argnums=argnums))
    if argnums is not None:
        raise InvalidTypeError(
            "argnums needs a function",
            where="autocast(policy, argnums=)",
            found=_shown(argnums),
            allowed="autocast(function, policy, argnums=)",
            fix="pass the function too, or leave argnums out",
        )
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
    """Return the error for ``autocast(dtype=...)`` and the like, which torch's autocast takes."""
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
    """Return a value's text for an error; for an array, its type alone."""
    text = repr(value)
    return text if len(text) < 80 and "\n" not in text else f"a {kind_of(value)}"


def rewrite(
    fn: Any = None,
    /,
    *args: Any,
    policy: Policy | str | None = None,
    backend: str | None = None,
    jit_compile: bool | None = None,
    argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Any:
    """Rewrite a function or model so that its operations run in the formats of a policy, and report what was decided.

    >>> import jax
    >>> fast = rewrite(lambda w, x: x @ w, jax.numpy.ones((2, 3)), jax.numpy.ones((4, 2)), policy="mixed_float16")
    >>> fast.plan.totals["by_format"]
    {'float16': 1}

    Args:
        fn: the function or model; without it, a decorator: ``@rewrite(policy="mixed_bfloat16")``.
        *args: example arguments. Without them, ``fn`` is rewritten at its first call if it does not show its framework
            itself.
        policy: a policy or its name; None is the current policy when ``fn`` is rewritten.
        backend: the framework's name, if neither the function nor the arguments show it and several are loaded.
        jit_compile: for TensorFlow: as in ``tf.function``.
        argnums: for JAX: the positions of the arguments that are parameters, the first by default.
        **kwargs: example keyword arguments.

    Returns:
        The replacement for ``fn``, with an attribute ``plan``; see the framework's own ``rewrite``.

    Raises:
        InvalidTypeError: ``fn`` is neither callable nor a graph, or no adapter knows the arguments.
        UnsupportedError: the framework's adapter has no rewrite, or does not have these options.
    """
    chosen = None if policy is None else make_policy(policy)
    options = _given(jit_compile=jit_compile, argnums=argnums)
    if fn is None and not (args or kwargs):
        return functools.partial(rewrite, policy=chosen, backend=backend, **options)
    own = registry.adapter_of(fn)
    _check_rewritable(fn, own, where="rewrite(fn)")
    if args or kwargs or backend is not None or own is not None:
        adapter = offering(REWRITE, backend, (fn, args, kwargs), where="rewrite(fn, *args)")
        return REWRITE.of(adapter, options)(fn, args, kwargs, chosen_policy(chosen, "rewrite(fn)"), **options)
    named = registry.adapter_named_in("rewrite", fn)
    if named and getattr(named, "rewrites_unseen", False):  # rewrite now, so that a SavedModel finds the function
        return REWRITE.of(named, options)(fn, (), {}, chosen_policy(chosen, "rewrite(fn)"), **options)
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
    """List the format of every operation of a function or model under a policy, with its place and the reason.

    The result prints as a table.

    >>> import jax
    >>> print(explain(lambda w, x: x @ w, jax.numpy.ones((2, 3)), jax.numpy.ones((4, 2)), policy="O1").policy)
    mixed_float16

    Args:
        fn: the function or model.
        *args: its arguments.
        policy: a policy or its name; None is the current policy.
        backend: the framework's name, if neither the function nor the arguments show it and several are loaded.
        engine: what will run it: "rewrite", the default, or in PyTorch "autocast", which records one run under
            `autocast`. A PyTorch model that is not a single graph is recorded too; the plan's ``engine`` reports that.
        **kwargs: its keyword arguments.

    Raises:
        InvalidTypeError: ``fn`` is neither callable nor a graph, or no adapter knows the arguments.
        UnsupportedError: the framework's adapter has no explain, or does not have this engine.
    """
    _check_rewritable(fn, registry.adapter_of(fn), where="explain(fn)")
    adapter = offering(EXPLAIN, backend, (fn, args, kwargs), where="explain(fn, *args)")
    options = {} if engine in (None, "rewrite") else {"engine": engine}
    return EXPLAIN.of(adapter, options)(fn, args, kwargs, make_policy(policy), **options)


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _check_rewritable(fn: object, adapter: Registered | None, *, where: str) -> None:
    if not REWRITE.offered_by(adapter):
        allowed = "a function, a model or a framework's graph"
        check_callable(fn, where=where, allowed=allowed, fix="pass the function itself, then its arguments")
