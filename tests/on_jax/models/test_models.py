"""The founding tables' models in JAX: their sizes as published, their training, and what of them runs in 16 bits."""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
from support.jax_scenarios import dots
from support.jax_scenarios import quickly_compiled as quickly_compiled

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from models import big_lstm as sizes
from models.data import images
from models.on_jax import alexnet, bert, big_lstm, gnmt, googlenet, resnet50, vgg16
from models.on_jax.training import Task, classify, cross_entropy

pytestmark = pytest.mark.slow

IMAGES = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
WORDS = jax.ShapeDtypeStruct((1, 8), jnp.int32)

PUBLISHED = {
    "alexnet": (alexnet.AlexNet(), [IMAGES], 61_100_840),
    "vgg16": (vgg16.VGG(), [IMAGES], 138_357_544),
    "googlenet": (googlenet.GoogLeNet(), [IMAGES], 13_004_888),  # torchvision, with both auxiliary heads
    "resnet50": (resnet50.ResNet(), [IMAGES], 25_557_032),
    "bert": (bert.BERT(), [WORDS], 109_483_778),  # transformers' BertForSequenceClassification of bert-base-uncased
    "gnmt": (gnmt.GNMT(), [WORDS, WORDS], 159_593_523),  # NVIDIA's examples, with 31,794 words
}

REACHED = {"alexnet": 0.8, "vgg16": 0.85, "googlenet": 0.85, "resnet50": 0.85, "bert": 0.7}
"""The least accuracy of the small models, after training, on test data."""

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


SHORT = Task(resnet50.ResNet(width=8, classes=10, blocks=(1,)), cross_entropy, optax.adam(0.01))
"""A ResNet that compiles in a moment."""


def module_named(name: str) -> Any:
    return importlib.import_module(f"models.on_jax.{name}")


def inputs_of(name: str) -> list[Any]:
    """Return two examples of what the small model is trained on."""
    if name == "gnmt":
        return [jax.ShapeDtypeStruct((2, 16), jnp.int32)] * 2
    shapes = {"bert": (2, 17), "alexnet": (2, 64, 64, 1), "googlenet": (2, 64, 64, 1)}
    return [jax.ShapeDtypeStruct(shapes.get(name, (2, 32, 32, 1)), jnp.int32 if name == "bert" else jnp.float32)]


def variables_of(model: Any, inputs: list[Any]) -> Any:
    """Return shapes and dtypes of a model's variables; nothing is allocated."""
    return jax.eval_shape(lambda *inputs: model.init(jax.random.key(0), *inputs, train=False), *inputs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_size_has_the_published_number_of_parameters(name: str) -> None:
    model, inputs, count = PUBLISHED[name]
    assert sum(leaf.size for leaf in jax.tree.leaves(variables_of(model, inputs)["params"])) == count


def test_the_big_lstm_has_the_published_number_of_parameters() -> None:
    assert sum(np.prod(shape) for shape in sizes.shapes(sizes.PUBLISHED).values()) == pytest.approx(1.8e9, rel=0.02)


def test_a_short_training_learns() -> None:
    found = classify(SHORT, images(size=16), polyamp.policy("mixed_float16"), seed=0, size=64, steps=60)
    assert found["accuracy"] > 0.5
    assert found["loss"] < 1.5


@pytest.mark.parametrize("name", PUBLISHED)
def test_products_and_convolutions_run_in_16_bits(name: str) -> None:
    model, inputs = module_named(name).TASK.model, inputs_of(name)

    def outputs_of(variables: Any, *inputs: Any) -> Any:
        return model.apply(variables, *inputs, train=False)

    mixed = polyamp.autocast(outputs_of, "mixed_bfloat16")
    assert set().union(*dots(mixed, variables_of(model, inputs), *inputs)) == {"bfloat16"}


def test_products_of_the_big_lstm_run_in_16_bits() -> None:
    params, words = big_lstm.initial(seed=0), sizes.batches(seed=0, steps=1)[0, 0]
    mixed = polyamp.autocast(big_lstm.sum_of_losses, "mixed_float16")
    assert set().union(*dots(mixed, params, words)) == {"float16"}


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", REACHED)
def test_the_small_model_learns(name: str, policy: str) -> None:
    assert module_named(name).train(polyamp.policy(policy), seed=0)["accuracy"] > REACHED[name]


@pytest.mark.long
def test_the_big_lstm_needs_a_loss_scale() -> None:
    scales = {"stalled": polyamp.LossScale.fixed(1), "fixed": polyamp.LossScale.fixed(128), "dynamic": None}
    float32 = big_lstm.train(polyamp.policy("float32"), seed=0)["loss"]
    losses = {
        name: big_lstm.train(polyamp.policy("mixed_float16", loss_scale=scale), seed=0)["loss"]
        for name, scale in scales.items()
    }
    assert losses["stalled"] > float32 + 0.3
    assert [losses["fixed"], losses["dynamic"]] == pytest.approx([float32] * 2, abs=0.02)
