"""`apex.fp16_utils`: `FP16_Optimizer` against Apex's arithmetic, and the parts of a loop that is written by hand."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch.compat.apex import fp16_utils
from polyamp.backends.torch.compat.apex.fp16_utils import (
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
)
from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    PolyampDeprecationWarning,
    PolyampWarning,
    StateError,
    UsageError,
)

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def half_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).half()


def loss_of(model: nn.Module, part: slice = slice(None)) -> Tensor:
    return model(X[part].half()).float().square().mean()


def made(**options: Any) -> tuple[nn.Module, FP16_Optimizer]:
    model = half_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, FP16_Optimizer(sgd, verbose=False, **options)


class ByHand:
    """Apex's steps, written out: scaled half gradients, divided in float32, masters, rounding."""

    def __init__(self, scale: float) -> None:
        self.model, self.scale = half_model(), scale
        self.masters = [param.detach().float().requires_grad_() for param in self.model.parameters()]
        self.sgd = torch.optim.SGD(self.masters, lr=0.1, momentum=0.9)

    def step(self, *losses: Any, max_norm: float | None = None) -> None:
        self.model.zero_grad()
        for loss in losses:
            (loss(self.model) * self.scale).backward()
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() / self.scale
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, max_norm)
        self.sgd.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)


def same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}, {}])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_loop_trains_as_by_hand(options: Any, max_norm: float | None) -> None:
    model, optimizer = made(**options)
    hand = ByHand(optimizer.loss_scale)
    for _ in range(5):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        if max_norm is not None:
            optimizer.clip_master_grads(max_norm)
        optimizer.step()
        hand.step(loss_of, max_norm=max_norm)
    assert same(model.parameters(), hand.model.parameters())
    assert same(optimizer.param_groups[0]["params"], hand.masters)


@pytest.mark.parametrize("delayed", [True, False])
def test_gradients_of_several_losses_add_up(delayed: bool) -> None:
    model, optimizer = made(static_loss_scale=64.0)
    hand = ByHand(64.0)
    parts = slice(0, 8), slice(8, 16)
    for _ in range(3):
        optimizer.zero_grad()
        for part in parts:
            optimizer.backward(loss_of(model, part), update_master_grads=not delayed)
        if delayed:
            optimizer.update_master_grads()
        optimizer.step()
        hand.step(*(lambda m, part=part: loss_of(m, part) for part in parts))
    for master, expected in zip(optimizer.param_groups[0]["params"], hand.masters, strict=True):
        torch.testing.assert_close(master, expected, rtol=2e-3, atol=2e-4)  # one sum is in float16


def test_a_step_updates_the_master_gradients_if_nobody_did() -> None:
    model, optimizer = made(static_loss_scale=64.0)
    hand = ByHand(64.0)
    optimizer.backward(loss_of(model), update_master_grads=False)
    optimizer.step()
    hand.step(loss_of)
    assert same(model.parameters(), hand.model.parameters())
    optimizer.zero_grad(True)
    with pytest.raises(UsageError):
        optimizer.step()


def test_an_overflow_skips_and_lowers_the_scale_in_backward(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = made(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10})
    optimizer.verbose = True
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    optimizer.step()
    before, state = [param.clone() for param in model.parameters()], str(optimizer.optimizer.state_dict())
    optimizer.zero_grad()
    with pytest.warns(PolyampWarning):
        optimizer.backward(loss_of(model) * math.inf)
    assert (optimizer.overflow, optimizer.loss_scale) == (True, 2.0**9)
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert optimizer.step() is None
    assert "reducing loss scale to 512.0" in capsys.readouterr().out
    assert same(before, model.parameters())
    assert str(optimizer.optimizer.state_dict()) == state
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    assert not optimizer.overflow
    optimizer.step()
    assert not same(before, model.parameters())


def test_a_static_scale_skips_an_overflow_and_stays() -> None:
    model, optimizer = made(static_loss_scale=8.0)
    before = [param.clone() for param in model.parameters()]
    with pytest.warns(PolyampWarning):
        optimizer.backward(loss_of(model) * math.nan)
    optimizer.step()
    assert same(before, model.parameters())
    assert optimizer.loss_scale == 8.0


def test_gradients_are_shown_unscaled_by_group() -> None:
    model = half_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    optimizer = FP16_Optimizer(torch.optim.SGD(groups, lr=0.1), static_loss_scale=128.0, verbose=False)
    optimizer.backward(loss_of(model))
    shown = optimizer.inspect_master_grad_data()
    assert shown is not None
    assert [len(group) for group in shown] == [2, 2]
    hand = half_model()
    (loss_of(hand) * 128).backward()
    expected = [param.grad.float() / 128 for param in hand.parameters()]  # type: ignore[union-attr]
    assert same([grad for group in shown for grad in group], expected)
    total = torch.linalg.vector_norm(torch.stack([grad.abs().max() for grad in expected]), math.inf)
    assert optimizer.clip_master_grads(1e9, math.inf) == total


