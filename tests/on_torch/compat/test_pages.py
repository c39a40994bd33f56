"""The pages for those who come from Apex and torch.amp: every line of the right column runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyamp

DOCS = Path(__file__).parents[3] / "docs" / "migrate"
ROWS = [
    [cell.strip("| ") for cell in line.split(" | ")]
    for page in ("apex.md", "torch_amp.md")
    for line in (DOCS / page).read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| old ")
]


@pytest.mark.parametrize(("old", "new"), [row[:2] for row in ROWS], ids=[row[0].replace("`", "") for row in ROWS])
def test_the_new_lines_run(old: str, new: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)
    opts = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, model, nn.Linear(4, 4))]
    names: dict[str, Any] = {"torch": torch, "polyamp": polyamp, "LossScale": polyamp.LossScale, "model": model, "x": x}
    names |= {"params": list(model.parameters()), "shape": 4, "tensors": [x.clone()], "number": 2.0, "n": 2}
    names |= {"saved": {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}, "flag": True, "level": "O1"}
    names |= {"opt": opts[0], "opt1": opts[0], "opt2": opts[2], "plain": opts[1], "loss": model(x).square().mean()}
    names["dtype"] = "bfloat16"
    if "wrap_optimizer(opt" not in new:
        names["opt"] = polyamp.wrap_optimizer(opts[0], "mixed_float16")
        names["schedule"] = torch.optim.lr_scheduler.ExponentialLR(names["opt"], 0.9)
        if "backward" not in new:
            names["opt"].backward(names["loss"])
    for line in re.findall(r"`([^`]+)`", new):
        if "DistributedDataParallel" not in line:  # which needs a process group
            exec(line, names)
