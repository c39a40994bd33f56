"""`record` of the PyTorch adapter: every tensor of one step, in float32 or the policy's formats; changes are undone."""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler, adapter
from polyamp.diagnosis.recording import ACTIVATION, GRADIENT, PARAMETER, Observation, Recording
from support.torch_cases import MODELS

X, Y = torch.linspace(-2, 2, 48).reshape(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])


def record(
    step: Any, *args: Any, policy: Any = "mixed_float16", widened: bool = True, scale: float | None = None
) -> Recording:
    return adapter.record(step, args, {}, polyamp.policy(policy), widened=widened, scale=scale)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), Y)


def squares(model: nn.Module, args: tuple[Any, ...]) -> Tensor:
    out = model(*args)
    while isinstance(out, tuple):
        out = out[0]
    return out.float().square().mean()


def places(recording: Recording) -> list[tuple[Any, ...]]:
    return [one[:6] for one in recording.observations]


def gradients(recording: Recording) -> dict[str, float]:
    return {one.name: one.spread.largest for one in recording.of_kind(PARAMETER)}


def largest_gradients(loss: Tensor, model: nn.Module) -> dict[str, float]:
    grads = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return {name: float(grad.abs().max()) for name, grad in zip(names, grads, strict=True)}


def one_of(recording: Recording, kind: str, place: str) -> Observation:
    (found,) = [one for one in recording.observations if one.kind == kind and one.place == place]
    return found


# What is recorded.


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "mixed_bfloat16") for name in MODELS), ("conv", "mixed_float16"), ("block", "float32")],
)
def test_a_widened_step_has_the_values_of_float32_and_the_formats_of_a_true_step(name: str, policy: str) -> None:
    torch.manual_seed(0)
    model, args = MODELS[name]()
    loss = squares(model, args)
    step = lambda *args: squares(model, args)  # noqa: E731
    wide, true = (record(step, *args, policy=policy, widened=widened) for widened in (True, False))
    assert wide.loss == loss.item()
    assert gradients(wide) == pytest.approx(largest_gradients(loss, model), rel=1e-5)
    assert places(wide) == places(true)
    assert policy.removeprefix("mixed_") in {one.format for one in wide.observations}


def test_tensors_come_in_the_order_of_computation_and_parameters_last() -> None:
    model = net()
    low, full = "float16", "float32"
    assert [
        (one.kind, one.name, one.where, one.op_class, one.format) for one in record(loss_of, model).observations
    ] == [
        (ACTIVATION, "matmul", "0", "lower", low),
        (ACTIVATION, "gelu", "1", "follow", low),
        (ACTIVATION, "layer_norm", "2", "inner", full),
        (ACTIVATION, "layer_norm", "2", "inner", low),  # as the next product takes it
        (ACTIVATION, "matmul", "3", "lower", low),
        (ACTIVATION, "log_softmax", "", "full", full),
        (ACTIVATION, "nll_loss", "", "full", full),
        (GRADIENT, "nll_loss", "", "full", full),
        (GRADIENT, "log_softmax", "", "full", full),
        (GRADIENT, "log_softmax", "", "full", low),
        (GRADIENT, "matmul", "3", "lower", low),
        (GRADIENT, "layer_norm", "2", "inner", full),
        (GRADIENT, "layer_norm", "2", "inner", low),
        (GRADIENT, "gelu", "1", "follow", low),
        (PARAMETER, "0.weight", "", "lower", low),
        (PARAMETER, "0.bias", "", "full", low),
        (PARAMETER, "2.weight", "", "inner", full),
        (PARAMETER, "2.bias", "", "inner", full),
        (PARAMETER, "3.weight", "", "lower", low),
        (PARAMETER, "3.bias", "", "full", low),
    ]


def test_classes_are_those_of_the_policys_rules() -> None:
    policy = polyamp.policy("mixed_float16", rules={"3/matmul": "full", "gelu": "full"})
    recording = record(loss_of, net(), policy=policy)
    found = {one.place: (one.op_class, one.format) for one in recording.of_kind(ACTIVATION)}
    assert found["0/matmul"] == ("lower", "float16")
    assert found["1/gelu"] == found["3/matmul"] == ("full", "float32")


@pytest.mark.parametrize("widened", [True, False])
def test_a_cast_between_full_and_lower_work_is_recorded_once_with_what_it_loses(widened: bool) -> None:
    weight = torch.full((2, 2), 0.5, requires_grad=True)

    def step() -> Tensor:
        x = (X[:, :2] * 10).exp().clamp(max=1e6)  # float32 work
        return (x @ weight + x @ weight).float().sum() * 1e-12

    found = record(step, widened=widened)
    casts = [one for one in found.of_kind(ACTIVATION) if one.name == "exp" and one.format == "float16"]
    assert len(casts) == 1
    assert casts[0].spread.is_finite is widened
    (gradient,) = [one for one in found.of_kind(GRADIENT) if (one.name, one.format) == ("mul", "float16")]
    assert gradient.spread.largest == pytest.approx(1e-12 if widened else 0.0)


