"""Steps whose loss nobody scaled are refused, however they come about, and right ones are not."""

import functools
import gc
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import GradScaler, LossScaledOptimizer
from polyamp.errors import InvalidTypeError, InvalidValueError, UnsupportedError, UsageError
from support.harness_torch import X, contents, linear, loss_of, skipping_on_device

NOT_SCALED = "the loss of this step was not scaled"


def wrap(model: nn.Module, **options: Any) -> LossScaledOptimizer:
    options = {"loss_scale": LossScale(init=256.0), **options}
    wrapped: LossScaledOptimizer = polyamp.wrap_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), "mixed_float16", **options
    )
    return wrapped


def refused(opt: LossScaledOptimizer, call: Callable[[], Any], match: str = NOT_SCALED) -> None:
    before, scale = contents(opt), opt.loss_scale
    with pytest.raises(polyamp.errors.UsageError, match=match):
        call()
    assert contents(opt) == before
    assert opt.loss_scale == scale


FUSED = pytest.mark.parametrize("fused", [None, True])


@FUSED
@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_"])
def test_a_plain_backward_is_refused_and_a_scaled_one_after_it_is_fine(call: str, fused: bool | None) -> None:
    model = linear()
    opt = wrap(model, fused_step=fused)
    for _ in range(2):
        loss_of(model).backward()
        refused(opt, lambda: getattr(opt, call)(*([1.0] if call == "clip_grad_norm_" else [])))
        opt.zero_grad()
        opt.backward(loss_of(model))
        opt.step()
        assert opt.last_step
        opt.zero_grad()


def test_what_another_optimizers_loss_left_is_scaled_as_well() -> None:
    models = [linear(), linear()]
    opts = [wrap(model) for model in models]
    for _ in range(2):
        opts[0].backward(loss_of(models[0]) + loss_of(models[1]))
        refused(opts[1], opts[1].inner.step, "the inner optimizer was stepped")
        refused(opts[1], lambda: nn.utils.clip_grad_norm_(models[1].parameters(), 1.0), "clipped while")
        for opt in opts:
            opt.step()
        nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
        for opt in opts:
            opt.zero_grad()


def test_the_scale_of_gradients_by_hand_has_to_be_said_by_a_possible_bool() -> None:
    model = linear()
    opt = wrap(model)
    model.weight.grad = torch.ones_like(model.weight)
    refused(opt, opt.step)
    opt.zero_grad()
    opt.backward(loss_of(model))
    with pytest.raises(InvalidTypeError, match="bool"):
        opt.step(scaled=1)  # type: ignore[arg-type]
    opt.unscale_()
    for again in (opt.unscale_, lambda: opt.step(scaled=True)):
        refused(opt, again, "unscaled already")
    opt.step()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize(("scales", "make"), [("scaler", torch.amp.GradScaler), ("both", GradScaler)])
def test_another_scaler_around_a_wrapped_optimizer_is_refused(
    fused: bool, unscales: bool, scales: str, make: Callable[..., Any]
) -> None:
    model = linear()
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), "mixed_float16")
    scaler = make("cpu")
    loss = loss_of(model)
    if scales == "both":
        refused(opt, lambda: scaler.scale(opt.scale(loss)), "scaled already")
    scaler.scale(loss).backward()
    if unscales and scales == "scaler":
        scaler.unscale_(opt)
    refused(opt, lambda: scaler.step(opt), "wrapped already")
    assert not {"grad_scale", "found_inf"} & set(vars(opt))
    opt.zero_grad()
    opt.backward(loss_of(model))
    opt.step()
    assert opt.last_step


@pytest.mark.parametrize("fused", [True, False])
def test_scalers_may_step_what_does_not_scale(fused: bool) -> None:
    plain_model, model = linear(), linear()
    plain = torch.optim.SGD(plain_model.parameters(), lr=0.1, fused=fused)
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), "mixed_bfloat16")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(loss_of(model)).backward()
    scaler.step(opt)
    loss_of(plain_model).backward()
    plain.step()
    assert contents(opt) == contents(plain)
    off = torch.amp.GradScaler("cpu", enabled=False)
    other = wrap(linear())
    other.backward(loss_of(linear()) + sum(p.sum() for p in other.model_parameters()))
    off.step(other)
    assert other.last_step


