"""Histograms of exponents: what they say of a format is what rounding to that format does."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp.diagnosis.probe import TOLERANCE
from polyamp.diagnosis.spread import SAMPLE, stride
from support.diagnosis_cases import count_values

# Magnitudes over float32's range and around the smallest of float16, but for half of that, which counts as kept.
anywhere, tiny = st.floats(0, 2.0**100, width=32), st.floats(2.0**-27, 2.0**-23, width=32)
magnitudes = (anywhere | tiny).filter(lambda value: value != 2.0**-25)
values = st.lists(magnitudes, min_size=1, max_size=40)


def in_float16(value: float) -> float:
    """Rounded to nearest even by the C library; beyond the format is inf."""
    try:
        return struct.unpack("e", struct.pack("e", value))[0]
    except OverflowError:
        return math.inf


@given(values)
def test_what_rounding_to_float16_flushes_and_loses(numbers: list[float]) -> None:
    small = [number for number in numbers if number and in_float16(number) == 0]
    subnormal = [number for number in numbers if 2.0**-25 < number < 2.0**-14]
    whole, spread = math.fsum(numbers), count_values(numbers)
    assert spread.flushed("float16") == pytest.approx(len(small) / len(numbers))
    lost = math.fsum(small) + len(subnormal) * 2.0**-26
    assert spread.lost("float16") == pytest.approx(lost / whole if whole else 0.0)


@pytest.mark.parametrize("decades", [0.1, 1, 3, 6])
def test_at_the_smallest_scale_float16_changes_a_gradient_by_at_most_half_a_percent(decades: float) -> None:
    gradient = 10.0 ** -np.random.default_rng(0).uniform(2, 2 + decades, 2000)
    scale = count_values(gradient).smallest_scale("float16", TOLERANCE)
    errors = [
        abs(gradient - (gradient * one).astype("float16") / one).sum() / gradient.sum() for one in (scale, scale / 4)
    ]
    assert errors[0] < 0.005 < errors[1]


@given(values)
def test_the_largest_scale_is_the_last_that_overflows_nothing(numbers: list[float]) -> None:
    spread = count_values(numbers)
    largest = spread.largest_scale("float16")
    if spread.largest == 0:
        assert largest == math.inf
        return
    assert spread.largest * largest <= 65504 < spread.largest * largest * 2


@given(values, st.sampled_from([0.0, 0.001, 0.1]))
def test_the_smallest_scale_is_the_first_that_loses_no_more_than_is_tolerated(
    numbers: list[float], tolerance: float
) -> None:
    spread = count_values(numbers)
    smallest = spread.smallest_scale("float16", tolerance)
    if spread.largest == 0:
        assert smallest == 0
        return
    exponent = round(math.log2(smallest))
    enough, too_small = (spread.scaled(power).lost("float16") for power in (exponent, exponent - 1))
    assert enough <= tolerance < too_small


@given(values, values)
def test_merging_is_looking_at_both(first: list[float], second: list[float]) -> None:
    merged, whole = count_values(first).merged(count_values(second)), count_values([*first, *second])
    assert merged.counts == whole.counts
    assert (merged.elements, merged.zeros, merged.largest) == (whole.elements, whole.zeros, whole.largest)
    assert merged.mass == pytest.approx(whole.mass)


@given(st.lists(st.floats(2.0**-60, 2.0**60, width=32), min_size=1), st.integers(-30, 30))
def test_scaling_is_scaling_every_element(numbers: list[float], exponent: int) -> None:
    scaled, whole = count_values(numbers).scaled(exponent), count_values([n * 2.0**exponent for n in numbers])
    assert scaled.counts == whole.counts
    assert scaled.largest == whole.largest
    assert scaled.mass == pytest.approx(whole.mass)


@pytest.mark.parametrize(("values", "inf", "nan"), [([math.inf, -math.inf, 1.0], 2, 0), ([math.nan, 2.0], 0, 1)])
def test_what_is_not_finite_is_counted_and_has_no_headroom(values: list[float], inf: int, nan: int) -> None:
    spread = count_values(values)
    assert (spread.inf, spread.nan, spread.is_finite) == (inf, nan, False)
    assert spread.headroom("float16") == -math.inf
    assert spread.largest_scale("float16") == 0


@given(st.integers(0, 10**9))
def test_a_sample_is_bounded_and_its_step_is_odd(elements: int) -> None:
    step = stride(elements)
    assert step % 2 == 1
    assert math.ceil(elements / step) <= SAMPLE
    assert step <= elements / SAMPLE + 2
