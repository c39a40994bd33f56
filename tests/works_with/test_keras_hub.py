"""Models of keras_hub, made from small configurations, train after ``polyamp.convert`` and can be explained."""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import pytest

import polyamp

keras = pytest.importorskip("keras")
keras_hub = pytest.importorskip("keras_hub")

TOKENS = np.random.default_rng(0).integers(1, 50, (8, 12)).astype("int32")
LABELS = np.array([0, 1] * 4)
BATCH = {"token_ids": TOKENS, "segment_ids": np.zeros((8, 12), "int32"), "padding_mask": np.ones((8, 12), "int32")}

pytestmark = [
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:keras_hub"),
]


def bert() -> Any:
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=50,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=12,
        dropout=0.0,
    )
    return keras_hub.models.BertTextClassifier(backbone=backbone, num_classes=2, preprocessor=None, dropout=0.0)


def fitted(model: Any, policy: str | None) -> list[float]:
    opt = keras.optimizers.SGD(0.1)
    if policy is not None:
        opt = polyamp.wrap_optimizer(opt, policy, loss_scale=2.0**8)
    model.compile(opt, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return [float(loss) for loss in model.fit(BATCH, LABELS, epochs=4, verbose=0).history["loss"]]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_bert_classifier_trains_near_float32(policy: str) -> None:
    if policy == "mixed_float16" and keras.backend.backend() == "jax":
        pytest.skip("JAX multiplies no float16 in attention on CPUs")
    expected = fitted(bert(), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", polyamp.PolyampWarning)  # the task compiled itself, which is not a mistake
        model = polyamp.convert(bert(), policy)
        assert fitted(model, policy) == pytest.approx(expected, rel=0.05)
    assert model.optimizer.last_step.applied


def test_a_task_that_is_trained_with_its_own_optimizer_is_told_then() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", polyamp.PolyampWarning)
        model = polyamp.convert(bert(), "mixed_float16")
    with pytest.warns(polyamp.PolyampWarning, match="compiled with Adam, which does not scale the loss"):
        model.train_on_batch(BATCH, LABELS)


def test_it_is_explained_and_diagnosed_as_it_is() -> None:
    model = polyamp.convert(bert(), "mixed_bfloat16")
    opt = polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), "mixed_bfloat16", loss_scale=1.0)
    model.compile(opt, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    plan = polyamp.explain(model, BATCH, LABELS, policy="mixed_bfloat16")
    products = [one.format for one in plan.operations if one.name == "matmul"]
    assert "bfloat16" in products
    assert polyamp.diagnose(model, BATCH, LABELS, policy="mixed_bfloat16").kind == "finite"
