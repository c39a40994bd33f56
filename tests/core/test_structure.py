"""Imports have no circle, and the linters that hold who may import whom each catch a planted violation.

That the linters pass on the tree as it is, is tox's environment ``lint``.
"""

import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_LINTER = ("lint-imports", "--no-cache")
RUFF = ("ruff", "check", "--no-cache", "--select=TID,D205,D400,D401,D404", "--output-format=concise")
pytestmark = pytest.mark.once


def lint(command: tuple[str, ...], tree: Path) -> tuple[bool, str]:
    """Whether the linter passes, and what it says."""
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], cwd=tree, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources and their settings, to be broken."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("polyamp", "backends"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@contextmanager
def planted(tree: Path, *plants: tuple[str, str]) -> Iterator[None]:
    """Add code to the ends of files for a while."""
    sources = {file: (tree / file).read_text() for file, _ in plants}
    for file, code in plants:
        with (tree / file).open("a") as source:
            source.write(f"\n\n{code}\n")
    yield
    for file, source in sources.items():
        (tree / file).write_text(source)


def test_import_linter_sees_planted_imports(tree: Path) -> None:
    plants = {
        ("polyamp/formats.py", "import torch"): "polyamp.formats -> torch",
        ("polyamp/verbs.py", "def late():\n    import jax"): "polyamp.verbs -> jax",
        ("polyamp/policies.py", "import polyamp.backends.jax"): "polyamp.policies -> polyamp.backends.jax",
        (
            "backends/keras/scaler.py",
            "import polyamp.backends.jax",
        ): "polyamp.backends.keras.scaler -> polyamp.backends.jax",
        (
            "backends/keras/native.py",
            "import polyamp.backends.jax",
        ): "polyamp.backends.keras.native -> polyamp.backends.jax",
        ("backends/keras/layers.py", "import tensorflow"): "polyamp.backends.keras.layers -> tensorflow",
        ("backends/torch/casting.py", "import tensorflow"): "polyamp.backends.torch.casting -> tensorflow",
        ("backends/jax/gradients.py", "import torch"): "polyamp.backends.jax.gradients -> torch",
        ("backends/tensorflow/casting.py", "import keras"): "polyamp.backends.tensorflow.casting -> keras",
    }
    with planted(tree, *plants):
        passes, said = lint(IMPORT_LINTER, tree)
    assert not passes
    assert [chain for chain in plants.values() if f"{chain} (l." not in said] == [], said


def test_ruff_sees_planted_imports_and_docstrings(tree: Path) -> None:
    function = 'def {}() -> None:\n    """{}"""'
    plants = {
        ("polyamp/formats.py", "import torch"): "TID253",
        ("polyamp/scale.py", "from jax import numpy"): "TID253",
        ("backends/torch/casting.py", "import backends.jax"): "TID251",
        ("polyamp/flow.py", "def late():\n    from backends import keras"): "TID251",
        ("polyamp/plan.py", function.format("late", "Returns it.")): "D401",
        ("backends/torch/casting.py", function.format("late", "Return it")): "D400",
        ("backends/jax/gradients.py", function.format("late", "This returns it.")): "D404",
        ("polyamp/verbs.py", function.format("late", "Return it,\n    and more.")): "D205",
    }
    with planted(tree, *plants):
        passes, said = lint(RUFF, tree)
    assert not passes
    found = {(line.partition(":")[0], line.split()[1]) for line in said.splitlines() if line.count(":") >= 3}
    assert {(file, rule) for (file, _), rule in plants.items()} <= found, said


