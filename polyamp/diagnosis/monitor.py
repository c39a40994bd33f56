"""Monitoring of training: check the health every few steps and report it to loggers, TensorBoard or other hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from polyamp.diagnosis.health import Health, check_probe, health
from polyamp.validation import check_count, is_integer, wrong_type

if TYPE_CHECKING:
    from polyamp.diagnosis.probe import Probe


class HealthMonitor:
    """A monitor that is called at each step, checks the loss scale every few calls and passes a `Health` to every hook.

    The other calls only count, so the device is waited for once in ``every`` steps.

    >>> import torch
    >>> from polyamp import wrap_optimizer
    >>> opt = wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), "mixed_float16")
    >>> monitor = HealthMonitor(every=2, hooks=[print])
    >>> for _ in range(3):
    ...     _ = monitor(opt)
    steps 0  skipped 0  scale 2^16  calibrating

    Args:
        every: number of calls from one check to the next.
        hooks: functions of a `Health`, such as those from `log_health` and `write_health`; None logs.
        probe: see `health`.

    Raises:
        InvalidTypeError: ``every`` is not an integer, a hook is not callable, or ``probe`` is not a probe.
        InvalidValueError: ``every`` is less than 1.
    """

    def __init__(
        self,
        every: int = 100,
        hooks: Iterable[Callable[[Health], object]] | None = None,
        probe: Probe | None = None,
    ) -> None:
        check_count("every", every, where="HealthMonitor(every=)")
        check_probe(probe, where="HealthMonitor(probe=)")
        self.every = every
        self.hooks = (log_health(),) if hooks is None else tuple(_check_hooks(hooks))
        self.probe = probe
        self._calls = 0

    def __call__(self, holder: Any) -> Health | None:
        """Check, if it is time to; see `health` for what ``holder`` may be and for the errors."""
        self._calls += 1
        return None if self._calls % self.every else self.look(holder)

    def look(self, holder: Any) -> Health:
        """Check now, whether it is time to or not, and pass the result to the hooks."""
        found = health(holder, self.probe)
        for hook in self.hooks:
            hook(found)
        return found


def log_health(logger: Any = None, level: int | None = None) -> Callable[[Health], None]:
    """Create a hook for plain logging: one line per check, and a warning with advice if it is alarming.

    >>> import logging
    >>> hook = log_health(logging.getLogger("training"), logging.DEBUG)

    Args:
        logger: a ``logging.Logger``, or an object with its ``log(level, message, *values)``; None is the logger
            ``polyamp``.
        level: level of lines that are not alarming; None is ``logging.INFO``.

    Raises:
        InvalidTypeError: ``logger`` is not a logger, or ``level`` is not an integer.
    """
    import logging  # costs milliseconds that `import polyamp` does not need

    target = logging.getLogger("polyamp") if logger is None else logger
    usual = logging.INFO if level is None else level
    if not callable(getattr(target, "log", None)):
        raise wrong_type(
            logger, where="log_health(logger=)", allowed="a logging.Logger", fix="give logging.getLogger(...), or None"
        )
    if not is_integer(usual):
        raise wrong_type(level, where="log_health(level=)", allowed="an integer", fix="give logging.INFO, for example")

    def hook(found: Health) -> None:
        if found.alarming:
            target.log(logging.WARNING, "%s. %s", found, found.finding)
        else:
            target.log(usual, "%s", found)

    return hook


def write_health(writer: Any, prefix: str = "loss_scale") -> Callable[[Health], None]:
    """Create a hook for TensorBoard: log2 of the scale, the margin, and the skipped steps, over the steps.

    >>> from polyamp import LossScale, LossScaleState
    >>> written = []
    >>> hook = write_health(lambda tag, value, step: written.append((tag, value, step)))
    >>> hook(Health(LossScale(), LossScaleState(2.0**15, 3, 1, 0, 1, steps=4, overflow_scale=2.0**16)))
    >>> written[0], written[-1]
    (('loss_scale/log2', 15.0, 4), ('loss_scale/margin', 1.0, 4))

    Args:
        writer: an object with ``add_scalar(tag, value, step)``, such as the ``SummaryWriter`` of torch and tensorboardX
            or the adapters of MLflow and other loggers; or a function with those three parameters, such as
            ``tf.summary.scalar``, which writes to TensorFlow's current writer.
        prefix: prefix of the tags.

    Raises:
        InvalidTypeError: it is neither.
    """
    write = getattr(writer, "add_scalar", writer)
    if not callable(write):
        allowed = "an object with add_scalar(tag, value, step), or a function of those"
        raise wrong_type(
            writer, where="write_health(writer)", allowed=allowed, fix="give a SummaryWriter, or tf.summary.scalar"
        )

    def hook(found: Health) -> None:
        counts = {name: float(getattr(found, name)) for name in ("skipped", "skipped_in_a_row", "unexpected")}
        values = {"log2": math.log2(found.scale), **counts, "margin": found.margin}
        for name, value in values.items():
            if value is not None:
                write(f"{prefix}/{name}", value, found.steps)

    return hook


def _check_hooks(hooks: Any) -> Iterable[Callable[[Health], object]]:
    if not isinstance(hooks, Iterable):
        raise wrong_type(
            hooks, where="HealthMonitor(hooks=)", allowed="several functions", fix="give a list: hooks=[log_health()]"
        )
    for hook in hooks:
        if not callable(hook):
            raise wrong_type(
                hook,
                where="HealthMonitor(hooks=)",
                allowed="functions of a Health",
                fix="give log_health(), for example",
            )
        yield hook
