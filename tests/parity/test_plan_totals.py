"""Programs without the patterns that the flow rule looks for: their plans stay the same, to the byte."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import polyamp

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import jax_models  # noqa: E402
import tensorflow_models  # noqa: E402
import torch_rewrite  # noqa: E402

pytestmark = pytest.mark.slow
RECORDED = json.loads((Path(__file__).parent / "data" / "plan_totals.json").read_text())


def plan_of(framework: str, model: str) -> polyamp.Plan:
    """Explain a model of the benchmarks; in TensorFlow a whole step."""
    if framework == "torch":
        module, x = torch_rewrite.MODELS[model](1)
        return polyamp.explain(module, x, policy="mixed_float16")
    task: Any = {"jax": jax_models, "tensorflow": tensorflow_models}[framework].task(model)
    if framework == "jax":
        return polyamp.explain(jax_models.loss_of(task.make()), *task.arguments(), policy="mixed_float16")
    return polyamp.explain(task.step, *task.batch, policy="mixed_float16")


@pytest.mark.parametrize(("framework", "model"), [(of, name) for of, models in RECORDED.items() for name in models])
def test_plans_of_published_models_stay_the_same(framework: str, model: str) -> None:
    assert plan_of(framework, model).totals == RECORDED[framework][model]
