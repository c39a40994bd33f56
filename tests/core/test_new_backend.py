"""A third party's backend, found by its entry point, passes the conformance suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polyamp.adapters import OPTIONAL

EXAMPLE = Path(__file__).parents[2] / "examples" / "new_backend"
SUITE = "test_conformance.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "polyamp_numpy.py"):
        (source / name).write_text((EXAMPLE / name).read_text())
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target, source]
    subprocess.run([sys.executable, *install], check=True)
    (target / SUITE).write_text(
        (EXAMPLE / SUITE).read_text()
    )  # beside the installed adapter, so that it tests that one
    return target


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=installed, capture_output=True, text=True)


def test_example_passes_the_conformance_suite(installed: Path) -> None:
    done = run(installed, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", SUITE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


FAULTS = {
    "skips nothing": ("        if finite:\n", "        if True:\n"),
    "never finds an overflow": ("finite = not self.settings.check or", "finite = True or"),
    "does not unscale": ("return np.float32(self.state.scale)", "return np.float32(1)"),
    "clips too early": (
        "limit = np.float32(self.max_grad_norm)",
        "limit = np.float32(self.max_grad_norm / self.state.scale)",
    ),
    "does not clip": ("if self.max_grad_norm is None", "if True"),
    "has its own scale rule": ("polyamp.advance(self.settings, self.state, finite)", "self.state"),
    "keeps no master weights": ("if is_half[name] else array", "if False else array"),
    "wraps twice": ("if isinstance(optimizer, LossScaled)", "if False"),
    "casts integers": ("and np.issubdtype(tree.dtype, np.floating)", ""),
}


IMPORTS = """
from contextlib import nullcontext
from polyamp.diagnosis.lint import Facts
from polyamp.diagnosis.recording import Recording
def halved(fn):
    return lambda *arrays: np.float32(fn(*(array.astype(np.float16).astype(np.float32) for array in arrays)))
"""
WRONG_VERBS = {
    "autocast_context": "lambda self, policy: nullcontext()",
    "traced_context": "lambda self, policy: nullcontext()",
    "autocast_function": "lambda self, fn, policy: fn",
    "rewrite": "lambda self, fn, args, kwargs, policy: halved(fn)",
    "explain": "lambda self, fn, args, kwargs, policy: polyamp.Plan(str(policy), ())",
    "convert": "lambda self, model, policy: model",
    "value_and_grad": "lambda self, fun, policy, has_aux, *, argnums=0: lambda _, a, b: (halved(fun)(a, b), b.T)",
    "save_loss_scale": "lambda self, holder, *, like=None: {}",
    "holds_loss_scale": "lambda self, tree: True",
    "fsdp_policy": "lambda self, policy, *, reduce, output, cast_forward_inputs: policy",
    "is_lowering": "lambda self: True",
    "record": "lambda self, step, args, kwargs, policy, *, widened, scale=None: "
    "Recording('numpy', str(policy), None, scale, ())",
    "facts": "lambda self, target, args, kwargs, policy, optimizer: Facts('numpy', policy)",
}


# Each suite runs in a fork of one process, which has imported pytest, NumPy and polyamp.
SUITES = """
import os, pathlib, sys
import numpy, pytest, polyamp.testing
for line in pathlib.Path("faults").read_text().splitlines():
    folder, select = line.split("\t")
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.path.insert(0, folder)
        output = os.open("output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        chosen = ["-k", select] if select else []
        code = pytest.main(["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "test_conformance.py", *chosen])
        sys.stdout.flush()
        os._exit(code)
    pathlib.Path(folder, "code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


def with_fault(text: str, fault: str) -> str:
    right, wrong = FAULTS[fault]
    assert text.count(right) == 1
    return text.replace(right, wrong)


def with_wrong_verb(text: str, verb: str) -> str:
    last = "\nadapter = NumpyAdapter()\n"
    assert text.endswith(last)
    return f"{text.removesuffix(last)}{IMPORTS}\nNumpyAdapter.{verb} = {WRONG_VERBS[verb]}{last}"


@pytest.fixture(scope="module")
def broken(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each fault and verb, in which the suite of a broken copy has run."""
    top, text = tmp_path_factory.mktemp("broken"), (installed / "polyamp_numpy.py").read_text()
    copies = {"nothing": (text, ""), **{fault: (with_fault(text, fault), "") for fault in FAULTS}}
    copies |= {verb: (with_wrong_verb(text, verb), f"{verb} or verb") for verb in OPTIONAL}
    for name, (broken_text, _) in copies.items():
        shutil.copytree(installed, top / name)
        (top / name / "polyamp_numpy.py").write_text(broken_text)
    (top / "faults").write_text("\n".join(f"{top / name}\t{select}" for name, (_, select) in copies.items()))
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SUITES], cwd=top, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (top / "nothing" / "code").read_text() == "0", (top / "nothing" / "output").read_text()
    return top


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAULTS, *OPTIONAL])
def test_suite_goes_red_for_a_planted_fault_and_for_a_wrong_optional_verb(broken: Path, name: str) -> None:
    said = (broken / name / "output").read_text()
    assert (broken / name / "code").read_text() == "1", said
    assert " failed" in said


def test_new_backend_is_found_by_name(installed: Path) -> None:
    done = run(installed, "-c", "from polyamp import adapters; print(adapters.adapter_named('numpy').name)")
    assert done.stdout.strip() == "numpy", done.stderr