@FUSED
@pytest.mark.parametrize("low", [False, True])
def test_the_inner_optimizer_may_not_step_on_scaled_gradients(fused: bool | None, low: bool) -> None:
    model = linear().half() if low else linear()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    opt = polyamp.wrap_optimizer(plain, "mixed_float16", fused_step=fused, loss_scale=256.0)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=1.0)
    plain.register_step_post_hook(lambda *_: calls.append("step"))
    for _ in range(2):
        opt.backward(sum(param.sum().float() for param in model.parameters()))
        refused(opt, plain.step, "the inner optimizer was stepped")
        opt.step()
        schedule.step()
        opt.zero_grad()
    assert calls == ["step", "step"]
    opt.backward(sum(param.sum().float() for param in model.parameters()))
    opt.unscale_()
    plain.step()


def test_the_inner_optimizer_is_free_when_the_wrapped_one_is_gone() -> None:
    model = linear()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = polyamp.wrap_optimizer(plain, "mixed_float16")
    opt.backward(loss_of(model))
    del opt
    gc.collect()
    plain.step()
    assert not plain._optimizer_step_pre_hooks
    assert not model.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("loss_scale", [LossScale.none(), 1.0])
def test_nothing_is_refused_where_nothing_is_scaled(loss_scale: Any) -> None:
    model = linear()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = polyamp.wrap_optimizer(plain, "mixed_bfloat16", loss_scale=loss_scale)
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    opt.zero_grad()
    opt.backward(loss_of(model))
    loss_of(model).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    plain.step()
    opt.step()
    opt.zero_grad()
    model.weight.grad = torch.ones_like(model.weight)
    opt.step()


# --- what is right is not refused -------------------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        hidden = self.first(x)
        if reentrant is None:
            return self.second(torch.tanh(hidden))
        hidden = checkpoint(self.first, x, use_reentrant=reentrant)
        return checkpoint(self.second, torch.tanh(hidden), use_reentrant=reentrant)


def reentrant_checkpoints(model: Deep, opt: LossScaledOptimizer) -> None:
    opt.backward(model(X.clone().requires_grad_(), reentrant=True).sum())


def checkpoints(model: Deep, opt: LossScaledOptimizer) -> None:
    opt.backward(model(X, reentrant=False).sum())


def second_order(model: Deep, opt: LossScaledOptimizer) -> None:
    opt.backward(model(X).sum(), create_graph=True)
    for param in model.parameters():
        param.grad = param.grad.detach()


def a_loss_scaled_inside_compiled_code(model: Deep, opt: LossScaledOptimizer) -> None:
    @torch.compile(backend="eager")
    def scaled_loss(x: Tensor) -> Tensor:
        return opt.scale(model(x).sum())  # type: ignore[no-any-return]

    scaled_loss(X).backward()


def a_compiled_model(model: Deep, opt: LossScaledOptimizer) -> None:
    opt.backward(torch.compile(model, backend="aot_eager", fullgraph=True)(X).sum())


def gradients_cached_at_the_representations(model: Deep, opt: LossScaledOptimizer) -> None:
    hidden = model(X).detach().requires_grad_()
    opt.backward(hidden.square().sum())
    model(X).backward(hidden.grad)


def gradients_of_autograd(model: Deep, opt: LossScaledOptimizer) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(opt.scale(model(X).sum()), params), strict=True):
        param.grad = grad


def a_backward_in_another_thread(model: Deep, opt: LossScaledOptimizer) -> None:
    thread = threading.Thread(target=lambda: opt.backward(model(X).sum()))
    thread.start()
    thread.join()


def a_failed_backward_before(model: Deep, opt: LossScaledOptimizer) -> None:
    scaled = opt.scale(model(X).sum())
    handle = model.first.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaled.backward()
    handle.remove()
    opt.zero_grad()
    opt.backward(model(X).sum())


RIGHT = [
    reentrant_checkpoints, checkpoints, second_order, a_loss_scaled_inside_compiled_code, a_compiled_model,
    gradients_cached_at_the_representations, gradients_of_autograd, a_backward_in_another_thread,
    a_failed_backward_before,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, about every loss
@pytest.mark.parametrize("run", RIGHT, ids=lambda run: run.__name__)
def test_scaled_gradients_are_not_refused(run: Callable[[Deep, Any], None]) -> None:
    model = Deep()
    opt = wrap(model, fused_step=RIGHT.index(run) % 2 == 0)
    for _ in range(2):
        opt.zero_grad()
        run(model, opt)
        opt.step()
        assert opt.last_step


def test_a_failed_pass_does_not_hide_the_next_unscaled_one() -> None:
    model = Deep()
    opt = wrap(model)
    a_failed_backward_before(model, opt)
    model(X).sum().backward()
    refused(opt, opt.step)


@FUSED
def test_what_the_last_step_left_stays_refused_after_another_optimizer_has_trained(fused: bool | None) -> None:
    first, second = linear(), linear()
    opt, other = wrap(first, fused_step=fused), wrap(second, fused_step=fused)
    opt.backward(loss_of(first))
    opt.step()
    next(first.parameters()).grad = None
    refused(opt, opt.step)
    other.backward(loss_of(second))
    other.step()
    refused(opt, opt.step)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_gradients_after_those_of_the_last_step_are_refused_unless_somebody_says_what_they_are(policy: str) -> None:
    model = linear()
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy)
    opt.backward(loss_of(model))
    opt.step()
    loss_of(model).backward()
    refused(opt, opt.step, "the unscaled gradients of the last step")
    opt.zero_grad()
    opt.backward(loss_of(model))
    opt.step()
    model.weight.grad = torch.ones_like(model.weight)
    if policy == "mixed_float16":
        refused(opt, opt.step)