def test_the_code_sees_16_bit_dtypes_while_it_is_widened() -> None:
    seen: list[Any] = []
    weight = torch.ones(2, 2, requires_grad=True)

    def step() -> Tensor:
        product = weight @ weight
        seen.extend(one.dtype for one in (product, product.clone(), torch.zeros_like(product)))
        return product.masked_fill(torch.eye(2) > 0, torch.finfo(product.dtype).min).float().sum()

    assert record(step).loss == 2 * 2.0 + 2 * torch.finfo(torch.float16).min
    assert seen == [torch.float16] * 3


def test_a_16_bit_loss_is_differentiated_in_float32() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    recording = record(lambda: (weight @ weight)[0, 0], scale=2.0**20, widened=False)
    assert recording.loss == 2.0
    assert recording.scale == 2.0**20


def test_16_bit_parameters_are_computed_in_float32() -> None:
    model = polyamp.convert(net(), "O2")
    reference = net()
    with torch.no_grad():
        for param, low in zip(reference.parameters(), model.parameters(), strict=True):
            param.copy_(low)
    recording = record(loss_of, model)
    grads = largest_gradients(loss_of(reference), reference)
    assert gradients(recording) == pytest.approx(grads, rel=1e-5)
    assert {one.name: one.format for one in recording.of_kind(PARAMETER)}["0.weight"] == "float16"
    assert {param.grad for param in model.parameters()} == {None}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        low = x.half() @ weight.half()
        ctx.save_for_backward(x, weight, low)
        return low * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, low = ctx.saved_tensors
        assert low.dtype == grad.dtype == torch.float16
        return (grad @ weight.half().t()).float() * 2, (x.half().t() @ grad).float() * 2


