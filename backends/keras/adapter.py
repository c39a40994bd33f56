"""The adapter: what `polyamp`'s verbs do with Keras objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import keras

from polyamp.backends.keras.casting import cast
from polyamp.backends.keras.convert import convert
from polyamp.backends.keras.explain import explain
from polyamp.backends.keras.facts import facts
from polyamp.backends.keras.operations import OPERATIONS
from polyamp.backends.keras.recording.record import record
from polyamp.backends.keras.steps.averages import guard_steps
from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.backends.keras.steps.settings import check_factor
from polyamp.diagnosis.facts import Facts
from polyamp.diagnosis.recording import Recording
from polyamp.loss_scale import LossScale, LossScaleState
from polyamp.plan import Plan
from polyamp.policy import Policy
from polyamp.refusals import no_loss_scale

if TYPE_CHECKING:
    from polyamp.demo import Task, Trace


@final
class KerasAdapter:
    """Keras 3 behind `polyamp.adapter.Adapter`, on whichever framework it runs, with model conversion and the demo."""

    name = "keras"
    operations: Mapping[str, str] = OPERATIONS
    instead: Mapping[str, str] = {
        "rewrite": "rewrite a function that calls the model, or its step: model.train_step = "
        "polyamp.rewrite(model.train_step, policy=policy); or polyamp.convert(model, policy)",
        "autocast_context": "polyamp.convert(model, policy), or the autocast of Keras' backend around what calls it",
    }
    """What to do where a verb is missing."""

    @property
    def runs_on(self) -> str:
        """The name of the adapter of Keras' backend, which functions that name both are for."""
        return str(keras.backend.backend())

    def owns(self, obj: object) -> bool:
        """Whether ``obj`` is a layer, model, optimizer or variable of Keras."""
        return isinstance(obj, keras.Layer | keras.optimizers.Optimizer | keras.Variable)

    def describe(self) -> dict[str, Any]:
        """Version and backend; the devices are those that the backend's own adapter describes.

        >>> adapter.describe()["title"].startswith("keras on ")
        True
        """
        backend = keras.backend.backend()
        notes = [f"runs on {backend}, which has the devices; KERAS_BACKEND chooses another"]
        return {
            "version": keras.__version__,
            "title": f"keras on {backend}",
            "backend": backend,
            "devices": [],
            "notes": notes,
        }

    def cast(self, tree: Any, format_name: str, /) -> Any:
        """See `polyamp.backends.keras.cast`."""
        return cast(tree, format_name)

    def wrap_optimizer(
        self,
        optimizer: Any,
        policy: Policy,
        *,
        loss_scale: LossScale,
        max_grad_norm: float | None,
        master_weights: bool | None = None,
    ) -> LossScaledOptimizer:
        """See `polyamp.backends.keras.LossScaledOptimizer`.

        Raises:
            InvalidValueError: also where ``optimizer`` has a ``loss_scale_factor`` of its own.
        """
        check_factor(optimizer)
        wrapped = LossScaledOptimizer(optimizer, loss_scale, max_grad_norm=max_grad_norm, master_weights=master_weights)
        wrapped.scaler.compute = policy.compute
        return wrapped

    def scale_loss(self, loss: Any, holder: Any) -> Any:
        """See `LossScaledOptimizer.scale_loss`."""
        return _wrapped(holder, "scale_loss(holder)").scale_loss(loss)

    def loss_scale_of(self, holder: Any) -> tuple[LossScale, LossScaleState]:
        """The settings of a wrapped optimizer, or of a model's, and its state on the host; waits for the device."""
        scaler = _wrapped(holder, "loss_scale_of(holder)").scaler
        return scaler.settings, scaler.host_state

    def save_loss_scale(self, holder: Any) -> dict[str, Any]:
        """The loss-scale state of a wrapped optimizer; waits for the device."""
        scaler = _wrapped(holder, "save_loss_scale(holder)").scaler
        return scaler.settings.to_state_dict(scaler.host_state)

    def load_loss_scale(self, holder: Any, saved: Mapping[str, Any]) -> LossScaledOptimizer:
        """The same optimizer, continuing from that state."""
        wrapped = _wrapped(holder, "load_loss_scale(holder)")
        wrapped.scaler.load(saved)
        return wrapped

    def record(
        self,
        step: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        policy: Policy,
        *,
        widened: bool,
        scale: float | None = None,
    ) -> Recording:
        """See `polyamp.backends.keras.recording.record.record`."""
        return record(step, args, kwargs, policy, widened=widened, scale=scale)

    def facts(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any
    ) -> Facts:
        """See `polyamp.backends.keras.facts.facts`."""
        return facts(target, args, kwargs, policy, optimizer)

    def explain(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Plan:
        """See `polyamp.backends.keras.explain.explain`."""
        return explain(fn, args, kwargs, policy)

    def convert(self, model: Any, policy: Policy) -> Any:
        """See `polyamp.backends.keras.convert`."""
        converted = convert(model, policy)
        if converted.compiled:
            guard_steps(converted)
        return converted

    def train_digits(self, task: Task) -> Trace:
        """Train the classifier of ``polyamp demo``."""
        from polyamp.backends.keras.demo import train

        return train(task)


adapter = KerasAdapter()


def _wrapped(holder: Any, where: str) -> LossScaledOptimizer:
    found = getattr(holder, "optimizer", None) if isinstance(holder, keras.Model) else holder
    if not isinstance(found, LossScaledOptimizer):
        raise no_loss_scale(found, where=where, allowed="what polyamp.wrap_optimizer gave, or a model compiled with it")
    return found
