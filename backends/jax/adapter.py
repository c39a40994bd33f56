"""The JAX adapter: what the core calls, handed to the modules that do it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np

from polyamp.backends.jax.autocast.function import autocast
from polyamp.backends.jax.casting import cast
from polyamp.backends.jax.devices import described
from polyamp.backends.jax.graphs.rewrite import explain, rewritten_for
from polyamp.backends.jax.operations import OPERATIONS
from polyamp.backends.jax.steps import saving
from polyamp.backends.jax.steps.state import holds_state
from polyamp.backends.jax.steps.step import Skip
from polyamp.backends.jax.steps.value_and_grad import scale_loss, value_and_grad
from polyamp.loss_scale import LossScale, LossScaleState
from polyamp.plan import Plan
from polyamp.policy import Policy
from polyamp.registry import missing

if TYPE_CHECKING:
    from polyamp.demo import Task, Trace
    from polyamp.diagnosis.facts import Facts
    from polyamp.diagnosis.recording import Recording


@final
class JaxAdapter:
    """JAX: arrays, any registered pytree, optax optimizers; flax and equinox by being pytrees."""

    name = "jax"
    operations: Mapping[str, str] = OPERATIONS

    def owns(self, obj: object) -> bool:
        """Whether ``obj`` is a pytree node that someone registered with JAX, or a NumPy array, which JAX takes."""
        known = obj is None or isinstance(obj, dict | list | tuple)
        return isinstance(obj, np.ndarray | np.generic) or not (known or jax.tree_util.all_leaves([obj]))

    def describe(self) -> dict[str, Any]:
        """Version, devices with the formats that are fast there, and notes; see `polyamp.adapter.Adapter`."""
        devices = [described(device) for device in jax.local_devices()]
        notes = [_package_note(package) for package in ("optax", "flax", "equinox")]
        if not any(device["fast"] for device in devices):
            notes.append("no device here is fast in 16 bits: good for checking results, not for speed")
        return {"version": jax.__version__, "devices": devices, "notes": notes}

    def cast(self, tree: Any, format_name: str, /) -> Any:
        """See `polyamp.backends.jax.cast`."""
        return cast(tree, format_name)

    def wrap_optimizer(
        self,
        optimizer: Any,
        policy: Policy,
        *,
        loss_scale: LossScale,
        max_grad_norm: float | None,
        axis_name: Hashable | None = None,
        master_weights: bool | None = None,
        skip: Skip = "auto",
    ) -> Any:
        """See `polyamp.backends.jax.wrap_optimizer`."""
        try:
            from polyamp.backends.jax.steps.transformation import wrap
        except ModuleNotFoundError as error:
            raise _without_optax(error) from error
        return wrap(
            optimizer,
            loss_scale,
            max_grad_norm=max_grad_norm,
            axis_name=axis_name,
            master_weights=master_weights,
            skip=skip,
        )

    def scale_loss(self, loss: Any, holder: Any) -> jax.Array:
        """See `polyamp.backends.jax.scale_loss`."""
        return scale_loss(loss, holder)

    def holds_loss_scale(self, tree: Any) -> bool:
        """Whether the state of a wrapped optimizer is in a pytree. States are values: each step gives a new one."""
        return holds_state(tree)

    def loss_scale_of(self, holder: Any) -> tuple[LossScale, LossScaleState]:
        """See `polyamp.backends.jax.steps.saving.loss_scale_of`."""
        return saving.loss_scale_of(holder)

    def save_loss_scale(self, holder: Any) -> dict[str, Any]:
        """See `polyamp.backends.jax.save_loss_scale`."""
        return saving.save_loss_scale(holder)

    def load_loss_scale(self, holder: Any, saved: Mapping[str, Any]) -> Any:
        """See `polyamp.backends.jax.load_loss_scale`."""
        return saving.load_loss_scale(holder, saved)

    def value_and_grad(
        self, fun: Callable[..., Any], policy: Policy | None, has_aux: bool, *, argnums: int | Sequence[int] = 0
    ) -> Callable[..., Any]:
        """See `polyamp.backends.jax.value_and_grad`."""
        return value_and_grad(fun, policy, has_aux, argnums=argnums)

    def autocast_function(
        self, fn: Callable[..., Any], policy: Policy | None, *, argnums: int | Sequence[int] = 0
    ) -> Callable[..., Any]:
        """See `polyamp.backends.jax.autocast`."""
        return autocast(fn, policy, argnums=argnums)

    def rewrite(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        policy: Policy,
        *,
        argnums: int | Sequence[int] = 0,
    ) -> Callable[..., Any]:
        """See `polyamp.backends.jax.rewrite`."""
        return rewritten_for(fn, args, kwargs, policy, argnums)

    def explain(self, fn: Callable[..., Any], args: Any, kwargs: Any, policy: Policy) -> Plan:
        """See `polyamp.backends.jax.explain`."""
        return explain(fn, *args, policy=policy, **kwargs)

    def record(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        policy: Policy,
        *,
        widened: bool,
        scale: float | None = None,
    ) -> Recording:
        """See `polyamp.backends.jax.recording.record.record`."""
        from polyamp.backends.jax.recording.record import record

        return record(step, args, kwargs, policy, widened=widened, scale=scale)

    def facts(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any
    ) -> Facts:
        """See `polyamp.backends.jax.facts.facts`."""
        from polyamp.backends.jax.facts import facts

        return facts(target, args, kwargs, policy, optimizer)

    def train_digits(self, task: Task) -> Trace:
        """See `polyamp.backends.jax.demo.train_digits`."""
        try:
            from polyamp.backends.jax.demo import train_digits
        except ModuleNotFoundError as error:
            raise _without_optax(error) from error
        return train_digits(task)


adapter = JaxAdapter()


def _without_optax(error: ModuleNotFoundError) -> Exception:
    return missing("optax", extra="jax") if error.name == "optax" else error


def _package_note(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} is not installed" + (': pip install "polyamp[jax]"' if package == "optax" else "")
