"""Importing polyamp loads no framework and few modules; a missing framework is an error that names its extra."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polyamp

PACKAGE = Path(polyamp.__file__).parent

STRANGERS = """
import sys
before = set(sys.modules)
import polyamp
loaded = sys.modules.keys() - before
roots = {name.partition(".")[0] for name in loaded}
print(*sorted(roots - sys.stdlib_module_names - {"polyamp"} | loaded & {"importlib.metadata"}))
"""

COUNT = "import sys; before = set(sys.modules); import polyamp; print(len(sys.modules.keys() - before))"

MOST_MODULES = 80
"""Modules that ``import polyamp`` may load, its own included: 69 today, which take about 15 ms on an AMD EPYC.

Modules are counted because a clock tells more about what else the machine does. One package that is slow to import
brings more than six along: ``asyncio`` 54, ``importlib.metadata`` 38.
"""

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import polyamp
MODULE = "polyamp.backends."
try:
    %s
except polyamp.errors.MissingFrameworkError as error:
    print(error)
"""

ENTRIES = """
import polyamp
for attempt in range(2):
    try:
        print(sorted(polyamp.adapters.entries()))
    except polyamp.PolyampError as error:
        print(error)
"""


def run(code: str, *arguments: str, path: Path | None = None) -> str:
    """What ``code`` prints in a process that finds modules under ``path`` first, and not in the checkout."""
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The package without its adapters, in a folder of its own, to be broken."""
    shutil.copytree(PACKAGE, tmp_path / "polyamp", ignore=shutil.ignore_patterns("backends", "__pycache__"))
    return tmp_path


def plant(copied: Path, code: str) -> None:
    with (copied / "polyamp" / "formats.py").open("a") as source:
        source.write(f"\n{code}\n")


def distribution(folder: Path, name: str, entry: str) -> None:
    """An installed distribution, as far as entry points go."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[polyamp.backends]\n{entry}\n")


PUBLIC = """
policy Policy current_policy set_global_policy LossScale LossScaleState advance StepResult wrap_optimizer autocast
value_and_grad scale_loss rewrite convert explain Plan save_loss_scale load_loss_scale diagnose probe calibrate lint
health watch parity profile PolyampError PolyampWarning
"""


def test_the_public_names_are_these() -> None:
    assert sorted(polyamp.__all__) == sorted(PUBLIC.split())
    assert all(hasattr(polyamp, name) for name in polyamp.__all__)


def test_policy_is_a_function_and_no_module() -> None:
    assert callable(polyamp.policy)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("polyamp.policy")


def test_import_loads_the_standard_library_only() -> None:
    assert run(STRANGERS).split() == []


@pytest.mark.parametrize("module", ["torch", "numpy", "importlib.metadata"])
def test_the_check_sees_a_planted_import(copied: Path, module: str) -> None:
    if module == "torch":  # of which there is none in the core's own environment
        (copied / "torch.py").touch()
    plant(copied, f"import {module}")
    assert module in run(STRANGERS, path=copied).split()


def test_import_loads_few_modules() -> None:
    assert int(run(COUNT)) <= MOST_MODULES


@pytest.mark.parametrize("module", ["asyncio", "importlib.metadata"])
def test_the_count_sees_a_planted_import(copied: Path, module: str) -> None:
    plant(copied, f"import {module}")
    assert int(run(COUNT, path=copied)) > MOST_MODULES


@pytest.mark.parametrize(
    ("framework", "call"),
    [
        *((name, "__import__(MODULE + sys.argv[1])") for name in ("torch", "jax", "tensorflow", "keras")),
        ("torch", "polyamp.wrap_optimizer(3, backend=sys.argv[1])"),
    ],
)
def test_missing_framework_names_the_extra(framework: str, call: str) -> None:
    said = run(BLOCK % call, framework)
    assert f"{framework} is not installed" in said
    assert f'pip install "polyamp[{framework}]"' in said


def test_fsdp_policies_need_torch() -> None:
    assert 'pip install "polyamp[torch]"' in run(BLOCK % "polyamp.policy('fp16').to_fsdp()", "torch")


def test_two_adapters_for_one_framework_are_refused_every_time(tmp_path: Path) -> None:
    distribution(tmp_path, "one", "mxnet = one:adapter")
    distribution(tmp_path, "two", "mxnet = two:adapter")
    said = run(ENTRIES, path=tmp_path)
    assert said.count("two adapters for the same framework") == 2
    assert "one:adapter and two:adapter" in said or "two:adapter and one:adapter" in said


def test_an_adapter_installed_twice_is_no_conflict(tmp_path: Path) -> None:
    distribution(tmp_path, "one", "mxnet = one:adapter")
    distribution(tmp_path, "two", "mxnet = one:adapter")
    assert "'mxnet'" in run(ENTRIES, path=tmp_path)


ADAPTER = """
class Array(list):
    pass

class Adapter:
    name, operations = "mine", {"mm": "matmul"}

    def owns(self, obj):
        return False

    def cast(self, tree, format_name, /):
        return f"{tree} in {format_name}"

adapter = Adapter()
"""

USE = """
import polyamp, mine
print(polyamp.adapters.adapter_named("mine").name, polyamp.policy("fp16").cast_to_compute(mine.Array([1.5])))
try:
    polyamp.convert(mine.Array())
except polyamp.errors.UnsupportedError as error:
    print(error)
"""


def test_an_adapter_of_somebody_else_is_found_by_its_entry_point(tmp_path: Path) -> None:
    distribution(tmp_path, "theirs", "mine = mine:adapter")
    (tmp_path / "mine.py").write_text(ADAPTER)
    said = run(USE, path=tmp_path)
    assert said.startswith("mine [1.5] in float16\n")
    assert "the mine adapter has no convert" in said
