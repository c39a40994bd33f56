"""The verbs for optimizers, models and losses. Each one finds the adapter of its arguments and calls it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from polyamp.adapters import adapter_for, check_backend, check_options, verb_of
from polyamp.errors import InvalidTypeError, brief, check_callable, norm_limit, refuses_unreadable
from polyamp.libraries import library
from polyamp.policies import Policy, in_policy
from polyamp.policies import policy as make_policy
from polyamp.settings import LossScale

if TYPE_CHECKING:
    import optax

    from polyamp.backends.keras.optimizer import LossScaledOptimizer as KerasOptimizer
    from polyamp.backends.tensorflow.optimizer import LossScaledOptimizer as TensorFlowOptimizer
    from polyamp.backends.torch.step.optimizer import LossScaledOptimizer as TorchOptimizer

Object = TypeVar("Object")
P = ParamSpec("P")
T = TypeVar("T")


# What an overload takes is known by the attributes that only one framework's objects have. A framework's own type would
# be `Any` for a type checker that does not find the framework, and would match the objects of all others.
class _TorchLike(Protocol):
    @property
    def param_groups(self) -> Any: ...


class _OptaxLike(Protocol):
    @property
    def init(self) -> Any: ...
    @property
    def update(self) -> Any: ...


class _KerasLike(Protocol):
    @property
    def apply(self) -> Any: ...
    @property
    def learning_rate(self) -> Any: ...


class _TensorFlowLike(Protocol):
    @property
    def compute_gradients(self) -> Any: ...


class WrapOptions(TypedDict, total=False):
    """The options of `wrap_optimizer`: first those of all frameworks, then those that only some frameworks have."""

    loss_scale: LossScale | float | str | None
    max_grad_norm: float | None
    backend: str | None
    master_weights: bool | None
    fused_step: bool | None  # PyTorch, as the next three
    process_group: Any
    norm_group: Any
    named_parameters: Any
    axis_name: Any  # JAX


@overload
def wrap_optimizer(
    optimizer: _TorchLike, policy: Policy | str | None = None, **options: Unpack[WrapOptions]
) -> TorchOptimizer: ...
@overload
def wrap_optimizer(
    optimizer: Sequence[_TorchLike], policy: Policy | str | None = None, **options: Unpack[WrapOptions]
) -> list[TorchOptimizer]: ...
@overload
def wrap_optimizer(
    optimizer: _KerasLike, policy: Policy | str | None = None, **options: Unpack[WrapOptions]
) -> KerasOptimizer: ...
@overload
def wrap_optimizer(
    optimizer: _TensorFlowLike, policy: Policy | str | None = None, **options: Unpack[WrapOptions]
) -> TensorFlowOptimizer: ...
@overload
def wrap_optimizer(
    optimizer: _OptaxLike, policy: Policy | str | None = None, **options: Unpack[WrapOptions]
) -> optax.GradientTransformationExtraArgs: ...
@overload
def wrap_optimizer(optimizer: object, policy: Policy | str | None = None, **options: Any) -> Any: ...
@refuses_unreadable
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
            ``fused_step``, ``process_group``, ``norm_group``, ``named_parameters``. JAX: ``axis_name``,
            ``master_weights``. TensorFlow and Keras: ``master_weights``.

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
    check_options(adapter.wrap_optimizer, options, where=where, elsewhere=_MEANT)
    is_chosen = policy is not None or loss_scale is not None or in_policy() or chosen.casts
    own = chosen if is_chosen else None
    return adapter.wrap_optimizer(optimizer, own, loss_scale=scale, max_grad_norm=limit, **options)


_MEANT = {
    **dict.fromkeys(
        ("clipnorm", "global_clipnorm", "max_norm", "clip_grad_norm", "clip_norm", "grad_clip", "gradient_clip_val"),
        "max_grad_norm",
    ),
    "skip_on_device": "fused_step",
    "share": "PyTorch optimizers of one loss share its scale if they are wrapped together: "
    "wrap_optimizer([first, second], policy)",
}
"""For errors: the option that other names stand for, or what to write without an option."""


def _check_made(optimizer: object) -> None:
    """Refuse objects that are not optimizers yet: a class, a function (such as an optax schedule), parameters."""
    if isinstance(optimizer, type):
        what = "no adapter knows this object: it is a class, not an optimizer"
        fix = f"make one first: {optimizer.__name__}(...); then wrap it"
    elif inspect.isroutine(optimizer) or isinstance(optimizer, functools.partial):
        what = "no adapter knows this object: it is a function, not an optimizer"
        fix = f"call it first: {getattr(optimizer, '__name__', 'it')}(...); then wrap what it returns"
    elif isinstance(optimizer, str):
        what = "no adapter knows this object: it is a name, not an optimizer"
        fix = "make one first, as in keras.optimizers.Adam(1e-3) or optax.adam(1e-3); then wrap it"
    elif isinstance(optimizer, Iterator):
        what = "no adapter knows this object: it is an iterator, of parameters perhaps, not an optimizer"
        fix = "make an optimizer of them first, as in torch.optim.AdamW(model.parameters(), lr=1e-3); then wrap it"
    else:
        return
    raise InvalidTypeError(
        what,
        where="wrap_optimizer(optimizer)",
        found=brief(optimizer),
        allowed="a torch.optim.Optimizer, an optax GradientTransformation, a Keras 3 or tf.compat.v1.train optimizer",
        fix=fix,
    )


@refuses_unreadable
def convert(model: Object, policy: Policy | str | None = None, *, backend: str | None = None) -> Object:
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
    converted: Object = verb_of(adapter, "convert")(model, make_policy(policy))
    return converted


@refuses_unreadable
def scale_loss(loss: Object, holder: Any) -> Object:
    """Return the loss in float32 times the current loss scale.

    >>> import torch
    >>> opt = wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), "mixed_float16")
    >>> scale_loss(torch.tensor(0.5), opt)
    tensor(32768.)

    Args:
        loss: a floating-point scalar.
        holder: a wrapped optimizer, or in JAX the optimizer state that contains its ``loss_scale``.
    """
    scaled: Object = adapter_for(None, holder, where="scale_loss(holder)").scale_loss(loss, holder)
    return scaled


@refuses_unreadable
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
    if like is not None:
        library(like, where="save_loss_scale(like=)")
    if hasattr(adapter, "save_loss_scale"):
        saved: dict[str, Any] = adapter.save_loss_scale(holder, like=like)
        return saved
    settings: LossScale
    settings, state = adapter.loss_scale_of(holder)
    return settings.to_state_dict(state, like=like)


@refuses_unreadable
def load_loss_scale(holder: Object, saved: Any) -> Object:
    """Continue from a loss-scale state saved by `save_loss_scale` or by another library, in this framework or another.

    Returns:
        The same object if it is mutable; in JAX, a new optimizer state.

    Raises:
        StateError: the state is of another kind, has missing fields, or is outside the settings; nothing is changed.
    """
    loaded: Object = adapter_for(None, holder, where="load_loss_scale(holder)").load_loss_scale(holder, saved)
    return loaded


@refuses_unreadable
def value_and_grad(
    fun: Callable[P, T],
    policy: Policy | str | None = None,
    has_aux: bool = False,
    *,
    argnums: int | Sequence[int] = 0,
    backend: str | None = None,
) -> Callable[Concatenate[Any, P], tuple[T, Any]]:
    """Differentiate a loss function under a policy. The loss is returned unscaled, the gradients still scaled.

    The function is written for float32, and runs under `autocast`. Gradients have the parameters' own format.

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
    check_callable(fun, where="value_and_grad(fun)", allowed="a function of a loss", fix="give the function itself")
    check_backend(backend)
    bound = None if policy is None else make_policy(policy)
    options = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}

    @functools.wraps(fun)
    def differentiated(opt_state: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = adapter_for(backend, (opt_state, params), where="value_and_grad(fun)(opt_state, params)")
        transformed = verb_of(adapter, "value_and_grad", options)(fun, bound, has_aux, **options)
        return transformed(opt_state, params, *args, **kwargs)

    return differentiated  # type: ignore[return-value]  # it shows the type of ``fun``
