"""Compiled code is loaded once, where ``POLYAMP_EXTENSION`` lets it be; where it is not, somebody can say why."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import polyamp
from polyamp.backends.torch import extension
from polyamp.errors import ExtensionError, InvalidValueError, PolyampWarning

COMMAND = [sys.executable, "-m", "polyamp.backends.torch.build"]

IMPORT = """
import json, sys, torch
seen = []
def watch(event, args):
    ours = any(part in str(args[:1]) for part in ("/csrc/", "polyamp_", sys.argv[1]))
    if event == "subprocess.Popen" or event in ("open", "ctypes.dlopen") and ours:
        seen.append(event)
sys.addaudithook(watch)
import polyamp.backends.torch
imported = [*seen]
from polyamp.backends.torch import extension
status = str(extension.status())
try:
    extension.available("cuda")
except extension.ExtensionError as error:
    print(json.dumps([imported, seen, status, str(error)]))
"""

ASK = """
import json
from polyamp.backends.torch import extension
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
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that the environment names, or a new one, with both libraries."""
    cache = os.environ.get("POLYAMP_CACHE") or str(tmp_path_factory.mktemp("cache"))
    subprocess.run(COMMAND, env={**os.environ, "POLYAMP_CACHE": cache}, check=True)
    return Path(cache)


def run(code: str, *arguments: str, **environment: str) -> str:
    """What a process prints that sees no GPU."""
    told = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def plant(content: bytes) -> Path:
    """What is in the cache as the operators' library, whole as far as its mark says."""
    library = extension.path_of("operators")
    library.parent.mkdir(parents=True)
    library.write_bytes(content)
    library.with_name(extension.BUILT).write_text("torch of a test")
    return library


def test_importing_starts_no_compiler_and_reads_no_source_and_require_says_what_is_missing(cache: Path) -> None:
    imported, seen, status, error = json.loads(run(IMPORT, str(cache), POLYAMP_EXTENSION="require"))
    assert imported == []
    assert set(seen) == {"open", "subprocess.Popen"}  # the watch sees what the status asks for
    assert "not in use" in status
    assert "PyTorch sees no NVIDIA GPU" in error
    assert not cache.exists()


@pytest.mark.parametrize(
    ("value", "asked"), [("on", "available('cpu')"), ("Off", "library('autocast')"), (" off", "status()")]
)
def test_another_word_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str, asked: str) -> None:
    monkeypatch.setenv("POLYAMP_EXTENSION", value)
    with pytest.raises(InvalidValueError, match="auto, off, require"):
        eval(f"extension.{asked}")


def test_for_the_cpu_nothing_is_built_unasked(cache: Path) -> None:
    assert not extension.available("cpu")
    assert not cache.exists()


def test_without_a_build_require_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYAMP_EXTENSION", "require")
    for _ in range(2):  # it is not forgotten
        with pytest.raises(ExtensionError, match=r"python -m polyamp\.backends\.torch\.build"):
            extension.available("cpu")


def test_a_library_that_does_not_load_is_told_once() -> None:
    library = plant(b"no library")
    with pytest.warns(PolyampWarning, match="the extension does not load") as told:
        assert [extension.available("cpu") for _ in range(3)] == [False] * 3
    assert len(told) == 1
    assert str(library) in str(told[0].message)
    assert "--force" in str(told[0].message)


def test_off_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(b"no library")
    monkeypatch.setenv("POLYAMP_EXTENSION", "off")
    assert not extension.available("cpu")
    assert extension.library("autocast") is None
    assert not extension._answers  # else it would have tried to load what was planted


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYAMP_EXTENSION", "require")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    for name, call in (
        ("operators", lambda: extension.available("cpu")),
        ("autocast", lambda: extension.library("autocast")),
        ("autocast", lambda: extension.build("autocast")),
    ):
        with pytest.raises(ExtensionError, match=r"no C\+\+ compiler") as told:
            call()
        assert f"where:   polyamp_{name}.so" in str(told.value)
        assert "to do:" in str(told.value)


