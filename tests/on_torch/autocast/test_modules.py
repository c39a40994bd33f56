"""Rules by the path of a module."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch import autocast

pytestmark = pytest.mark.usefixtures("module_hooks_of_its_own")

X = torch.arange(16.0).reshape(2, 8) / 16
LOW, FULL = torch.float16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(self.norm(self.linear(x))) + x
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.decoder:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def outputs(model: nn.Module, rules: dict[str, str], name: str = "mixed_float16") -> dict[str, torch.dtype]:
    """The dtype of every module's output."""
    seen: dict[str, torch.dtype] = {}

    def note(path: str) -> Any:
        return lambda module, inputs, output: seen.__setitem__(path, output.dtype)

    handles = [module.register_forward_hook(note(path)) for path, module in model.named_modules()]
    with polyamp.autocast(polyamp.policy(name, rules=rules)):
        model(X)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"decoder.*.norm": "lower"}, {"decoder.0.norm": LOW, "decoder.1.norm": LOW, "head": FULL}),
        ({"decoder/1/norm": "lower"}, {"decoder.0.norm": FULL, "decoder.1.norm": LOW}),
        ({"decoder.1": "full"}, {"decoder.0.linear": LOW, "decoder.1.linear": FULL, "decoder.1.act": FULL}),
        ({"head": "lower"}, {"head.1": LOW, "decoder.0.norm": FULL}),
        ({"head": "full"}, {"head.0": FULL, "decoder.0.linear": LOW}),
        ({"norm": "lower"}, {"decoder.0.norm": LOW, "decoder.1.norm": LOW}),  # also the name of an operation
        ({"gelu": "full", "decoder.*": "lower"}, {"decoder.0.norm": LOW, "decoder.0.act": FULL}),
        ({"decoder.*": "lower", "gelu": "full"}, {"decoder.0.norm": LOW, "decoder.0.act": LOW}),
        ({"decoder.0": "keep"}, {"decoder.0.linear": FULL, "decoder.1.linear": LOW}),
    ],
)
def test_a_rule_is_about_every_operation_of_the_modules_that_it_names(
    rules: dict[str, str], expected: dict[str, torch.dtype]
) -> None:
    seen = outputs(Model(), rules)
    assert {path: seen[path] for path in expected} == expected


def test_an_exception_in_a_module_leaves_its_rule_there() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(8, 8), Broken())
    with autocast(polyamp.policy("mixed_float16", rules={"1": "full"})):
        with pytest.raises(ZeroDivisionError):
            model(X)
        assert (X @ X.t()).dtype == LOW


def test_models_are_not_kept_alive() -> None:
    model = Model()
    alive = weakref.ref(model)
    outputs(model, {"decoder.1.linear": "full"})
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:the rule '2' matched nothing")
def test_modules_that_are_added_later_have_their_paths() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert outputs(model, {"1": "full", "2": "full"})["0"] == LOW
    model.append(nn.Linear(8, 8))
    assert outputs(model, {"1": "full", "2": "full"})["2"] == FULL


def test_a_path_of_no_module_is_reported_once_modules_have_run() -> None:
    policy = polyamp.policy("mixed_float16", rules={"encoder.*.norm": "lower", "decoder.*.norm": "lower"})
    with polyamp.autocast(policy):
        pass
    said = pytest.warns(polyamp.PolyampWarning, match=r"the rule .encoder\.\*\.norm. matched nothing")
    with said, polyamp.autocast(policy):
        Model()(X)