def test_custom_functions_with_casts_of_their_own() -> None:
    weight = torch.full((8, 2), 1e4, requires_grad=True)
    recording = record(lambda: (Double.apply(X * 1e3, weight) * 1e-9).float().sum(), policy="float32")
    product, doubled = list(recording.of_kind(ACTIVATION))[2:4]
    assert (product.name, product.format, doubled.name, doubled.format) == ("matmul", "float16", "mul", "float16")
    assert product.spread.largest == (X * 1e3 @ weight).abs().max().item()
    (gradient,) = recording.of_kind(PARAMETER)
    assert gradient.spread.largest == pytest.approx(2e-9 * float((X * 1e3).sum(0).abs().max()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_functions_are_recorded_once(reentrant: bool) -> None:
    model = net()
    policy = polyamp.policy("mixed_float16", rules={"2": "full"})
    plain = record(loss_of, model, policy=policy)

    def checkpointed(model: nn.Module) -> Tensor:
        return F.cross_entropy(checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant), Y)

    again = record(checkpointed, model, policy=policy)
    own = [one for one in places(again) if not one[1].startswith("parameter 0")]
    extra = [one for one in own if one not in places(plain)]
    assert [one for one in own if one in places(plain)] == places(plain)
    assert [one[:3] for one in extra] == [(GRADIENT, "matmul", "0")] * len(extra)
    assert gradients(again).items() >= gradients(plain).items()


def test_compiled_functions_run_eagerly() -> None:
    model, runs = net(), list[str]()

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return lambda *args: (runs.append("compiled"), module(*args))[1]

    compiled = torch.compile(model, backend=backend)
    assert compiled(X).shape == (6, 4)
    assert places(record(loss_of, compiled)) == places(record(loss_of, model))
    assert runs == ["compiled"]
    torch.testing.assert_close(compiled(X), model(X))
    assert len(runs) == 2


@pytest.mark.parametrize("widened", [True, False])
def test_recurrent_layers_run_without_the_kernels_that_want_16_bits(widened: bool) -> None:
    lstm, seen = nn.LSTM(8, 4), list[bool]()
    lstm.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    before = torch.backends.cudnn.enabled
    record(lambda: lstm(X)[0].float().mean(), widened=widened)
    assert (seen, torch.backends.cudnn.enabled) == ([before and not widened], before)


def test_shared_weights_and_residuals_add_up_gradients() -> None:
    layer = nn.Linear(8, 8, bias=False)
    recording = record(lambda x: (layer(layer(x) + x) + x).float().square().mean(), X)
    assert [one.name for one in recording.of_kind(PARAMETER)] == ["weight"]
    assert [one.shape for one in recording.of_kind(GRADIENT) if one.shape == (8, 8)] == []


def test_gradients_without_a_computation_are_recorded_too() -> None:
    weight = torch.ones(3, requires_grad=True)
    (gradient,) = record(lambda: weight.sum()).of_kind(PARAMETER)
    assert gradient[:2] == (PARAMETER, "parameter 0 of shape (3,)")
    assert gradient.spread.largest == 1.0


def test_several_models_have_names_of_their_own() -> None:
    encoder, decoder = net(), nn.Sequential(nn.Linear(4, 4))
    recording = record(lambda: loss_of(nn.Sequential(encoder, decoder)))
    assert {"0.0.weight", "1.0.weight"} <= gradients(recording).keys()
    recording = record(lambda: F.cross_entropy(decoder(encoder(X)), Y))
    assert {"Sequential.0.weight", "Sequential_1.0.weight", "3.weight"} <= gradients(recording).keys()


# Training steps.


class Steps:
    """Training steps that do the same, each with an optimizer of another kind."""

    def __init__(self) -> None:
        self.model, self.went_on = net(), False
        self.plain = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.own_scaler = GradScaler("cpu", init_scale=64.0)
        self.wrapped = polyamp.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01), loss_scale=LossScale(init=64.0, interval=2)
        )

    def loss(self) -> Tensor:
        with polyamp.autocast("mixed_bfloat16"):
            return F.cross_entropy(self.model(X), Y)

    def backward_alone(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        return loss

    def plain_step(self) -> float:
        self.plain.zero_grad()
        loss = self.backward_alone()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.plain.step()
        self.went_on = True
        return loss.item()

    def lbfgs(self) -> Any:
        optimizer = torch.optim.LBFGS(self.model.parameters())
        return optimizer.step(lambda: (optimizer.zero_grad(), self.backward_alone())[1])

    def functional(self) -> None:
        params = list(self.model.parameters())
        grads = torch.autograd.grad(self.loss(), params)
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param -= 0.1 * grad

    def with_wrapped(self) -> None:
        self.wrapped.zero_grad()
        self.wrapped.backward(self.loss())
        self.wrapped.step()
        self.went_on = True

    def wrapped_and_clipped(self) -> None:
        self.wrapped.scale(self.loss()).backward()
        self.wrapped.clip_grad_norm_(1e-3)
        self.wrapped.step()
        self.wrapped.zero_grad()

    def wrapped_closure(self) -> Tensor:
        def closure() -> Tensor:
            self.wrapped.zero_grad()
            loss = self.loss()
            self.wrapped.backward(loss)
            return loss

        return self.wrapped.step(closure)

    def native_scaler(self) -> None:
        self.plain.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale_(self.plain)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.scaler.step(self.plain)
        self.scaler.update()
        self.went_on = True

    def polyamps_scaler(self) -> None:
        self.own_scaler.scale(self.loss()).backward()
        self.own_scaler.step(self.plain)
        self.own_scaler.update()
        self.went_on = True

    def contents(self) -> list[Any]:
        """All that a step may change, as it compares."""
        scalers = [self.scaler.state_dict(), self.own_scaler.state_dict(), polyamp.save_loss_scale(self.wrapped)]
        params = [(param.tolist(), param._version, param.grad is None) for param in self.model.parameters()]
        optimizers = [repr(self.plain.state_dict()), repr(self.wrapped.inner.state_dict())]
        witness = {name: value for name, value in vars(self.wrapped.witness).items() if name != "_opened_at"}
        return [params, scalers, optimizers, witness, repr(self.wrapped.last_step)]


STEPS = [
    name for name, member in vars(Steps).items() if callable(member) and name not in ("__init__", "loss", "contents")
]
SCALED = {"with_wrapped", "wrapped_and_clipped", "wrapped_closure", "native_scaler", "polyamps_scaler"}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_is_recorded_up_to_its_update_and_training_goes_on(name: str) -> None:
    steps, alone = Steps(), Steps()
    before = steps.contents()
    expected = record(steps.loss, policy="mixed_bfloat16")
    found = record(getattr(steps, name), policy="mixed_bfloat16")
    assert steps.contents() == before
    assert not steps.went_on  # after the update
    assert found.differentiates
    assert found.scale == (64.0 if name in SCALED else 1.0)
    assert found.loss == pytest.approx(expected.loss)
    assert gradients(found.unscaled()) == pytest.approx(gradients(expected))
    computed = [place for place in places(found) if place[1] not in ("mul", "clip")]
    assert computed == [place for place in places(expected) if place[1] != "mul"]
    for widened in (True, False):
        getattr(steps, name)()
        getattr(alone, name)()
        record(getattr(steps, name), policy="mixed_bfloat16", widened=widened)
    weights = [[param.tolist() for param in one.model.parameters()] for one in (steps, alone)]
    assert weights[0] == weights[1]
    assert steps.contents()[1:3] == alone.contents()[1:3]


def test_a_backward_pass_of_the_steps_own_is_outside_of_the_policys_region() -> None:
    weight = torch.ones(8, 2, requires_grad=True)

    def step() -> None:
        with torch.autocast("cpu", enabled=False):
            loss = (X @ weight).sum()
        loss.backward()

    assert one_of(record(step), PARAMETER, "parameter 0 of shape (8, 2)").format == "float32"


def test_a_window_under_way_goes_on() -> None:
    steps, alone = Steps(), Steps()
    for one in (steps, alone):
        one.wrapped.backward(one.loss())
    grads = [param.grad for param in steps.model.parameters()]
    record(steps.with_wrapped, policy="mixed_bfloat16")
    assert all(param.grad is grad for param, grad in zip(steps.model.parameters(), grads, strict=True))
    for one in (steps, alone):
        one.wrapped.backward(one.loss())
        one.wrapped.step()
    assert steps.contents()[:3] == alone.contents()[:3]


def test_gradients_of_a_step_that_accumulates_are_their_sums() -> None:
    model = net()

    def step() -> None:
        for part in (slice(0, 3), slice(3, 6)):
            (F.cross_entropy(model(X[part]), Y[part]) / 2).backward()

    recording = record(step)
    assert gradients(recording) == pytest.approx(gradients(record(loss_of, model)))
    assert len(list(recording.of_kind(PARAMETER))) == 6
    assert [one.shape for one in recording.of_kind(GRADIENT) if one.shape == (16, 8)] == []


def test_what_is_given_as_the_scale_comes_before_what_is_seen() -> None:
    assert record(Steps().native_scaler, scale=32.0).scale == 32.0
    assert not record(loss_of, net(), scale=32.0).differentiates


def test_a_loss_that_is_not_finite_is_recorded() -> None:
    model = net()
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "mixed_float16")

    def step() -> None:
        opt.backward(loss_of(model) * math.inf)
        opt.step()

    recording = record(step)
    assert recording.differentiates
    assert [one.name for one in recording.observations if not one.spread.is_finite] == ["mul"]
    assert not math.isfinite(record(lambda: loss_of(model) * math.inf).loss or 0.0)


