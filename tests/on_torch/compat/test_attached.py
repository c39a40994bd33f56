"""An optimizer object that acts as its wrapper, and stays the object that schedulers and the program have."""

import copy
import io
import math
import pickle
import warnings
from types import MethodType
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, StepLR

import polyamp
from polyamp.backends.torch import LossScaledOptimizer
from polyamp.backends.torch.compat.attached import Attached, attach, wrapper_of
from support.harness_torch import OPTIMIZERS, X, Y, contents

SCALE = polyamp.LossScale(init=1024.0)


class Plain(Attached):
    polyamp_saves_scale = False


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1).to(dtype)


def loss_of(model: torch.nn.Linear) -> torch.Tensor:
    return (model(X.to(model.weight.dtype)).float().squeeze(1) - Y).square().mean()


def train(model: torch.nn.Linear, opt: Any, wrapper: LossScaledOptimizer, steps: int = 3, bad: int = -1) -> None:
    for place in range(steps):
        opt.zero_grad()
        wrapper.backward(loss_of(model))
        if place == bad:
            model.weight.grad[0, 0] = math.inf
        opt.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["sgd_foreach", "adam", "adamw_fused", "third_party"])
def test_it_trains_as_the_wrapped_optimizer_does(name: str, dtype: torch.dtype) -> None:
    one, two = model_of(dtype), model_of(dtype)
    wrapped = polyamp.wrap_optimizer(OPTIMIZERS[name](one.parameters()), "mixed_float16", loss_scale=SCALE)
    plain = OPTIMIZERS[name](two.parameters())
    wrapper = attach(plain, "mixed_float16", loss_scale=SCALE)
    train(one, wrapped, wrapped, bad=1)
    train(two, plain, wrapper, bad=1)
    assert wrapper.scaler.state.skipped == 1
    assert contents(wrapper) == contents(wrapped)
    assert torch.equal(one.weight, two.weight)
    assert all(value.keys() for value in plain.state.values())


def test_the_object_stays_and_its_class_is_kept() -> None:
    class Own(torch.optim.SGD):
        def rate(self) -> float:
            return float(self.param_groups[0]["lr"] * self.factor)

    opt = Own(model_of().parameters(), lr=0.5)
    opt.factor = 4
    groups, state, identity = opt.param_groups, opt.state, id(opt)
    attach(opt, "mixed_float16", loss_scale=SCALE)
    assert isinstance(opt, Own)
    assert type(opt).__name__ == "Own"
    assert opt.param_groups is groups
    assert opt.state is state
    assert id(opt) == identity
    assert opt.rate() == 2.0
    opt.factor = 8
    assert opt.rate() == 4.0
    opt.param_groups[0]["lr"] = 1.0
    assert opt.rate() == 8.0
    assert "lr: 1.0" in repr(opt)
    del opt.factor
    with pytest.raises(AttributeError, match="factor"):
        opt.rate()
    assert opt.defaults["lr"] == 0.5
    assert not hasattr(opt, "backward")  # by which old programs recognise other wrappers


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("skipped", [True, False])
def test_schedulers_work_and_warn_only_about_a_wrong_order(before: bool, skipped: bool) -> None:
    def schedule(steps: bool) -> list[float]:
        model = model_of()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler: LRScheduler | None = StepLR(opt, 1, 0.5) if before else None
        wrapper = attach(opt, "mixed_float16", loss_scale=SCALE)
        scheduler = scheduler or StepLR(opt, 1, 0.5)
        if steps:
            train(model, opt, wrapper, 1, bad=0 if skipped else -1)
        scheduler.step()
        return [group["lr"] for group in wrapper.inner.param_groups]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schedule(steps=True) == [0.5]
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        schedule(steps=False)


