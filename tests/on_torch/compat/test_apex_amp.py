"""`apex.amp` on polyamp: training at each level, several losses and optimizers, clipping, checkpoints."""

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import polyamp
from polyamp.backends.torch.apex import amp
from polyamp.backends.torch.compat.attached import wrapper_of
from polyamp.errors import PolyampDeprecationWarning
from support.harness_torch import contents

STATE = amp._amp_state
pytestmark = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")

LEVELS = ["O0", "O1", "O2", "O3"]
DIGITS = load_digits()
PICTURES = torch.tensor(DIGITS.data[:512] / 16, dtype=torch.float32)
LABELS = torch.tensor(DIGITS.target[:512])


@pytest.fixture(autouse=True)
def _levels_end_with_their_test() -> Iterator[None]:
    yield
    if STATE.handle is not None:
        STATE.handle._deactivate()


def digits_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def backward(loss: Tensor, optimizers: Any, **options: Any) -> None:
    with amp.scale_loss(loss, optimizers, **options) as scaled:
        scaled.backward()


def step(model: nn.Module, opt: Any, **options: Any) -> float:
    opt.zero_grad()
    loss = functional.mse_loss(model(X), Y)
    backward(loss, opt, **options)
    opt.step()
    return loss.item()


def train_digits(level: str | None, epochs: int = 6) -> list[float]:
    model = digits_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    if level is not None:
        model, opt = amp.initialize(model, opt, opt_level=level, loss_scale=1024.0 if level in ("O1", "O2") else None)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for at in range(0, 512, 64):
            opt.zero_grad()
            loss = functional.cross_entropy(model(PICTURES[at : at + 64]), LABELS[at : at + 64])
            if level is None:
                loss.backward()
            else:
                backward(loss, opt)
            opt.step()
            total += loss.item() / 8
        losses.append(total)
    return losses


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains_digits_as_float32_does(level: str) -> None:
    expected, losses = train_digits(None), train_digits(level)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=0.0 if level == "O0" else 0.01)
    assert losses[-1] < 0.35


@pytest.mark.parametrize(
    ("level", "linear", "norm", "trained", "product"),
    [
        ("O0", torch.float32, torch.float32, torch.float32, torch.float32),
        ("O1", torch.float32, torch.float32, torch.float32, torch.float16),
        ("O2", torch.float16, torch.float32, torch.float32, torch.float16),
        ("O3", torch.float16, torch.float16, torch.float16, torch.float16),
    ],
)
def test_the_types_of_each_level(
    level: str, linear: torch.dtype, norm: torch.dtype, trained: torch.dtype, product: torch.dtype
) -> None:
    model = small()
    opt = sgd(model)
    model, opt = amp.initialize(model, opt, opt_level=level)
    seen = []
    model[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    outputs = model(X)
    assert outputs.dtype == (torch.float16 if level == "O1" else torch.float32)
    assert seen == [product]
    assert (model[0].weight.dtype, model[1].weight.dtype, model[1].running_mean.dtype) == (linear, norm, norm)
    assert {param.dtype for param in amp.master_params(opt)} == {trained}
    if level != "O1":
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}
        assert {value.dtype for value in model[0].state_dict().values()} == {torch.float32}


