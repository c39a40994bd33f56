"""What gradients are multiplied by, as far as an optimizer of arrays knows: under which scale they were made.

`ScaledLosses` records the scale of the last loss. For example, two losses are scaled by 8, and then two steps are made.
The first step doubles the scale, and the gradients of the second are still those of a loss times 8.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from polyamp.errors import InvalidTypeError, UsageError, kind_of, warn_once
from polyamp.skips import NONFINITE_LOSS


def gradients_in(grads: Any, where: str) -> list[Any]:
    """Return gradients as a list. Refuse containers among them, which a framework would convert along every path."""
    is_list = isinstance(grads, Iterable) and not hasattr(grads, "dtype")
    found = list(grads) if is_list else [grads]
    wrong = [one for one in found if one is not None and "float" not in str(getattr(one, "dtype", ""))]
    if wrong or not is_list:
        raise _no_gradients(wrong[0] if wrong else grads, where)
    return found


def pairs_in(grads_and_vars: Any, where: str) -> tuple[list[Any], list[Any]]:
    """Return the gradients and the variables of pairs."""
    pairs = list(grads_and_vars) if isinstance(grads_and_vars, Iterable) else [grads_and_vars]
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and hasattr(pair[1], "dtype")):
            raise _no_gradients(pair, where)
    return gradients_in([grad for grad, _ in pairs], where), [variable for _, variable in pairs]


def _no_gradients(found: object, where: str) -> InvalidTypeError:
    return InvalidTypeError(
        "a step needs a list of gradients",
        where=where,
        found=f"{kind_of(found)} of {getattr(found, 'dtype', 'no dtype')}",
        allowed="floating-point tensors or None, where a step takes pairs each with its variable",
        fix="give the gradients of the scaled loss in a flat list, in the order of the variables",
    )


_turns = itertools.count(1)


class ScaledLosses:
    """The losses that one optimizer scaled: whether there are any, and the scale and the place of the last one."""

    _latest: Callable[[], ScaledLosses | None] = staticmethod(lambda: None)  # the one that scaled a loss last
    _eager = 0  # losses that all optimizers scaled in eager code

    def __init__(self) -> None:
        self.finite: Any = None  # whether the last loss was finite; scalar bool
        self._place: Any = None  # what was traced around it; None in eager code
        self._scale: Any = None  # its scale; None if it is not known
        self._scaled = 0  # when it was scaled
        self._noted = 0  # the same, or when the scale was read after that, perhaps to multiply a loss by it
        self._claimed = next(_turns)  # when gradients came last
        self._open = 0  # traces that scaled a loss and made no step: compiled, they scale losses unseen
        self._opened: Any = None  # the last of them
        self._uncounted = False  # whether losses may have been scaled that are not counted
        self._before = ScaledLosses._eager
        self._steps = Counter[int]()  # steps in eager code, of each variable

    def note(self, place: Any, scale: Any, finite: Any, *, is_traced: bool = False) -> None:
        """Record that a loss was scaled; ``is_traced``: the code that scales it can run again without this call."""
        self._note(place)
        self._place, self._scale, self.finite, self._scaled = place, scale, finite, self._noted
        self._uncounted |= is_traced and place is None
        ScaledLosses._eager += place is None
        ScaledLosses._latest = weakref.ref(self)

    def note_by_hand(self, place: Any) -> None:
        """Record that the scale was read, perhaps to multiply a loss by it."""
        self._uncounted = True
        self._note(place)

    def _note(self, place: Any) -> None:
        self._noted = next(_turns)
        if place is not None and place is not self._opened:
            self._open, self._opened = self._open + 1, place

    def why(self) -> str:
        """Return the reason of a skip if the last loss that was scaled was inf or NaN, else an empty string."""
        try:
            return "" if self.finite is None or self.finite else NONFINITE_LOSS
        except TypeError:  # it was scaled in a graph
            return ""

    def are_here(self, place: Any) -> bool:
        """Return whether the gradients that an optimizer gets in a place come from the last loss scaled there."""
        others = place is None and (self._open > 0 or self._noted > self._scaled)
        return self._place is place and self._scaled > 0 and not others

    def _may_be_scaled(self, place: Any, variables: Iterable[Any]) -> bool:
        """Return whether a scaled loss can have made these gradients: each loss serves one step of a variable."""
        if place is not None or self._open or self._uncounted:
            return self._noted > 0
        known = list(map(id, variables))
        self._steps.update(known)
        return self._noted > 0 and ScaledLosses._eager - self._before >= max([1, *(self._steps[one] for one in known)])

    def claim(self, place: Any, current: Any, is_scaled: bool | None = None, variables: Iterable[Any] = ()) -> Any:
        """Return the scale of the gradients that an optimizer gets; ``current`` is that of the next loss.

        ``is_scaled`` is whether these are gradients of a loss times its scale; None if the adapter does not know.
        ``variables`` are those that the gradients are for, if they are known.
        """
        before, self._claimed = self._claimed, next(_turns)
        if place is not None and place is self._opened:  # what it compiles takes the gradients of its losses itself
            self._open, self._opened = self._open - 1, None
        own = current if self._place is not place or self._scale is None else self._scale
        latest = self._latest()
        is_known = latest is not None and latest._place is place and latest._scale is not None
        if latest is not None and is_known and self._noted < before < latest._scaled and not self._open:
            if not (_equal(latest._scale, current) and _equal(own, current)):
                raise UsageError(
                    "the loss of these gradients was scaled by another optimizer",
                    where="the gradients of a step",
                    found="no loss that this optimizer scaled since its last step",
                    allowed="gradients of a loss times this optimizer's loss scale",
                    fix="scale a joint loss once for each optimizer, and take the gradients of the result for its own "
                    "variables",
                )
        elif not (self._may_be_scaled(place, variables) if is_scaled is None else is_scaled):
            warn_once(
                "no loss was scaled, and the optimizer divides gradients by the loss scale: its updates are too small "
                "by that factor. What to do: take the gradients of polyamp.scale_loss(loss, optimizer).",
            )
        if own is not current and not self.are_here(place) and not _equal(own, current):
            raise UsageError(
                "the loss scale of these gradients is not known: it changed since the last loss was scaled",
                where="the gradients of a step",
                found="losses that were scaled in compiled functions or by hand, and one that scale_loss scaled here",
                allowed="one step after each loss",
                fix="make the step before the next loss is scaled, or scale, differentiate and step in one function",
            )
        return own


def _equal(one: Any, other: Any) -> bool:
    try:
        return float(one) == float(other)
    except TypeError:  # in a graph, where scales have no values yet
        return False
