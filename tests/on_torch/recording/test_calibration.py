"""Calibration of PyTorch models whose plain policy fails: rules for one layer, with the evidence."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from polyamp import calibrate


class Wide(nn.Module):
    """Its second layer's results leave float16; a factor brings them back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.wide, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        with torch.no_grad():
            self.wide.weight.mul_(30000.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(torch.relu(self.first(x))) * 1e-5
        output: Tensor = self.head(hidden)
        return output


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    labels = [torch.randint(0, 10, (8,), generator=generator) for _ in range(count)]
    return [(nn.functional.one_hot(y, 16).float() * 40, y) for y in labels]


def test_the_rules_name_that_layer_alone() -> None:
    model = Wide()
    found = calibrate(lambda x, y: cross_entropy(model(x), y), batches(3), "mixed_float16")
    assert found.rules == {"wide/matmul": "full"}
    assert [one.kind for one in found.before] == ["forward"] * 3
    assert found.is_safe


def test_an_input_that_float32_made_too_large_is_found() -> None:
    class Chain(Wide):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.head(self.wide(torch.relu(self.first(x))))
            return output

    model = Chain()
    with torch.no_grad():
        model.head.weight.mul_(1e-6)
    found = calibrate(lambda x, y: cross_entropy(model(x), y), batches(1), "mixed_float16")
    assert found.rules == {"wide/matmul": "full", "head/matmul": "full"}


class Both(nn.Module):
    """Two branches whose gradients are further apart than float16 is wide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.small = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x).sum() * 2.0**12 + self.small(x).sum() * 2.0**-44


def test_gradients_that_no_scale_serves_are_told_with_the_scale_to_start_at() -> None:
    found = calibrate(Both(), [torch.ones(2, 4)], "mixed_float16")
    assert (found.rules, found.is_safe) == ({}, False)
    assert "Start with LossScale(init=" in str(found)
