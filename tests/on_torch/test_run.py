"""Unmodified scripts under a policy: their losses are those of float32, what they see is float32 and unscaled."""

import json
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyamp import policy as make_policy
from polyamp.backends.torch import run as running
from polyamp.errors import PolyampDeprecationWarning, UsageError, forget_warnings
from polyamp.run import run_script
from support.harness_torch import skipping_on_device

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"
TOLERANCE = {"mixed_float16": 1e-2, "mixed_bfloat16": 6e-2}

Run = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    forget_warnings()
    monkeypatch.syspath_prepend(SCRIPTS)  # under ``python -P`` a script's own folder is not searched
    for other in ("jax", "tensorflow", "keras"):  # earlier suites in this process may have imported them
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.setenv("CHECKPOINT", str(tmp_path / "checkpoint.pt"))
    yield
    for name in [name for name in sys.modules if name == "digits" or name.partition(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script, given by its name or source, and return its results and the report."""

    def run(script: str, policy: str | None = None) -> dict[str, Any]:
        file = SCRIPTS / f"{script}.py"
        if "\n" in script:
            file = tmp_path / "script.py"
            file.write_text(script)
        out, report = tmp_path / "out.json", tmp_path / "report.json"
        error = run_script(str(file), (str(out),), policy=make_policy(policy) if policy else None, report=report)
        if error is not None:
            raise error
        results = json.loads(out.read_text()) if out.exists() else {}
        return {**results, "report": json.loads(report.read_text())}

    return run


PLAIN: dict[str, dict[str, Any]] = {}  # what scripts report without polyamp


def plainly(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if script not in PLAIN:
        out = tmp_path / "plain.json"
        monkeypatch.setattr(sys, "argv", [script, str(out)])
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
        PLAIN[script] = json.loads(out.read_text())
    return PLAIN[script]


@pytest.mark.parametrize("policy", TOLERANCE)
@pytest.mark.parametrize("script", ["plain", "accumulation", "gan", "lbfgs", "resume", "penalty", "compiled"])
def test_a_script_without_mixed_precision_gets_the_losses_of_float32(
    script: str, policy: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = plainly(script, tmp_path, monkeypatch), run(script, policy)
    report = found.pop("report")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=TOLERANCE[policy]), name
    assert found["losses"] != expected["losses"], "it did run in 16 bits"
    assert report["verdicts"] == []
    (health,) = report["health"]
    assert health["steps"] >= 4
    assert health["skipped"] == 0


@pytest.mark.parametrize("script", ["plain", "accumulation"])
def test_without_a_policy_a_script_is_bitwise_the_same(
    script: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = plainly(script, tmp_path, monkeypatch), run(script)
    assert found["losses"] == expected["losses"]
    report = found["report"]
    assert (report["health"], report["verdicts"]) == ([], [])


def test_torch_is_as_before_after_a_run(run: Run) -> None:
    def state() -> list[Any]:
        owners = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.optim.SGD, torch.autocast)
        return [dict(vars(one)) for one in owners] + [torch.autograd.backward, torch.cuda.amp.GradScaler]

    torch.optim.SGD([torch.ones(1)])  # torch adds to a class when its first object is made
    before = state()
    run("plain", "mixed_float16")
    assert [one for one, two in zip(before, state(), strict=True) if one != two] == []


SETUP = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
layer = torch.nn.Linear(2, 1)
x = torch.ones(4, 2)
"""
TRAINS = """
loss = layer(x).sum()
loss.backward()
"""
OPTIMIZER = "opt = torch.optim.SGD(layer.parameters(), lr=0.1)\n"
LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups
"""
EDGE = "from torch.autograd.graph import get_gradient_edge\n"
PICKLED = pickle.dumps(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1))
REFUSED = {
    "autocast": ("with torch.autocast('cpu', dtype=torch.bfloat16):\n    pass", "mixed precision of its own"),
    "autocast by another name": ("from torch import amp as a\nwith a.autocast('cpu'):\n    pass", "of its own"),
    "GradScaler": ("from torch.amp import GradScaler\nscaler = GradScaler('cpu')", "of its own"),
    "apex": ("try:\n    from apex import amp\nexcept ImportError:\n    pass\namp.initialize(1)", "of its own"),
    "torch.cuda.amp": (
        "import warnings\nwarnings.simplefilter('ignore')\ntorch.cuda.amp.GradScaler()",
        r"found: +torch\.cuda\.amp",
    ),
    "half": ("layer = layer.half()", "of its own"),
    "bfloat16": ("layer.to(dtype=torch.bfloat16)(x)", "of its own"),
    "halved inputs": ("layer(x.half())", "of its own"),
    "halved parameters": ("layer.weight.data = layer.weight.data.half()\nlayer(x)", "of its own"),
    "polyamp": ("import polyamp\nwith polyamp.autocast('mixed_float16'):\n    pass", "of its own"),
    "no optimizer": (TRAINS + "layer.weight.data -= 0.1 * layer.weight.grad", "before any optimizer exists"),
    "inputs": (OPTIMIZER + "y = layer(x)\ny.sum().backward(inputs=[y])", "not a leaf"),
    "an edge": (OPTIMIZER + EDGE + "y = layer(x)\ny.sum().backward(inputs=get_gradient_edge(y))", "not a leaf"),
    "from an edge": (OPTIMIZER + EDGE + "torch.autograd.backward(get_gradient_edge(layer(x).sum()))", "from an edge"),
    "an optimizer in an optimizer": (LOOKAHEAD + OPTIMIZER + "opt = Lookahead(opt)", "steps another one"),
    "an unpickled optimizer": (
        f"import pickle\nopt = pickle.loads({PICKLED!r})\nopt.step()",
        "nothing can skip its steps",
    ),
    "hook": (OPTIMIZER + "layer.weight.register_hook(lambda grad: grad.clamp(-1, 1))", "inside the backward pass"),
    "retained": (
        OPTIMIZER + "y = layer(x)\ny.retain_grad()",
        "inside the backward pass",
    ),
    "distribution": (
        OPTIMIZER + "class D(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return torch.distributions.Normal(super().forward(x), 1.0)\nD(2, 1)(x)",
        "expects float32",
    ),
}
MARK = "\nopen({mark!r}, 'w').close()\n"


@pytest.mark.parametrize("case", REFUSED)
def test_a_script_that_cannot_be_run_safely_is_refused_before_it_trains(case: str, run: Run, tmp_path: Path) -> None:
    code, reason = REFUSED[case]
    mark = tmp_path / "trained"
    with pytest.raises(UsageError, match=reason) as refused:
        run(SETUP + code + MARK.format(mark=str(mark)), "mixed_float16")
    assert "script.py:" in str(refused.value), "the line is named"
    assert not mark.exists(), "the script went on"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit"] == "refused"


HARMLESS = {
    "off": OPTIMIZER + "with torch.autocast('cpu', enabled=False):\n    pass\n" + TRAINS + "opt.step()",
    "checks": OPTIMIZER + "assert layer.weight.dtype != torch.float16\n" + TRAINS + "opt.step()",
    "inputs that are leaves": OPTIMIZER + "layer(x).sum().div(16).backward(inputs=[layer.bias])\n"
    "assert layer.bias.grad.item() == 0.25\nopt.step()",
    "float": OPTIMIZER + "layer.float().to('cpu')\n" + TRAINS + "opt.step()",
}


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless_uses_of_the_same_names_pass(case: str, run: Run) -> None:
    assert run(SETUP + HARMLESS[case] + "\n", "mixed_float16")["report"]["health"][0]["steps"] == 1


@pytest.mark.parametrize("case", ["hook", "retained", "inputs", "an optimizer in an optimizer"])
def test_what_a_loss_scale_forbids_runs_in_bfloat16(case: str, run: Run) -> None:
    assert run(SETUP + REFUSED[case][0] + "\n", "mixed_bfloat16")["report"]["exit"] == "ended"


def test_a_refusal_that_the_script_catches_stands(run: Run, tmp_path: Path) -> None:
    mark = tmp_path / "trained"
    caught = "try:\n    y = layer(x)\n    y.retain_grad()\nexcept Exception:\n    pass\n"
    code = SETUP + OPTIMIZER + caught + TRAINS + MARK.format(mark=str(mark))
    with pytest.raises(UsageError, match="retain_grad"):
        run(code, "mixed_float16")
    assert not mark.exists()


def test_a_policy_that_stores_16_bits_is_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="stores parameters"):
        run("import torch\n", "float16")


OVERFLOW = """
import torch
layer = torch.nn.Linear(2, 1, bias=False)
opt = torch.optim.SGD(layer.parameters(), lr=0.1)
before, seen = layer.weight.detach().clone(), []
for scale in (1e35, 1.0, 1.0):
    opt.zero_grad()
    loss = layer(torch.ones(1, 2)).sum() * scale
    loss.backward()
    torch.nn.utils.clip_grad_value_(layer.parameters(), 1.0)
    opt.step()
    seen.append(torch.equal(layer.weight, before))
import sys, json
with open(sys.argv[1], "w") as file:
    json.dump({"losses": [], "seen": seen}, file)
"""


COPIED = "import copy\nopt, layer = copy.deepcopy((opt, layer))\nbefore, seen"


@pytest.mark.parametrize(
    ("written", "instead", "on_device"),
    [("", "", False), ("lr=0.1", "lr=0.1, fused=True", True), ("before, seen", COPIED, False)],
    ids=["plain", "decided on the device", "a copied optimizer"],
)
def test_an_overflow_skips_the_step_even_if_the_script_hides_it_by_clipping(
    written: str, instead: str, on_device: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = running.attach
    if on_device:
        monkeypatch.setattr(running, "attach", lambda *args, **kind: skipping_on_device(attach(*args, **kind)))
    for policy, scale, overflow in (("mixed_float16", 2.0**15, "1e35"), ("mixed_bfloat16", 1.0, "float('inf')")):
        found = run(OVERFLOW.replace(written, instead).replace("1e35", overflow), policy)
        assert found["seen"] == [True, False, False]
        (health,) = found["report"]["health"]
        assert (health["steps"], health["skipped"], health["scale"]) == (3, 1, scale)


def test_every_step_skipped_is_a_verdict(run: Run) -> None:
    found = run(OVERFLOW.replace("(1e35, 1.0, 1.0)", "[float('inf')] * 3"), "mixed_float16")
    assert "All 3 steps were skipped" in found["report"]["verdicts"][0]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")  # torch's, once in a process
def test_derivatives_of_gradients_are_unscaled(run: Run) -> None:
    code = """
import torch
layer = torch.nn.Linear(2, 1, bias=False)
opt = torch.optim.SGD(layer.parameters(), lr=0.1)
with torch.no_grad():
    layer.weight.fill_(0.5)
layer(torch.ones(1, 2)).square().sum().div(2**10).backward(create_graph=True)
first, layer.weight.grad = layer.weight.grad, None
assert first.tolist() == [[2**-9, 2**-9]], first
first.square().sum().backward()
assert layer.weight.grad.tolist() == [[2**-16, 2**-16]], layer.weight.grad
"""
    run(code, "mixed_float16")


def test_no_model_in_16_bits_is_a_verdict(run: Run) -> None:
    code = SETUP + "opt = torch.optim.SGD([weight], lr=0.1)\n(weight * 2).sum().backward()\nopt.step()\n"
    assert "No model ran in 16 bits" in run(code, "mixed_float16")["report"]["verdicts"][0]
    assert run(code, "float32")["report"]["verdicts"] == []


def test_a_compiled_function_stays_in_float32_and_that_is_a_verdict(run: Run) -> None:
    code = """
import torch
layer = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(layer.parameters(), lr=0.1)
step = torch.compile(lambda x: layer(x).sum(), backend="eager", fullgraph=True)
step(torch.ones(1, 2)).backward()
opt.step()
"""
    assert "No model ran in 16 bits" in run(code, "mixed_float16")["report"]["verdicts"][0]


def test_checkpointed_modules_run_again_in_the_region_of_their_model(run: Run) -> None:
    code = """
import torch
from torch.utils.checkpoint import checkpoint
class Model(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), reentrant
    def forward(self, x):
        again = lambda x: self.second(torch.relu(self.first(x)))
        return checkpoint(again, self.first(x), use_reentrant=self.reentrant)  # both passes reach the first layer
grads = []
for reentrant in (True, False):
    torch.manual_seed(0)
    model = Model(reentrant)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().div(4).backward()
    grads.append([param.grad for param in model.parameters()])
    opt.step()
for one, other in zip(*grads):
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
assert grads[0][-1].item() == 0.25
"""
    assert run(code, "mixed_float16")["report"]["health"][0]["skipped"] == 0


def test_a_sparse_gradient_is_unscaled(run: Run) -> None:
    code = """
import torch
table = torch.nn.Embedding(4, 2, sparse=True)
opt = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
for _ in range(2):
    table(torch.tensor([1, 1, 2])).sum().backward()
assert table.weight.grad.to_dense().tolist() == [[0, 0], [4, 4], [2, 2], [0, 0]], table.weight.grad
opt.step()
"""
    assert run(code, "mixed_float16")["report"]["health"][0]["skipped"] == 0


def test_the_recipe_of_torch_cuda_amp_runs_and_is_reported(run: Run) -> None:
    with pytest.warns(Warning, match=r"torch\.cuda\.amp"):
        found = run("cuda_amp")
    assert found["losses"][-1] < found["losses"][0]
    assert found["report"]["health"][0]["steps"] == 5


def test_apexs_quick_start_runs_and_is_reported(run: Run) -> None:
    with pytest.warns(PolyampDeprecationWarning, match=r"apex\.amp"):
        found = run("apex_readme")
    assert found["losses"][-1] < found["losses"][0]
    assert found["report"]["health"][0]["steps"] == 5
    assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32, "the level ended with the run"