def test_tests_may_import_of_an_adapter_what_is_public(tmp_path: Path) -> None:
    files = [path for path in sorted(ROOT.glob("backends/*/**/*.py")) if "csrc" not in path.parts]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.name != "__init__.py"]
    (tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "tests/ruff.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "planted.py").write_text("".join(f"import polyamp.{module}\n" for module in modules))
    _, said = lint(RUFF, tmp_path)
    lines = re.findall(r"^tests/planted\.py:(\d+):\d+: TID251", said, re.MULTILINE)
    banned = {modules[int(line) - 1] for line in lines}
    public = {module.removeprefix("backends.") for module in modules if module not in banned}
    assert {name for name in public if ".integrations." not in name} == {
        *(f"{framework}.adapter" for framework in ("torch", "jax", "tensorflow", "keras")),
        *("torch.convert", "torch.apex", "torch.cuda_amp", "jax.value_and_grad", "keras.convert"),
    }, said


CIRCLES = """
import json, re, grimp

def circle(found, module):
    for imported in sorted(found.find_modules_directly_imported_by(module)):
        if chain := found.find_shortest_chain(importer=imported, imported=module):
            return [module, *chain]

found = grimp.build_graph("polyamp", exclude_type_checking_imports=True, cache_dir=None)
for module in [one for one in found.modules if one.endswith(".adapter")]:
    source = open(module.replace(".", "/") + ".py").read()
    for late in re.findall(r'"(polyamp[.\\w]+):\\w+"', source):  # verbs of an adapter's table that are imported later
        found.add_import(importer=module, imported=late)
typed = grimp.build_graph("polyamp", exclude_type_checking_imports=False, cache_dir=None)
regions, boxed = (f"polyamp.backends.torch.autocast.{name}" for name in ("regions", "boxed"))
if boxed in typed.find_modules_directly_imported_by(regions):  # the table of kernels that a region holds
    typed.remove_import(importer=regions, imported=boxed)
for module in typed.modules:
    for imported in typed.find_modules_directly_imported_by(module):
        if ".backends." in imported and ".backends." not in module:  # what an overload of a verb returns
            typed.remove_import(importer=module, imported=imported)
print(json.dumps(list(filter(None, (circle(graph, one) for graph in (found, typed) for one in sorted(graph.modules))))))
"""


def circles(tree: Path) -> list[str]:
    """The ways in which modules import themselves through others: by imports in functions as well, and for types.

    An example for each module. One import is left out, of a type in the folder of autocast.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-P", "-c", CIRCLES]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return [" -> ".join(chain) for chain in json.loads(done.stdout)]


def test_imports_have_no_circle() -> None:
    assert circles(ROOT) == []


def test_planted_circles_are_seen(tree: Path) -> None:
    plants = [
        ("polyamp/formats.py", "def late():\n    import polyamp.scale"),
        ("polyamp/plan.py", "if TYPE_CHECKING:\n    from polyamp.rewriting import explain"),
        ("polyamp/flow.py", "from polyamp.policies import Policy"),
        ("backends/torch/casting.py", "from polyamp.backends.torch.adapter import adapter"),
        (
            "backends/torch/step/saving.py",
            "if TYPE_CHECKING:\n    from polyamp.backends.torch.step.optimizer import LossScaledOptimizer",
        ),
        (
            "backends/tensorflow/graphs/values.py",
            "if TYPE_CHECKING:\n    from polyamp.backends.tensorflow.graphs.program import Functions",
        ),
    ]
    modules = (
        "formats",
        "scale",
        "plan",
        "rewriting",
        "flow",
        "policies",
        "backends.torch.casting",
        "backends.torch.adapter",
        "backends.torch.step.saving",
        "backends.torch.step.optimizer",
        "backends.tensorflow.graphs.values",
        "backends.tensorflow.graphs.program",
    )
    with planted(tree, *plants):
        seen = circles(tree)
    assert {f"polyamp.{one}" for one in modules} <= {chain.partition(" ")[0] for chain in seen}, seen


def test_names_of_the_core_in_docstrings_exist() -> None:
    sources = [file.read_text() for folder in ("polyamp", "backends") for file in (ROOT / folder).rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"`(polyamp\.[A-Za-z_.]+)`", source)}
    groups = {"polyamp.backends", "polyamp.scripts"}  # of entry points
    assert [name for name in sorted(named - groups) if ".backends." not in name and not exists(name)] == []


def exists(name: str) -> bool:
    """Whether a name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
