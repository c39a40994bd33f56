"""The conformance suite that every adapter passes, polyamp's own and third-party ones.

The author of an adapter writes a `Harness`, which drives the framework with NumPy arrays, and a subclass::

    class TestMine(Conformance):
        @pytest.fixture
        def harness(self):
            return MyHarness()

`examples/new_backend` is a whole example.
"""

from __future__ import annotations

import pytest

from polyamp.errors import UsageError
from polyamp.testing.harness import (
    Arrays,
    Harness,
    Session,
    overflow_trace,
    random_arrays,
    same_bits,
    spoiled,
)
from polyamp.testing.steps import SETTINGS, Steps
from polyamp.testing.verbs import OptionalVerbs

__all__ = [
    "SETTINGS",
    "Arrays",
    "Conformance",
    "Harness",
    "Session",
    "overflow_trace",
    "random_arrays",
    "same_bits",
    "spoiled",
]


class Conformance(Steps, OptionalVerbs):
    """The promises of every adapter, as pytest tests. Subclass it and override the ``harness`` fixture.

    Tests of an optional verb are skipped if the adapter does not offer it.

    >>> class TestMine(Conformance):
    ...     @pytest.fixture
    ...     def harness(self):
    ...         return MyHarness()
    """

    @pytest.fixture
    def harness(self) -> Harness:
        """Return the framework under test."""
        raise UsageError("a conformance suite needs its framework", fix="override the harness fixture")
