"""State dicts with and without masters, between 16-bit formats, and of what does not fit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from support.harness_torch import OPTIMIZERS
from support.torch_kinds import Net, bits, memory, train


def wrap(net: Net, name: str = "adamw_fused", kind: Any = None, **options: Any) -> LossScaledOptimizer:
    return LossScaledOptimizer(
        OPTIMIZERS[name](net.parameters()), LossScale(init=64.0, interval=3), master_weights=kind, **options
    )


def trained(dtype: torch.dtype, name: str = "adamw_fused", kind: Any = None) -> tuple[Net, LossScaledOptimizer]:
    net = Net(dtype, usual=True)
    opt = wrap(net, name, kind)
    train(net, opt, 2)
    train(net, opt, overflow=True)
    return net, opt


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ABSENT = object()


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd_fused", True), ("momentum", False), ("adamw_fused", True), ("third_party", False)]
)
@pytest.mark.parametrize("model_last", [True, False])
def test_training_resumes_bit_for_bit(name: str, kind: Any, model_last: bool) -> None:
    net, opt = trained(torch.bfloat16, name, kind)
    saved = through_a_file({"net": net.state_dict(), "opt": opt.state_dict()})
    other_net = Net(torch.bfloat16, usual=True)
    other = wrap(other_net, name, kind)
    train(other_net, other)
    loads = [lambda: other_net.load_state_dict(saved["net"]), lambda: other.load_state_dict(saved["opt"])]
    for load in loads[:: -1 if model_last else 1]:
        load()
    assert memory(other_net, other) == memory(net, opt)
    for each, its in ((net, opt), (other_net, other)):
        each.random.manual_seed(5)
        train(each, its, 4)
    assert memory(other_net, other) == memory(net, opt)
    assert polyamp.save_loss_scale(other) == polyamp.save_loss_scale(opt)


@pytest.mark.parametrize(("before", "after"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_masters_move_to_another_format_bit_for_bit(before: torch.dtype, after: torch.dtype) -> None:
    net, opt = trained(before)
    other_net = Net(after, usual=True)
    other = wrap(other_net)
    saved = through_a_file({"net": net.state_dict(), "opt": opt.state_dict()})
    other_net.load_state_dict(saved["net"])
    other.load_state_dict(saved["opt"])
    assert bits(other.state_dict()) == bits(opt.state_dict())
    for param, master in zip(other_net.low(), saved["opt"]["master_weights"].values(), strict=True):
        assert torch.equal(param, master.to(after))
    for each, its in ((net, opt), (other_net, other)):
        each.random.manual_seed(5)
        each.turned.grad = None
        train(each, its, 2)
    assert other.loss_scale == opt.loss_scale


@pytest.mark.parametrize(("before", "after"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_moments_of_16_bits_become_the_parameters_format_and_say_so(before: torch.dtype, after: torch.dtype) -> None:
    _, opt = trained(before, "momentum", False)
    net, other = trained(after, "momentum", False)
    with pytest.warns(polyamp.PolyampWarning, match="training does not resume bit for bit"):
        other.load_state_dict(opt.state_dict())
    assert other.state[net.turned]["momentum_buffer"].dtype == after
    train(net, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"param_groups": 3}, "not an optimizer's"),
        ({"param_groups": [3]}, "not an optimizer's"),
        ({"param_groups": [{"lr": 0.1}]}, "not an optimizer's"),
        ({"param_groups": [{"params": 3}]}, "not an optimizer's"),
        ({"param_groups": [{"params": [0]}]}, "parameter groups differ"),
        ({"state": 3}, "not an optimizer's"),
        ({"state": {0: 3}}, "not an optimizer's"),
        ({"state": ABSENT}, "not an optimizer's"),
        ({"loss_scale": ABSENT}, "state is incomplete"),
        ({"loss_scale": None}, "loss.scale"),
        ({"loss_scale": {"kind": "other"}}, "not a loss-scale state"),
        ({"loss_scales": 3}, "must be a mapping"),
        ({"loss_scales": {"generator": {}}}, "loss.scale"),
        ({"master_weights": 3}, "master weights"),
        ({"master_weights": {0: 3}}, "master weights"),
        ({"master_weights": {"rounds": 3, "draws": 0}}, "master weights"),
        ({"master_weights": {0: torch.ones(2)}}, "master weights"),
        ({"moments": {"exp_avg": torch.ones(7)}}, "does not fit its parameter"),
        ({"moments": {"exp_avg_sq": "text"}}, "does not fit its parameter"),
        ({"moments": {"step": None, "exp_avg": torch.tensor(7.0)}}, "cannot load this state"),
    ],
    ids=repr,
)
def test_bad_states_change_nothing(change: dict[str, Any], message: str) -> None:
    net, opt = trained(torch.bfloat16, kind=True)
    before = memory(net, opt)
    other_net, other = trained(torch.bfloat16, kind=True)
    train(other_net, other)
    state = other.state_dict()
    state["state"][0] |= change.get("moments", {})
    state = {key: value for key, value in {**state, **change}.items() if value is not ABSENT}
    with pytest.raises(polyamp.errors.StateError, match=message):
        opt.load_state_dict(state)
    assert memory(net, opt) == before
    assert opt.loss_scale == 32.0


class OneOfTwoRanks(torch.optim.SGD):
    """Drops the state that another rank keeps, as `ZeroRedundancyOptimizer` does."""

    def load_state_dict(self, state_dict: Any) -> None:
        state_dict["state"][0] = None
        super().load_state_dict(state_dict)


def test_an_optimizer_may_drop_states_when_it_loads_them() -> None:
    nets = [torch.nn.Linear(3, 1) for _ in range(2)]
    opts = [polyamp.wrap_optimizer(OneOfTwoRanks(net.parameters(), momentum=0.9), "mixed_float16") for net in nets]
    opts[0].backward(nets[0](torch.ones(2, 3)).sum())
    opts[0].step()
    saved = opts[0].state_dict()
    before = bits(saved)
    opts[1].load_state_dict(saved)
    assert bits(saved) == before
    assert opts[1].state[nets[1].weight] is None
    assert bits(opts[1].state[nets[1].bias]) == bits(opts[0].state[nets[0].bias])


def test_distributed_checkpoints_take_the_inner_optimizer_of_float32_parameters() -> None:
    nets = [torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)]
    opts = [polyamp.wrap_optimizer(torch.optim.AdamW(net.parameters()), "mixed_float16") for net in nets]
    opts[0].backward(nets[0](torch.ones(2, 3)).sum())
    opts[0].step()
    saved = get_optimizer_state_dict(nets[0], opts[0].inner)
    set_optimizer_state_dict(nets[1], opts[1].inner, saved)
    assert bits(opts[1].state_dict()["state"]) == bits(opts[0].state_dict()["state"])
    with pytest.warns(polyamp.PolyampWarning, match="was not wrapped"):
        set_optimizer_state_dict(nets[1], opts[1], saved)
    assert bits(opts[1].state_dict()["state"]) == bits(opts[0].state_dict()["state"])