def test_a_region_of_the_steps_own_counts() -> None:
    model = net()

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            low = model(x)
        with torch.autocast("cpu", enabled=False):
            return model(low.float() @ low.float().t() @ x).float().mean()

    recording = record(step, X)
    formats = [one.format for one in recording.of_kind(ACTIVATION) if one.name == "matmul"]
    assert formats == ["bfloat16"] * 2 + ["float32"] * 4


# What is left behind.


class Noisy(nn.Module):
    """Changes everything that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count = float(random.random() + np.random.rand())
        self.last = self.dropout(self.norm(self.layer(x)))
        return self.last


def test_nothing_that_a_step_changes_stays_changed() -> None:
    model = Noisy().eval()
    model.layer.weight.grad = grad = torch.ones(4, 8)
    version, versions = grad._version, [param._version for param in model.parameters()]
    saved = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def step() -> None:
        model.train()
        model.zero_grad(set_to_none=False)
        loss_of(model).backward()
        with torch.no_grad():
            model.layer.weight.mul_(0.5).add_(1)
            model.layer.weight.data[0].fill_(3)

    record(step)
    assert not model.training
    assert (model.last, hasattr(model, "count")) == (None, False)
    assert model.layer.weight.grad is grad
    assert (grad._version, grad.unique().tolist()) == (version, [1.0])
    assert [param._version for param in model.parameters()] == versions
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(now[0], states[0])
    assert now[1:] == states[1:]


def test_errors_of_the_step_pass_through_and_leave_nothing_behind() -> None:
    model = Noisy().eval()
    saved = copy.deepcopy(model.state_dict())

    def step() -> Tensor:
        model.train()
        loss_of(model).backward()
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        record(step)
    assert not model.training
    assert {param.grad for param in model.parameters()} == {None}
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert record(loss_of, model).loss is not None


def test_casts_of_weights_do_not_stay_in_a_region_around() -> None:
    model = net()
    with polyamp.autocast("mixed_float16"):
        before = model(X)
        record(loss_of, model)
        assert type(model(X)) is Tensor
        assert torch.equal(model(X), before)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda: net()(X), r"a tensor of float\d+ and shape \(6, 4\)"),
        (lambda: torch.ones(()), "which does not require gradients"),
        (lambda: "loss", r"'loss' \(str\)"),
        (lambda: X.sum().int(), "a tensor of int32"),
    ],
)
def test_a_step_without_a_loss_is_refused(step: Callable[[], Any], said: str) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match=said) as caught:
        record(step)
    assert "return the loss" in str(caught.value)
