"""Unknown options and values are refused in the same way everywhere, with a list of the known ones."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import keras
import optax
import pytest
import tensorflow as tf
import torch

import polyamp
from polyamp import adapters

OPTIMIZERS = {
    "torch": lambda: torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1),
    "jax": lambda: optax.sgd(0.1),
    "keras": lambda: keras.optimizers.SGD(0.1),
    "tensorflow": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1),
}
OPTIONS = {
    "torch": {
        "master_weights",
        "fused_step",
        "process_group",
        "norm_group",
        "named_parameters",
    },
    "jax": {"axis_name", "master_weights", "skip"},
    "keras": {"master_weights"},
    "tensorflow": {"master_weights"},
}


EVERY = {"max_norm", "fused_stepp"}.union(*OPTIONS.values())
LACKING = [(framework, option) for framework in OPTIMIZERS for option in sorted(EVERY - OPTIONS[framework])]


@pytest.mark.parametrize(("framework", "option"), LACKING)
def test_an_option_that_a_framework_lacks_is_refused_with_those_that_it_has(framework: str, option: str) -> None:
    with pytest.raises(polyamp.errors.UnsupportedError, match="an option that does not exist here") as caught:
        polyamp.wrap_optimizer(OPTIMIZERS[framework](), "mixed_float16", **{option: True})
    assert all(known in str(caught.value) for known in OPTIONS[framework])


@pytest.mark.parametrize("value", ["remainder", 1, "yes"])
@pytest.mark.parametrize("framework", OPTIMIZERS)
def test_master_weights_are_a_switch(framework: str, value: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="master_weights"):
        polyamp.wrap_optimizer(OPTIMIZERS[framework](), "mixed_float16", master_weights=value)


@pytest.mark.parametrize(("verb", "option"), [("explain", "engine"), ("rewrite", "jit_compile")])
def test_engines_that_a_framework_lacks_are_refused(verb: str, option: str) -> None:
    with pytest.raises(polyamp.errors.UnsupportedError, match="an option that does not exist here"):
        getattr(polyamp, verb)(lambda x: x @ x, jnp.ones((2, 2)), policy="fp16", **{option: "autocast"})


@pytest.mark.parametrize(
    ("heading", "framework"),
    [("PyTorch", "torch"), ("JAX", "jax"), ("Keras and TensorFlow", "keras"), ("Keras and TensorFlow", "tensorflow")],
)
def test_the_docs_list_every_option(heading: str, framework: str) -> None:
    text = Path(__file__).parents[2].joinpath("docs/frameworks.md").read_text()
    table = text.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    options = inspect.signature(adapters.adapter_named(framework).wrap_optimizer).parameters.values()
    own = {option.name for option in options if option.kind is option.KEYWORD_ONLY} - {"loss_scale", "max_grad_norm"}
    assert set(re.findall(r"^\| `(\w+)` ", table, re.MULTILINE)) == own == OPTIONS[framework]


@pytest.mark.slow
def test_a_backend_needs_no_import_of_its_own() -> None:
    code = "import polyamp; b = polyamp.backends; print(b.torch.__name__, b.jax.__name__, hasattr(b, 'theano'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["polyamp.backends.torch", "polyamp.backends.jax", "False"]
