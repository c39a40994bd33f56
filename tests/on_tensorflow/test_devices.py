"""A device that is slow in the policy's format is reported once."""

from typing import Any

import pytest
import tensorflow as tf

import polyamp
from polyamp.backends.tensorflow import adapter
from polyamp.backends.tensorflow.devices import devices, report_slow
from polyamp.formats import cpu_flags, fast_on_cpu

IMAGE, KERNEL = tf.ones((1, 8, 8, 2)), tf.ones((3, 3, 2, 4))


def convolved(x: Any) -> Any:
    return tf.nn.conv2d(x, KERNEL, 1, "SAME")


def test_the_cpu_is_described_by_its_flags() -> None:
    assert adapter.describe()["devices"][-1] == {"name": "cpu", "fast": fast_on_cpu(cpu_flags())}


@pytest.mark.skipif("bfloat16" in devices()[-1]["fast"], reason="this CPU has units for bfloat16")
def test_convolutions_on_a_cpu_without_units_are_mentioned() -> None:
    with pytest.warns(polyamp.PolyampWarning, match="no units for bfloat16"):
        polyamp.rewrite(convolved, IMAGE, policy="mixed_bfloat16")


@pytest.mark.parametrize(
    ("operation", "compute", "device"),
    [("matmul", "bfloat16", "CPU"), ("conv", "float16", "CPU"), ("conv", "float32", "CPU")],
)
def test_other_work_on_a_cpu_is_not_mentioned(operation: str, compute: str, device: str) -> None:
    report_slow(operation, compute, device)
