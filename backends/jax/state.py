"""The state of a wrapped optimizer: a pytree of arrays, whose type holds the settings of the loss scale.

Functions here find the state in larger pytrees, and refuse a pytree in which the loss scale cannot work. On the host
they read, save and load the loss scale, and check its limits.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax.casting import check_tree, is_array
from polyamp.errors import UsageError, is_number, wrong_type
from polyamp.policies import Policy
from polyamp.scale import StepResult
from polyamp.settings import TYPES, LossScale, LossScaleState
from polyamp.skips import report_limits

SCALARS = len(LossScaleState._fields)
_DTYPES = {float: np.float32, int: np.int32}


class _Fields(NamedTuple):
    loss_scale: Any
    good_steps: Any
    hysteresis: Any
    skipped_in_a_row: Any
    skipped: Any
    steps: Any
    growths: Any
    calibrating: Any
    grown_at: Any
    overflow_scale: Any
    inner_state: Any
    master_weights: Any


class LossScaleOptState(_Fields):
    """The state that ``wrap_optimizer(tx).init(params)`` returns: a NamedTuple, and therefore a pytree.

    >>> import optax, polyamp
    >>> opt_state = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16").init({"w": jnp.ones(2)})
    >>> float(opt_state.loss_scale), opt_state.last_step
    (65536.0, StepResult(applied=False, scale=65536.0, skipped_in_a_row=0))

    Attributes:
        loss_scale: the scale of the next loss; f32[]. ``optax.tree.get(opt_state, "loss_scale")`` reads it from any
            larger state.
        good_steps, hysteresis, skipped_in_a_row, skipped, steps, growths, calibrating, grown_at: i32[]; see
            `polyamp.LossScaleState`.
        overflow_scale: f32[]; see there.
        inner_state: the state of the optimizer that was wrapped.
        master_weights: pytree of float32 copies of the 16-bit parameters, with None for the others; None if no
            parameter has 16 bits.
    """

    __slots__ = ()
    settings: ClassVar[LossScale]
    policy: ClassVar[Policy | None]  # that the optimizer was wrapped for; None if nobody chose one

    @property
    def scalars(self) -> LossScaleState:
        """Return the scalars in the form that `polyamp.advance` takes."""
        fields = [jax.tree.leaves(field) for field in self[:SCALARS]]  # flax.nnx wraps them
        for name, leaves in zip(self._fields, fields, strict=False):
            if len(leaves) != 1 or not (is_array(leaves[0]) or is_number(leaves[0])):
                found, where = leaves[0] if leaves else None, f"{name} of the state of a wrapped optimizer"
                fix = "pass the result of tx.init(params), or the state that the last update returned"
                raise wrong_type(found, where=where, allowed="an array of shape ()", fix=fix)
        return LossScaleState(*(leaf for (leaf,) in fields))

    @property
    def last_step(self) -> StepResult:
        """Return what the last step did; under ``LossScale.none()`` every step is applied, and none is counted.

        Inside ``jit`` the values are traced, and ``last_step.applied`` can be passed to `select`. Outside they are
        numbers, and reading one waits for the device.
        """
        return StepResult(self.scalars, None if self.settings.check else True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.settings, self.policy, tuple(self))


@functools.cache
def state_type(settings: LossScale, policy: Policy | None) -> type[LossScaleOptState]:
    """Return `LossScaleOptState` with these settings and this policy."""
    # They belong to the type, since flax, orbax and optax rebuild a NamedTuple from its type and its fields alone.
    own = {"__slots__": (), "__module__": __name__, "settings": settings, "policy": policy}
    return type("LossScaleOptState", (LossScaleOptState,), own)


def _rebuild(settings: LossScale, policy: Policy | None, fields: tuple[Any, ...]) -> LossScaleOptState:
    return state_type(settings, policy)._make(fields)


def initial_scalars(settings: LossScale) -> LossScaleState:
    """Return the state before the first step as arrays, f32[] and i32[], each in its own buffer."""
    values = zip(settings.initial_state(), TYPES, strict=True)
    return LossScaleState(*(jax.device_put(_DTYPES[kind](value)) for value, kind in values))


def is_state(leaf: object) -> TypeGuard[LossScaleOptState]:
    """Return whether a node of a pytree is the state of a wrapped optimizer."""
    return isinstance(leaf, LossScaleOptState)


def states_in(tree: Any) -> list[LossScaleOptState]:
    """Return the states of wrapped optimizers in a pytree."""
    check_tree(tree, where="the arguments, in which the state of a wrapped optimizer is looked for")
    return list(filter(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def holds_state(tree: Any) -> bool:
    """Return whether a pytree holds the state of a wrapped optimizer."""
    return bool(states_in(tree))


def find_state(holder: Any, *others: Any) -> LossScaleOptState:
    """Return the one wrapped optimizer's state in a pytree: an optax state, flax ``TrainState`` or ``nnx.Optimizer``.

    >>> find_state({"params": jax.numpy.ones(2)})
    Traceback (most recent call last):
    ...
    polyamp.errors.UsageError: there is no state of a wrapped optimizer in this tree...

    Args:
        holder: the pytree.
        *others: the other arguments of the call, in which a swapped state is looked for.

    Raises:
        UsageError: there is none, or more than one; or the wrapped optimizer is only a part of an optax optimizer.
    """
    found = states_in(holder)
    if len(found) == 1:
        if found[0].settings.check:
            _check_outermost(holder)
        return found[0]
    fix = f"{_WRAP}, and pass the result of tx.init(params)"
    if found:
        fix = f"pass the state of one of them; if they belong to one optimizer, {_WRAP}"
    elif holds_state(others):
        fix = "swap the arguments, opt_state comes first: value_and_grad(fun, policy)(opt_state, params, *args)"
    elif _is_restored(holder):
        fix = "restore the checkpoint with a target that has the types, such as jax.eval_shape(tx.init, params)"
    count = "there are several states" if found else "there is no state"
    raise UsageError(
        f"{count} of a wrapped optimizer in this tree",
        where=_HOLDER,
        found=f"{len(found)} in {type(holder).__name__}",
        allowed="one",
        fix=fix,
    )


_HOLDER = "the optimizer state that holds the loss scale"
_WRAP = "wrap the outermost optimizer, once: tx = polyamp.wrap_optimizer(optax.chain(...), policy)"


def _is_restored(holder: Any) -> bool:
    """Return whether a pytree has the fields of a state in a dict, as orbax restores them without a target."""

    def is_one(node: Any) -> bool:
        return isinstance(node, Mapping) and node.keys() >= set(_Fields._fields)

    return any(map(is_one, jax.tree.leaves(holder, is_leaf=is_one)))


def _check_outermost(holder: Any) -> None:
    """Refuse a wrapped optimizer that is a part of an optax optimizer: other parts see scaled gradients, or no skip."""
    nodes = jax.tree.leaves(holder, is_leaf=lambda node: is_state(node) or is_of_optax(node) or _is_chain(node))
    whole = next((node for node in nodes if holds_state(node) and not is_state(node)), None)
    if whole is not None:
        place = type(whole).__name__ if is_of_optax(whole) else "chain, or next to the state of another optimizer"
        raise only_a_part(place, where=_HOLDER)


def only_a_part(place: str, *, where: str) -> UsageError:
    """Return the error for a wrapped optimizer inside an optimizer of optax."""
    return UsageError(
        "the wrapped optimizer is only a part of an optax optimizer: gradients are accumulated before they are "
        "tested, used by other parts while they are scaled, or applied by these although the step is skipped",
        where=where,
        found=f"a wrapped optimizer in optax's {place}",
        allowed="a wrapped optimizer around all others, optax.MultiSteps and optax.masked too",
        fix=_WRAP + "; pass the states of separate optimizers separately",
    )


def _is_chain(node: Any) -> bool:
    """Return whether a node looks like the state of ``optax.chain`` or ``named_chain`` with a wrapped part."""
    parts = list(node.values()) if type(node) is OrderedDict else node if type(node) is tuple else ()
    return any(is_of_optax(part) and not holds_state(part) for part in parts) and holds_state(node)


def is_of_optax(state: object) -> bool:
    """Return whether a node of a pytree is the state of an optimizer of optax."""
    return type(state).__module__.partition(".")[0] == "optax"


def check_limits(holder: Any) -> StepResult:
    """Return what the last step did; warn or raise if the loss scale cannot help any more.

    A compiled step cannot warn or raise, so the limits ``LossScale(on_min=, max_skips=)`` are checked here: call it
    outside ``jit``, at each step or now and then. It waits for the device. Steps outside ``jit`` do not need it.

    >>> import optax, polyamp
    >>> tx = polyamp.wrap_optimizer(optax.sgd(0.1), "mixed_float16")
    >>> check_limits(tx.init({"w": jnp.ones(2)})).skipped_in_a_row
    0

    Args:
        holder: a pytree that holds the state of one wrapped optimizer.

    Raises:
        LossScaleError: too many skipped steps in a row, or an overflow at the smallest scale under ``on_min="raise"``.
        UsageError: ``holder`` holds no such state, or more than one.
    """
    state = find_state(holder)
    scalars = _on_host(state)
    report_limits(state.settings, scalars)
    return StepResult(scalars, None if state.settings.check else True)


def loss_scale_of(holder: Any) -> tuple[LossScale, LossScaleState]:
    """Return the settings of the loss scale in a pytree, and its state as Python numbers. Waits for the device."""
    state = find_state(holder)
    return state.settings, _on_host(state)


def load_loss_scale(holder: Any, saved: Mapping[str, Any]) -> Any:
    """Return the same pytree with a loss-scale state that `save_loss_scale` returned, in any framework."""
    old = find_state(holder)
    values = old.settings.from_state_dict(saved)
    names = old._fields[: len(old.scalars)]
    fields = {  # each keeps the shape and the devices of a replicated state
        name: jax.tree.map(functools.partial(jnp.full_like, fill_value=value), getattr(old, name))
        for name, value in zip(names, values, strict=True)
    }
    new = old._replace(**fields)
    return jax.tree.map(lambda leaf: new if is_state(leaf) else leaf, holder, is_leaf=is_state)


def _on_host(state: LossScaleOptState) -> LossScaleState:
    fields = [np.asarray(field) for field in jax.device_get(state.scalars)]  # all copies at once
    if any(np.unique(field).size > 1 for field in fields):
        raise _of_an_ensemble(f"loss scales {fields[0].tolist()}", allowed="one state, or equal copies of one")
    return LossScaleState(*(field.flat[0].item() for field in fields))


def check_single(state: LossScaleOptState) -> None:
    """Refuse the state of an ensemble, whose step is mapped over its members."""
    shape = jnp.shape(state.scalars.scale)
    if shape:
        raise _of_an_ensemble(f"loss scales of shape {shape}", allowed="one state; jax.vmap(step) passes each member's")


def _of_an_ensemble(found: str, *, allowed: str) -> UsageError:
    return UsageError(
        "the members of this ensemble have loss scales of their own",
        where=_HOLDER,
        found=found,
        allowed=allowed,
        fix="pass one member: jax.tree.map(lambda leaf: leaf[0], opt_state)",
    )