def test_options_replace_what_the_level_implies() -> None:
    model, opt = small(), None
    model = amp.initialize(model, opt, opt_level="O3", keep_batchnorm_fp32="True", cast_model_outputs=torch.bfloat16)
    assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.float16, torch.float32)
    assert model(X).dtype == torch.bfloat16
    model = small()
    opt = sgd(model)
    amp.initialize(model, opt, opt_level="O2", cast_model_type=torch.bfloat16, master_weights=False, loss_scale="128.0")
    assert model[0].weight.dtype == torch.bfloat16
    assert [param.dtype for param in amp.master_params(opt)].count(torch.bfloat16) == 4
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}}
    other = small()
    amp.initialize(other, sgd(other), opt_level="O2", cast_model_type=torch.bfloat16)  # with a dynamic scale
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}
    amp.initialize(small(), opt_level="O2", cast_model_type=torch.bfloat16, master_weights=False, loss_scale="128.0")
    properties = STATE.opt_properties
    assert (properties.enabled, properties.opt_level, properties.master_weights) == (True, "O2", False)
    assert properties.cast_model_type is torch.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"opt_level": "01"},
        {"opt_level": "O1", "keep_batchnorm_fp32": True},
        {"opt_level": "O1", "master_weights": True},
        {"opt_level": "O1", "cast_model_type": torch.float16},
        {"opt_level": "O2", "patch_torch_functions": True},
        {"opt_level": "O2", "keep_batchnorm_fp32": "yes"},
        {"opt_level": "O2", "loss_scale": "large"},
        {"opt_level": "O2", "loss_scale": -1.0},
        {"opt_level": "O2", "cast_model_outputs": torch.int8},
        {"opt_level": "O2", "cast_model_type": torch.int8},
        {"opt_level": "O2", "num_losses": 0},
    ],
)
def test_options_that_contradict_each_other_are_refused_before_anything_changes(options: dict[str, Any]) -> None:
    model = small()
    opt = sgd(model)
    with pytest.raises(polyamp.errors.InvalidValueError):
        amp.initialize(model, opt, **options)
    assert model[0].weight.dtype == torch.float32
    assert type(opt) is torch.optim.SGD
    assert model(X).dtype == torch.float32


def test_what_cannot_be_initialized_is_refused() -> None:
    model, opt = small(), sgd(small())
    for models, optimizers in ((X, None), ([model, X], opt), (model, X), (model, (opt,))):
        with pytest.raises(polyamp.errors.InvalidTypeError):
            amp.initialize(models, optimizers)
    with pytest.raises(polyamp.errors.UsageError, match="several devices"):
        amp.initialize(nn.DataParallel(model), opt)
    with pytest.raises(polyamp.errors.UsageError, match="16-bit parameters"):
        amp.initialize(small().half(), opt)
    amp.initialize(model, opt, opt_level="O0")
    for again in (opt, wrapper_of(opt), polyamp.wrap_optimizer(sgd(small()), "mixed_float16")):
        with pytest.raises(polyamp.errors.UsageError, match="wrapped already"):
            amp.initialize(small(), again, opt_level="O0")


