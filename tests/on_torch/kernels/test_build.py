"""Libraries are built once, by real compilers, into a cache that processes share; what a compiler made is checked."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyamp.backends.torch import build as build_command
from polyamp.backends.torch.building import architectures, builder, checks, recipes, toolchain
from polyamp.backends.torch.building.builder import BuildError
from polyamp.backends.torch.building.checks import Kernel
from polyamp.backends.torch.building.recipes import Job, Recipe
from polyamp.backends.torch.building.toolchain import Cxx, Toolchain
from polyamp.errors import ExtensionError, InvalidValueError

ROOT = Path(__file__).parents[3]

SOURCES = {
    "factor.h": "constexpr int factor = 2;\n",
    "scaled.cpp": """
#include "factor.h"
extern "C" __attribute__((visibility("default"))) int scaled(int value) { return factor * value; }
""",
    "copy.cu": """
#include "factor.h"
__global__ void wide(float4* to, const float4* from) { to[threadIdx.x] = from[threadIdx.x]; }
__global__ void wide_stats(float* to, const float4* from) { float4 v = from[threadIdx.x]; *to = v.x * v.y * v.z * v.w; }
__global__ void narrow(float* to, const float* from) { to[threadIdx.x] = factor * from[threadIdx.x]; }
struct Table { char bytes[1000]; };
__global__ void __launch_bounds__(1024, 2) spilling(float* all, const __grid_constant__ Table table) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = all[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 64; ++i) all[i * 1024 + threadIdx.x] = kept[63 - i] * kept[i] + table.bytes[i];
}
__global__ void __launch_bounds__(256, 1) greedy(float* all) {
  float kept[96];
  for (int i = 0; i < 96; ++i) kept[i] = all[i * 256 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 96; ++i) all[i * 256 + threadIdx.x] = kept[95 - i] * kept[i];
}
""",
}

# Builds what its arguments name, in a process of its own.
BUILD = """
import sys
from pathlib import Path
from polyamp.backends.torch.building import builder, toolchain
from polyamp.backends.torch.building.recipes import Job, Recipe
recipe = Recipe("scaled", host=("scaled.cpp",), folder=Path(sys.argv[1]))
print(builder.build(Job.of(recipe, toolchain.find(cuda=False), ())).reused)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYAMP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sources of a small library."""
    (tmp_path / "csrc").mkdir()
    for name, text in SOURCES.items():
        (tmp_path / "csrc" / name).write_text(text)
    return tmp_path / "csrc"


@pytest.fixture
def recipe(folder: Path) -> Recipe:
    return Recipe("scaled", host=("scaled.cpp",), folder=folder)


@pytest.fixture
def job(recipe: Recipe) -> Job:
    return Job.of(recipe, toolchain.find(cuda=False), ())


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes ``CXX`` a script around g++, which notes each call that compiles and then does what it is told."""

    def make(does: str) -> Path:
        script, notes = tmp_path / "cxx", tmp_path / "calls"
        script.write_text(
            f'#!/bin/sh\ncase "$*" in\n  --version) exec g++ --version ;;\n'
            f'  *" -c "* | "-c "*) echo called >> {notes} ; {does} ;;\nesac\nexec g++ "$@"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return notes

    return make


def scaled(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).scaled(21))


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_library_is_built_and_found_again(job: Job) -> None:
    files: list[str] = []
    built = builder.build(job, on_step=files.append)
    assert scaled(built.path) == 42
    assert files == ["scaled.cpp", "polyamp_scaled.so"]
    assert not built.reused
    again = builder.build(job, on_step=files.append)
    assert again == replace(built, reused=True)
    assert len(files) == 2
    assert builder.find(job.recipe, ()) == again


def test_force_builds_again(job: Job, compiler: Callable[[str], Path]) -> None:
    calls = compiler(":")
    job = replace(job, toolchain=toolchain.find(cuda=False))
    builder.build(job)
    assert not builder.build(job, force=True).reused
    assert len(calls.read_text().split()) == 2


