"""Evidence from a recording for and against 16 bits at each place of a model; see `polyamp.diagnosis.calibration`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from polyamp.diagnosis.probe import Probe
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Observation, Recording
from polyamp.diagnosis.rounding import rounding, source_of
from polyamp.diagnosis.spread import LOWEST
from polyamp.formats import format_of
from polyamp.layout import power, share
from polyamp.operations import OPERATIONS

RELAXABLE = frozenset(
    {"exp", "exp2", "expm1", "pow", "integer_pow", "rsqrt", "reciprocal", "cbrt", "hypot", "sinh", "cosh", "softplus"}
)
"""Operations that the table keeps in float32 only for the range of their results and derivatives.

An exponential that stays a few bits inside float16 has an argument below 8, which float16 represents to 0.4 %. Other
elementwise operations are excluded because they need the bits of their argument: log and log1p (small probabilities),
square (a variance as the difference of two means), sin, cos and tan (arguments past a few turns).
"""


class Evidence(NamedTuple):
    """The reason for a rule."""

    rule: str  # the pattern: one operation at one path
    op_class: str  # the class that the rule assigns, "full" or "follow"
    place: str  # the operation with its path, as recorded
    was: str  # its class without the rule
    why: str  # what was observed, in words
    largest: float  # largest observed magnitude, in float32
    lost: float  # share of the L1 mass that the format would lose
    # powers of two between the largest magnitude and the format's maximum; for gradients, without a loss scale
    headroom: float
    batches: int = 1  # number of batches it is based on


def pattern_of(place: str) -> str:
    """Return the pattern for a rule about one operation and its path, with wildcard characters escaped."""
    *_, named = re.split(r"[./]{2,}|^[./]", place)  # the part after the last blank component, since patterns have none
    return re.sub(r"([*?[])", r"[\1]", named)


def overflowing(probe: Probe) -> Iterator[Evidence]:
    """Yield the products of the forward pass that overflow the format; if there are none, other operations that do."""
    most = format_of(probe.format).max
    for one in _causes(probe.overflowing):
        yield _evidence(
            probe, one, "full", f"{one.spread.largest:.3g} is beyond {probe.format}, which ends at {most:g}"
        )


def too_narrow(probe: Probe, tolerated: float) -> Iterator[Evidence]:
    """Yield the operations of the forward pass whose results are too small for the format."""
    losing = [one for one in _forward(probe.recording) if one.spread.lost(probe.format) > tolerated]
    for one in _causes(losing):
        lost = share(one.spread.lost(probe.format))
        yield _evidence(probe, one, "full", f"{lost} of its L1 mass would be lost in {probe.format}")


def poisoned(narrow: Recording, probe: Probe) -> Iterator[Evidence]:
    """Yield the first 16-bit result that is not finite in a recording in the formats themselves, but is in float32."""
    # One of its inputs, from float32 work, overflows when it is rounded to the format.
    bad = next((one for one in narrow.of_kind(ACTIVATION) if not (one.spread.is_finite or _is_rounding(one))), None)
    for one in probe.recording.of_kind(ACTIVATION):
        if bad and bad.is_low and one.place == bad.place:
            yield _evidence(
                probe, one, "full", f"an input of it is beyond {probe.format}: the result is not finite there"
            )
            return


def rounded(narrow: Recording, probe: Probe) -> Iterator[Evidence]:
    """Yield the 16-bit result whose rounding changes the loss, from a recording in the formats themselves."""
    found = rounding(narrow, probe.recording)
    if found is None:
        return
    place = source_of(narrow, found.first).place
    one = next((each for each in probe.recording.of_kind(ACTIVATION) if each.place == place), None)
    if one is not None:
        why = f"rounded to {probe.format} it changes the loss: {found.loss:.4g} for {found.loss_float32:.4g}"
        yield _evidence(probe, one, "full", why)


def without_a_scale(probe: Probe) -> Iterator[Evidence]:
    """Yield the fewest places that have to leave 16 bits so that one loss scale suits all other gradients."""
    # Yield nothing if a loss scale suits all gradients already.
    if probe.window is None or not probe.window.is_empty:
        return
    counting = {id(one) for one in probe.counting}
    limits = [
        (one, probe.need(one) if id(one) in counting else 0.0, probe.tolerate(one) * 2.0**-probe.margin)
        for one in probe.bounding
    ]
    makers = {id(one): _makers(probe.recording, one) for one in probe.bounding}

    def against(scale: float) -> list[Observation]:
        return [one for one, low, high in limits if not low <= scale <= high]

    def cost(scale: float) -> tuple[int, float]:
        made = [makers[id(one)] for one in against(scale)]
        return len({maker.place for each in made for maker in each}) + len(makers) * made.count([]), -scale

    scales = {edge for _, low, high in limits for edge in (low, high) if 0 < edge < math.inf}
    best = min(scales, key=cost)
    for one in against(best):
        for maker in makers[id(one)]:
            needs = (
                f"needs a loss scale of {power(probe.need(one))} to {power(probe.tolerate(one))}; others, {power(best)}"
            )
            yield _evidence(probe, maker, "full", f"its {one.kind} {needs}", observed=one)


def relaxable(probe: Probe) -> Iterator[Evidence]:
    """Yield operations in float32 only for their range that stay inside the format by the probe's margin."""
    # Their gradients have to stay inside it too. This is required of every tensor at a place, since a rule affects all
    # of them. Yield nothing for formats with float32's range.
    if format_of(probe.format).exponent_bits == format_of("float32").exponent_bits:
        return
    places: dict[str, list[Observation]] = {}
    for one in probe.recording.of_kind(ACTIVATION):
        if one.name in RELAXABLE and (_is_rounding(one) or not one.is_low) and not _is_part(one):
            places.setdefault(one.place, []).append(one)
    for here in places.values():
        gradients = _gradients(probe, here[0])
        room = min(*(_room(probe, one) for one in here), *(_gradient_room(probe, one) for one in gradients), math.inf)
        if probe.margin <= room < math.inf:
            largest = max(here, key=lambda one: one.spread.largest)
            yield _evidence(probe, largest, "follow", f"stays {room:.1f} bits inside of {probe.format}")