def test_what_goes_in_comes_out() -> None:
    one, two = small(), small()
    first, second = sgd(one), sgd(two)
    models, optimizers = [one, two], [first, second]
    returned = amp.initialize(models, optimizers, opt_level="O0")
    assert returned[0] is models
    assert returned[1] is optimizers
    assert isinstance(first, torch.optim.SGD)
    assert amp.initialize(one, opt_level="O0") is one
    assert amp.initialize([one], opt_level="O0") == [one]
    alone = sgd(small())
    assert amp.initialize([one], alone, opt_level="O0") == ([one], alone)
    assert amp.initialize(one, None, enabled=False) is one
    plain = sgd(small())
    assert amp.initialize(one, plain, enabled=False) == (one, plain)
    assert type(plain) is torch.optim.SGD
    with amp.scale_loss(X.sum(), plain) as scaled:
        assert scaled.item() == X.sum().item()


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_has_stepped_keeps_its_state_in_the_types_that_it_trains(level: str) -> None:
    model = small()
    opt = sgd(model)
    functional.mse_loss(model(X), Y).backward()
    opt.step()
    before = [value["momentum_buffer"].clone() for value in opt.state.values()]
    amp.initialize(model, opt, opt_level=level, loss_scale=64.0)
    states = [opt.state[param] for param in amp.master_params(opt)]
    for param, state, expected in zip(amp.master_params(opt), states, before, strict=True):
        assert state["momentum_buffer"].dtype == param.dtype
        torch.testing.assert_close(state["momentum_buffer"].float(), expected, rtol=1e-3, atol=1e-4)
    step(model, opt)
    assert wrapper_of(opt).last_step


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_of_master_params_clips_true_gradients(level: str) -> None:
    model, plain = small(), small()
    opt, plain_opt = sgd(model), sgd(plain)
    functional.mse_loss(plain(X), Y).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    plain_opt.step()
    amp.initialize(model, opt, opt_level=level, loss_scale=512.0)
    backward(functional.mse_loss(model(X), Y), opt)
    norm = nn.utils.clip_grad_norm_(amp.master_params(opt), 0.5)
    opt.step()
    torch.testing.assert_close(norm.float(), expected, rtol=0.02, atol=0)
    for param, reference in zip(amp.master_params(opt), plain.parameters(), strict=True):
        torch.testing.assert_close(param.float(), reference, rtol=0.01, atol=2e-3)


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulation_with_and_without_delayed_unscaling(level: str, delayed: bool) -> None:
    model, plain = nn.Linear(4, 1), nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    opt = sgd(model)
    amp.initialize(model, opt, opt_level=level, loss_scale=256.0)
    for part in range(4):
        rows = slice(4 * part, 4 * part + 4)
        functional.mse_loss(plain(X[rows]), Y[rows]).backward()
        backward(functional.mse_loss(model(X[rows]), Y[rows]), opt, delay_unscale=delayed and part < 3)
        if not delayed:
            grad = next(amp.master_params(opt)).grad.float()
            torch.testing.assert_close(grad, plain.weight.grad, rtol=0.01, atol=0.01)
    grad = next(amp.master_params(opt)).grad.float()
    torch.testing.assert_close(grad, plain.weight.grad, rtol=0.01, atol=0.01)
    opt.step()
    assert wrapper_of(opt).last_step


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_any_block_skips(level: str, part: int) -> None:
    model = small()
    opt = sgd(model)
    amp.initialize(model, opt, opt_level=level, num_losses=3)
    for scaler in STATE.loss_scalers:
        scaler._loss_scale = 1024.0
    step(model, opt)
    before, weights = contents(wrapper_of(opt)), [param.detach().clone() for param in model.parameters()]
    opt.zero_grad()
    for number in range(3):
        with amp.scale_loss(functional.mse_loss(model(X), Y), opt, loss_id=number) as scaled:
            scaled.backward()
            if number == part:
                model[0].weight.grad[0, 0] = math.inf
    opt.step()
    assert "0.weight" in wrapper_of(opt).last_step.reason
    assert contents(wrapper_of(opt)) == before
    assert all(map(torch.equal, model.parameters(), weights))
    assert [one.loss_scale() for one in STATE.loss_scalers] == [512.0 if n == part else 1024.0 for n in range(3)]


