"""Rewritten functions work as ``tf.function``s, for example in a SavedModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import polyamp

X = tf.ones((8, 6))
F16 = polyamp.policy("mixed_float16")


class Served(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.ones((6, 2)) / 7)

    @polyamp.rewrite(policy=F16)
    def __call__(self, x: Any) -> Any:
        return x @ self.weight

    @polyamp.rewrite(policy=F16)
    def serve(self, x: Any) -> Any:
        return tf.matmul(x, self.weight)


def with_attribute(make: Any) -> tf.Module:
    module = tf.Module()
    module.weight = tf.Variable(tf.ones((6, 2)) / 7)
    module.serve = make(module)
    return module


def closed_over(module: Any) -> Any:
    def serve(x: Any) -> Any:
        return x @ module.weight

    return polyamp.rewrite(serve, policy=F16)


def decorated(module: Any) -> Any:
    @polyamp.rewrite(policy=F16)
    def serve(x: Any) -> Any:
        return tf.matmul(x, module.weight)

    return serve


def reloaded(module: tf.Module, path: Path) -> Any:
    tf.saved_model.save(module, str(path))
    return tf.saved_model.load(str(path))


@pytest.mark.parametrize("make", [closed_over, decorated])
def test_an_attribute_of_a_module_is_saved(make: Any, tmp_path: Path) -> None:
    module = with_attribute(make)
    expected = module.serve(X)
    loaded = reloaded(module, tmp_path)
    found = loaded.serve(X)
    assert found.numpy().tolist() == expected.numpy().tolist()


@pytest.mark.parametrize("name", ["__call__", "serve"])
def test_a_method_of_a_module_is_saved(name: str, tmp_path: Path) -> None:
    module = Served()
    expected = getattr(module, name)(X)
    loaded = reloaded(module, tmp_path)
    found = getattr(loaded, name)(X)
    assert found.numpy().tolist() == expected.numpy().tolist()
    assert found.numpy()[0, 0] != pytest.approx(6 / 7, abs=1e-6)  # in float16


def test_an_attribute_that_is_not_there_is_said_plainly() -> None:
    fast = polyamp.rewrite(lambda x: x + x, policy="float32")
    with pytest.raises(AttributeError, match="before its first call"):
        _ = fast._nothing
    fast(X)
    with pytest.raises(AttributeError, match=r"no attribute '_nothing'$"):
        _ = fast._nothing
