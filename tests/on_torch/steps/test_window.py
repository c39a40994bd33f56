"""Several losses on one optimizer, several optimizers on one loss, and both: each gradient by its loss's scale."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from support.harness_torch import contents, skipping_on_device

Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    return {name: torch.full((3,), value, requires_grad=True) for name, value in (("a", 0.5), ("b", -0.25))}


def first_loss(params: Weights) -> torch.Tensor:
    return (params["a"] * params["b"]).square().sum()


def spoil(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad[1] = math.inf


def sgd(params: list[torch.Tensor], **options: Any) -> Any:
    return polyamp.wrap_optimizer(torch.optim.SGD(params, lr=0.125, momentum=0.5), "mixed_float16", **options)


def scales(opt: LossScaledOptimizer) -> dict[Any, float]:
    return {loss_id: float(scaler.state.scale) for loss_id, scaler in {None: opt.scaler, **opt.scaler.others}.items()}


@pytest.mark.parametrize(("fused_step", "on_device"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # without masters, and with them
@pytest.mark.parametrize("ids", [(None, None, None), (None, "b", "c")])
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_overflow_in_any_part_skips_and_only_its_loss_scale_backs_off(
    bad: int, unscales: bool, ids: tuple[Any, ...], dtype: torch.dtype, on_device: bool, fused_step: bool
) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=dtype))
    inner, scale = torch.optim.SGD([weight], lr=1.0, fused=True), LossScale(init=8.0)
    opt = skipping_on_device(LossScaledOptimizer(inner, scale, fused_step=fused_step), on_device)
    opt.backward(weight.sum())
    opt.step()  # so that kernels may skip
    opt.zero_grad()
    before, values = contents(opt), weight.detach().clone()
    for place, loss_id in enumerate(ids):
        opt.backward(weight.sum(), loss_id)
        if place == bad:
            weight.grad[1] = math.inf
        if unscales:
            opt.unscale_()
    opt.step()
    assert not opt.last_step.applied
    assert contents(opt) == before
    assert torch.equal(weight, values)
    assert scales(opt) == {loss_id: 4.0 if loss_id == ids[bad] else 8.0 for loss_id in ids}


@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_and_dense_gradients_add_up(sparse_first: bool) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    opt = LossScaledOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), LossScale(init=8.0))
    losses = [lambda: table(torch.tensor([1])).sum(), lambda: table.weight.sum()]
    for loss in losses if sparse_first else losses[::-1]:
        opt.backward(loss())
        opt.unscale_()
    assert table.weight.grad.to_dense().tolist() == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]


@settings(max_examples=30, deadline=None)
@given(
    trace=st.lists(st.tuples(st.sampled_from(["first", "second", "third"]), st.booleans()), min_size=1, max_size=12),
    step_every=st.integers(1, 3),
)
def test_every_loss_id_goes_through_the_scales_of_an_optimizer_of_its_own(
    trace: list[tuple[str, bool]], step_every: int
) -> None:
    config = LossScale(init=16.0, interval=2)
    opt = LossScaledOptimizer(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.0), config)
    (weight,) = opt.param_groups[0]["params"]
    states = {name: config.initial_state() for name in ("first", "second", "third")}
    for start in range(0, len(trace), step_every):
        opt.zero_grad()
        seen: dict[str, bool] = {}
        for name, finite in trace[start : start + step_every]:
            opt.backward(weight.sum(), loss_id=name)
            if not finite:
                weight.grad.fill_(math.nan)
            is_first = all(seen.values())  # what is not finite already hides a later overflow
            seen[name] = seen.get(name, True) and (finite or not is_first)
        opt.step()
        assert opt.last_step.applied == all(seen.values())
        states.update((name, polyamp.advance(config, states[name], finite)) for name, finite in seen.items())
    for name in {name for name, _ in trace}:
        assert opt.scaler.of(name).state == states[name]


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("broken", ["a", "b", "ab"])
@pytest.mark.parametrize("together", [True, False])
def test_an_overflow_in_any_optimizer_of_a_loss_lowers_its_scale_once(
    together: bool, broken: str, on_device: bool, fused_step: bool
) -> None:
    params = weights()
    made = [torch.optim.SGD([params[name]], lr=0.1, fused=True) for name in "ab"]
    options = {"policy": "mixed_float16", "fused_step": fused_step}
    opts = (
        [*polyamp.wrap_optimizer(made, **options)] if together else [polyamp.wrap_optimizer(m, **options) for m in made]
    )
    skipping_on_device(opts, on_device)
    for overflow in (False, True, False):
        for opt in opts:
            opt.zero_grad()
        opts[0].backward(first_loss(params))
        for name in broken if overflow else "":
            spoil(params[name])
        for name, opt in zip("ab", opts, strict=True):
            before = contents(opt)
            opt.step()
            assert bool(opt.last_step) == (contents(opt) != before) == (not overflow or name not in broken)
    assert [opt.loss_scale for opt in opts] == [32768.0, 32768.0 if together else 65536.0]
    assert int(opts[0].scaler.state.skipped) == 1


def test_the_scales_of_all_losses_are_saved_and_copied() -> None:
    params = weights()
    opt = sgd(list(params.values()))
    opt.backward(first_loss(params), loss_id="first")
    spoil(params["a"])
    opt.step()
    copied = copy.deepcopy(opt)
    loaded = sgd(list(weights().values()))
    loaded.load_state_dict(opt.state_dict())
    assert scales(copied) == scales(loaded) == scales(opt) == {None: 65536.0, "first": 32768.0}


@pytest.mark.parametrize(
    ("option", "said"),
    [("skip_on_device", "did you mean fused_step"), ("share", r"wrap_optimizer\(\[first, second\], policy\)")],
)
def test_an_option_under_another_name_is_told_what_to_write(option: str, said: str) -> None:
    plain = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(polyamp.errors.UnsupportedError, match=said):
        polyamp.wrap_optimizer(plain, "mixed_float16", **{option: True})