def _is_part(one: Observation) -> bool:
    """Return whether an operation is part of a larger one that sums in float32, such as the exp of JAX's softmax."""
    names = (name.strip("_") for name in re.split(r"[./]", one.where))
    return any(name in OPERATIONS and OPERATIONS[name].op_class in ("full", "inner") for name in names)


def _room(probe: Probe, one: Observation) -> float:
    """Return by how many powers of two all elements stay inside the format's smallest normal and largest numbers."""
    limits, spread = format_of(probe.format), one.spread
    if not spread.largest:
        return math.inf
    smallest = next(place for place, count in enumerate(spread.counts) if count)
    return min(spread.headroom(probe.format), smallest + LOWEST - math.log2(limits.smallest_normal))


def _gradient_room(probe: Probe, one: Observation) -> float:
    """Return by how many powers of two the recommended loss scale may change until a gradient overflows or is lost."""
    if not one.spread.largest:
        return math.inf
    scale = math.log2(probe.recommended.init)
    need = probe.need(one)
    return min(scale - math.log2(need) if need else math.inf, one.spread.headroom(probe.format) - scale)


def _gradients(probe: Probe, one: Observation) -> list[Observation]:
    return [each for each in probe.recording.of_kind(GRADIENT) if _same_path(each.where, one.where)]


def _makers(recording: Recording, one: Observation) -> list[Observation]:
    """Return the 16-bit forward operations that a gradient belongs to."""
    # These are the operations of the same name at the gradient's path; without any, the products at that path.
    if _is_rounding(one):
        return _product_before(recording, one)
    if one.kind == PARAMETER:  # its name may start with modules above the one that the step calls
        here = [each for each in _forward(recording) if _is_end_of(each.where, _parent(one.name))]
    else:
        here = [each for each in _forward(recording) if _same_path(each.where, one.where)]
    same = [each for each in here if each.name == one.name]
    return same or [each for each in here if each.op_class == "lower"]


def _product_before(recording: Recording, one: Observation) -> list[Observation]:
    """Return the last product before a float32 operation: its 16-bit result is the operation's input."""
    # The gradient of that operation is rounded to 16 bits for the product.
    forward = list(recording.of_kind(ACTIVATION))
    places = [each.place for each in forward]
    before = forward[: places.index(one.place)] if one.place in places else forward
    return [each for each in before if each.is_low and each.op_class == "lower"][-1:]


def _is_rounding(one: Observation) -> bool:
    """Return whether a tensor is a float32 result that was rounded to 16 bits for the next operation."""
    return one.is_low and one.op_class == "full"


def _forward(recording: Recording) -> list[Observation]:
    low = (one for one in recording.of_kind(ACTIVATION) if one.is_low and not _is_rounding(one))
    return [one for one in low if one.spread.is_finite]


def _causes(observations: Iterable[Observation]) -> Sequence[Observation]:
    """Return the products among these operations; without products, those that are not ``keep`` or ``full``."""
    # An operation that follows a float32 operation runs in float32 without a rule.
    each = [one for one in observations if one.op_class not in ("keep", "full")]
    return [one for one in each if one.op_class == "lower"] or each


def _parent(name: str) -> str:
    return "/".join(re.split(r"[./]", name)[:-1])


def _same_path(one: str, other: str) -> bool:
    return re.split(r"[./]", one) == re.split(r"[./]", other)


def _is_end_of(path: str, whole: str) -> bool:
    return f"/{whole}".endswith(f"/{path.replace('.', '/')}") if path else not whole


def _evidence(
    probe: Probe, maker: Observation, op_class: str, why: str, *, observed: Observation | None = None
) -> Evidence:
    spread = (observed or maker).spread
    return Evidence(
        pattern_of(maker.place),
        op_class,
        maker.place,
        maker.op_class,
        why,
        spread.largest,
        spread.lost(probe.format),
        spread.headroom(probe.format),
    )
