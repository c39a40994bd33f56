"""Settings and traces for the tests of the loss-scale rule, and functions that walk a trace."""

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from polyamp import LossScale, LossScaleState, advance

TRACES = st.lists(st.booleans(), min_size=1, max_size=60)
"""For every step: were its gradients finite?"""


@st.composite
def powers_of_two(draw: st.DrawFn) -> LossScale:
    """Draw settings whose numbers are all powers of two, within limits that a short trace reaches."""
    low, init, high = sorted(draw(st.lists(st.integers(-20, 20), min_size=3, max_size=3)))
    factors = {"growth": 2.0 ** draw(st.integers(1, 3)), "backoff": 2.0 ** -draw(st.integers(1, 3))}
    return LossScale(init=2.0**init, min=2.0**low, max=2.0**high, **factors, **draw(counts()))


@st.composite
def any_numbers(draw: st.DrawFn) -> LossScale:
    """Draw settings of any float32 numbers, from the smallest normal one to the largest."""
    scales = st.floats(2.0**-126, 2.0**127, width=32, allow_subnormal=False)
    low, init, high = sorted(draw(st.lists(scales, min_size=3, max_size=3)))
    growth = draw(st.floats(1.0, 64.0, width=32, exclude_min=True))
    backoff = draw(st.floats(2.0**-6, 1.0, width=32, exclude_max=True))
    return LossScale(init=init, min=low, max=high, growth=growth, backoff=backoff, **draw(counts()))


@st.composite
def counts(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "interval": draw(st.integers(1, 5)),
        "hysteresis": draw(st.integers(1, 4)),
        "consecutive": draw(st.booleans()),
        "late_growth": draw(st.sampled_from(["never", "after_overflow", "always"])),
        "on_min": "ignore",
    }


def walk(
    config: LossScale, finite: Iterable[Any], state: LossScaleState | None = None, **where: Callable[..., Any]
) -> list[LossScaleState]:
    """Return the state after every step of a trace."""
    state = config.initial_state() if state is None else state
    states = []
    for flag in finite:
        state = advance(config, state, flag, **where)
        states.append(state)
    return states


def read(trace: str) -> list[bool]:
    """Read a drawn trace: ``.`` is a finite step, ``!`` an overflow."""
    return [step == "." for step in trace.replace(" ", "")]


class DeepSpeed:
    """DynamicLossScaler.update_scale of deepspeed/runtime/fp16/loss_scaler.py, 0.19, without its logging."""

    def __init__(self, saved: dict[str, Any] | None = None, interval: int = 1000, hysteresis: int = 2) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter = 2.0**16, 0, -1
        self.scale_factor, self.min_scale, self.consecutive_hysteresis = 2.0, 1.0, False
        self.scale_window, self.delayed_shift, self.cur_hysteresis = interval, hysteresis, hysteresis
        self.__dict__.update(saved or {})

    def step(self, finite: bool) -> float:
        if finite:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable = (self.cur_iter - self.last_overflow_iter) - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        else:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1
        return self.cur_scale