@pytest.mark.parametrize("name", ["scaled.cpp", "factor.h"])
def test_a_changed_source_is_another_library(job: Job, folder: Path, name: str) -> None:
    first = builder.build(job)
    (folder / name).write_text(SOURCES[name].replace("2;", "3;").replace("factor *", "2 * factor *"))
    assert builder.find(job.recipe, ()) is None
    second = builder.build(job)
    assert first.path != second.path
    assert (scaled(first.path), scaled(second.path)) in {(42, 63), (42, 84)}


@pytest.mark.parametrize(
    "change",
    [{"flags": ("-DNDEBUG",)}, {"tied": "torch 3"}, {"host": ("scaled.cpp", "other.cpp")}, {"device": ("copy.cu",)}],
    ids=str,
)
def test_a_changed_recipe_is_another_library(recipe: Recipe, folder: Path, change: dict[str, tuple[str, ...]]) -> None:
    (folder / "other.cpp").touch()
    assert replace(recipe, **change).digest != recipe.digest


def test_the_folder_of_the_sources_does_not_matter(recipe: Recipe, tmp_path: Path) -> None:
    moved = recipe.folder.rename(tmp_path / "moved")
    before = Recipe("scaled", host=("scaled.cpp",), folder=moved)
    (tmp_path / "csrc").symlink_to(moved)
    assert before.digest == recipe.digest


def test_compilers_and_what_they_read_name_the_build(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(job, toolchain=Toolchain(Cxx(job.toolchain.cxx.command, "g++ 1.0"), None))
    assert other.key != job.key
    before = job.key
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    assert job.key != before


def test_a_build_by_another_compiler_is_found_too(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    built = builder.build(job)
    monkeypatch.setenv("PATH", "/nowhere")
    assert builder.find(job.recipe, ()) == replace(built, reused=True)


def test_a_folder_without_its_manifest_is_no_build(job: Job) -> None:
    built = builder.build(job)
    built.path.with_name(builder.MANIFEST).write_text('{"digest": "')
    assert builder.find(job.recipe, ()) is None
    assert not builder.build(job).reused


@pytest.mark.parametrize(
    "damage",
    [
        lambda said: {},
        lambda said: [said],
        lambda said: None,
        lambda said: 3,
        lambda said: {key: value for key, value in said.items() if key != "digest"},
        lambda said: said | {"architectures": None},
        lambda said: said | {"architectures": "9.0"},
        lambda said: said | {"architectures": [9.0]},
        lambda said: said | {"architectures": ["sm_90"]},
        lambda said: said | {"compilers": ["g++"]},
        lambda said: {key: value for key, value in said.items() if key != "sha256"},
        lambda said: said | {"sha256": None},
    ],
)
def test_a_damaged_manifest_is_no_build(job: Job, damage: Callable[[Any], Any]) -> None:
    manifest = builder.build(job).path.with_name(builder.MANIFEST)
    assert builder.find(job.recipe, ()) is not None
    manifest.write_text(json.dumps(damage(json.loads(manifest.read_text()))))
    assert builder.find(job.recipe, ()) is None
    assert not builder.build(job).reused
    assert builder.find(job.recipe, ()) is not None


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702])
@pytest.mark.parametrize("part", ["cache", "folder", "library"])
def test_what_others_can_write_is_refused(job: Job, cache: Path, part: str, mode: int) -> None:
    built = builder.build(job)
    place = {"cache": cache, "folder": built.path.parent, "library": built.path}[part]
    before = place.stat().st_mode
    place.chmod(mode)
    with pytest.raises(BuildError, match="others can write") as caught:
        builder.find(job.recipe, ())
    assert f"chmod go-w {place}" in str(caught.value)
    if part != "library":
        with pytest.raises(BuildError, match="others can write"):
            builder.build(job)
    place.chmod(before)
    assert builder.find(job.recipe, ()) is not None


def test_another_owner_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    builder.build(job)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    monkeypatch.setattr(builder.os, "getuid", lambda: 4321)
    if Path(__file__).stat().st_uid != 0:  # the administrator's files are anybody's
        with pytest.raises(BuildError, match="others can write"):
            builder.find(job.recipe, ())


