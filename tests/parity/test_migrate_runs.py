"""Converted programs train: to the losses of the original where it runs here, else to those of float32.

The originals with ``torch.amp`` run on the CPU. Those with Apex cannot; the same program in float32 is the reference.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

import polyamp
from polyamp.migration.convert import migrate_source

PROGRAMS = Path(__file__).parents[1] / "support" / "migrate"


def source(folder: str, name: str) -> str:
    return (PROGRAMS / folder / f"{name}.py").read_text()


def run(code: str, name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, f"{name}.py", "exec"), namespace)
    return namespace


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda':UserWarning")
@pytest.mark.parametrize("name", ["torch_recipe", "torch_trainer", "torch_accumulation"])
def test_a_converted_program_of_torch_amp_has_the_losses_of_the_original(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns() if name == "torch_trainer" else _nothing():  # torch.cuda.amp is deprecated
        original = run(source("before", name), name, monkeypatch)
    converted = run(source("after", name), name, monkeypatch)
    assert converted["losses"] == pytest.approx(original["losses"], rel=1e-3)
    assert converted["losses"][-1] < 0.8 * converted["losses"][0]
    assert converted.get("norms") == pytest.approx(original["norms"], rel=1e-2) if "norms" in original else True
    assert converted.get("final_scale") == original.get("final_scale")


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_converted_loop_follows_the_dtype_that_it_is_told(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTYPE", dtype)
    original, converted = (
        run(source(folder, "torch_accumulation"), "loop", monkeypatch) for folder in ("before", "after")
    )
    assert converted["losses"] == pytest.approx(original["losses"], rel=1e-6 if dtype == "float32" else 2e-2)
    assert converted["optimizer"].loss_scale == 1.0


APEX = ["apex_quick_start", "apex_imagenet", "apex_dcgan", "apex_fp16_optimizer"]


@pytest.mark.parametrize("name", APEX)
def test_a_converted_program_of_apex_has_the_losses_of_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = source("after", name)
    single = re.sub(r'"O[12]"', '"O0"', code)
    reference = run(single, name, monkeypatch)["losses"]
    converted = run(code, name, monkeypatch)["losses"]
    assert converted == pytest.approx(reference, rel=5e-3)
    assert converted != reference  # it did compute in 16 bits
    assert converted[-1] < converted[0]


@pytest.mark.parametrize("name", ["apex_quick_start", "apex_dcgan"])
def test_a_converted_program_has_the_losses_of_the_original_on_polyamps_apex(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyamp.backends.torch.compat import apex
    from polyamp.backends.torch.compat.apex import amp

    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    try:
        with pytest.warns(polyamp.PolyampDeprecationWarning):
            original = run(source("before", name), name, monkeypatch)["losses"]
    finally:
        amp._amp_state.handle._deactivate()  # O1 would last as long as the process
    assert run(source("after", name), name, monkeypatch)["losses"] == pytest.approx(original, rel=2e-3)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_level_that_is_an_option_of_the_program_still_is(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = source("after", "apex_fine_tuning")
    reference = run(code, "fine_tuning", monkeypatch)["losses"]
    converted = run(code, "fine_tuning", monkeypatch, "--fp16", "--fp16_opt_level", level)["losses"]
    assert converted == pytest.approx(reference, rel=1e-6 if level == "O0" else 5e-3)
    assert (converted == reference) == (level == "O0")


def test_a_converted_loop_of_keras_has_the_losses_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    before = keras.config.dtype_policy()
    try:
        converted = run(source("after", "keras_loop"), "keras_loop", monkeypatch)
        keras.config.set_dtype_policy("float32")
        single = (
            source("after", "keras_loop")
            .replace("'mixed_float16'", "'float32'")
            .replace('"mixed_float16"', '"float32"')
        )
        reference = run(single.replace(', loss_scale=polyamp.LossScale.like("keras")', ""), "keras_loop", monkeypatch)
    finally:
        keras.config.set_dtype_policy(before)
    assert converted["losses"] == pytest.approx(reference["losses"], rel=2e-2)
    assert float(converted["optimizer"].loss_scale) == 2.0**15
    assert converted["losses"][-1] < converted["losses"][0]


@pytest.mark.parametrize("name", ["keras_experimental", "tensorflow1", "jmp_policies"])
def test_every_other_converted_program_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyamp.backends.tensorflow import disable_mixed_precision_graph_rewrite

    before = keras.config.dtype_policy()
    try:
        namespace = run(source("after", name), name, monkeypatch)
    finally:
        keras.config.set_dtype_policy(before)
        if name == "tensorflow1":
            disable_mixed_precision_graph_rewrite()
    assert namespace.get("scales", [2.0**15, 128.0, 2.0**10]) == [2.0**15, 128.0, 2.0**10]
    if name == "jmp_policies":
        assert namespace["losses"] == [16.0]


def test_a_fused_optimizer_that_pytorch_lacks_trains() -> None:
    old = "import torch\nfrom apex.optimizers import FusedLAMB\np = torch.ones(2, requires_grad=True)\n"
    old += "opt = FusedLAMB([p], lr=0.1)\np.sum().backward()\nopt.step()\n"
    namespace: dict[str, Any] = {}
    exec(migrate_source(old.encode()).after.decode(), namespace)
    assert float(namespace["p"].detach().max()) < 1.0