# --- clipping ---------------------------------------------------------------------------------------------------------

CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "norm_by_name": lambda model: nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1),
    "infinity_norm": lambda model: nn.utils.clip_grad_norm_(list(model.parameters()), 1.0, norm_type=math.inf),
    "one_parameter": lambda model: nn.utils.clip_grad_norm_(model.weight, 1.0),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "value_by_name": lambda model: nn.utils.clip_grad_value_(model.parameters(), clip_value=0.1),
    "with_norm": lambda model: nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(3.0)),
}
imported_before = nn.utils.clip_grad_norm_
CLIPS["imported"] = lambda model: imported_before(model.parameters(), 1.0)


def measures_before(clip: Callable[..., Any]) -> bool:
    """Whether the norm is computed from the model's own gradients before polyamp sees the call."""
    return clip in (CLIPS["with_norm"], CLIPS["imported"])


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_clipping_scaled_gradients_is_refused_and_clipping_unscaled_ones_is_not(clip: Any, low: bool) -> None:
    model = linear().half() if low else linear()
    opt = wrap(model)
    for _ in range(2):
        opt.backward(sum(param.sum().float() for param in model.parameters()))
        grads = [param.grad.clone() for param in model.parameters()]
        refused(opt, lambda: clip(model), "clipped while they were scaled")
        assert all(map(torch.equal, grads, (param.grad for param in model.parameters())))
        opt.unscale_()
        if low and measures_before(clip):
            refused(opt, lambda: clip(model), "16-bit gradients of the model")
        else:
            clip(model)
            assert opt.param_groups[0]["params"][0].grad.abs().max() < 1.0  # the master's, if there is one
        opt.step()
        assert opt.last_step
        clip(model)
        opt.zero_grad()
        sum(param.sum().float() for param in model.parameters()).backward()
        clip(model)  # gradients of a loss that is none of the optimizer's
        opt.zero_grad()


def test_a_loss_is_scaled_once() -> None:
    model = linear()
    opt = wrap(model)
    scaled = opt.scale(loss_of(model))
    refused(opt, lambda: opt.backward(scaled), "scaled already")
    refused(opt, lambda: opt.scale({"loss": scaled}), "scaled already")
    scaled.backward()
    opt.step()
    assert opt.last_step


@pytest.mark.parametrize("scales", [True, False])
def test_clipping_by_the_models_parameters_clips_their_masters(scales: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nn.utils, nn.utils.clip_grad):  # as in a process that has wrapped no optimizer yet
        for name, known in list(vars(module).items()):
            if hasattr(known, "asks_polyamp"):
                monkeypatch.setattr(module, name, known.__wrapped__)
    model = linear().half() if scales else linear().bfloat16()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wrap(model) if scales else polyamp.wrap_optimizer(sgd, "bfloat16")
    opt.backward(sum(3 * param.sum().float() for param in model.parameters()))
    opt.unscale_()
    masters = opt.param_groups[0]["params"]
    expected = nn.utils.get_total_norm([master.grad for master in masters])
    assert expected > 2
    torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), math.inf), expected)
    torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 2.0), expected)
    torch.testing.assert_close(nn.utils.get_total_norm([master.grad for master in masters]), torch.tensor(2.0))


def test_clipping_may_measure_and_touch_what_is_not_scaled() -> None:
    model, other = linear(), linear()
    opt = wrap(model)
    loss_of(other).backward()
    opt.backward(loss_of(model))
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    torch.testing.assert_close(norm, nn.utils.get_total_norm([param.grad for param in model.parameters()]))
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    with pytest.warns(UserWarning, match="empty generator"):
        nn.utils.clip_grad_norm_((param for param in ()), 1.0)
    opt.step()
    assert opt.last_step


