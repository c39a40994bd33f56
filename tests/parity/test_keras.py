"""Keras on JAX and on torch: its adapter imports no other framework."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_no_framework_is_imported_but_by_keras(backend: str) -> None:
    code = """
import sys, keras
keras_brought = set(sys.modules)
import polyamp, numpy as np
layers = [keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)]
model = polyamp.convert(keras.Sequential(layers), "mixed_float16")
model.compile(polyamp.wrap_optimizer(keras.optimizers.Adam(), "mixed_float16", max_grad_norm=1.0), "mse")
model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), verbose=0)
print({"jax", "tensorflow", "torch"} & (set(sys.modules) - keras_brought), "tensorflow" in sys.modules)
"""
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set() False"
