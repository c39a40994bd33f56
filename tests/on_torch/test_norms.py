"""Norms under O2: by name and behaviour, whoever wrote them, and what a model's authors keep in float32."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import polyamp


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class T5LayerNorm(LlamaRMSNorm):
    """By a base's name too."""


class LayerNorm2d(nn.Module):
    """Over channels, as in vision."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 1, 1))
        self.bias = nn.Parameter(torch.zeros(size, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:]) * self.weight.flatten() + self.bias.flatten()


class FrozenBatchNorm2d(nn.Module):
    """As torchvision's: buffers alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(size) if name in ("weight", "running_var") else torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale + (self.bias - self.running_mean * scale)


NORMS = [LlamaRMSNorm, T5LayerNorm, LayerNorm2d, FrozenBatchNorm2d, nn.RMSNorm]


class AdaptiveNorm(nn.Module):
    """Has a product inside: it is no norm alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, size), nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.linear(x)


class Normalizer(nn.Module):
    """Is called otherwise."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class WideNorm(nn.Module):
    """Has a matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def formats(model: nn.Module) -> set[torch.dtype]:
    return {value.dtype for value in model.state_dict().values() if value.is_floating_point()}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_a_norm_stays_in_float32_and_gives_its_output_back_low(norm: Any, compute: str) -> None:
    model = polyamp.convert(nn.Sequential(nn.Linear(4, 4), norm(4), nn.Linear(4, 4)), _o2(compute))
    low = getattr(torch, compute)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    model[1].register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    assert [formats(part) for part in model] == [{low}, {torch.float32}, {low}]
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [(torch.float32, low)]


def _o2(compute: str) -> polyamp.Policy:
    return polyamp.policy(param=compute, compute=compute, output="float32")


@pytest.mark.parametrize("other", [AdaptiveNorm, Normalizer, WideNorm])
def test_what_is_no_norm_is_lowered(other: Any) -> None:
    model = polyamp.convert(nn.Sequential(other(4)), "O2")
    own = [value for name, value in model.named_parameters() if ".norm." not in name]
    assert {value.dtype for value in own} == {torch.float16}
    model(torch.ones(2, 4)).sum().backward()


def test_weights_that_are_normalised_are_no_norms() -> None:
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = polyamp.convert(nn.Sequential(linear), "O2")
    assert formats(model) == {torch.float16}
    assert model(torch.ones(2, 4)).dtype == torch.float32


@pytest.mark.parametrize("rule", ["1", "rms_norm"])
def test_a_rule_of_the_users_wins(rule: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), LlamaRMSNorm(4))
    polyamp.convert(model, polyamp.policy("O2", rules={rule: "lower"}))
    assert formats(model[1]) == {torch.float16}


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.wi(x))
        return self.wo(hidden.to(self.wo.weight.dtype))


class Kept(nn.Module):
    """As Hugging Face's T5."""

    _keep_in_fp32_modules: ClassVar[Any] = ["wo"]

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.swo = nn.ModuleList([Feed(), Feed()]), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.swo(x)


class Strict(Kept):
    _keep_in_fp32_modules = None
    _keep_in_fp32_modules_strict = frozenset({"layers.0.wo", "layers.1.wo"})


@pytest.mark.parametrize("kind", [Kept, Strict])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_authors_keep_in_float32_stays_there(kind: Any, wrapped: bool) -> None:
    model = kind()
    outermost = polyamp.convert(nn.Sequential(model) if wrapped else model, "O2")
    assert [formats(layer.wo) for layer in model.layers] == [{torch.float32}] * 2
    assert [formats(layer.wi) for layer in model.layers] == [{torch.float16}] * 2
    assert formats(model.swo) == {torch.float16}
    assert outermost(torch.ones(1, 4)).dtype == torch.float32


def test_a_rule_comes_before_the_authors() -> None:
    model = polyamp.convert(Kept(), polyamp.policy("O2", rules={"layers.0.wo": "lower"}))
    assert formats(model.layers[0].wo) == {torch.float16}
    assert formats(model.layers[1].wo) == {torch.float32}
