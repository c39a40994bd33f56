"""Keras' own tests of its `LossScaleOptimizer`, as installed, with polyamp's class in place of Keras'.

They skip the same tests on a backend for Keras' class too.
"""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path

import pytest

from polyamp.backends.keras import LossScaledOptimizer

NAME = "keras.src.optimizers.loss_scale_optimizer_test"
IMPORT = "from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer\n"

pytestmark = [
    pytest.mark.backends,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras 3.15 and NumPy 2
    pytest.mark.filterwarnings(r"ignore:SGD\(loss_scale_factor=100\) is ignored:polyamp.PolyampWarning"),
]


def with_our_class() -> types.ModuleType:
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.origin is None:
        pytest.fail(f"this installation of Keras ships no {NAME}: install it from the wheel of PyPI, which does")
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert source.count(IMPORT) == 1, f"Keras imports its class in another way: {spec.origin}"
    module = types.ModuleType("keras_own")
    module.__dict__["LossScaleOptimizer"] = LossScaledOptimizer
    exec(compile(source.replace(IMPORT, ""), spec.origin, "exec"), module.__dict__)
    return module


LossScaleOptimizerTest = with_our_class().LossScaleOptimizerTest


def test_there_is_something_to_pass() -> None:
    assert sum(name.startswith("test_") for name in dir(LossScaleOptimizerTest)) > 20
