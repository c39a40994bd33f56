"""The Keras models of the founding tables: as large as published, trained alike under every policy, and in 16 bits."""

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import pytest

import polyamp

BACKEND = keras.backend.backend()
HERE = Path(__file__).parent

pytestmark = pytest.mark.slow
needs_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="a rewrite of TensorFlow")


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "examples"))
    yield
    keras.utils.clear_session()


def model_of(name: str) -> Any:
    return importlib.import_module(f"models.on_keras.{name}")


def images_of(size: int) -> dict[str, Any]:
    return {"width": 1, "size": size, "channels": 3, "classes": 1000}


@pytest.mark.parametrize(
    ("name", "sizes", "count"),
    [
        ("alexnet", lambda _: images_of(224), 61_100_840),
        ("vgg16", lambda _: images_of(224), 138_357_544),
        ("bert", lambda bert: {"sizes": bert.PUBLISHED, "classes": 2}, 109_482_240 + 2 * 768 + 2),
        ("transformer", lambda transformer: {"sizes": transformer.PUBLISHED}, 209_911_808),
    ],
)
def test_at_the_published_sizes_there_are_as_many_parameters(name: str, sizes: Callable, count: int) -> None:
    module = model_of(name)
    with keras.StatelessScope(initialize_variables=False):
        model = module.make_model(**sizes(module))
    assert sum(math.prod(weight.shape) for weight in model.trainable_weights) == count


@pytest.mark.long
@needs_tensorflow
def test_bert_learns_in_a_rewritten_step_whose_products_have_16_bits() -> None:
    bert, data = model_of("bert"), importlib.import_module("models.data")
    short, texts = replace(bert.TRAINING, steps=60), data.sentences()
    model = short.run(polyamp.policy("mixed_float16"), 0, texts.train)
    assert model_of("training").tested(model, texts.test)["accuracy"] > 0.2
    assert {row.format for row in model.train_step.plan.operations if row.name == "matmul"} == {"float16"}


@pytest.mark.long
@needs_tensorflow
def test_the_big_lstm_stalls_without_a_loss_scale() -> None:
    big_lstm = model_of("big_lstm")
    policies = [polyamp.policy("mixed_float16", loss_scale=polyamp.LossScale.fixed(scale)) for scale in (1, 128)]
    stalled, trained = ([*big_lstm.curve(policy, seed=0)] for policy in policies)
    assert stalled[0] == pytest.approx(trained[0], abs=0.001)
    assert stalled[-1] > trained[-1] + 0.1