def test_a_build_that_did_not_end_is_no_build() -> None:
    plant(b"no library").with_name(extension.BUILT).unlink()
    assert not extension.available("cpu")
    assert "it is not built" in str(extension.status())


@pytest.mark.parametrize(
    ("set_to", "folder"),
    [
        ({"POLYAMP_CACHE": "/a", "TORCH_EXTENSIONS_DIR": "/b"}, "/a"),
        ({"TORCH_EXTENSIONS_DIR": "/b", "XDG_CACHE_HOME": "/c"}, "/b"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/c/polyamp"),
        ({"HOME": "/d"}, "/d/.cache/polyamp"),
    ],
)
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, set_to: dict[str, str], folder: str) -> None:
    for name in ("POLYAMP_CACHE", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert str(extension.path_of("operators").parent.parent) == folder


def test_only_sources_tell_builds_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Path(shutil.copytree(extension.CSRC, tmp_path / "csrc", ignore=shutil.ignore_patterns("__pycache__")))
    monkeypatch.setattr(extension, "CSRC", sources)
    before = extension.path_of("operators")
    (sources / "__pycache__").mkdir()  # whoever imports check.py leaves it
    assert extension.path_of("operators") == before
    (sources / "abi.h").write_text("// changed")
    assert extension.path_of("operators") != before


@pytest.mark.parametrize("place", ["cache", "folder", "library", "link", "owner"])
def test_a_library_that_others_can_write_is_not_opened(place: str) -> None:
    library = plant(b"no library")
    folder = library.parent
    if place == "link":
        library.rename(folder / "other.so")
        library.symlink_to("other.so")
    elif place == "owner":
        os.chown(library, os.geteuid() + 1, -1)
    else:
        {"cache": folder.parent, "folder": folder, "library": library}[place].chmod(0o777)
    with pytest.warns(PolyampWarning, match="others can write the built extension"):
        assert not extension.available("cpu")


def test_a_lock_that_another_user_planted_is_not_followed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_lacking", lambda: None)
    victim, folder = cache.parent / "victim", extension.path_of("operators").parent
    victim.write_text("precious")
    cache.mkdir()
    folder.with_name(f"{folder.name}.lock").symlink_to(victim)
    with pytest.raises(ExtensionError, match="could not be built"):
        extension.build("operators")
    assert victim.read_text() == "precious"


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POLYAMP_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(extension, "_lacking", lambda: None)
    with pytest.raises(ExtensionError, match="POLYAMP_CACHE names another folder"):
        extension.build("operators")


# What the doctor says.


def described() -> tuple[dict[str, Any], str]:
    found = polyamp.adapters.adapter_named("torch").describe()
    return found["extension"], found["notes"][-1]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CXX", "/nowhere/g++", "no C++ compiler"),
        ("POLYAMP_EXTENSION", "off", "CUDA extension not in use: POLYAMP_EXTENSION=off"),
        ("POLYAMP_EXTENSION", "auto", "polyamp_operators.so"),
    ],
)
def test_the_doctor_says_why_it_is_not_in_use(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    if value == "auto":
        plant(b"no library")
    assert said in described()[1]


# What is built.


@pytest.mark.compilers
@pytest.mark.parametrize(("mode", "used"), [("auto", True), ("require", True), ("off", False)])
def test_what_is_built_is_used_unless_it_is_turned_off(compiled: Path, mode: str, used: bool) -> None:
    said = run(ASK.replace('    said["cuda"]', "    #"), POLYAMP_CACHE=str(compiled), POLYAMP_EXTENSION=mode)
    found = json.loads(said)
    assert (found["cpu"], found["autocast"]) == (used, used)
    assert found["status"]["devices"] == (["cpu"] if used else [])
    for part, name in (("library", "operators"), ("autocast", "autocast")):
        path = found["status"][part]
        assert (path is not None and path.endswith(f"polyamp_{name}.so")) if used else path is None


@pytest.mark.compilers
def test_the_command_builds_once_unless_it_is_forced(compiled: Path) -> None:
    environment = {**os.environ, "POLYAMP_CACHE": str(compiled)}
    times = []
    for options in ([], ["--force"]):
        done = subprocess.run([*COMMAND, *options], env=environment, capture_output=True, text=True, check=True)
        times.append([Path(line).stat().st_mtime for line in done.stdout.splitlines()])
        assert ("polyamp builds" in done.stderr) == bool(options)
    assert all(before < after for before, after in zip(*times, strict=True))


COMPILER = """#!/bin/sh
for word in "$@"; do [ "$word" = -c ] && { echo "$word" >>{log}; {then}; }; done
exec c++ "$@"
"""


def compiler(folder: Path, then: str = ":") -> tuple[dict[str, str], Path]:
    """A compiler that keeps a log of its calls, and does something before it compiles."""
    script, log = folder / "compiler", folder / "log"
    script.write_text(COMPILER.replace("{log}", str(log)).replace("{then}", then))
    script.chmod(0o755)
    return {**os.environ, "CXX": str(script), "POLYAMP_CACHE": str(folder / "cache")}, log


@pytest.mark.compilers
def test_processes_that_ask_at_once_build_once_also_after_one_was_killed(tmp_path: Path) -> None:
    environment, log = compiler(tmp_path)
    killed = subprocess.Popen(COMMAND, env=environment, start_new_session=True)
    while not log.exists():
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    begun = len(log.read_text().split())
    ranks = [subprocess.Popen(COMMAND, env=environment) for _ in range(2)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    assert len(log.read_text().split()) <= begun + 5  # a source each


@pytest.mark.compilers
@pytest.mark.parametrize(("says", "is_kept"), [("no such luck", True), ("Killed signal terminated program", False)])
def test_a_failure_is_told_with_its_end_and_not_tried_again(tmp_path: Path, says: str, is_kept: bool) -> None:
    environment, log = compiler(tmp_path, then=f"echo {says}; exit 1")
    calls = []
    for options in ([], [], ["--force"]):
        done = subprocess.run([*COMMAND, *options], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert says in done.stderr
        assert "tries again" in done.stderr
        assert "Traceback" not in done.stderr
        calls.append(len(log.read_text().split()))
    assert (calls[0] == calls[1]) is is_kept
    assert calls[1] < calls[2]


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
def test_a_cache_with_the_operators_alone_will_do_for_steps(compiled: Path, tmp_path: Path) -> None:
    folder = compiled / extension.path_of("operators").parent.name
    shutil.copytree(folder, tmp_path / "carried" / folder.name)
    said = run(STEP_WITHOUT_AUTOCAST, POLYAMP_CACHE=str(tmp_path / "carried"), POLYAMP_EXTENSION="require")
    assert said.startswith("True\nit is not built")
    assert "polyamp_autocast.so" in said


@pytest.mark.compilers
def test_the_kernels_code_is_clean_under_the_sanitizers(tmp_path: Path) -> None:
    sources = [str(Path(__file__).parent / "native/sanitize.cpp"), str(extension.CSRC / "emulate.cpp")]
    flags = ["-std=c++17", "-g", "-O1", "-ffp-contract=off", "-fsanitize=address,undefined", f"-I{extension.CSRC}"]
    program = tmp_path / "sanitize"
    subprocess.run(["c++", *flags, "-fno-sanitize-recover=all", *sources, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# With a GPU.

BUILD_AT_FIRST_USE = """
import logging
logging.basicConfig(format="%(message)s", stream=__import__("sys").stdout)
from polyamp.backends.torch import extension
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
@pytest.mark.parametrize(("mode", "ends"), [("auto", "False"), ("require", "cannot be built here")])
def test_without_a_compiler_a_gpu_goes_without_or_it_is_told(mode: str, ends: str) -> None:
    code = "from polyamp.backends.torch import extension\ntry: print(extension.available('cuda'))\n"
    said = run(
        f"{code}except extension.ExtensionError as error: print(error)",
        CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        PATH="/nowhere",
        POLYAMP_EXTENSION=mode,
    )
    assert ends in said
