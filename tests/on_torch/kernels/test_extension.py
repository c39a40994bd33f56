"""Compiled code is loaded once, where ``POLYAMP_EXTENSION`` lets it be; where it is not, somebody can say why."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import polyamp
from polyamp.backends.torch.building import builder, extension, recipes, toolchain
from polyamp.backends.torch.building.recipes import Job
from polyamp.errors import ExtensionError, InvalidValueError, PolyampWarning

IMPORT = """
import sys, torch
seen = []
def watch(event, args):
    ours = any(part in str(args[:1]) for part in ("/csrc/", "polyamp_", sys.argv[1]))
    if event == "subprocess.Popen" or event in ("open", "ctypes.dlopen") and ours:
        seen.append(event)
sys.addaudithook(watch)
import polyamp.backends.torch
try:
    %s
except polyamp.PolyampError:
    pass
print(*seen)
"""

ASK = """
import json
from polyamp.backends.torch.building import extension
from polyamp.errors import ExtensionError
said = {}
try:
    said["cpu"] = extension.available("cpu")
    said["autocast"] = extension.library("autocast") is not None
    said["cuda"] = extension.available("cuda")
except ExtensionError as error:
    said["error"] = str(error)
print(json.dumps(said | {"status": extension.status().as_dict()}))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing of what this process has found out so far."""
    monkeypatch.setenv("POLYAMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("POLYAMP_EXTENSION", raising=False)
    monkeypatch.setattr(extension, "_answers", {})
    monkeypatch.setattr(extension, "_loaded", {})
    monkeypatch.setattr(torch.ops, "loaded_libraries", set())  # with what the run's header says of the extension
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The libraries: those of the cache that the environment names, or built for this."""
    tools = toolchain.find(cuda=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYAMP_CACHE", os.environ.get("POLYAMP_CACHE") or str(tmp_path_factory.mktemp("cache")))
        return {
            name: (builder.find(recipe(), ()) or builder.build(Job.of(recipe(), tools, ()))).path
            for name, recipe in recipes.RECIPES.items()
        }


def run(code: str, *arguments: str, **environment: str) -> str:
    """What a process prints that sees no GPU."""
    told = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(**environment: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(run(ASK, **environment))
    return said


def plant(cache: Path, content: bytes) -> Path:
    """What is in the cache as the operators' library, whole as far as its manifest says."""
    library = cache / "operators-0" / recipes.operators().file
    library.parent.mkdir(parents=True)
    library.write_bytes(content)
    manifest = {"digest": recipes.operators().digest, "architectures": ["9.0"], "compilers": "nvcc 13.0.88, g++ 12.2.0"}
    manifest["sha256"] = hashlib.sha256(content).hexdigest()
    library.with_name(builder.MANIFEST).write_text(json.dumps(manifest))
    return library


def test_a_library_that_others_can_write_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(cache, b"anything").parent.chmod(0o777)
    said = extension.status()
    assert said.library is None
    assert "others can write the built extension" in (said.why or "")


BUILDING = "from polyamp.backends.torch.building import"


@pytest.mark.parametrize(
    ("then", "seen"),
    [
        ("pass", set()),
        (f"{BUILDING} recipes; recipes.operators().digest", {"open"}),
        (f"{BUILDING} toolchain as t; t.find_nvcc(iter([t.Path('/bin/true')]))", {"subprocess.Popen"}),
    ],
)
def test_importing_starts_no_compiler_and_reads_no_source(cache: Path, then: str, seen: set[str]) -> None:
    assert set(run(IMPORT % then, str(cache)).split()) == seen  # the last two show that the watch sees
    assert not cache.exists()


@pytest.mark.parametrize(("value", "mode"), [(None, "auto"), ("", "auto"), ("off", "off"), ("require", "require")])
def test_the_mode_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, value: str | None, mode: str) -> None:
    if value is not None:
        monkeypatch.setenv("POLYAMP_EXTENSION", value)
    assert extension.mode() == mode


@pytest.mark.parametrize("value", ["on", "Off", "1", " off"])
@pytest.mark.parametrize("asked", ["mode()", "available('cpu')", "library('autocast')", "status()"])
def test_another_word_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str, asked: str) -> None:
    monkeypatch.setenv("POLYAMP_EXTENSION", value)
    with pytest.raises(InvalidValueError, match="auto, off, require"):
        eval(f"extension.{asked}")


