"""The settings of the loss scale, and the state that a step hands to the next one.

For example, with the defaults the scale starts at 2**16 and doubles after 2 000 finite steps; at the next overflow the
step is skipped and the scale is halved. `polyamp.scale.advance` is the rule.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_arguments,
    did_you_mean,
    is_integer,
    is_number,
    refuses_unreadable,
    wrong_type,
)
from polyamp.formats import FORMATS, in_single
from polyamp.libraries import KIND, LARGEST_COUNT, OTHER_NAMES, library, read, report_lost, write

FLOAT32 = FORMATS["float32"]


class LossScaleState(NamedTuple):
    """The state that `advance` carries from step to step: scalars of Python or of any framework.

    Attributes:
        scale: the factor for the next loss; float32.
        good_steps: finite steps since the scale last changed, counted towards growth; int32.
        hysteresis: overflows left before the scale backs off; int32. -1: an overflow came at the smallest scale when
            none was left.
        skipped_in_a_row: skipped steps since the last applied one; int32.
        skipped: all skipped steps; int32.
        steps: all steps, including skipped ones; int32.
        growths: number of times the scale grew; int32.
        calibrating: skipped steps before the scale first grew; int32.
        grown_at: value of ``steps`` when the scale last grew, 0 if it never did; int32.
        overflow_scale: the scale of the last skipped step, 0 if none was skipped; float32.

    The last five do not affect the scale; `polyamp.health` reads them. They are zero in states saved without them.
    """

    scale: Any
    good_steps: Any
    hysteresis: Any
    skipped_in_a_row: Any
    skipped: Any
    steps: Any = 0
    growths: Any = 0
    calibrating: Any = 0
    grown_at: Any = 0
    overflow_scale: Any = 0.0


TYPES = LossScaleState(float, int, int, int, int, int, int, int, int, float)
"""The Python type of each field of a state on the host."""


Settings = TypeVar("Settings", bound=type[Any])


def named_settings(cls: Settings) -> Settings:
    """Decorate a dataclass so that an unknown keyword argument is polyamp's error, which names the setting to write."""
    made: Callable[..., None] = cls.__init__
    names = [field.name for field in fields(cls)]

    @refuses_unreadable
    @functools.wraps(made)
    def init(self: Any, *args: Any, **given: Any) -> None:
        unknown = [name for name in given if name not in names]
        if unknown:
            hint = did_you_mean(OTHER_NAMES.get(unknown[0], unknown[0]), names)  # also what other libraries call it
            raise InvalidValueError(
                "unknown loss-scale setting",
                where=f"{cls.__name__}({unknown[0]}=)",
                found=", ".join(unknown),
                allowed=", ".join(names),
                fix=f"{hint}use one of the settings above",
            )
        made(self, *args, **given)

    cls.__init__ = init
    return cls


