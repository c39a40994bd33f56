"""What one step costs a reader: calls, files, depth and modules of ours. Time is measured in benchmarks/."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Runs in a process of its own, which has loaded nothing else. Native `GradScaler` makes 18 calls in one file.
STEPS = """
import json, sys
from pathlib import Path
import torch
import polyamp

policy = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
# far from an overflow, which takes more calls
settings = None if policy == "mixed_bfloat16" else polyamp.LossScale(init=2.0**8)
opt = polyamp.wrap_optimizer(plain, policy, loss_scale=settings, max_grad_norm=1.0)
ours = tuple(str((Path(polyamp.__file__).parent / folder).resolve()) for folder in ("", "backends"))
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
    if turn == 0:
        first = [name for name in sys.modules if name.split(".")[0] == "polyamp"]
print(json.dumps({"calls": calls, "files": [*{file for file, _ in calls}], "depth": max(depths), "modules": first}))
"""


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_plain_step_with_clipping_is_short(policy: str) -> None:
    done = subprocess.run([sys.executable, "-c", STEPS, policy], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found["calls"]) <= 80, found["calls"]
    assert len(found["files"]) <= 8, found["files"]
    assert found["depth"] <= 7
    assert len(found["modules"]) <= 60, found["modules"]
