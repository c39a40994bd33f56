"""What one step costs a reader: calls, files, depth and modules of ours. Time is measured in benchmarks/."""

import json
import subprocess
import sys
from typing import Any

import pytest

# Runs in a process of its own, which has loaded nothing else. Native `GradScaler` makes 18 calls in one file.
STEPS = """
import json, sys
from pathlib import Path
import torch
import polyamp.backends.torch

imported = [*sys.modules]
ours = tuple(str((Path(polyamp.__file__).parent / folder).resolve()) for folder in ("", "backends"))
found, modules = {}, None
for policy in ("mixed_float16", "mixed_bfloat16"):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    # far from an overflow, which takes more calls
    settings = None if policy == "mixed_bfloat16" else polyamp.LossScale(init=2.0**8)
    opt = polyamp.wrap_optimizer(plain, policy, loss_scale=settings, max_grad_norm=1.0)
    calls, depths = [], [0]

    def note(frame, event, _):
        file = str(Path(frame.f_code.co_filename).resolve())
        if event in ("call", "return") and file.startswith(ours):
            depths.append(depths[-1] + (1 if event == "call" else -1))
            calls.extend([(file, frame.f_code.co_qualname)] if event == "call" else [])

    for turn in range(4):
        with polyamp.autocast(policy):
            loss = model(torch.ones(3, 2)).square().mean()
        sys.setprofile(note if turn == 3 else None)
        opt.backward(loss)
        opt.step()
        sys.setprofile(None)
        assert opt.last_step
        opt.zero_grad()
        modules = modules or [*sys.modules]
    found[policy] = {"calls": calls, "depth": max(depths)}
    del opt, plain, model
print(json.dumps(found | {"imported": imported, "modules": modules}))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    return json.loads(subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_plain_step_with_clipping_is_short(found: Any, policy: str) -> None:
    calls = [name for _, name in found[policy]["calls"]]
    step = calls.index("LossScaledOptimizer.step")
    # Of the pass, one call for each parameter; of the step, one of the hook that a float16 optimizer leaves.
    assert step <= 38, calls[:step]
    assert len(calls) - step <= 50, calls[step:]
    files = {file for file, _ in found[policy]["calls"][step:]}
    assert len(files) <= 8, files
    assert found[policy]["depth"] <= 7


def test_few_modules_are_loaded(found: Any) -> None:
    ours = [name for name in found["modules"] if name.split(".")[0] == "polyamp"]
    assert len(ours) <= 62, ours  # the folder of the step and the words about skips among them
    assert "torch.distributed.tensor" not in found["imported"]  # for those who have no distributed tensors