@named_settings
@dataclass(frozen=True)
class LossScale:
    """The settings of the loss scale: how it starts, grows, backs off and is bounded. Frozen and hashable.

    >>> from polyamp import advance
    >>> config = LossScale(init=8.0, interval=2)
    >>> state = config.initial_state()
    >>> for finite in (True, True, False):
    ...     state = advance(config, state, finite)
    ...     print(state.scale)
    8.0
    16.0
    8.0

    Args:
        init: first scale, within [min, max].
        growth: factor by which the scale grows, > 1.
        interval: finite steps between growths, >= 1.
        backoff: factor by which the scale backs off after an overflow, in (0, 1).
        hysteresis: overflows needed before the scale backs off, >= 1. The allowance is refilled at growth
            (Megatron-LM), or at every finite step under ``consecutive`` (DeepSpeed's ``consecutive_hysteresis``).
        consecutive: see ``hysteresis``.
        min: smallest scale, > 0. It may be below 1, since a model with large gradients needs that.
        max: largest scale. The default, 2**24, is Apex's limit.
        on_min: what to do at an overflow when the scale is already at ``min``: "warn", "raise" or "ignore".
        max_skips: raise `LossScaleError` after this many skipped steps in a row; None never raises.
        nonfinite_loss: what to do if a loss is inf or NaN before scaling: "skip" skips the step, warns once and
            continues; "raise" raises `NonFiniteLossError`, at once if that is known without waiting for a device, else
            at a later step.
        late_growth: when the scale grows one step later than ``interval``: "never", "after_overflow" (DeepSpeed; it
            includes the first growth), or "always" (flax).
        check: whether gradients are tested at all; False only in `LossScale.none`.

    Raises:
        InvalidTypeError: a setting has the wrong type.
        InvalidValueError: a setting is outside its range, or settings contradict each other.

    The defaults of init, growth, interval and backoff are those of ``torch.amp.GradScaler``.
    """

    init: float = 2.0**16
    growth: float = 2.0
    interval: int = 2000
    backoff: float = 0.5
    hysteresis: int = 1
    consecutive: bool = False
    min: float = 2.0**-14
    max: float = 2.0**24
    on_min: Literal["warn", "raise", "ignore"] = "warn"
    max_skips: int | None = None
    nonfinite_loss: Literal["skip", "raise"] = "skip"
    late_growth: Literal["never", "after_overflow", "always"] = "never"
    check: bool = True

    _REALS: ClassVar = ("init", "growth", "backoff", "min", "max")
    _CHOICES: ClassVar = {
        "on_min": ("warn", "raise", "ignore"),
        "nonfinite_loss": ("skip", "raise"),
        "late_growth": ("never", "after_overflow", "always"),
        "consecutive": (False, True),
        "check": (False, True),
    }

    def __post_init__(self) -> None:
        counts = ("interval", "hysteresis", *(["max_skips"] if self.max_skips is not None else []))
        numbers = {name: getattr(self, name) for name in (*self._REALS, *counts)}
        reals = [(name, numbers[name], is_number(numbers[name]), "a number") for name in self._REALS]
        whole = [(name, numbers[name], is_integer(numbers[name]), "an integer") for name in counts]
        check_arguments("LossScale", [*reals, *whole], InvalidTypeError)
        for name, value in numbers.items():
            fits, allowed = 0 < value <= sys.float_info.max, "a finite number greater than 0"
            if name in counts:
                fits, allowed = 1 <= value <= LARGEST_COUNT, "an integer between 1 and 2**31 - 1: counters are int32"
            check_arguments("LossScale", [(name, value, fits, allowed)])
        for name in self._REALS:
            object.__setattr__(self, name, float(numbers[name]))
        growth, backoff = in_single(self.growth), in_single(self.backoff)
        smallest, largest = FLOAT32.smallest_normal, FLOAT32.max
        limits = [
            ("backoff", backoff, 0 < backoff < 1, "a number between 0 and 1, both excluded, as a float32 number"),
            ("growth", growth, growth > 1, "a number greater than 1, as a float32 number"),
            ("max", self.max, self.max <= largest, f"at most {largest:g}, the largest float32"),
            ("min", self.min, self.min >= smallest, f"at least {smallest:g}, the smallest normal float32"),
            ("min", self.min, self.min <= self.max, f"at most max, which is {self.max:g}"),
            ("init", self.init, self.min <= self.init <= self.max, f"between min, {self.min:g}, and max, {self.max:g}"),
        ]
        for name, choices in self._CHOICES.items():
            value = getattr(self, name)
            fits = isinstance(value, type(choices[0])) and value in choices
            limits.append((name, value, fits, "one of " + ", ".join(map(repr, choices))))
        check_arguments("LossScale", limits)

    @classmethod
    @refuses_unreadable
    def fixed(cls, scale: float) -> LossScale:
        """Return a scale that never changes. A step with non-finite gradients is still skipped.

        >>> LossScale.fixed(128).initial_state().scale
        128.0
        """
        check_arguments("LossScale.fixed", [("scale", scale, is_number(scale), "a number")], InvalidTypeError)
        check_arguments("LossScale.fixed", [("scale", scale, 0 < scale <= FLOAT32.max, "a positive finite number")])
        value = float(scale)
        return cls(init=value, min=value, max=value, on_min="ignore")

    @classmethod
    @refuses_unreadable
    def of(cls, value: LossScale | float | str, *, where: str = "LossScale.of(value)") -> LossScale:
        """Return settings unchanged, a number as a fixed scale, and "dynamic" as the defaults, as most libraries do.

        >>> LossScale.of(1024), LossScale.of("dynamic")
        (LossScale.fixed(1024.0), LossScale())

        Raises:
            InvalidTypeError: ``value`` is none of these. A number in quotes is not a number.
            InvalidValueError: the number is not positive and finite.
        """
        if isinstance(value, LossScale):
            return value
        if isinstance(value, str) and value == "dynamic":
            return cls()
        if not is_number(value):
            raise wrong_type(
                value,
                where=where,
                allowed='a polyamp.LossScale, a number for a scale that never moves, or "dynamic"',
                fix=_without_quotes(value) or "write LossScale(...), LossScale.fixed(128) or LossScale.none()",
                what="this is not a loss scale",
            )
        return cls.fixed(value)

    @classmethod
    def none(cls) -> LossScale:
        """Return settings without scaling and without a check: the wrapped optimizer acts exactly as the plain one.

        >>> LossScale.none().check
        False
        """
        return replace(cls.fixed(1.0), check=False)

    @classmethod
    def skip_nonfinite(cls) -> LossScale:
        """Return settings without scaling that still skip a step with non-finite gradients.

        The default of policies in bfloat16, which need no loss scale: one NaN step would ruin the run. DeepSpeed calls
        this ``check_grad_overflow``.

        >>> config = LossScale.skip_nonfinite()
        >>> config.initial_state().scale, config.check
        (1.0, True)
        """
        return cls.fixed(1.0)

    @classmethod
    @refuses_unreadable
    def like(cls, name: str, **changes: Any) -> LossScale:
        """Return the settings with which this rule makes the same updates as another library's.

        >>> LossScale.like("apex", interval=100).max == 2.0**24
        True

        Args:
            name: torch, apex, keras, tensorflow, deepspeed, megatron, flax, jmp or fairseq.
            **changes: any field of `LossScale`, with that library's own meaning (``interval=4`` for flax is its
                ``growth_interval=4``).

        Raises:
            InvalidValueError: the library or a field is unknown.
        """
        own = library(name, where="LossScale.like(name)").settings
        return cls(**{**own, **changes})

    @property
    def dynamic(self) -> bool:
        """Whether the scale can change."""
        return self.check and self.min < self.max

    @property
    def scales(self) -> bool:
        """Whether a scaled loss can differ from an unscaled one."""
        return self.check and not self.min == self.max == 1

    def initial_state(self) -> LossScaleState:
        """Return the state before the first step, as Python numbers."""
        return LossScaleState(self.init, self._restart, self.hysteresis, 0, 0)

    def in_float32(self) -> LossScale:
        """Return the settings rounded to float32, so that limits compare equal to the states that reach them.

        >>> LossScale(backoff=0.7).in_float32().backoff
        0.699999988079071
        """
        reals = {name: in_single(getattr(self, name)) for name in self._REALS}
        return replace(self, **reals)

    @property
    def _restart(self) -> int:
        """The value of `good_steps` at the start and after an overflow."""
        return 0 if self.late_growth == "never" else -1

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as JSON values.

        >>> LossScale(interval=100).to_dict()
        {'interval': 100}
        """
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @classmethod
    @refuses_unreadable
    def from_dict(cls, settings: Mapping[str, Any]) -> LossScale:
        """Build settings from the result of `to_dict`."""
        checks = [("settings", settings, isinstance(settings, Mapping), "the result of LossScale.to_dict()")]
        check_arguments("LossScale.from_dict", checks, InvalidTypeError)
        return cls(**{str(name): value for name, value in settings.items()})

    @refuses_unreadable
    def to_state_dict(self, state: LossScaleState, *, like: str | None = None) -> dict[str, Any]:
        """Return the state as JSON values, in the form that every framework's adapter saves and loads.

        Scalars on a device are copied to the host.

        >>> LossScale().to_state_dict(LossScale().initial_state())["scale"]
        65536.0
        >>> config = LossScale.like("apex")
        >>> config.to_state_dict(config.initial_state(), like="apex")
        {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}

        Args:
            state: the state, of any framework's scalars.
            like: another library, to return the form that this library loads: one of the names of `like`. What it has
                no field for is lost, which a warning lists; see docs/reference/saved_state.md.

        Raises:
            InvalidValueError: the library is unknown.
        """
        check_arguments("LossScale", [("state", state, isinstance(state, LossScaleState), "a LossScaleState")])
        values = {name: kind(value) for name, kind, value in zip(state._fields, TYPES, state, strict=True)}
        if like is None:
            return {"kind": KIND, "version": 1, **values}
        saved = write(vars(self), values, like)
        report_lost(vars(self), vars(LossScale.like(like)), values, like)
        return saved

    @refuses_unreadable
    def from_state_dict(self, saved: Any) -> LossScaleState:
        """Load a state from `to_state_dict`, or from another library's loss scaler.

        A state saved without scaling (bfloat16) starts at ``init`` if these settings scale. A state saved with a scale
        loses it if these settings do not scale. Either case issues a warning. Missing counters are 0. The scale must
        lie between ``min`` and ``max``, as float32 numbers.

        >>> state = LossScale().from_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}})  # Apex
        >>> state.scale, state.good_steps
        (512.0, 3)

        Args:
            saved: the result of `to_state_dict`; or the state of torch's ``GradScaler``, of Apex, DeepSpeed, Megatron,
                flax, jmp, Keras or fairseq: as a mapping, in a checkpoint, or the scaler itself.

        Returns:
            A state of Python numbers, with every field as saved.

        Raises:
            StateError: the state is of another kind, has no scale, or has a scale that these settings exclude.
        """
        return LossScaleState(**read(vars(self), self.initial_state()._asdict(), saved))

    def __repr__(self) -> str:
        if self == LossScale.none():
            return "LossScale.none()"
        if self == LossScale.fixed(self.init):
            return f"LossScale.fixed({self.init!r})"
        return f"LossScale({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"


def _without_quotes(value: object) -> str:
    """Return what to write instead of a number in quotes; empty for anything else."""
    try:
        return f"write {float(value):g}, without quotes" if isinstance(value, str) else ""
    except Exception:  # a string of a class of the user's
        return ""