def test_for_the_cpu_nothing_is_built_unasked(cache: Path) -> None:
    assert not extension.available("cpu")
    assert not cache.exists()


@pytest.mark.parametrize("device_type", ["mps", "xpu", "meta"])
def test_there_are_no_kernels_for_other_devices(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    monkeypatch.setenv("POLYAMP_EXTENSION", "require")
    assert not extension.available(device_type)


def test_without_a_build_auto_goes_on_without_a_word() -> None:
    said = ask(POLYAMP_EXTENSION="auto")
    assert (said["cpu"], said["autocast"], said["cuda"]) == (False, False, False)


def test_without_a_build_require_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYAMP_EXTENSION", "require")
    for _ in range(2):  # it is not forgotten
        with pytest.raises(ExtensionError, match=r"python -m polyamp\.backends\.torch\.build"):
            extension.available("cpu")


def test_without_a_compiler_require_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYAMP_EXTENSION", "require")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(ExtensionError, match=r"no C\+\+ compiler"):
        extension.available("cpu")


def test_without_a_gpu_require_says_so() -> None:
    code = "from polyamp.backends.torch.building import extension\ntry: extension.available('cuda')\n"
    assert "PyTorch sees no NVIDIA GPU" in run(
        f"{code}except extension.ExtensionError as error: print(error)", POLYAMP_EXTENSION="require"
    )


def test_a_library_that_does_not_load_is_told_once(cache: Path) -> None:
    library = plant(cache, b"no library")
    with pytest.warns(PolyampWarning, match="the extension does not load") as told:
        assert [extension.available("cpu") for _ in range(3)] == [False] * 3
    assert len(told) == 1
    assert str(library) in str(told[0].message)
    assert "--force" in str(told[0].message)


def test_a_library_that_does_not_load_is_an_error_where_it_is_required(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(cache, b"no library")
    monkeypatch.setenv("POLYAMP_EXTENSION", "require")
    with pytest.raises(ExtensionError, match=r"invalid ELF header|file too short"):
        extension.available("cpu")


def test_off_looks_at_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(cache, b"no library")
    monkeypatch.setenv("POLYAMP_EXTENSION", "off")
    assert not extension.available("cpu")
    assert extension.library("autocast") is None
    assert not extension._answers  # else it would have tried to load what was planted


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYAMP_EXTENSION", "require")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    for ask, file in (
        (lambda: extension.available("cpu"), "polyamp_operators.so"),
        (lambda: extension.library("autocast"), "polyamp_autocast.so"),
        (lambda: extension._tools(recipes.autocast()), "polyamp_autocast.so"),  # as on a GPU, where it would be built
    ):
        with pytest.raises(ExtensionError, match=r"no C\+\+ compiler") as told:
            ask()
        assert f"where:   {file}" in str(told.value)
        assert "to do:" in str(told.value)


def test_a_library_that_is_not_required_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYAMP_EXTENSION", "require")
    assert extension.library("autocast", required=False) is None
    with pytest.raises(ExtensionError, match=r"polyamp_autocast\.so"):
        extension.library("autocast")


def test_a_damaged_manifest_is_a_library_that_is_not_built(cache: Path) -> None:
    plant(cache, b"no library").with_name(builder.MANIFEST).write_text('{"digest": 3, "arch')
    assert not extension.available("cpu")
    assert "it is not built" in str(extension.status())


def test_every_gpu_is_asked_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whether a driver runs the library is asked of a GPU; asked of the current one, it takes memory there."""
    asked = []

    def serving(name: str, device: torch.device, *, build: bool) -> builder.Built:
        asked.append(str(device))
        return builder.Built(Path("polyamp_operators.so"), (), "")

    monkeypatch.setattr(extension, "_serving", serving)
    for device in ("cuda:1", torch.device("cuda", 1), "cuda:0", "cpu", torch.device("cpu"), "cuda:1"):
        assert extension.available(device)
    assert asked == ["cuda:1", "cuda:0", "cpu"]


# What the doctor says.


def described() -> tuple[dict[str, Any], str]:
    found = polyamp.registry.adapter_named("torch").describe()
    return found["extension"], found["notes"][-1]


def test_the_doctor_says_how_to_build() -> None:
    status, note = described()
    assert status["library"] is None
    assert note.startswith("CUDA extension not in use: it is not built")
    assert builder.COMMAND in note


def test_the_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert "no C++ compiler" in described()[1]


def test_the_doctor_says_that_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYAMP_EXTENSION", "off")
    assert described()[1] == "CUDA extension not in use: POLYAMP_EXTENSION=off"


def test_the_doctor_says_what_does_not_load(cache: Path) -> None:
    library = plant(cache, b"no library")
    assert str(library) in described()[1]


# What is built.


@pytest.mark.compilers
@pytest.mark.parametrize(("mode", "used"), [("auto", True), ("require", True), ("off", False)])
def test_what_is_built_is_used_unless_it_is_turned_off(compiled: dict[str, Path], mode: str, used: bool) -> None:
    cache = compiled["operators"].parent.parent
    said = run(ASK.replace('    said["cuda"]', "    #"), POLYAMP_CACHE=str(cache), POLYAMP_EXTENSION=mode)
    found = json.loads(said)
    assert (found["cpu"], found["autocast"]) == (used, used)
    assert found["status"]["devices"] == (["cpu"] if used else [])
    assert found["status"]["library"] == (str(compiled["operators"]) if used else None)
    assert found["status"]["autocast"] == (str(compiled["autocast"]) if used else None)


STEP_WITHOUT_AUTOCAST = """
import torch, polyamp
model = torch.nn.Linear(4, 4)
opt = polyamp.wrap_optimizer(torch.optim.AdamW(model.parameters()), "mixed_bfloat16", fused_step=True)
with polyamp.autocast("mixed_bfloat16"):
    loss = model(torch.ones(2, 4)).sum()
opt.backward(loss)
opt.step()
print(bool(opt.last_step))
try:
    with polyamp.autocast(polyamp.policy("mixed_bfloat16", rules={"softmax": "lower"})):
        torch.softmax(torch.ones(2, 4), -1)
except polyamp.PolyampError as error:
    print(error)
"""


@pytest.mark.compilers
def test_a_cache_with_the_operators_alone_will_do_for_steps(compiled: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(compiled["operators"].parent, tmp_path / "carried" / "operators-0")
    said = run(STEP_WITHOUT_AUTOCAST, POLYAMP_CACHE=str(tmp_path / "carried"), POLYAMP_EXTENSION="require")
    assert said.startswith("True\nit is not built")
    assert "polyamp_autocast.so" in said


@pytest.mark.compilers
def test_a_second_library_is_not_loaded(compiled: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copytree(compiled["operators"].parent, tmp_path / "other") / compiled["operators"].name
    first = (
        f"import torch; from polyamp.backends.torch.kernels import operators; torch.ops.load_library({str(other)!r})"
    )
    cache = compiled["operators"].parent.parent
    said = json.loads(run(first + ASK, POLYAMP_CACHE=str(cache), POLYAMP_EXTENSION="require"))
    assert "another build of the extension is loaded" in said["error"]
    assert str(other) in said["error"]


# With a GPU.

BUILD_AT_FIRST_USE = """
import logging
logging.basicConfig(format="%(message)s", stream=__import__("sys").stdout)
from polyamp.backends.torch.building import extension
print(extension.available("cuda"), extension.available("cpu"), extension.status())
"""


@pytest.mark.gpu
def test_the_first_use_on_a_gpu_builds_it_for_all_processes() -> None:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    first, second = (run(BUILD_AT_FIRST_USE, CUDA_VISIBLE_DEVICES=gpu) for _ in range(2))
    assert "polyamp builds polyamp_operators.so once" in first
    assert "True True CUDA extension in use on cpu, cuda" in first
    assert second == first.split("\n", 1)[1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_on_the_second_gpu_leaves_the_first_alone() -> None:
    code = """
import torch, polyamp
weight = torch.ones(4, device="cuda:1", requires_grad=True)
opt = polyamp.wrap_optimizer(torch.optim.AdamW([weight]), "mixed_float16")
for _ in range(2):
    opt.zero_grad()
    opt.backward(weight.sum())
    opt.step()
print(bool(opt.last_step), torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
"""
    assert run(code, CUDA_VISIBLE_DEVICES="0,1").strip() == "True False True"


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "ends"), [("auto", "False"), ("require", "no C++ compiler")])
def test_without_a_compiler_a_gpu_goes_without_or_it_is_told(mode: str, ends: str) -> None:
    code = "from polyamp.backends.torch.building import extension\ntry: print(extension.available('cuda'))\n"
    said = run(
        f"{code}except extension.ExtensionError as error: print(error)",
        CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        PATH="/nowhere",
        POLYAMP_EXTENSION=mode,
    )
    assert ends in said