def test_a_group_is_somebody_else(job: Job) -> None:
    built = builder.build(job)
    built.path.chmod(0o775)
    own = built.path.stat()
    if own.st_gid == own.st_uid:
        assert builder.find(job.recipe, ()) is not None
    if os.getuid() == 0:
        os.chown(built.path, 0, 4321)
        with pytest.raises(BuildError, match="mode 775"):
            builder.find(job.recipe, ())


def test_a_folder_that_all_share_will_do(job: Job, cache: Path) -> None:
    builder.build(job)
    cache.chmod(0o1777)
    assert builder.find(job.recipe, ()) is not None


def test_what_is_made_is_ours_whatever_the_umask_is(job: Job) -> None:
    before = os.umask(0)
    try:
        builder.build(job)
    finally:
        os.umask(before)
    assert builder.find(job.recipe, ()) is not None


def test_another_library_than_was_built_is_refused_and_built_again(job: Job) -> None:
    built = builder.build(job)
    built.path.write_bytes(built.path.read_bytes() + b"planted")
    with pytest.raises(BuildError, match="changed after the build") as caught:
        builder.find(job.recipe, ())
    assert "--force" in str(caught.value)
    assert not builder.build(job).reused
    assert builder.find(job.recipe, ()) is not None
    assert scaled(built.path) == 42


def test_an_older_build_serves_where_the_newest_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    older = builder.build(job)
    newer = older.path.parent.with_name(f"{older.path.parent.name}0")
    shutil.copytree(older.path.parent, newer)
    (newer / older.path.name).write_bytes(b"planted")
    os.utime(newer / builder.MANIFEST, (2e9, 2e9))
    found = builder.find(job.recipe, ())
    assert found is not None
    assert found.path == older.path


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_a_manifest_that_is_no_json_is_no_build(job: Job, content: bytes) -> None:
    builder.build(job).path.with_name(builder.MANIFEST).write_bytes(content)
    assert builder.find(job.recipe, ()) is None
    assert not builder.build(job).reused


@pytest.mark.parametrize(
    ("made_for", "gpus", "found"),
    [
        ((), [], True),
        ((), [(9, 0)], False),
        (("8.0", "9.0"), [(8, 6), (9, 0)], True),
        (("9.0",), [(8, 0)], False),
        (("9.0",), [(10, 0)], False),
        (("9.0+PTX",), [(10, 0), (12, 0)], True),
        (("9.0",), [], True),
    ],
)
def test_a_library_is_found_for_the_gpus_that_it_has_code_for(
    job: Job, made_for: tuple[str, ...], gpus: list[tuple[int, int]], found: bool
) -> None:
    manifest = builder.build(job).path.with_name(builder.MANIFEST)
    with_device = replace(job.recipe, device=("copy.cu",))
    said = {"digest": with_device.digest, "architectures": made_for}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | said))
    assert (builder.find(with_device, gpus) is not None) == found


def test_processes_that_ask_at_once_build_once(folder: Path, compiler: Callable[[str], Path]) -> None:
    calls = compiler("sleep 0.5")
    processes = [start(folder) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in processes]
    assert sorted(out.strip() for out, err in said) == ["False", "True"], said
    assert calls.read_text().split() == ["called"]