@pytest.mark.parametrize(
    ("how", "dtype"), [("pickle", torch.float32), ("deepcopy", torch.float16), ("torch.save", torch.float16)]
)
def test_copies_are_attached_and_train_alike(how: str, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    wrapper = attach(opt, "mixed_float16", loss_scale=SCALE, kind=Plain)
    train(model, opt, wrapper)
    if how == "pickle":
        twin_model, twin = pickle.loads(pickle.dumps((model, opt)))
    elif how == "deepcopy":
        twin_model, twin = copy.deepcopy((model, opt))
    else:
        torch.save((model, opt), file := io.BytesIO())
        file.seek(0)
        twin_model, twin = torch.load(file, weights_only=False)
    other = wrapper_of(twin)
    assert other is not None
    assert other is not wrapper
    train(model, opt, wrapper)
    train(twin_model, twin, other)
    assert isinstance(twin, torch.optim.Adam)
    assert contents(other) == contents(wrapper)
    assert twin.state_dict().keys() == opt.state_dict().keys()
    assert ("loss_scale" in opt.state_dict()) is (dtype == torch.float16)  # with masters, which a plain state lacks


@pytest.mark.parametrize("kind", [Attached, Plain])
def test_a_plain_state_leaves_the_loss_scale(kind: type[Attached]) -> None:
    model = model_of()
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    wrapper = attach(opt, "mixed_float16", loss_scale=SCALE, kind=kind)
    train(model, opt, wrapper, 4, bad=1)
    plain = torch.optim.Adam(model_of().parameters(), lr=0.25)
    opt.load_state_dict(plain.state_dict())
    assert wrapper.loss_scale == 512.0
    assert opt.param_groups[0]["lr"] == 0.25
    with pytest.raises(polyamp.errors.StateError, match="not an optimizer's"):
        opt.load_state_dict(None)  # type: ignore[arg-type]


def test_groups_are_added_with_masters() -> None:
    model, more = model_of(torch.float16), model_of(torch.float16)
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    wrapper = attach(opt, "float16", loss_scale=SCALE)
    opt.add_param_group({"params": more.parameters(), "lr": 0.25})
    assert [param.dtype for group in opt.param_groups for param in group["params"]] == [torch.float32] * 4
    wrapper.backward(loss_of(model) + loss_of(more))
    before = more.weight.clone()
    opt.step()
    assert not torch.equal(more.weight, before)
    opt.zero_grad()
    assert more.weight.grad is None


def test_what_cannot_be_attached_is_refused_and_nothing_changes() -> None:
    opt = torch.optim.SGD(model_of().parameters(), lr=0.5)
    with pytest.raises(polyamp.errors.InvalidValueError):
        attach(opt, "mixed_float16", max_grad_norm=-1.0)
    assert type(opt) is torch.optim.SGD
    assert opt.param_groups[0]["lr"] == 0.5
    with pytest.raises(polyamp.errors.InvalidTypeError, match="optimizer"):
        attach(model_of(), "mixed_float16", loss_scale=SCALE)  # type: ignore[arg-type]
    attach(opt, "mixed_float16", loss_scale=SCALE)
    with pytest.raises(polyamp.errors.UsageError, match="wrapped already"):
        polyamp.wrap_optimizer(opt, "mixed_float16", loss_scale=SCALE)


@pytest.mark.parametrize("fused", [True, False])
def test_torchs_scaler_around_it_is_refused(fused: bool) -> None:
    model = model_of()
    opt = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    attach(opt, "mixed_float16", loss_scale=SCALE)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(polyamp.errors.UsageError, match="scales its loss itself"):
        scaler.step(opt)
    assert torch.equal(model.weight, model_of().weight)


def test_a_step_that_another_library_replaced_is_still_called() -> None:
    calls = []

    def replaced(self: Any, *args: Any) -> None:
        calls.append(self)
        type(self).step(self, *args)

    model, expected = model_of(), model_of()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    opt.step = MethodType(replaced, opt)  # type: ignore[method-assign]
    wrapper = attach(opt, "mixed_float16", loss_scale=SCALE)
    train(model, opt, wrapper, 1)
    assert len(calls) == 1
    loss_of(expected).backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    torch.testing.assert_close(model.weight, expected.weight)
