"""`polyamp.parity` calls every planted degradation worse, and equivalent what is not damaged, on real data.

The task is the digits of scikit-learn, as raw counts of a sensor, with a layer norm and a log softmax written out.
Numbers that float16 loses are in all its parts: the variance of large values, a small epsilon, the small gradients
behind a norm of large values. PyTorch trains it; the verdict is computed from numbers, which come from anywhere.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import polyamp
from polyamp import LossScale

TRAINED, BATCH, STEPS, HIDDEN, RATE = 1280, 256, 40, 48, 0.2
FITTING, OVERFLOWING = 2.0**14, 2.0**18  # the largest input: float16 holds all values, and does not
DAMAGED = {
    "norm in 16 bits": polyamp.policy("mixed_float16", rules={"norm/*": "lower"}),
    "log softmax in 16 bits": polyamp.policy("mixed_float16", rules={"probabilities/*": "lower"}),
    "scale too small": polyamp.policy("mixed_float16", loss_scale=LossScale.fixed(2.0**-10)),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::polyamp.PolyampWarning"),  # what breaks here reports itself too
]


class Norm(torch.nn.Module):
    """A layer norm written out: its variance does not fit float16 where the values are beyond 256."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class LogProbabilities(torch.nn.Module):
    """A log softmax written out: its epsilon is 0 in float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(x, -1) + 1e-12).log()


class Classifier(torch.nn.Module):
    """A network on raw counts, normalised by a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(64, HIDDEN), Norm()
        self.second, self.probabilities = torch.nn.Linear(HIDDEN, 10), LogProbabilities()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.probabilities(self.second(torch.relu(self.norm(self.first(x)))))


@functools.cache
def digits(largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts from 0 to ``largest``, and labels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    counts = (data.data / 16 * largest).astype(np.float32)
    return torch.from_numpy(counts[order]), torch.from_numpy(data.target[order])


def rows_of(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.choice(TRAINED, BATCH, replace=False) for _ in range(STEPS)]


def classify(policy: polyamp.Policy, seed: int, largest: float = FITTING) -> dict[str, float]:
    torch.manual_seed(seed)
    x, y = digits(largest)
    net = Classifier()
    opt = polyamp.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9), policy)
    for rows in rows_of(seed):
        with polyamp.autocast(policy):
            loss = functional.nll_loss(net(x[rows]), y[rows])
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
    with torch.no_grad(), polyamp.autocast(policy):
        return {"loss": float(functional.nll_loss(net(x[TRAINED:]), y[TRAINED:]))}


def verdicts(train: Any, *policies: Any) -> list[str]:
    found = polyamp.parity(train, policies, seeds=6, margin="5%", controls=False, progress=False)
    return [one.verdict for one in found.comparisons]


def test_what_is_damaged_is_worse_and_the_rest_is_equivalent() -> None:
    found = verdicts(classify, *DAMAGED.values(), "mixed_bfloat16")
    assert dict(zip([*DAMAGED, "undamaged"], found, strict=True)) == {
        **dict.fromkeys(DAMAGED, "worse"),
        "undamaged": "equivalent",
    }


def test_the_controls_show_that_the_task_can_tell() -> None:
    found = polyamp.parity(classify, "mixed_float16", seeds=6, margin="5%", progress=False)
    assert found.verdict == "equivalent"
    (policy,) = found.comparisons
    assert [(one.control, one.verdict) for one in found.controls_of(policy)] == [
        ("no loss scaling", "worse"),
        ("all in 16 bits", "worse"),
    ]


def test_the_rules_of_calibrate_make_training_equivalent() -> None:
    torch.manual_seed(100)
    (x, y), net = digits(OVERFLOWING), Classifier()
    batches = [(x[rows], y[rows]) for rows in rows_of(100)[:2]]
    calibration = polyamp.calibrate(
        lambda x, y: functional.nll_loss(net(x), y), batches, "mixed_float16", backend="torch"
    )
    assert calibration.rules == {"first/matmul": "full"}
    assert calibration.is_safe
    overflowing = functools.partial(classify, largest=OVERFLOWING)
    assert verdicts(overflowing, "mixed_float16", calibration.policy) == ["worse", "equivalent"]