def test_groups_of_parameters_are_apexs() -> None:
    model = fp16_utils.convert_network(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.half)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    optimizer = FP16_Optimizer(sgd, verbose=False)
    assert [len(group) for group in optimizer.fp16_groups] == [2]
    assert optimizer.fp16_groups[0][0] is params[0]
    assert optimizer.fp32_from_fp16_groups[0][0] is sgd.param_groups[0]["params"][0]
    assert optimizer.fp32_from_fp32_groups[0][0] is params[2]
    assert optimizer.param_groups is sgd.param_groups
    assert optimizer.state is sgd.state


def test_a_float32_model_needs_no_masters() -> None:
    model = half_model().float()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=16.0, verbose=False)
    optimizer.backward(model(X).square().mean())
    optimizer.step()
    plain = half_model().float()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(X).square().mean().backward()
    sgd.step()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, expected)


def test_a_closure_trains_as_a_loop() -> None:
    (model, optimizer), (looped, loop) = made(static_loss_scale=32.0), made(static_loss_scale=32.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        return loss

    for _ in range(3):
        assert optimizer.step(closure) is not None
        loop.zero_grad()
        loop.backward(loss_of(looped))
        loop.step()
    assert same(model.parameters(), looped.parameters())
    assert not optimizer.overflow


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_saved_state_resumes_to_the_bit(dynamic: bool) -> None:
    options: Any = {"dynamic_loss_scale": True} if dynamic else {"static_loss_scale": 64.0}
    model, optimizer = made(**options)

    def train(a: nn.Module, b: FP16_Optimizer) -> None:
        b.zero_grad()
        b.backward(loss_of(a))
        b.step()

    for _ in range(3):
        train(model, optimizer)
    optimizer.loss_scale = 2.0**7
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert set(saved["optimizer"]) == {
        "loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step", "optimizer_state_dict",
        "fp32_from_fp16",
    }  # fmt: skip
    other, resumed = made(**options)
    train(other, resumed)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.loss_scale == 2.0**7
    for _ in range(3):
        train(model, optimizer)
        train(other, resumed)
    assert same(model.parameters(), other.parameters())
    assert same(optimizer.param_groups[0]["params"], resumed.param_groups[0]["params"])


def test_a_state_of_apex_loads() -> None:
    model, optimizer = made(dynamic_loss_scale=True)

    class ScalerOfApex:  # what a checkpoint of Apex holds
        def __init__(self) -> None:
            self._loss_scale, self._unskipped = 1024.0, 7

    saved = {**optimizer.state_dict(), "loss_scaler": ScalerOfApex()}
    saved["fp32_from_fp16"] = [[torch.full_like(one, 0.5) for one in group] for group in saved["fp32_from_fp16"]]
    optimizer.load_state_dict(saved)
    assert optimizer.loss_scale == 1024.0
    assert all((param == 0.5).all() for param in model.parameters())


def test_a_state_of_another_model_changes_nothing() -> None:
    model, optimizer = made(static_loss_scale=64.0)
    saved, before = optimizer.state_dict(), [param.clone() for param in model.parameters()]
    bad = {**saved, "fp32_from_fp16": [[torch.zeros(3)]]}
    without = {key: value for key, value in saved.items() if key != "loss_scaler"}
    for state, match in ((bad, "shapes"), (without, "loss_scaler"), ({**saved, "loss_scaler": 3}, "loss-scale")):
        with pytest.raises(StateError, match=match):
            optimizer.load_state_dict(state)
    assert same(before, model.parameters())
    assert optimizer.loss_scale == 64.0


def test_the_scale_can_be_set() -> None:
    for options in ({"static_loss_scale": 64.0}, {"dynamic_loss_scale": True}):
        model, optimizer = made(**options)
        optimizer.loss_scale = 4.0
        optimizer.backward(loss_of(model))
        optimizer.step()
        assert optimizer.loss_scale == 4.0
        with pytest.raises(InvalidValueError):
            optimizer.loss_scale = 0.0


def test_misuse_is_refused() -> None:
    model = half_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidTypeError, match="scale_windows"):
        FP16_Optimizer(sgd, dynamic_loss_scale=True, dynamic_loss_args={"scale_windows": 3})
    with pytest.raises(InvalidValueError):
        FP16_Optimizer(sgd, static_loss_scale=-1.0)
    with pytest.raises(InvalidTypeError):
        FP16_Optimizer(model)  # type: ignore[arg-type]
    assert {param.dtype for group in sgd.param_groups for param in group["params"]} == {torch.float16}
    with pytest.raises(UsageError, match="state_dict"):
        pickle.dumps(FP16_Optimizer(sgd, verbose=False))