@pytest.mark.skipif(torch.__version__ < "2.11", reason="PyTorch 2.10 compiles no clipping")
def test_compiled_code_clips_as_it_did() -> None:
    model = linear()
    wrap(model)
    loss_of(model).backward()
    clip = torch.compile(nn.utils.clip_grad_norm_, backend="eager", fullgraph=True)
    clip(list(model.parameters()), 0.5)
    torch.testing.assert_close(nn.utils.get_total_norm([p.grad for p in model.parameters()]), torch.tensor(0.5))


# --- a loss that is not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "shape"), [(math.inf, ()), (math.nan, (3,))])
def test_a_loss_that_is_not_finite_is_an_error_where_that_is_asked_for(bad: float, shape: tuple[int, ...]) -> None:
    model = linear()
    opt = wrap(model, loss_scale=LossScale(nonfinite_loss="raise"))
    with pytest.raises(polyamp.errors.NonFiniteLossError):
        GradScaler("cpu", loss_scale=opt.scaler.settings).scale([torch.ones(()), torch.full(shape, bad)])
    with pytest.raises(polyamp.errors.NonFiniteLossError, match="a smaller scale cannot help"):
        opt.backward(model.weight.sum() * torch.full(shape, bad))
    assert model.weight.grad is None
    assert opt.loss_scale == 65536.0


@pytest.mark.parametrize(
    ("policy", "scale", "said"),
    [("mixed_float16", LossScale(), "float16 may have"), ("mixed_bfloat16", 1.0, "the range of")],
)
def test_the_warning_tells_by_the_format(policy: str, scale: LossScale | float, said: str) -> None:
    polyamp.errors.forget_warnings()
    model = linear()
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy, loss_scale=scale)
    with pytest.warns(polyamp.PolyampWarning, match=said) as caught:
        opt.backward(loss_of(model) * math.nan)
    assert caught[0].filename == __file__


# --- the scale may be set ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
def test_the_scale_can_be_set_within_the_settings(on_device: bool) -> None:
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    opt = skipping_on_device(polyamp.wrap_optimizer(inner, "mixed_float16"), on_device)
    for value in (math.inf, 1.0, 1.0):
        opt.zero_grad()
        opt.backward(loss_of(model))
        model.weight.grad[0, 0] *= value
        opt.step()
    counted = polyamp.save_loss_scale(opt)
    opt.loss_scale = 4
    assert opt.loss_scale == 4.0
    assert polyamp.save_loss_scale(opt) == {**counted, "scale": 4.0}
    before = contents(opt)
    for bad, kind in ((0.0, InvalidValueError), (2.0**30, InvalidValueError), (math.nan, ValueError),
                      ("4", InvalidTypeError), (True, InvalidTypeError)):  # fmt: skip
        with pytest.raises(kind, match="the loss scale"):
            opt.loss_scale = bad
    assert contents(opt) == before


