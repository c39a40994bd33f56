"""Which devices are fast in which formats, and what is said of those that are not."""

import pytest

from polyamp import PolyampWarning
from polyamp.formats import cpu_flags, fast_on_cpu, fast_on_gpu, report_slow_format, why_not_fast


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce GTX 1650",
        "GeForce GTX 1660 SUPER",
        "NVIDIA GeForce GTX 1630",
        "NVIDIA GeForce MX450",
        "NVIDIA GeForce MX550",
        "NVIDIA T1000 8GB",
        "Quadro T2000",
        "NVIDIA T400 4GB",
        "NVIDIA T600 Laptop GPU",
    ],
)
def test_turing_chips_without_tensor_cores_are_known_by_name(name: str) -> None:
    assert fast_on_gpu(name, "7.5") == []
    assert "unlike other GPUs" in why_not_fast(name, "7.5")


@pytest.mark.parametrize(
    ("name", "capability", "fast"),
    [
        ("Tesla T4", "7.5", ["float16"]),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5), ["float16"]),
        ("Quadro RTX 4000", "7.5", ["float16"]),
        ("Tesla P100-PCIE-16GB", "6.0", []),
        ("NVIDIA A100-SXM4-40GB", "8.0", ["float16", "bfloat16", "tensorfloat32"]),
        ("NVIDIA H200", (9, 0), ["float16", "bfloat16", "tensorfloat32", "float8_e4m3fn", "float8_e5m2"]),
        ("NVIDIA B200", "10.0", ["float16", "bfloat16", "tensorfloat32", "float8_e4m3fn", "float8_e5m2"]),
        ("unknown", None, []),
    ],
)
def test_other_gpus_by_their_compute_capability(name: str, capability: str, fast: list[str]) -> None:
    assert fast_on_gpu(name, capability) == fast


def test_cpus_by_their_flags() -> None:
    assert fast_on_cpu({"avx2", "avx512f"}) == []
    assert fast_on_cpu({"amx_bf16", "amx_fp16"}) == ["bfloat16", "float16"]
    assert isinstance(cpu_flags(), set)


@pytest.mark.parametrize(
    ("device", "compute"),
    [
        ({"name": "cpu", "fast": []}, "bfloat16"),
        ({"name": "cuda:0 Tesla V100", "fast": ["float16"]}, "bfloat16"),
        ({"name": "GPU:0 GTX 1660", "fast": []}, "float16"),
    ],
)
def test_a_slow_format_is_told_once(device: dict[str, object], compute: str) -> None:
    with pytest.warns(PolyampWarning, match=f"has no units for {compute}, and is slow in it: 14 times"):
        report_slow_format(device, compute, cost="14 times float32's time")
    report_slow_format(device, compute, cost="14 times float32's time")  # a second warning would be an error


@pytest.mark.parametrize(
    ("device", "compute"),
    [
        ({"name": "cpu", "fast": ["bfloat16"]}, "bfloat16"),
        ({"name": "cpu", "fast": []}, "float16"),
        ({"name": "cpu", "fast": []}, "float32"),
        ({"name": "cuda:0 A100", "fast": ["float16", "bfloat16"]}, "float16"),
    ],
)
def test_nothing_is_said_of_a_fast_format_nor_of_float16_on_a_cpu(device: dict[str, object], compute: str) -> None:
    report_slow_format(device, compute)
