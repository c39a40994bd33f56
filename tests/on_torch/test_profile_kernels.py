"""How the profile reads PyTorch's file of a step on a GPU; the events are those of a step on an H200."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyamp.backends.torch.profiling import _read  # noqa: TID251


def event(name: str, start: float, seconds: float, category: str = "cpu_op", thread: int = 1, **arguments: Any) -> Any:
    return {"name": name, "ts": start, "dur": seconds, "cat": category, "tid": thread, "args": arguments}


LOW = "c10::BFloat16"
EVENTS = [
    event("module: encoder", 0, 30, "user_annotation"),
    event("aten::mm", 1, 10, **{"External id": 3, "Sequence number": 7, "Input type": [LOW, LOW]}),
    event("AddmmBackward0", 40, 20, thread=2, **{"External id": 5, "Sequence number": 7, "Fwd thread id": 1}),
    event(
        "aten::_cudnn_attention_backward", 41, 9, thread=2, **{"External id": 6, "Input type": [LOW] * 5 + ["float"]}
    ),
    event("aten::item", 60, 27, **{"External id": 8, "Input type": ["float"]}),
    event("aten::_local_scalar_dense", 62, 24, **{"External id": 9, "Input type": ["float"]}),
    event("cudaStreamSynchronize", 76, 8, "cuda_runtime", **{"External id": 9}),
    event("cudaDeviceSynchronize", 90, 8, "cuda_runtime"),
    event("nvjet_sm90_tst", 20, 40, "kernel", 7, **{"External id": 3}),
    event("cudnn_generated_fort_native_sdpa", 50, 20, "kernel", 7, **{"External id": 6}),
]


def test_kernels_are_the_operators_that_launched_them(tmp_path: Path) -> None:
    (tmp_path / "torch.pt.trace.json").write_text(json.dumps({"traceEvents": EVENTS}))
    trace = _read(tmp_path, 1)
    assert [(one.name, one.where, one.kind) for one in trace.operations] == [
        ("matmul", "encoder", "16-bit products"),
        ("attention", "encoder", "16-bit products"),
    ]
    assert [one.seconds for one in trace.operations] == pytest.approx([40e-6, 20e-6])
    assert trace.busy == pytest.approx(50e-6)  # the kernels ran side by side for 10 microseconds
    assert trace.waits == pytest.approx({"aten::item": 8e-6})
