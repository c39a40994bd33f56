"""A device that is slow in the policy's format is reported once."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import adapter
from polyamp.backends.tensorflow.devices import devices, report_slow
from polyamp.backends.tensorflow.graphs.capture import concrete_of
from polyamp.backends.tensorflow.graphs.program import decided_for, lowered_in
from polyamp.devices import cpu_flags, fast_on_cpu

IMAGE, KERNEL = tf.ones((1, 8, 8, 2)), tf.ones((3, 3, 2, 4))


def convolved(x: Any) -> Any:
    return tf.nn.conv2d(x, KERNEL, 1, "SAME")


def test_the_cpu_is_described_by_its_flags() -> None:
    assert adapter.describe()["devices"][-1] == {"name": "cpu", "fast": fast_on_cpu(cpu_flags())}


@pytest.mark.skipif("bfloat16" in devices()[-1]["fast"], reason="this CPU has units for bfloat16")
@pytest.mark.parametrize("how", ["rewrite", "autocast"])
def test_convolutions_on_a_cpu_without_units_are_mentioned(how: str) -> None:
    ways = {
        "rewrite": lambda: polyamp.rewrite(convolved, IMAGE, policy="mixed_bfloat16"),
        "autocast": lambda: polyamp.autocast("mixed_bfloat16", backend="tensorflow")(convolved)(IMAGE),
    }
    with pytest.warns(polyamp.PolyampWarning, match="no units for bfloat16"):
        ways[how]()


def test_a_rewrite_knows_what_it_lowered_where() -> None:
    def step(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: convolved(x), lambda: convolved(-x))

    decisions = decided_for(concrete_of(step, (IMAGE,), {}), polyamp.policy("mixed_bfloat16"))
    assert ("conv", "CPU") in lowered_in(decisions)
    assert not lowered_in(decided_for(concrete_of(step, (IMAGE,), {}), polyamp.policy("float32")))


@pytest.mark.parametrize(
    ("operation", "compute", "device"),
    [("matmul", "bfloat16", "CPU"), ("conv", "float16", "CPU"), ("conv", "float32", "CPU")],
)
def test_other_work_on_a_cpu_is_not_mentioned(operation: str, compute: str, device: str) -> None:
    report_slow(operation, compute, device)


def test_a_rewrite_that_changes_nothing_names_the_functions_place() -> None:
    with pytest.warns(polyamp.PolyampWarning, match=r"changed nothing in <lambda> \(test_devices\.py:\d+\)"):
        polyamp.rewrite(lambda x: tf.exp(x), tf.ones(3), policy="mixed_float16")


@pytest.mark.parametrize("pattern", ["head/*", "head.*", "*/head/*"])
def test_a_pattern_of_a_scope_is_about_what_stands_directly_in_it_too(pattern: str) -> None:
    weight = tf.Variable(tf.ones((4, 4)))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, tf.name_scope("model"):
            x = x @ weight
            with tf.name_scope("head"):
                x = tf.matmul(x, weight)
                with tf.name_scope("deeper"):
                    x = tf.matmul(x, weight, name="named")
            loss = tf.reduce_mean(x)
        return tape.gradient(loss, weight)

    plan = polyamp.rewrite(step, tf.ones((2, 4)), policy=polyamp.policy("mixed_float16", rules={pattern: "full"})).plan
    formats = {one.format for one in plan.operations if one.name == "matmul" and "head" in one.where}
    others = {one.format for one in plan.operations if one.name == "matmul" and "head" not in one.where}
    assert (formats, others) == ({"float32"}, {"float16"})
