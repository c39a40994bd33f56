"""Modules and containers in a policy's formats."""

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch import cast


class Net(nn.Module):
    """A stem, a norm, a recurrent part with tied weights, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False))
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.embed(tokens) + self.shift) * scale
        for layer in self.layers:
            hidden = layer(hidden)
        return {"logits": self.head(hidden.mean(1)), "tokens": tokens}


def run(model: nn.Module) -> dict[str, torch.Tensor]:
    return model(torch.arange(6).reshape(2, 3), scale=torch.ones(4))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in model.state_dict().items()}


def test_o2_keeps_norms_in_float32_and_the_model_runs() -> None:
    model = polyamp.convert(Net(), "O2")
    full = {name for name, dtype in dtypes(model).items() if dtype == torch.float32}
    assert full == {name for name in dtypes(model) if "norm" in name or name.startswith("head.1.")} - {
        "head.1.num_batches_tracked"
    }
    out = run(model)
    assert out["logits"].dtype == torch.float32
    assert out["tokens"].dtype == torch.int64
    out["logits"].sum().backward()
    assert model.norm.weight.grad.dtype == torch.float32
    assert model.embed.weight.grad.dtype == torch.float16


@pytest.mark.parametrize("policy", ["O3", "float16", "bfloat16"])
def test_pure_policies_lower_norms_too(policy: str) -> None:
    made = polyamp.policy(policy)
    model = polyamp.convert(Net(), made)
    floating = {dtype for dtype in dtypes(model).values() if dtype.is_floating_point}
    assert floating == {torch.bfloat16 if policy == "bfloat16" else torch.float16}
    assert model.count.dtype == torch.int64
    assert run(model)["logits"].dtype in floating


def test_path_rules_keep_a_subtree_and_nothing_inside_it_loses_bits() -> None:
    model = polyamp.convert(Net(), polyamp.policy("O2", rules={"head": "full", "layers.*.linear1": "full"}))
    inside: list[torch.dtype] = []
    model.head[0].register_forward_hook(lambda *args: inside.append(args[2].dtype))
    assert {value.dtype for value in model.head.state_dict().values()} == {torch.float32, torch.int64}
    assert model.layers[0].linear1.weight.dtype == torch.float32
    assert run(model)["logits"].dtype == torch.float32
    assert inside == [torch.float32]


def test_keep_leaves_a_module_alone() -> None:
    model = Net()
    model.head.double()
    polyamp.convert(model, polyamp.policy("O2", rules={"head": "keep"}))
    assert model.head[0].weight.dtype == torch.float64


def test_a_root_that_is_a_norm_or_a_single_layer_runs() -> None:
    norm, layer = (polyamp.convert(part, "O2") for part in (nn.LayerNorm(4), nn.Linear(4, 4)))
    assert norm.weight.dtype == torch.float32
    assert norm(torch.ones(2, 4)).dtype == torch.float32
    assert layer.weight.dtype == torch.float16
    assert layer(torch.ones(2, 4)).dtype == torch.float32


def test_losses_are_not_rounded() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    model = polyamp.convert(nn.ModuleDict({"loss": loss}), "O2")
    assert model["loss"](torch.ones(2, 3), torch.tensor([0, 1])).dtype == torch.float32


@pytest.mark.parametrize("rules", [{}, {"1": "full"}])
def test_tied_weights_stay_tied(rules: dict[str, str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = weight = model[0].weight
    polyamp.convert(model, polyamp.policy("O2", rules=rules))
    assert model[0].weight is model[1].weight is weight
    assert weight.dtype == (torch.float32 if rules else torch.float16)
    model(torch.ones(1, 4)).sum().backward()


def test_converting_again_replaces_everything() -> None:
    model = Net().eval()
    before = run(model)["logits"]
    polyamp.convert(model, "O2")
    polyamp.convert(model, "bfloat16")
    assert run(model)["logits"].dtype == torch.bfloat16
    polyamp.convert(model, "float32")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert {dtype for dtype in dtypes(model).values() if dtype.is_floating_point} == {torch.float32}
    assert torch.allclose(run(model)["logits"], before, atol=0.1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_alike_and_can_be_converted_back(copied: object) -> None:
    model = polyamp.convert(Net().eval(), "O2")
    other = copied(model)
    assert torch.equal(run(other)["logits"], run(model)["logits"])
    polyamp.convert(other, "float32")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in other.modules())
    assert model.embed.weight.dtype == torch.float16
    assert run(model)["logits"].dtype == torch.float32


def test_state_dicts_load_into_converted_models() -> None:
    model, other = polyamp.convert(Net().eval(), "O2"), polyamp.convert(Net().eval(), "O2")
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other)["logits"], run(model)["logits"])


def test_an_optimizer_made_before_keeps_its_parameters_and_gradients_follow() -> None:
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    polyamp.convert(model, "O2")
    assert opt.param_groups[0]["params"][0] is model.weight
    assert model.weight.grad.dtype == torch.float16


def test_a_mixed_policy_says_that_autocast_does_the_work() -> None:
    with pytest.warns(polyamp.PolyampWarning, match="autocast"):
        polyamp.convert(nn.Linear(2, 2), "mixed_float16")


def test_rules_without_a_module_are_reported() -> None:
    with pytest.warns(polyamp.PolyampWarning, match="'hed' of .* matched nothing in"):
        polyamp.convert(Net(), polyamp.policy("O2", rules={"hed": "full"}))


def test_what_was_shared_stays_shared() -> None:
    shared = torch.ones(2)
    first, second = cast([shared, shared], "float16")
    assert first is second
    model = Net()
    model.head[2].weight = model.embed.weight
    assert polyamp.policy("float16").cast_to_param({"model": model})["model"] is model
    assert model.head[2].weight is model.embed.weight
    assert model.embed.weight.dtype == torch.float16
    assert model.shift.dtype == torch.float16
    assert model.count.dtype == torch.int64


def test_complex_parameters_keep_their_imaginary_part() -> None:
    """`module.half()` drops it."""
    model = nn.Linear(2, 2, dtype=torch.complex64)
    assert polyamp.policy("bfloat16").cast_to_param(model) is model
    assert model.weight.dtype == torch.complex64


def test_batch_norms_take_16_bit_data_beside_float32_parameters() -> None:
    model = polyamp.convert(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)), polyamp.policy("O2"))
    seen: list[torch.dtype] = []
    for part in (model[1], model[2]):
        part.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model(torch.ones(3, 4))
    assert seen == [torch.float16, torch.float32]
    assert {value.dtype for value in model[1].parameters()} == {torch.float32}


@pytest.mark.filterwarnings("error::polyamp.errors.PolyampWarning")
@pytest.mark.parametrize("policy", ["O3", "float16", "bfloat16"])
def test_a_model_all_in_16_bits_is_not_reported_as_one_in_float32(policy: str) -> None:
    model = polyamp.convert(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 1)), policy)
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy)
    for _ in range(3):
        opt.backward(model(torch.zeros(2, dtype=torch.long)).sum())
        opt.step()
        opt.zero_grad()


# Norms by name and behaviour, whoever wrote them, and what a model's authors keep in float32.


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
