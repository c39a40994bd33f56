"""What a type checker, and so an editor, knows of the results of the verbs in a user's program."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import polyamp

pytestmark = [pytest.mark.once, pytest.mark.slow]
ROOT = Path(polyamp.__file__).parents[1]
FRAMEWORKS = {
    "torch": "torch.*",
    "optax": "optax.*",
    "keras": "keras.*",
    "tensorflow": "tensorflow.*,tensorflow.python.training.*,tensorflow.python.trackable.*",
}
TORCH, KERAS, TENSORFLOW = (
    f"polyamp.backends.{room}.optimizer.LossScaledOptimizer" for room in ("torch.step", "keras", "tensorflow")
)
OPTAX = "optax._src.base.GradientTransformationExtraArgs"

PROGRAM = """
import keras
import optax
import tensorflow as tf
import torch
import polyamp

def step(weight: int, rate: float) -> str:
    return ""

model = torch.nn.Linear(2, 2)
sgd = torch.optim.SGD(model.parameters())
"""
OF_FRAMEWORKS = {
    "polyamp.wrap_optimizer(sgd, 'fp16', max_grad_norm=1.0)": TORCH,
    "polyamp.wrap_optimizer([sgd, sgd], 'fp16')": f"list[{TORCH}]",
    "polyamp.wrap_optimizer(optax.adamw(1e-3), 'fp16')": OPTAX,
    "polyamp.wrap_optimizer(keras.optimizers.SGD(0.1), 'fp16')": KERAS,
    "polyamp.wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), 'fp16')": TENSORFLOW,
}
OF_VERBS = {
    "polyamp.wrap_optimizer(sgd).backward": "def (loss: torch._tensor.Tensor",
    "polyamp.convert(model, 'O2')": "torch.nn.modules.linear.Linear",
    "polyamp.scale_loss(torch.ones(()), sgd)": "torch._tensor.Tensor",
    "polyamp.load_loss_scale(sgd, {})": "torch.optim.sgd.SGD",
    "polyamp.autocast('fp16')": "polyamp.regions.Autocast",
    "polyamp.autocast(step, 'fp16')": "def (weight: int, rate: float) -> str",
    "polyamp.autocast('fp16')(step)": "def (weight: int, rate: float) -> str",
    "polyamp.rewrite(model)": "polyamp.backends.torch.graphs.rewrite.Rewritten",
    "polyamp.rewrite(step)": "polyamp.rewriting.Rewritten[[weight: int, rate: float], str]",
    "polyamp.rewrite(policy='fp16')(step)": "polyamp.rewriting.Rewritten[[weight: int, rate: float], str]",
    "polyamp.rewrite(step).plan": "polyamp.plan.Plan",
    "polyamp.explain(step, 1, 0.1)": "polyamp.plan.Plan",
    "polyamp.value_and_grad(step)": "def (Any, weight: int, rate: float) -> tuple[str, Any]",
    "polyamp.diagnose(step)": "polyamp.diagnosis.",
    "polyamp.probe(step)": "polyamp.diagnosis.",
    "polyamp.health(sgd)": "polyamp.diagnosis.",
    "polyamp.lint(step)": "polyamp.diagnosis.",
    "polyamp.policy('fp16')": "polyamp.policies.Policy",
}


# optax, Keras and TensorFlow have annotations, and no mark that says so.
FOLLOWED = "follow_imports = normal\nfollow_untyped_imports = true"
ABSENT = "follow_imports = skip\nfollow_imports_for_stubs = true\nignore_missing_imports = true"
# Large parts that no type here comes from: without them it takes half of the time.
NOT_ASKED = (
    "jax.*,jaxlib.*,flax.*,huggingface_hub.*,matplotlib.*,"
    "torch._inductor.*,torch._dynamo.*,torch.distributed.*,tensorflow.lite.*,tensorflow.python.*"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project, whose checks share a cache."""
    return tmp_path_factory.mktemp("project")


def revealed(folder: Path, calls: list[str], absent: set[str]) -> dict[str, str]:
    """Return the type that mypy finds for each call where some frameworks are not installed."""
    (folder / "program.py").write_text(PROGRAM + "".join(f"reveal_type({call})\n" for call in calls))
    parts = [(NOT_ASKED, ABSENT)]
    parts += [(modules, ABSENT if name in absent else FOLLOWED) for name, modules in FRAMEWORKS.items()]
    (folder / "mypy.ini").write_text("[mypy]\n" + "".join(f"[mypy-{modules}]\n{how}\n" for modules, how in parts))
    found = {} if ROOT.name == "site-packages" else {"MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", "mypy", "program.py"]
    done = subprocess.run(command, cwd=folder, env=os.environ | found, capture_output=True, text=True, check=False)
    types = re.findall(r'program\.py:\d+: note: Revealed type is "(.*)"', done.stdout)
    assert len(types) == len(calls), done.stdout + done.stderr
    return dict(zip(calls, types, strict=True))


def test_the_result_of_a_verb_has_its_type(folder: Path) -> None:
    expected = OF_FRAMEWORKS | OF_VERBS
    found = revealed(folder, list(expected), set())
    assert not {call: kind for call, kind in found.items() if expected[call] not in kind}


@pytest.mark.parametrize(("only", "count"), [("torch", 2), ("optax", 1)])
def test_a_framework_that_is_not_installed_takes_no_other_framework_s_objects(
    folder: Path, only: str, count: int
) -> None:
    mine = {call: kind for call, kind in OF_FRAMEWORKS.items() if only in kind}
    found = revealed(folder, list(mine), FRAMEWORKS.keys() - {only})
    assert len([call for call, kind in found.items() if mine[call] in kind]) == count