def test_a_killed_builder_leaves_nothing_behind(
    recipe: Recipe, cache: Path, tmp_path: Path, compiler: Callable[[str], Path]
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    calls = compiler(f"while [ -e {hold} ]; do sleep 0.05; done")
    process = start(recipe.folder)
    wait_for(calls.exists)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(list(cache.glob("*.partial"))) == 1
    hold.unlink()  # the compiler, an orphan now, goes on where it was
    built = builder.build(Job.of(recipe, toolchain.find(cuda=False), ()))
    assert scaled(built.path) == 42
    assert not list(cache.glob("*.partial"))


FAILING = "for i in $(seq 30); do echo $i: no >&2; done; exit 1"


def test_a_failure_is_told_with_its_end_and_not_tried_again(recipe: Recipe, compiler: Callable[[str], Path]) -> None:
    calls = compiler(FAILING)
    job = Job.of(recipe, toolchain.find(cuda=False), ())
    assert builder.failed_before(job) is None
    with pytest.raises(BuildError) as first:
        builder.build(job)
    assert "30: no" in str(first.value)
    assert "9: no" not in str(first.value).replace("19: no", "").replace("29: no", "")
    with pytest.raises(BuildError) as second:
        builder.build(job)
    assert str(second.value) == str(first.value) == str(builder.failed_before(job))
    assert len(calls.read_text().split()) == 1
    log = next(line.split()[1] for line in str(first.value).splitlines() if "where:" in line)
    assert "1: no" in Path(log).read_text()


def test_a_retry_after_a_failure_forgets_it(recipe: Recipe, compiler: Callable[[str], Path]) -> None:
    compiler(FAILING)
    job = Job.of(recipe, toolchain.find(cuda=False), ())
    with pytest.raises(BuildError):
        builder.build(job)
    compiler(":")
    assert scaled(builder.build(job, retry=True).path) == 42
    assert builder.failed_before(job) is None


def test_a_compiler_that_was_killed_is_tried_again(recipe: Recipe, compiler: Callable[[str], Path]) -> None:
    compiler("kill -9 $$")
    job = Job.of(recipe, toolchain.find(cuda=False), ())
    with pytest.raises(BuildError):
        builder.build(job)
    assert builder.failed_before(job) is None


def test_a_cache_that_cannot_be_written_is_told(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POLYAMP_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="set POLYAMP_CACHE"):
        builder.build(job)


@pytest.mark.parametrize(
    ("set_to", "folder"),
    [
        ({"POLYAMP_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/polyamp"),
        ({"HOME": "/c"}, "/c/.cache/polyamp"),
    ],
)
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, set_to: dict[str, str], folder: str) -> None:
    for name in ("POLYAMP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert builder.cache() == Path(folder)


# Finding compilers.


def test_no_cxx_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ExtensionError, match="neither g\\+\\+ nor c\\+\\+ on PATH"):
        toolchain.find(cuda=False)


def test_a_cxx_that_does_not_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(ExtensionError, match="CXX=/nowhere/g\\+\\+, which does not run"):
        toolchain.find(cuda=False)


def test_cxx_may_be_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env g++")
    assert toolchain.find_cxx().command[1:] == ("g++",)


def test_an_nvcc_that_does_not_run_is_told(tmp_path: Path) -> None:
    script = tmp_path / "nvcc"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(ExtensionError, match=f"{script}: does not run"):
        toolchain.find_nvcc(iter([script, tmp_path / "nothing"]))


def test_cuda_home_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert next(toolchain.nvcc_places()) == tmp_path / "bin" / "nvcc"


# Architectures.

KNOWN = ("7.5", "8.0", "9.0", "10.0", "12.0")


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("all", ("7.5", "8.0", "9.0", "10.0", "12.0+PTX")),
        ("10.0,9.0", ("9.0", "10.0")),
        ("9.0, 9.0+PTX", ("9.0+PTX",)),
    ],
)
def test_architectures_by_text(text: str, chosen: tuple[str, ...]) -> None:
    assert architectures.choose(text, KNOWN) == chosen


@pytest.mark.parametrize("text", ["7.0", "9", "sm_90", "", "9.0,", "9.0 10.0", "native,9.0"])
def test_architectures_that_are_none(text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"7\.5, 8\.0, 9\.0"):
        architectures.choose(text, KNOWN)


# What compilers say.


def test_a_warning_is_found_in_the_log(recipe: Recipe) -> None:
    (recipe.folder / "scaled.cpp").write_text('extern "C" int scaled(int value) { int unused; return 2 * value; }')
    built = builder.build(Job.of(recipe, toolchain.find(cuda=False), ()))
    assert any("unused variable" in line for line in checks.warnings(built.log))


