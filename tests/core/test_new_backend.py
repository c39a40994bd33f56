"""A third party's backend, found by its entry point, passes the conformance suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyamp.dispatch import OPTIONAL

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


@pytest.mark.once
@pytest.mark.parametrize("fault", FAULTS)
def test_suite_goes_red_for_a_planted_fault(installed: Path, tmp_path: Path, fault: str) -> None:
    right, wrong = FAULTS[fault]
    for source in installed.iterdir():
        (tmp_path / source.name).symlink_to(source)
    broken = tmp_path / "polyamp_numpy.py"
    text = (installed / broken.name).read_text()
    assert text.count(right) == 1
    broken.unlink()
    broken.write_text(text.replace(right, wrong))
    done = run(tmp_path, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", SUITE)
    assert done.returncode == 1, done.stdout + done.stderr
    assert " failed" in done.stdout


IMPORTS = """
from contextlib import nullcontext
from polyamp.diagnosis.facts import Facts
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
    "Recording('numpy', str(policy), None, scale, widened, ())",
    "facts": "lambda self, target, args, kwargs, policy, optimizer: Facts('numpy', policy)",
}


@pytest.mark.once
@pytest.mark.parametrize("verb", OPTIONAL)
def test_suite_goes_red_for_a_wrong_optional_verb(installed: Path, tmp_path: Path, verb: str) -> None:
    for source in installed.iterdir():
        (tmp_path / source.name).symlink_to(source)
    broken, last = tmp_path / "polyamp_numpy.py", "\nadapter = NumpyAdapter()\n"
    text = (installed / broken.name).read_text()
    assert text.endswith(last)
    broken.unlink()
    wrong = f"NumpyAdapter.{verb} = {WRONG_VERBS[verb]}"
    broken.write_text(f"{text.removesuffix(last)}{IMPORTS}\n{wrong}{last}")
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", SUITE, "-k", f"{verb} or verb")
    assert done.returncode == 1, done.stdout + done.stderr
    assert " failed" in done.stdout


def test_new_backend_is_found_by_name(installed: Path) -> None:
    done = run(installed, "-c", "from polyamp import registry; print(registry.adapter_named('numpy').name)")
    assert done.stdout.strip() == "numpy", done.stderr