DEEP = functools.reduce(lambda tree, _: [tree], range(3000), torch.ones(()))


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda opt: opt.step(3), r"step\(closure\)"),
        (lambda opt: opt.scale(torch.ones(()), loss_id=[]), "loss_id="),
        (lambda opt: opt.scale(DEEP), "nested too deeply"),
        (lambda opt: opt.backward(torch.ones(()), retain=True), "did you mean retain_graph"),
        (lambda opt: opt.backward(torch.ones(()), None, True), "builtins.bool"),
        (lambda opt: opt.update(), "leave it out: step"),
        (lambda opt: polyamp.wrap_optimizer(opt.inner, "fp16", named_parameters=3), "named_parameters="),
        (lambda opt: polyamp.wrap_optimizer(opt.inner, "fp16", named_parameters=[torch.ones(1)]), "named parameters"),
        (lambda opt: polyamp.wrap_optimizer(opt.inner, "fp16", named_parameters=[("a", 1, 2)]), "named parameters"),
        (lambda opt: polyamp.wrap_optimizer(opt.inner, "fp16", process_group="world"), "process group"),
        (lambda opt: polyamp.wrap_optimizer(opt.inner, "fp16", fused_step="yes"), "fused_step"),
        (
            lambda opt: polyamp.wrap_optimizer(opt.inner, "fp16", norm_group=lambda _: None),
            "clip by a norm of your own",
        ),
        (lambda opt: opt.clip_grad_norm_("1"), "gradient-norm limit"),
        (lambda opt: opt.clip_grad_norm_(math.nan), "gradient-norm limit"),
        (lambda opt: opt.add_param_group(3), "add_param_group"),
        (lambda _: GradScaler("cpu").scale(DEEP), "nested too deeply"),
        (lambda _: GradScaler("cpu").step(3), "GradScaler"),
        (lambda _: GradScaler("cpu").update("x"), "update"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_and_change_nothing(call: Any, where: str) -> None:
    opt = polyamp.wrap_optimizer(torch.optim.SGD(linear().parameters(), lr=0.1), "mixed_float16")
    before = contents(opt)
    with pytest.raises((InvalidTypeError, InvalidValueError, UnsupportedError), match=where):
        call(opt)
    assert contents(opt) == before


def two_layers(**options: Any) -> tuple[torch.nn.Module, torch.nn.Module, LossScaledOptimizer, torch.optim.Optimizer]:
    """Two layers, of which the first has a wrapped optimizer and the second a plain one."""
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    opt = polyamp.wrap_optimizer(torch.optim.SGD(first.parameters(), lr=0.1), **({"loss_scale": 1024.0} | options))
    return first, second, opt, torch.optim.SGD(second.parameters(), lr=0.1)


ONE = torch.ones(1, 2)


def a_loss_of_both() -> None:
    first, second, opt, plain = two_layers()
    opt.backward(second(first(ONE)).sum())
    opt.step()
    plain.step()


def another_one_of_the_same_parameters() -> None:
    first, _, opt, _ = two_layers()
    opt.backward(first(ONE).sum())
    torch.optim.SGD(first.parameters(), lr=0.1).step()


def a_loss_added_to_its_own() -> None:
    first, second, opt, plain = two_layers()
    for _ in range(2):
        second(ONE).sum().backward()
        opt.backward(second(first(ONE)).sum())
        opt.step()
        opt.zero_grad()
        plain.step()


def in_the_backward_pass() -> None:
    first, second, opt, plain = two_layers()
    second.weight.register_post_accumulate_grad_hook(lambda _: plain.step())
    opt.backward(second(first(ONE)).sum())


def a_wrapped_one_in_the_backward_pass() -> None:
    first, _, opt, _ = two_layers()
    first.weight.register_post_accumulate_grad_hook(lambda _: opt.inner.step())
    opt.backward(first(ONE).sum())
    opt.backward(first(ONE).sum())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (a_loss_of_both, "not wrapped(.|\n)*wrap all optimizers of the loss together"),
        (another_one_of_the_same_parameters, "not wrapped"),
        (a_loss_added_to_its_own, "not wrapped"),
        (in_the_backward_pass, "inside the backward pass"),
        (a_wrapped_one_in_the_backward_pass, "inside the backward pass"),
    ],
)
def test_plain_optimizers_do_not_step_on_scaled_gradients(program: Callable[[], None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        program()


def unscaled_by_the_wrapped_one() -> None:
    first, _, opt, _ = two_layers()
    opt.backward(first(ONE).sum())
    opt.unscale_()
    torch.optim.SGD(first.parameters(), lr=0.1).step()


def divided_by_hand() -> None:
    first, second, opt, plain = two_layers()
    opt.backward(second(first(ONE)).sum())
    for param in second.parameters():
        param.grad /= opt.loss_scale
    opt.step()
    plain.step()


def cleared_and_made_anew() -> None:
    """As a discriminator's, to which the generator's loss adds."""
    first, second, opt, plain = two_layers()
    for set_to_none in (True, False):
        opt.zero_grad()
        opt.backward(second(first(ONE)).sum())
        opt.step()
        plain.zero_grad(set_to_none)
        second(first(ONE).detach()).sum().backward()
        plain.step()


def without_a_scale() -> None:
    first, second, opt, plain = two_layers(loss_scale=LossScale.skip_nonfinite())
    opt.backward(second(first(ONE)).sum())
    plain.step()


def of_a_scaler() -> None:
    first, _, opt, _ = two_layers()
    plain, scaler = torch.optim.SGD(first.parameters(), lr=0.1), GradScaler("cpu", init_scale=64.0)
    scaler.scale(first(ONE).sum()).backward()
    scaler.step(plain)
    assert opt.loss_scale == 1024.0


@pytest.mark.parametrize(
    "program", [unscaled_by_the_wrapped_one, divided_by_hand, cleared_and_made_anew, without_a_scale, of_a_scaler]
)
def test_plain_optimizers_step_on_gradients_without_a_scale(program: Callable[[], None]) -> None:
    program()


def test_a_wrapped_optimizer_can_be_collected_while_torch_loops_over_its_hooks() -> None:
    held: list[Any] = []

    def collects(*_: Any) -> None:
        held.clear()
        gc.collect()

    hook = register_optimizer_step_pre_hook(collects)
    held.append(two_layers())
    try:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).step()
    finally:
        hook.remove()
    assert not held