def gan(level: str | None, steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    make, judge = torch.optim.SGD(generator.parameters(), lr=0.05), torch.optim.SGD(critic.parameters(), lr=0.05)
    if level is not None:
        [generator, critic], [make, judge] = amp.initialize(
            [generator, critic], [make, judge], opt_level=level, num_losses=3, loss_scale=64.0
        )
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    entropy = functional.binary_cross_entropy_with_logits

    def differentiate(loss: Tensor, opt: Any, number: int) -> float:
        loss.backward() if level is None else backward(loss, opt, loss_id=number)
        return loss.item()

    losses = []
    for _ in range(steps):
        critic.zero_grad()
        losses.append(differentiate(entropy(critic(X), ones), judge, 0))
        fake = generator(X[:, :2])
        losses.append(differentiate(entropy(critic(fake.detach()), zeros), judge, 1))
        judge.step()
        generator.zero_grad()
        losses.append(differentiate(entropy(critic(fake), ones), make, 2))
        make.step()
    return losses


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_gan_with_two_optimizers_and_three_losses(level: str) -> None:
    np.testing.assert_allclose(gan(level), gan(None), rtol=0, atol=0.0 if level == "O0" else 3e-3)


def test_calls_for_each_model_share_the_loss_scales() -> None:
    one, two = small(), small()
    first, second = sgd(one), sgd(two)
    amp.initialize(one, first, opt_level="O1")
    STATE.loss_scalers[0]._loss_scale = 4.0
    amp.initialize(two, second, opt_level="O1", num_losses=2)
    assert [scaler.loss_scale() for scaler in STATE.loss_scalers] == [65536.0, 65536.0]
    STATE.loss_scalers[0]._loss_scale = 256.0
    for model, opt in ((one, first), (two, second)):
        step(model, opt)
        assert wrapper_of(opt).loss_scale == 256.0
        assert model(X).dtype == torch.float16
    handle = STATE.handle
    handle._deactivate()
    assert one(X).dtype == two(X).dtype == torch.float32


def test_a_loss_of_two_optimizers_lets_both_skip() -> None:
    one, two = small(), small()
    first, second = sgd(one), sgd(two)
    amp.initialize([one, two], [first, second], opt_level="O1", loss_scale=128.0)
    with amp.scale_loss((one(X).float() + two(X).float() - Y).square().mean(), [first, second]) as scaled:
        scaled.backward()
        one[0].weight.grad[0, 0] = math.nan
    first.step()
    second.step()
    assert not wrapper_of(first).last_step
    assert not wrapper_of(second).last_step
    assert torch.equal(two[0].weight, small()[0].weight)


def test_a_block_for_one_optimizer_leaves_the_gradients_of_another() -> None:
    one, two = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    first, second = sgd(one), sgd(two)
    amp.initialize([one, two], [first, second], opt_level="O0", loss_scale=128.0)
    backward(one.weight.sum(), first)
    backward(two.weight.sum() + one.weight.sum(), second)
    assert one.weight.grad.tolist() == [[2.0] * 4]
    assert two.weight.grad.tolist() == [[1.0] * 4]


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_resumes_bit_for_bit(level: str) -> None:
    def start() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = small()
        opt = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)  # 1e-8 is 0 in float16
        amp.initialize(model, opt, opt_level=level, num_losses=2, verbosity=0)
        return model, opt

    model, opt = start()
    [step(model, opt, loss_id=number % 2) for number in range(12)]
    saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict(), "amp": amp.state_dict()})
    expected = [step(model, opt, loss_id=number % 2) for number in range(6)]
    weights, scales = contents(wrapper_of(opt)), amp.state_dict()
    model, opt = start()
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    amp.load_state_dict(saved["amp"])
    assert amp.state_dict() == saved["amp"]
    assert [step(model, opt, loss_id=number % 2) for number in range(6)] == expected
    assert amp.state_dict() == scales
    assert contents(wrapper_of(opt)) == weights


def test_the_state_of_apex_itself_is_read() -> None:
    model = small()
    opt = sgd(model)
    amp.initialize(model, opt, opt_level="O1", num_losses=2)
    first = {"loss_scale": 512.0, "unskipped": 7}
    amp.load_state_dict({"loss_scaler0": first})
    assert amp.state_dict() == {"loss_scaler0": first, "loss_scaler1": {"loss_scale": 65536.0, "unskipped": 0}}
    wrapper = wrapper_of(opt)
    assert (wrapper.loss_scale, wrapper.scaler.state.good_steps) == (512.0, 7)
    for wrong in ({"scale": 1.0}, {"loss_scaler0": {"loss_scale": 2.0}}, {"loss_scaler0": 3}, 5):
        with pytest.raises(polyamp.errors.StateError):
            amp.load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(polyamp.errors.StateError, match="outside these settings"):
        amp.load_state_dict({"loss_scaler0": first, "loss_scaler1": {"loss_scale": 2.0**40, "unskipped": 0}})
    assert amp.state_dict()["loss_scaler0"] == first
    amp.initialize(small(), opt_level="O1", loss_scale=128.0)
    amp.load_state_dict({"loss_scaler0": first})  # a static scale may be any number
    assert amp.state_dict() == {"loss_scaler0": first}
    plain = torch.optim.SGD(small().parameters(), lr=0.5, momentum=0.9)
    opt.load_state_dict(plain.state_dict())
    assert opt.param_groups[0]["lr"] == 0.5
    assert wrapper.loss_scale == 512.0
    assert opt.state_dict().keys() == {"state", "param_groups"}


