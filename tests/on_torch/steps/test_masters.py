"""Float32 master weights of 16-bit parameters, and state dicts."""

import math
from typing import Any

import pytest
import torch

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from support.harness_torch import OPTIMIZERS, X, Y

LOW = [torch.float16, torch.bfloat16]


def low_model(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
    model[0].to(dtype)
    model[2].to(dtype)
    return model


def train(model: torch.nn.Sequential, opt: Any, steps: int, *, overflow: bool = False) -> None:
    for _ in range(steps):
        hidden = model[1](model[0](X.to(model[0].weight.dtype)).float())
        loss = (model[2](hidden.to(model[2].weight.dtype)).float().squeeze(1) - Y).square().mean()
        opt.zero_grad()
        opt.backward(loss)
        if overflow:
            model[2].weight.grad[0, 1] = math.inf
        opt.step()


@pytest.mark.parametrize(("name", "dtype"), [("momentum", LOW[0]), ("adamw", LOW[1]), ("adamw_fused", LOW[1])])
def test_the_inner_optimizer_trains_float32_and_the_model_is_its_rounding(name: str, dtype: torch.dtype) -> None:
    model = low_model(dtype)
    opt = polyamp.wrap_optimizer(OPTIMIZERS[name](model.parameters()), loss_scale=LossScale())
    train(model, opt, 3)
    trained = opt.param_groups[0]["params"]
    assert [param.dtype for param in trained] == [torch.float32] * 6
    assert trained[2] is model[1].weight  # float32 already: no master
    for param, master in zip(model.parameters(), trained, strict=True):
        assert torch.equal(param, master.to(param.dtype))
    moments = [value for state in opt.state.values() for value in state.values()]
    assert all(value.dtype == torch.float32 for value in moments)


def test_new_groups_get_masters_and_repeated_parameters_are_refused() -> None:
    model = low_model(torch.float16)
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), loss_scale=LossScale())
    for part in (model[0], model[2]):
        opt.add_param_group({"params": list(part.parameters()), "lr": 0.01})
    with pytest.raises(polyamp.errors.InvalidValueError, match="more than one parameter group"):
        opt.add_param_group({"params": [model[2].weight]})
    assert len(opt.param_groups) == 3
    assert {param.dtype for group in opt.param_groups for param in group["params"]} == {torch.float32}
    train(model, opt, 1)
    assert torch.equal(model[0].weight, opt.param_groups[1]["params"][0].half())


def test_state_that_exists_at_wrapping_is_kept_in_float32() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    plain = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    plain.step()
    opt = polyamp.wrap_optimizer(plain, "mixed_bfloat16")
    (master,) = opt.param_groups[0]["params"]
    assert list(opt.state) == [master]
    assert opt.state[master]["step"] == 1
    assert opt.state[master]["exp_avg"].dtype == torch.float32


def test_masters_follow_a_model_that_was_loaded_and_keep_their_bits_elsewhere() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float16))
    opt = polyamp.wrap_optimizer(torch.optim.SGD([weight], lr=1e-5), loss_scale=LossScale(init=8.0))
    opt.backward(weight.float().sum())
    opt.step()
    (master,) = opt.param_groups[0]["params"]
    kept = master[0].item()
    with torch.no_grad():
        weight[1] = 5.0
    opt.zero_grad()
    opt.backward(weight.float().sum() * 0)
    opt.step()
    assert master.tolist() == [kept, 5.0]
    assert kept != 1.0


def test_parameters_that_lose_bits_after_wrapping_are_refused() -> None:
    model = low_model(torch.float32)
    opt = polyamp.wrap_optimizer(OPTIMIZERS["sgd"](model.parameters()), "mixed_float16")
    model.half()
    opt.backward(sum(param.float().sum() for param in model.parameters()))
    with pytest.raises(polyamp.errors.UsageError, match="converted to 16 bits"):
        opt.step()


@pytest.mark.parametrize(("policy", "options"), [("O2", {}), ("float32", {"master_weights": True})])
def test_master_weights_that_cannot_be_are_reported(policy: str, options: dict[str, bool]) -> None:
    with pytest.warns(polyamp.PolyampWarning, match="convert"):
        polyamp.wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), policy, **options)


class KeepsFloat32(torch.optim.Optimizer):
    """Keeps a float32 moment of a 16-bit parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            moment = self.state[param].setdefault("moment", torch.zeros_like(param, dtype=torch.float32))
            moment.add_(param.grad.float(), alpha=0.1)


def test_float32_moments_of_16_bit_parameters_are_loaded_in_float32() -> None:
    """torch's own load_state_dict casts them to the parameter's dtype."""
    weights = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    opts = [LossScaledOptimizer(KeepsFloat32([weight]), LossScale.none(), master_weights=False) for weight in weights]
    opts[0].backward(weights[0].float().sum())
    opts[0].step()
    opts[1].load_state_dict(opts[0].state_dict())
    assert torch.equal(opts[1].state[weights[1]]["moment"], torch.full((2,), 0.1))


@pytest.mark.parametrize("limit", [None, 1.0])
def test_what_masters_and_float32_parameters_beside_them_changed_counts_when_a_later_loss_adds(
    limit: float | None,
) -> None:
    low, full = torch.nn.Parameter(torch.tensor([1.0, 2.0]).half()), torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    plain = torch.optim.SGD([low, full], lr=0.125)
    opt = polyamp.wrap_optimizer(plain, "float16", loss_scale=polyamp.LossScale(init=256.0))
    opt.backward((low.float() * full).sum())
    opt.unscale_() if limit is None else opt.clip_grad_norm_(limit)
    opt.backward((low.float() * full).sum())
    opt.step()
    share = 1.0 if limit is None else limit / math.sqrt(1 + 4 + 9 + 16)
    expected = torch.tensor([1 - 0.125 * 3 * (1 + share), 2 - 0.125 * 4 * (1 + share)])
    torch.testing.assert_close(low.detach().float(), expected, rtol=2e-3, atol=0)
    expected = torch.tensor([3 - 0.125 * (1 + share), 4 - 0.125 * 2 * (1 + share)])
    torch.testing.assert_close(full.detach(), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_master_follows_although_its_parameter_has_no_gradient(fused: bool) -> None:
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    opt = polyamp.wrap_optimizer(torch.optim.SGD(params, lr=0.1), "bfloat16", fused_step=fused)
    with torch.no_grad():
        params[0].mul_(0.5)
    opt.backward(params[1].float().sum())
    opt.step()
    idle, stepped = opt.param_groups[0]["params"]
    assert idle.tolist() == [0.5] * 3
    assert stepped.tolist() == pytest.approx([0.9] * 3)