def test_a_clean_log_has_no_warnings(job: Job) -> None:
    assert checks.warnings(builder.build(job).log) == []


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (Kernel("step", "9.0", 64, 0, wide=("load", "store")), None),
        (Kernel("step", "9.0", 64, 0), None),
        (Kernel("grad_stats", "9.0", 64, 0, wide=("load",)), None),
        (Kernel("step", "9.0", 65, 0, wide=("load", "store")), "65 registers"),
        (Kernel("step", "9.0", 64, 4, wide=("load", "store")), "4 bytes of registers are spilled"),
        (Kernel("step", "9.0", 64, 0, wide=("load",)), "no store of 16 bytes"),
        (Kernel("step", "9.0", 64, 0, wide=("store",)), "no load of 16 bytes"),
        (Kernel("grad_stats", "9.0", 64, 0, wide=("load",), in_flight=8), None),
        (
            Kernel("grad_stats", "9.0", 64, 0, wide=("load",), in_flight=6),
            "6 loads of 16 bytes before the first is used",
        ),
        (Kernel("step<Adam>", "9.0", 64, 0, wide=("load", "store"), in_flight=5), "fewer than 6"),
    ],
)
def test_what_a_check_fails_on(kernel: Kernel, problem: str | None) -> None:
    assert [problem in found for found in kernel.problems()] == ([True] if problem else [])


LOADS = """
code for sm_90
  Function : k
/*0000*/ LDG.E.128 R4, desc[UR4][R2.64] ;  /* 0x0 */
/*0010*/ LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ;  /* 0x0 */
/*0020*/ HFMA2.MMA R12, -RZ, RZ, 0, 0 ;  /* 0x0 */
/*0030*/ @!P0 LDG.E.EF.128 R16, desc[UR4][R2.64+0x20] ;  /* 0x0 */
/*0040*/ FADD R20, R12, %s ;  /* 0x0 */
/*0050*/ LDG.E.128 R24, desc[UR4][R2.64+0x30] ;  /* 0x0 */
/*0060*/ %s ;  /* 0x0 */
/*0070*/ LDG.E.128 R28, desc[UR4][R2.64+0x40] ;  /* 0x0 */
"""


@pytest.mark.parametrize(
    ("used", "then", "most"),
    [
        ("RZ", "NOP", 5),
        ("R7", "NOP", 3),
        ("R12", "NOP", 5),
        ("RZ", "BRA 0x100", 4),
        ("RZ", "@P0 BRA 0x100", 5),
        ("R16", "EXIT", 3),
    ],
)
def test_loads_in_flight_are_those_before_a_use_or_a_jump(used: str, then: str, most: int) -> None:
    ((key, accesses),) = checks.read_machine_code(LOADS % (used, then))
    assert key == ("k", "9.0")
    assert accesses == (("load",), most)


# The command.


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> Callable[..., Any]:
    """The command, with the small library for its own."""
    monkeypatch.setattr(build_command, "RECIPES", {"scaled": lambda: recipe})
    return lambda *options: CliRunner().invoke(build_command.app, options)


def test_the_command_says_where_the_library_is(run: Callable[..., Any], recipe: Recipe) -> None:
    first, second = run("--json"), run()
    assert first.exit_code == second.exit_code == 0
    said = json.loads(first.stdout)["scaled"]
    assert scaled(Path(said["library"])) == 42
    assert not said["reused"]
    assert said["library"] in second.stdout
    assert "was built before" in second.stdout


def test_the_command_prints_a_line_for_each_file_where_there_is_no_terminal(run: Callable[..., Any]) -> None:
    assert "scaled: scaled.cpp\nscaled: polyamp_scaled.so\n" in run().stderr


def test_the_command_fails_on_warnings_when_it_checks(run: Callable[..., Any], recipe: Recipe) -> None:
    (recipe.folder / "scaled.cpp").write_text("int scaled(int value) { int unused; return 2 * value; }")
    assert run().exit_code == 0
    checked = run("--check", "--json")
    assert checked.exit_code == 1
    assert "unused variable" in json.loads(checked.stdout)["scaled"]["problems"][0]


def test_the_command_tries_again_what_has_failed(run: Callable[..., Any], compiler: Callable[[str], Path]) -> None:
    compiler(FAILING)
    assert isinstance(run().exception, BuildError)
    compiler(":")
    assert run().exit_code == 0