@pytest.mark.parametrize("limits", [{"min_loss_scale": 1024.0}, {"max_loss_scale": 2.0**11}])
def test_limits_of_the_loss_scale(limits: dict[str, float]) -> None:
    model = small()
    opt = sgd(model)
    amp.initialize(model, opt, opt_level="O1", verbosity=0, **limits)
    (scaler,) = STATE.loss_scalers
    assert scaler.loss_scale() == min(65536.0, limits.get("max_loss_scale", 65536.0))
    for _ in range(9):
        opt.zero_grad()
        with amp.scale_loss(functional.mse_loss(model(X), Y), opt) as scaled:
            scaled.backward()
            model[0].weight.grad[0, 0] = math.inf
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.step()
    assert scaler.loss_scale() == limits.get("min_loss_scale", 4.0)


def test_misuse_is_refused() -> None:
    model = small()
    opt, plain = sgd(model), sgd(small())
    amp.initialize(model, opt, opt_level="O1", loss_scale=64.0)
    with pytest.raises(polyamp.errors.UsageError, match=r"did not go through amp\.initialize"):
        backward(model(X).sum(), plain)
    with pytest.raises(polyamp.errors.InvalidValueError, match="no loss of this number"):
        backward(model(X).sum(), opt, loss_id=1)
    with pytest.raises(polyamp.errors.UsageError, match="not scaled"):  # noqa: SIM117
        with amp.scale_loss(functional.mse_loss(model(X), Y), opt):
            functional.mse_loss(model(X), Y).backward()
    opt.zero_grad()
    step(model, opt)
    with pytest.raises(polyamp.errors.UsageError, match="last step are still there"):
        backward(functional.mse_loss(model(X), Y), opt)


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_runs_at_the_level(level: str) -> None:
    model = small()
    opt = sgd(model)
    amp.initialize(model, opt, opt_level=level, loss_scale=64.0)
    seen = []
    model[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))

    def closure() -> Tensor:
        opt.zero_grad()
        loss = functional.mse_loss(model(X), Y)
        backward(loss, opt)
        return loss

    first, last = opt.step(closure), None
    for _ in range(5):
        last = opt.step(closure)
    assert last < first
    assert set(seen) == {torch.float32 if level == "O0" else torch.float16}


def test_nothing_keeps_models_and_optimizers_alive() -> None:
    model = small()
    opt = sgd(model)
    amp.initialize(model, opt, opt_level="O2", loss_scale=64.0)
    step(model, opt)
    gone = weakref.ref(model), weakref.ref(opt), weakref.ref(wrapper_of(opt))
    gc.disable()
    try:
        del opt
        assert [ref() for ref in gone[1:]] == [None, None]  # at once, without the garbage collector
    finally:
        gc.enable()
    del model
    gc.collect()
    assert gone[0]() is None


def test_every_function_shows_the_line_to_write_instead() -> None:
    model = small()
    opt = sgd(model)
    uses: dict[str, Callable[[], object]] = {
        r'polyamp\.wrap_optimizer\(opt, "O2"\)': lambda: amp.initialize(model, opt, opt_level="O2", loss_scale=64.0),
        "clip_grad_norm_": lambda: list(amp.master_params(opt)),
        r"opt\.state_dict\(\)": amp.state_dict,
        "load_loss_scale": lambda: amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}),
        r"opt\.backward\(loss\)": lambda: backward(functional.mse_loss(model(X), Y), opt),
    }
    for line, use in uses.items():
        with pytest.warns(PolyampDeprecationWarning, match=line) as caught:
            use()
        assert caught[0].filename == __file__
