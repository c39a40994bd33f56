"""`apex.optimizers`, `apex.normalization` and `apex.multi_tensor_apply`, against formulas and PyTorch's own."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import polyamp
from polyamp.backends.torch.compat.apex import multi_tensor_apply, normalization, optimizers
from polyamp.backends.torch.compat.apex.normalization import fused_layer_norm as functions
from polyamp.backends.torch.compat.attached import attach
from polyamp.backends.torch.modules import operation_of
from polyamp.errors import InvalidValueError, PolyampDeprecationWarning, StateError, UnsupportedError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")

FUSED: dict[str, Callable[..., Any]] = {
    name: getattr(optimizers, name) for name in optimizers.__all__ if name != "FusedMixedPrecisionLamb"
}
SHAPES = [(3, 5), (7,), (1,)]


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(value) for value in tensors(dtype)]


def set_grads(params: list[Any], step: int) -> list[Tensor]:
    grads = tensors(params[0].dtype, seed=step + 1)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return grads


def run(optimizer: Any, params: list[Any], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


# Formulas, in float64, one parameter at a time.


def lamb(params: list[Tensor], grads: list[Tensor], state: dict[Any, Any], o: dict[str, Any]) -> None:
    state["t"] = t = state.get("t", 0) + 1
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
    clip, (b1, b2) = max(1.0, norm / o["max_grad_norm"]), o["betas"]
    for index, (p, grad) in enumerate(zip(params, grads, strict=True)):
        m, v = state.setdefault(index, (torch.zeros_like(p), torch.zeros_like(p)))
        g = grad / clip + (0 if o["adam_w_mode"] else o["weight_decay"] * p)
        m.mul_(b1).add_(((1 - b1) if o["grad_averaging"] else 1) * g)
        v.mul_(b2).add_((1 - b2) * g * g)
        c1, c2 = (1 - b1**t, 1 - b2**t) if o["bias_correction"] else (1, 1)
        update = (m / c1) / ((v / c2).sqrt() + o["eps"]) + (o["weight_decay"] * p if o["adam_w_mode"] else 0)
        trust = float(p.norm() / update.norm()) if o["use_nvlamb"] or o["weight_decay"] else 1.0
        p.sub_(o["lr"] * trust * update)


def novograd(params: list[Tensor], grads: list[Tensor], state: dict[Any, Any], o: dict[str, Any]) -> None:
    state["t"] = t = state.get("t", 0) + 1
    b1, b2 = o["betas"]
    for index, (p, g) in enumerate(zip(params, grads, strict=True)):
        now = float(g.norm() if o["norm_type"] == 2 else g.abs().max())
        m, old = state.get(index, (torch.zeros_like(p), 0.0 if o["init_zero"] else now))
        squared = math.sqrt(b2 * old**2 + (1 - b2) * now**2)
        norm = squared if o["norm_type"] == 2 else b2 * old + (1 - b2) * now
        c1, c2 = (1 - b1**t, math.sqrt(1 - b2**t)) if o["bias_correction"] else (1, 1)
        share, denominator = ((1 - b1) if o["grad_averaging"] else 1), norm / c2 + o["eps"]
        if o["reg_inside_moment"]:
            m = b1 * m + share * (g / denominator + o["weight_decay"] * p)
            p.sub_(o["lr"] * m / c1)
        else:
            m = b1 * m + share * g
            p.sub_(o["lr"] * (m / c1 / denominator + o["weight_decay"] * p))
        state[index] = m, norm


def adam(params: list[Tensor], grads: list[Tensor], state: dict[Any, Any], o: dict[str, Any]) -> None:
    state["t"] = t = state.get("t", 0) + 1
    b1, b2 = o["betas"]
    for index, (p, grad) in enumerate(zip(params, grads, strict=True)):
        m, v = state.setdefault(index, (torch.zeros_like(p), torch.zeros_like(p)))
        g = grad + (0 if o["adam_w_mode"] else o["weight_decay"] * p)
        m.mul_(b1).add_((1 - b1) * g)
        v.mul_(b2).add_((1 - b2) * g * g)
        c1, c2 = (1 - b1**t, 1 - b2**t) if o["bias_correction"] else (1, 1)
        decay = o["weight_decay"] * p if o["adam_w_mode"] else 0
        p.sub_(o["lr"] * ((m / c1) / ((v / c2).sqrt() + o["eps"]) + decay))


def sgd(params: list[Tensor], grads: list[Tensor], state: dict[Any, Any], o: dict[str, Any]) -> None:
    for index, (p, g) in enumerate(zip(params, grads, strict=True)):
        before = g + o["weight_decay"] * p * (not o["wd_after_momentum"])
        m = state[index] = o["momentum"] * state[index] + before if index in state else before.clone()
        p.sub_(
            o["lr"]
            * ((before + o["momentum"] * m if o["nesterov"] else m) + o["weight_decay"] * p * o["wd_after_momentum"])
        )


def adagrad(params: list[Tensor], grads: list[Tensor], state: dict[Any, Any], o: dict[str, Any]) -> None:
    for index, (p, grad) in enumerate(zip(params, grads, strict=True)):
        g = grad + (0 if o["adagrad_w_mode"] else o["weight_decay"] * p)
        h = state[index] = state.get(index, 0) + g * g
        p.sub_(o["lr"] * (g / (h.sqrt() + o["eps"]) + (o["weight_decay"] * p if o["adagrad_w_mode"] else 0)))


BASE = {"lr": 0.05, "weight_decay": 0.1}
MOMENTS = {**BASE, "betas": (0.8, 0.95), "eps": 1e-4, "bias_correction": True}
LAMB = {**MOMENTS, "adam_w_mode": True, "grad_averaging": True, "max_grad_norm": 1.0, "use_nvlamb": False}
NOVO = {**MOMENTS, "reg_inside_moment": False, "grad_averaging": True, "norm_type": 2, "init_zero": False}
ADAM, ADAGRAD = {**MOMENTS, "adam_w_mode": True}, {**BASE, "eps": 1e-4, "adagrad_w_mode": False}
SGD = {**BASE, "momentum": 0.9, "nesterov": False, "wd_after_momentum": False}


@pytest.mark.parametrize(
    ("name", "formula", "base", "change"),
    [
        *[("FusedLAMB", lamb, LAMB, change) for change in (
            {}, {"adam_w_mode": False}, {"grad_averaging": False}, {"bias_correction": False}, {"use_nvlamb": True},
            {"weight_decay": 0.0}, {"weight_decay": 0.0, "use_nvlamb": True}, {"max_grad_norm": 1e9},
        )],
        *[("FusedNovoGrad", novograd, NOVO, change) for change in (
            {}, {"reg_inside_moment": True}, {"grad_averaging": False}, {"bias_correction": False}, {"norm_type": 0},
            {"init_zero": True}, {"weight_decay": 0.0},
        )],
        *[("FusedAdam", adam, ADAM, change) for change in (
            {}, {"adam_w_mode": False}, {"bias_correction": False}, {"weight_decay": 0.0},
        )],
        *[("FusedSGD", sgd, SGD, change) for change in (
            {}, {"wd_after_momentum": True}, {"nesterov": True}, {"nesterov": True, "wd_after_momentum": True},
            {"momentum": 0.0},
        )],
        *[("FusedAdagrad", adagrad, ADAGRAD, change) for change in (
            {}, {"adagrad_w_mode": True}, {"weight_decay": 0.0},
        )],
    ],
)  # fmt: skip
def test_steps_are_those_of_the_formula(name: str, formula: Any, base: dict[str, Any], change: dict[str, Any]) -> None:
    options = {**base, **change}
    params, exact, state = parameters(), tensors(torch.float64), {}
    exact = [one.float().double() for one in exact]
    optimizer = FUSED[name](params, **options)
    for step in range(6):
        grads = set_grads(params, step)
        before = [param.grad.clone() for param in params]
        optimizer.step()
        assert all(map(torch.equal, before, [param.grad for param in params]))  # gradients stay
        formula(exact, [grad.double() for grad in grads], state, options)
    for param, expected in zip(params, exact, strict=True):
        torch.testing.assert_close(param.detach(), expected.float(), rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optimizers.FusedAdam, torch.optim.AdamW),
        (lambda params, **o: optimizers.FusedAdam(params, adam_w_mode=False, **o), torch.optim.Adam),
        (lambda params, **o: optimizers.FusedSGD(params, lr=0.1, momentum=0.9, **o),
         lambda params, **o: torch.optim.SGD(params, lr=0.1, momentum=0.9, **o)),
    ],
)  # fmt: skip
def test_steps_are_pytorchs_to_the_bit(ours: Any, theirs: Any) -> None:
    a, b = parameters(), parameters()
    run(ours(a, weight_decay=0.01), a, 5)
    run(theirs(b, weight_decay=0.01), b, 5)
    assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_saved_state_resumes_to_the_bit(name: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = FUSED[name](params, lr=0.05)
    run(optimizer, params, 3)
    copied = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = FUSED[name](copied, lr=0.05)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    run(optimizer, params, 3, first=3)
    run(resumed, copied, 3, first=3)
    assert all(map(torch.equal, params, copied))
    if name != "FusedSGD":  # whose state PyTorch keeps in the type of the parameter
        kept = {value.dtype for state in resumed.state.values() for value in state.values()}
        assert kept == {torch.float32}


def test_states_are_in_apexs_form() -> None:
    for name, moments in (("FusedAdam", {"exp_avg", "exp_avg_sq"}), ("FusedLAMB", {"exp_avg", "exp_avg_sq"}),
                          ("FusedNovoGrad", {"exp_avg"}), ("FusedAdagrad", {"sum"})):  # fmt: skip
        params = parameters()
        optimizer = FUSED[name](params)
        run(optimizer, params, 2)
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["step"] == 2
        assert [set(one) for one in saved["state"].values()] == [moments] * 3
    params = parameters()
    adagrad_of_apex = {"state": {i: {"sum": torch.ones(s)} for i, s in enumerate(SHAPES)},
                       "param_groups": [{"lr": 0.1, "eps": 0.0, "weight_decay": 0.0, "params": [0, 1, 2]}]}  # fmt: skip
    optimizer = optimizers.FusedAdagrad(params)
    optimizer.load_state_dict(adagrad_of_apex)
    before, (grad, *_) = params[0].detach().clone(), set_grads(params, 0)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), before - 0.1 * grad / (1 + grad * grad).sqrt())


def test_copies_keep_their_options() -> None:
    params = parameters()
    optimizer = optimizers.FusedLAMB(params, use_nvlamb=True, adam_w_mode=False, set_grad_none=False)
    copied = copy.deepcopy(optimizer)
    assert (copied.use_nvlamb, copied.adam_w_mode, copied.set_grad_none) == (True, 0, False)
    sgd_copied = pickle.loads(pickle.dumps(optimizers.FusedSGD(params, 0.1, wd_after_momentum=True)))
    assert sgd_copied.wd_after_momentum
    assert not sgd_copied.set_grad_none


def test_master_weights_take_small_steps() -> None:
    def moved(make: Any) -> float:
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = make([weight])
        for _ in range(20):
            weight.grad = torch.ones(4, dtype=torch.bfloat16)
            optimizer.step()
        return 1 - float(weight.detach().float()[0])

    assert moved(lambda p: optimizers.FusedAdam(p, lr=1e-3)) == 0
    assert moved(lambda p: optimizers.FusedAdam(p, lr=1e-3, capturable=True, master_weights=True)) == pytest.approx(
        0.02, abs=0.004
    )
    lamb_moved = moved(lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=1e-3, weight_decay=0.0, use_nvlamb=True))
    assert lamb_moved == pytest.approx(0.02, abs=0.004)


def test_captured_options_are_tensors() -> None:
    params = parameters()
    optimizer = optimizers.FusedAdam(params, lr=0.1, capturable=True)
    run(optimizer, params, 2)
    group = optimizer.param_groups[0]
    assert isinstance(group["lr"], Tensor)
    assert group["step"].tolist() == [2]
    plain = parameters()
    run(optimizers.FusedAdam(plain, lr=float(group["lr"])), plain, 2)
    assert all(map(torch.equal, params, plain))


def test_gradients_are_cleared_as_the_option_says() -> None:
    for name, make in FUSED.items():
        params = parameters()
        for none in (True, False):
            set_grads(params, 0)
            make(params, set_grad_none=none, **({"lr": 0.1} if name == "FusedSGD" else {})).zero_grad()
            assert all((param.grad is None) is none for param in params)
            assert none or not any(param.grad.any() for param in params)


def test_a_closure_is_evaluated_first_with_gradients_on() -> None:
    for name, make in FUSED.items():
        weight = nn.Parameter(torch.ones(2))
        optimizer = make([weight], lr=0.1)

        def closure(weight: Tensor = weight) -> Tensor:
            loss = weight.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 2, name
        assert (weight < 1).all()


def test_a_parameter_without_a_gradient_stays() -> None:
    for make in FUSED.values():
        params = parameters()
        before = params[1].detach().clone()
        optimizer = make(params, lr=0.1)
        optimizer.add_param_group({"params": []})
        set_grads(params, 0)
        params[1].grad = None
        optimizer.step()
        assert torch.equal(params[1], before)
        assert params[1] not in optimizer.state or not optimizer.state[params[1]]


# With polyamp.


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("wrap", [polyamp.wrap_optimizer, attach])
def test_wrapped_they_train_masters_and_skip(name: str, dtype: torch.dtype, wrap: Any) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).to(dtype)

    def model() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(4, 3).to(dtype)

    scaled, plain = model(), model().float()
    inner = FUSED[name](scaled.parameters(), lr=0.05)
    returned = wrap(inner, "O2" if dtype == torch.float16 else "mixed_float16")
    control = FUSED[name](plain.parameters(), lr=0.05)

    def train(overflow: bool = False) -> None:
        loss = scaled(x).float().square().mean()
        returned.zero_grad()
        returned.backward(loss * math.inf if overflow else loss)
        (inner if wrap is attach else returned).step()

    for _ in range(3):
        train()
        with torch.no_grad():
            grads = torch.autograd.grad
        copied = model().to(dtype)
        copied.load_state_dict({key: value.to(dtype) for key, value in plain.state_dict().items()})
        loss = copied(x).float().square().mean()
        for param, grad in zip(plain.parameters(), grads(loss, list(copied.parameters())), strict=True):
            param.grad = grad.float()
        control.step()
    held = returned.param_groups[0]["params"]
    assert {param.dtype for param in held} == {torch.float32}
    for param, expected in zip(held, plain.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), expected.detach(), rtol=2e-3, atol=2e-4)
    before, state = [p.detach().clone() for p in held], copy.deepcopy(returned.inner.state_dict())
    with pytest.warns(polyamp.PolyampWarning):
        train(overflow=True)
    assert not returned.last_step
    assert all(map(torch.equal, before, held))
    assert str(returned.inner.state_dict()) == str(state)


# Refusals.


def test_options_without_a_meaning_are_refused() -> None:
    params = parameters()
    for make in FUSED.values():
        with pytest.raises(InvalidValueError, match="lr"):
            make(params, lr=-1.0)
    for make in (optimizers.FusedAdam, optimizers.FusedLAMB, optimizers.FusedNovoGrad):
        with pytest.raises(InvalidValueError, match="AMSGrad"):
            make(params, amsgrad=True)
        with pytest.raises(InvalidValueError, match="betas"):
            make(params, betas=(0.9, 1.0))
    with pytest.raises(InvalidValueError, match="norm_type"):
        optimizers.FusedNovoGrad(params, norm_type=1)
    with pytest.raises(InvalidValueError, match="Nesterov"):
        optimizers.FusedSGD(params, 0.1, nesterov=True)


def test_arguments_of_the_first_fused_adam_are_refused() -> None:
    params = parameters()
    optimizer = optimizers.FusedAdam(params)
    set_grads(params, 0)
    with pytest.raises(UsageError, match="scale"):
        optimizer.step(scale=128.0)
    assert optimizer.step(None, scale=None) is None


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    for name in ("FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad"):
        dense, table = nn.Parameter(torch.ones(2)), nn.Embedding(4, 2, sparse=True)
        table(torch.tensor([1])).sum().backward()
        dense.grad = torch.ones(2)
        optimizer = FUSED[name]([dense, table.weight])
        with pytest.raises(UsageError, match="sparse"):
            optimizer.step()
        assert dense.eq(1).all()
        assert "step" not in optimizer.param_groups[0]


def test_novograd_refuses_other_parameters_than_it_began_with() -> None:
    params = parameters()
    optimizer = optimizers.FusedNovoGrad(params)
    run(optimizer, params, 1)
    set_grads(params, 1)
    params[0].grad = None
    with pytest.raises(StateError, match="norm for each parameter"):
        optimizer.step()


def test_each_old_name_shows_its_successor() -> None:
    names: dict[str, Callable[[], Any]] = {
        "torch.optim.AdamW": lambda: optimizers.FusedAdam(parameters()),
        "torch.optim.SGD": lambda: optimizers.FusedSGD(parameters(), 0.1),
        "torch.optim.Adagrad": lambda: optimizers.FusedAdagrad(parameters()),
        "torch.nn.LayerNorm": lambda: normalization.FusedLayerNorm(4),
        "torch.nn.RMSNorm": lambda: normalization.FusedRMSNorm(4),
    }
    for successor, make in names.items():
        with pytest.warns(PolyampDeprecationWarning, match=successor) as caught:
            make()
        assert caught[0].filename == __file__


# Norms.


@pytest.mark.parametrize("affine", [True, False])
def test_norms_are_pytorchs_under_their_names(affine: bool) -> None:
    x = torch.randn(5, 4)
    for ours, theirs, operation in (
        (normalization.FusedLayerNorm(4, 1e-5, affine), nn.LayerNorm(4, 1e-5, affine), "layer_norm"),
        (normalization.FusedRMSNorm(4, elementwise_affine=affine), nn.RMSNorm(4, 1e-5, affine), "rms_norm"),
    ):
        theirs.load_state_dict(ours.state_dict())
        assert torch.equal(ours(x), theirs(x))
        assert operation_of(ours) == operation
        converted = polyamp.convert(nn.Sequential(nn.Linear(4, 4), ours), "O2")
        assert all(param.dtype == torch.float32 for param in converted[1].parameters())


def test_mixed_norms_return_the_type_of_their_weight() -> None:
    x = torch.randn(5, 4)
    for module in (normalization.MixedFusedLayerNorm(4), normalization.MixedFusedRMSNorm(4)):
        plain = functional.layer_norm(x.half().float(), [4]) if "Layer" in type(module).__name__ else (
            functional.rms_norm(x.half().float(), [4], eps=1e-5)
        )  # fmt: skip
        assert torch.equal(module(x.half()), plain)
        assert module.half()(x.half()).dtype == torch.float16
        with pytest.raises(InvalidValueError, match="needs one"):
            type(module)(4, elementwise_affine=False)


def test_norms_as_functions() -> None:
    x, weight, bias = torch.randn(5, 2, 4), torch.randn(2, 4), torch.randn(2, 4)
    shape = (2, 4)
    layer, rms = functional.layer_norm, functional.rms_norm
    assert torch.equal(functions.fused_layer_norm(x, shape), layer(x, shape, eps=1e-6))
    assert torch.equal(functions.fused_layer_norm_affine(x, weight, bias, shape), layer(x, shape, weight, bias, 1e-6))
    assert torch.equal(functions.fused_rms_norm(x[..., 0], 2), rms(x[..., 0], [2], eps=1e-6))
    assert torch.equal(functions.fused_rms_norm_affine(x, weight, shape), rms(x, shape, weight, 1e-6))
    assert functions.mixed_dtype_fused_layer_norm_affine(x.half(), weight, bias, shape).dtype == torch.float32
    assert functions.mixed_dtype_fused_rms_norm_affine(x, weight.half(), shape).dtype == torch.float16
    assert torch.equal(functions.manual_rms_norm(x, shape, None, 1e-5), rms(x, shape, eps=1e-5))


def test_kernels_of_apex_are_not_available() -> None:
    applier = multi_tensor_apply.multi_tensor_applier
    assert applier.available is False
    with pytest.raises(UnsupportedError, match="kernels") as error:
        applier(None, None, [])
    assert isinstance(error.value.__cause__, ImportError)
    with pytest.raises(ModuleNotFoundError) as missing:
        __import__("amp_C")
    assert str(missing.value) == str(applier.import_err)
