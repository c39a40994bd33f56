"""The Keras adapter passes the suite that every adapter passes, and Keras' own tests of its `LossScaleOptimizer`."""

import importlib.util
import types
from pathlib import Path

import keras
import pytest
from keras import layers

import polyamp
from polyamp.backends.keras import LossScaledOptimizer, adapter
from support.conformance import Conformance
from support.harness_keras import KerasHarness


@pytest.mark.backends
class TestKeras(Conformance):
    @pytest.fixture
    def harness(self) -> KerasHarness:
        return KerasHarness()


def test_cast_refuses_layers() -> None:
    with pytest.raises(polyamp.errors.UnsupportedError, match="convert"):
        polyamp.policy("float16").cast_to_param({"model": layers.Dense(2)})


def test_description_names_the_backend() -> None:
    assert adapter.describe()["title"] == f"keras on {keras.backend.backend()}"


# Keras' own tests, as installed, with polyamp's class in place of Keras'. They skip the same tests on a backend for
# Keras' class too.

NAME = "keras.src.optimizers.loss_scale_optimizer_test"
IMPORT = "from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer\n"


def with_our_class() -> type:
    spec = importlib.util.find_spec(NAME)
    if spec is None and keras.__version__ < "3.15":  # whose wheels have no tests
        return object
    if spec is None or spec.origin is None:
        pytest.fail(f"this installation of Keras ships no {NAME}: install it from the wheel of PyPI, which does")
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert source.count(IMPORT) == 1, f"Keras imports its class in another way: {spec.origin}"
    module = types.ModuleType("keras_own")
    module.__dict__["LossScaleOptimizer"] = LossScaledOptimizer
    exec(compile(source.replace(IMPORT, ""), spec.origin, "exec"), module.__dict__)
    found: type = module.LossScaleOptimizerTest
    assert sum(name.startswith("test_") for name in dir(found)) > 20
    return found


@pytest.mark.backends
@pytest.mark.filterwarnings(r"ignore:SGD\(loss_scale_factor=100\) is ignored:polyamp.PolyampWarning")
class TestOfKeras(with_our_class()):
    pass