@pytest.mark.filterwarnings("default::polyamp.errors.PolyampDeprecationWarning")
def test_each_old_name_shows_its_successor() -> None:
    model = half_model()
    names = {
        "polyamp.wrap_optimizer": lambda: FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
        "polyamp.convert": lambda: network_to_half(half_model()),
        "opt.backward": lambda: DynamicLossScaler(),
    }
    for successor, make in names.items():
        with pytest.warns(PolyampDeprecationWarning, match=successor) as caught:
            make()
        assert caught[0].filename == __file__


# Loops written by hand.


@given(
    st.lists(st.booleans(), max_size=30),
    st.sampled_from([1.0, 2.0, 4.0, 2.0**20, 2.0**32]),
    st.sampled_from([2.0, 4.0]),
    st.integers(1, 4),
)
def test_the_dynamic_scale_follows_apexs_rule(overflows: list[bool], init: float, factor: float, window: int) -> None:
    scaler = DynamicLossScaler(init, factor, window)
    scale, last = init, -1
    for step, overflow in enumerate(overflows):
        scaler.update_scale(overflow)
        if overflow:
            scale, last = max(scale / factor, 1.0), step
        elif (step - last) % window == 0:
            scale = min(scale * factor, 2.0**127)
        assert (scaler.loss_scale, scaler.cur_iter, scaler.last_overflow_iter) == (scale, step + 1, last)


@pytest.mark.parametrize("flat", [False, True])
def test_a_loop_by_hand_trains_as_the_optimizer(flat: bool) -> None:
    model, (other, optimizer) = half_model(), made(static_loss_scale=128.0)
    model_params, master_params = prep_param_lists(model, flat_master=flat)
    assert len(master_params) == (1 if flat else 4)
    sgd, scaler = torch.optim.SGD(master_params, lr=0.1, momentum=0.9), LossScaler(128.0)
    for _ in range(3):
        model.zero_grad()
        scaler.backward(loss_of(model))
        assert not scaler.has_overflow(model_params)
        model_grads_to_master_grads(model_params, master_params, flat_master=flat)
        for master in master_params:
            assert master.grad is not None
            master.grad.div_(scaler.loss_scale)
        sgd.step()
        master_params_to_model_params(model_params, master_params, flat_master=flat)
        optimizer.zero_grad()
        optimizer.backward(loss_of(other))
        optimizer.step()
    assert same(model.parameters(), other.parameters())


def test_overflows_are_found_in_any_gradient() -> None:
    scaler, params = DynamicLossScaler(), [nn.Parameter(torch.ones(2)) for _ in range(3)]
    params[1].grad = torch.ones(2)
    assert not scaler.has_overflow(params)
    params[1].grad[1] = math.inf
    assert scaler.has_overflow(params)
    params[1].grad[0] = -math.inf  # their sum is NaN
    assert scaler.has_overflow(params)
    assert [grad.tolist() for grad in LossScaler(4.0).scale_gradient(None, (torch.ones(1),), None)] == [[4.0]]


def test_networks_keep_batch_norms_with_weights() -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.LSTM(2, 2))

    for model in (
        fp16_utils.convert_network(network(), torch.half),
        network_to_half(network())[1],
        FP16Model(network()).network,
    ):
        dtypes = [{value.dtype for value in part.state_dict().values() if value.is_floating_point()} for part in model]
        half, full = {torch.float16}, {torch.float32}
        assert dtypes == [half, full, half, half]
    image = torch.randn(2, 3, 5, 5)
    assert FP16Model(network()[:2])(image).dtype == torch.float16
    assert network_to_half(network()[:2])(image).dtype == torch.float16


def test_masters_of_parameters_without_gradients() -> None:
    model = half_model()
    model_params, master_params = prep_param_lists(model)
    model_params[0].grad = torch.ones_like(model_params[0])
    model_grads_to_master_grads(model_params, master_params)
    assert [master.grad is None for master in master_params] == [False, True, True, True]
    model_params, flat = prep_param_lists(model, flat_master=True)
    model_grads_to_master_grads(model_params, flat, flat_master=True)
    assert flat[0].grad is not None
    assert float(flat[0].grad.sum()) == model_params[0].numel()


def test_the_health_of_the_wrapped_optimizer_is_reported() -> None:
    model, optimizer = made(dynamic_loss_scale=True)
    optimizer.backward(loss_of(model))
    optimizer.step()
    assert polyamp.health(optimizer.wrapped).steps == 1
