"""Report the health of the loss scale during ``model.fit``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras

from polyamp.diagnosis.diagnose import diagnose
from polyamp.diagnosis.health import Explainer, Health, health
from polyamp.errors import InvalidTypeError, check_arguments, check_count

_NO_SCALE_HELPS = ("forward", "layer", "model")
_NAME = "backends.keras.HealthCallback"
_FEW = 4  # skipped steps


def _log(found: Health) -> None:
    logger = logging.getLogger("polyamp")
    if found.alarming:
        logger.warning("%s. %s", found, found.finding)
    else:
        logger.info("%s", found)


class HealthCallback(keras.callbacks.Callback):
    """A callback that checks the health of ``fit`` every few batches and at each epoch's end, and adds it to the logs.

    Each look logs the line of `polyamp.health` to the logger ``polyamp``, as a warning with advice if it is alarming.
    For other uses, call ``polyamp.health(model)`` in a callback of your own.

    >>> import numpy as np, polyamp
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    >>> model = polyamp.convert(model, "mixed_float16")
    >>> settings = polyamp.LossScale(init=2.0**10)
    >>> optimizer = polyamp.wrap_optimizer(keras.optimizers.SGD(), "mixed_float16", loss_scale=settings)
    >>> model.compile(optimizer=optimizer, loss="mse")
    >>> history = model.fit(np.ones((8, 4)), np.ones(8), verbose=0, callbacks=[HealthCallback()])
    >>> history.history["loss_scale"], history.history["skipped"]
    ([1024.0], [0])

    Args:
        every: number of batches between checks; a check waits for the device.
        batch: ``(x, y)``, a batch on which `polyamp.diagnose` finds out why steps are skipped: once for each run of
            skips, and once if a quarter of the steps is skipped, in a row or not, and no loss scale helps. The verdict
            is issued as a `PolyampWarning`.

    Raises:
        InvalidTypeError: ``every`` is not an integer, or ``batch`` is not a tuple; when training begins: the model's
            optimizer is not a result of `polyamp.wrap_optimizer`.
        InvalidValueError: ``every`` is less than 1.
    """

    def __init__(self, every: int = 100, *, batch: Sequence[Any] | None = None) -> None:
        super().__init__()
        check_count("every", every, where="HealthCallback(every=)")
        is_batch = batch is None or isinstance(batch, tuple | list)
        check_arguments(
            _NAME, [("batch", batch, is_batch, "a batch of the training data: a tuple (x, y)")], InvalidTypeError
        )
        self.every = every
        self.batch = batch
        self._explain = Explainer(lambda *batch: diagnose(self.model, *batch))
        self._batches, self._looked = 0, -1
        self._seen, self._is_explained = (0, 0), False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raise if the model's optimizer is not wrapped."""
        health(self.model)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Check the health, at every ``every``-th batch."""
        self._batches += 1
        if self._batches % self.every == 0:
            self._look()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Check the health, and add ``loss_scale`` and ``skipped`` (number of skipped steps so far) to the logs."""
        found = self._look() if self._looked != self._batches else health(self.model)
        if logs is not None:
            logs.update(loss_scale=found.scale, skipped=found.skipped)

    def _look(self) -> Health:
        self._looked = self._batches
        found = health(self.model)
        _log(found)
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
