"""Report the health of the loss scale during ``model.fit``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from polyamp.backends.keras.unstable import update_variables
from polyamp.diagnosis.diagnose import diagnose
from polyamp.diagnosis.health import Health, check_probe, health
from polyamp.diagnosis.watch import Explainer
from polyamp.errors import check_count, wrong_type

if TYPE_CHECKING:
    from polyamp.diagnosis.diagnose import Verdict
    from polyamp.diagnosis.probe import Probe

_NO_SCALE_HELPS = ("forward", "layer", "model")
_FEW = 4  # skipped steps


def _log(found: Health) -> None:
    logger = logging.getLogger("polyamp")
    if found.alarming:
        logger.warning("%s. %s", found, found.finding)
    else:
        logger.info("%s", found)


class HealthCallback(keras.callbacks.Callback):
    """A callback that checks the health of ``fit`` every few batches and at each epoch's end, and adds it to the logs.

    >>> import numpy as np, polyamp
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    >>> model = polyamp.convert(model, "mixed_float16")
    >>> settings = polyamp.LossScale(init=2.0**10)
    >>> optimizer = polyamp.wrap_optimizer(keras.optimizers.SGD(), "mixed_float16", loss_scale=settings)
    >>> model.compile(optimizer=optimizer, loss="mse")
    >>> history = model.fit(np.ones((8, 4)), np.ones(8), verbose=0, callbacks=[HealthCallback(hooks=[print])])
    steps 1  skipped 0  scale 2^10  calibrating
    >>> history.history["loss_scale"], history.history["skipped"]
    ([1024.0], [0])

    Args:
        every: number of batches between checks; a check waits for the device.
        hooks: functions that take the result of `polyamp.health`; None logs its line to the logger ``polyamp``, as a
            warning with advice if it is alarming.
        probe: the result of `polyamp.probe` for this model: the scale is then compared with its window.
        batch: ``(x, y)``, a batch on which `polyamp.diagnose` finds out why steps are skipped: once for each run of
            skips, and once if a quarter of the steps is skipped, in a row or not, and no loss scale helps.
        on_verdict: a function that takes that verdict; None issues it as a `PolyampWarning`.

    Raises:
        InvalidTypeError: ``every`` is not an integer, a hook is not callable, ``batch`` is not a tuple, or ``probe`` is
            not a probe; when training begins: the model's optimizer is not a result of `polyamp.wrap_optimizer`.
        InvalidValueError: ``every`` is less than 1.
    """

    def __init__(
        self,
        every: int = 100,
        hooks: Iterable[Callable[[Health], object]] | None = None,
        probe: Probe | None = None,
        *,
        batch: Sequence[Any] | None = None,
        on_verdict: Callable[[Verdict], object] | None = None,
    ) -> None:
        super().__init__()
        check_count("every", every, where="HealthCallback(every=)")
        check_probe(probe, "HealthCallback")
        hooks = (_log,) if hooks is None else tuple(hooks) if isinstance(hooks, Iterable) else (hooks,)
        for hook in hooks:
            if not callable(hook):
                raise wrong_type(
                    hook,
                    where="HealthCallback(hooks=)",
                    allowed="functions of a health",
                    fix="give a list of functions: hooks=[print]",
                )
        if not (batch is None or isinstance(batch, tuple | list)):
            raise wrong_type(
                batch,
                where="HealthCallback(batch=)",
                allowed="a tuple (x, y)",
                fix="give one batch of the training data",
            )
        self.every = every
        self.batch = batch
        self._hooks, self._probe = hooks, probe
        self._explain = Explainer(lambda *batch: diagnose(self.model, *batch), on_verdict)
        self._batches, self._looked = 0, -1
        self._seen, self._is_explained = (0, 0), False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raise if the model's optimizer is not wrapped."""
        health(self.model)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Check the health if it is time for it."""
        self._batches += 1
        if self._batches % self.every == 0:
            self._look()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Check the health, and add ``loss_scale`` and ``skipped`` (number of skipped steps so far) to the logs."""
        found = self._look() if self._looked != self._batches else health(self.model)
        if logs is not None:
            logs.update(loss_scale=found.scale, skipped=found.skipped)

    def _look(self) -> Health:
        update_variables(self.model)  # on JAX, fit does not update them while it runs
        self._looked = self._batches
        found = health(self.model, self._probe)
        for hook in self._hooks:
            hook(found)
        often = self._skips_often(found)
        if self.batch is not None and not self._is_explained:
            if found.state == "spiral":
                self._explain(found, *self.batch)
            elif often and diagnose(self.model, *self.batch).kind in _NO_SCALE_HELPS:
                self._explain(found, *self.batch)
                self._is_explained = True
        return found

    def _skips_often(self, found: Health) -> bool:
        """Return whether a quarter of the last steps was skipped, and at least a few."""
        skipped, steps = found.skipped - self._seen[0], found.steps - self._seen[1]
        often = skipped >= _FEW and 4 * skipped >= steps
        if often or steps >= 4 * _FEW:
            self._seen = (found.skipped, found.steps)
        return often