def test_an_error_of_the_command_is_told_without_a_traceback() -> None:
    without = {**os.environ, "CXX": "/nowhere/g++"}
    told = [sys.executable, "-m", "polyamp.backends.torch.build"]
    done = subprocess.run(told, env=without, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no C++ compiler" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_option_is_told_with_exit_code_2(run: Callable[..., Any]) -> None:
    assert run("--fast").exit_code == 2


# With nvcc.


@pytest.fixture
def cuda_job(folder: Path) -> Job:
    recipe = Recipe("copy", host=("scaled.cpp",), device=("copy.cu",), folder=folder)
    found = toolchain.find(cuda=True)
    assert found.nvcc is not None
    return Job.of(recipe, found, architectures.choose("8.0,9.0+PTX", found.nvcc.knows))


@pytest.mark.compilers
def test_kernels_are_told_for_every_architecture(cuda_job: Job) -> None:
    built = builder.build(cuda_job)
    assert scaled(built.path) == 42
    kernels = {(kernel.name, kernel.architecture): kernel for kernel in checks.examine(cuda_job, built)}
    names = {"wide", "wide_stats", "narrow", "spilling", "greedy"}
    assert {(name.partition("(")[0], gpu) for name, gpu in kernels} == {
        (n, gpu) for n in names for gpu in ("8.0", "9.0")
    }
    by_name = {name.partition("(")[0]: kernel for (name, gpu), kernel in kernels.items() if gpu == "9.0"}
    assert by_name["wide"].problems() == by_name["wide_stats"].problems() == []
    assert by_name["wide"].parameters == 16
    assert by_name["spilling"].parameters == 1008
    assert by_name["wide"].wide == ("load", "store")
    assert by_name["wide_stats"].wide == ("load",)
    assert by_name["narrow"].wide == ()
    assert [by_name[name].in_flight for name in ("wide", "narrow")] == [1, 0]
    assert "bytes of registers are spilled" in by_name["spilling"].problems()[0]
    assert "registers, more than 64" in by_name["greedy"].problems()[0]


@pytest.mark.compilers
def test_the_command_fails_on_bad_kernels_when_it_checks(
    run: Callable[..., Any], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_command, "RECIPES", {"copy": lambda: replace(recipe, name="copy", device=("copy.cu",))})
    checked = run("--arch", "9.0", "--check")
    assert checked.exit_code == 1
    assert "bytes of registers are spilled" in checked.stdout
    assert run("--arch", "9.0").exit_code == 0


@pytest.mark.compilers
@pytest.mark.parametrize("arch", ["5.2", "all,9.0"])
def test_an_architecture_that_nvcc_does_not_know_is_told(run: Callable[..., Any], arch: str) -> None:
    assert isinstance(run("--arch", arch).exception, InvalidValueError)


@pytest.mark.compilers
def test_nvcc_is_found_behind_a_script(tmp_path: Path) -> None:
    nvcc = toolchain.find(cuda=True).nvcc
    assert nvcc is not None
    script = tmp_path / "nvcc"
    script.write_text(f'#!/bin/sh\nexec {nvcc.path} "$@"\n')
    script.chmod(0o755)
    assert toolchain.find_nvcc(iter([script])) == replace(nvcc, path=str(script))


@pytest.mark.compilers
def test_an_nvcc_without_its_headers_is_passed_by(tmp_path: Path) -> None:
    nvcc = toolchain.find(cuda=True).nvcc
    assert nvcc is not None
    script = tmp_path / "nvcc"
    elsewhere = f'[ "$1" = -dryrun ] && exec echo "#$ TOP={tmp_path}/bin/.."'
    script.write_text(f'#!/bin/sh\n{elsewhere}\nexec {nvcc.path} "$@"\n')
    script.chmod(0o755)
    assert toolchain.find_nvcc(iter([script, Path(nvcc.path)])) == nvcc
    with pytest.raises(ExtensionError, match=r"has no cuda_runtime\.h next to it"):
        toolchain.find_nvcc(iter([script]))


# The kernels' code on the CPU, under the sanitizers.


@pytest.mark.compilers
def test_the_kernels_code_is_clean_under_the_sanitizers(tmp_path: Path) -> None:
    sources = [ROOT / "tests/on_torch/kernels/native/sanitize.cpp", recipes.CSRC / "emulate.cpp"]
    told = ["-std=c++17", "-g", "-O1", "-ffp-contract=off", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    program = tmp_path / "sanitize"
    subprocess.run([*toolchain.find_cxx().command, *told, "-I", recipes.CSRC, *sources, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
