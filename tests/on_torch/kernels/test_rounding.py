"""Masters kept as remainders, and stochastic rounding: what saves memory between steps."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from polyamp.backends.torch.kernels.rounding import join, round_stochastically, split
from polyamp.backends.torch.steps import master_storage
from support.harness_torch import OPTIMIZERS
from support.torch_closures import REEVALUATING
from support.torch_rounding import KINDS, TEMPORARY, Net, bits, memory, train

LOW = [torch.float16, torch.bfloat16]
PATTERNS = torch.arange(-(2**15), 2**15, dtype=torch.int16)  # every value of a 16-bit format
kinds = pytest.mark.parametrize("kind", KINDS)
temporary_kinds = pytest.mark.parametrize("kind", TEMPORARY)


def floats(bits: Any) -> torch.Tensor:
    return torch.as_tensor(bits, dtype=torch.int32).view(torch.float32)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(whole), other.view(whole))


def check_split(values: torch.Tensor) -> None:
    rounded, remainder = split(values)
    numbers = ~values.isnan()
    assert (rounded.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert same_bits(join(rounded, remainder)[numbers], values[numbers])
    assert join(rounded, remainder)[~numbers].isnan().all()
    assert torch.equal(rounded.isnan(), ~numbers)
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert same_bits(rounded[numbers & ~ties], values.bfloat16()[numbers & ~ties])
    assert (rounded.float().abs() > values.abs())[numbers & ties].all()


@pytest.mark.parametrize("low_half", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_float32_is_bfloat16_and_a_remainder_for_every_upper_half(low_half: int) -> None:
    check_split(floats((PATTERNS.int() << 16) | low_half))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1))
def test_float32_is_bfloat16_and_a_remainder_for_every_pattern(bits: list[int]) -> None:
    check_split(floats(bits))


@given(st.integers(-(2**15), 2**15 - 1))
def test_any_remainder_belongs_to_its_parameter(left_over: int) -> None:
    params = PATTERNS.view(torch.bfloat16)
    params = params[~params.isnan()]
    remainder = torch.full(params.shape, left_over, dtype=torch.int16)
    values = join(params, remainder)
    numbers = ~values.isnan()  # beyond inf
    rounded, again = split(values)
    assert same_bits(rounded[numbers], params[numbers])
    assert torch.equal(again[numbers], remainder[numbers])
    assert numbers.sum() >= len(params) - 2


@pytest.mark.parametrize("dtype", LOW)
def test_values_of_16_bits_are_not_moved_by_chance(dtype: torch.dtype) -> None:
    values = PATTERNS.view(dtype)
    rounded = round_stochastically(values.float(), dtype, torch.Generator().manual_seed(1))
    numbers = ~values.isnan()
    assert same_bits(rounded[numbers], values[numbers])
    assert rounded[~numbers].isnan().all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
@pytest.mark.parametrize("dtype", LOW)
def test_nan_is_rounded_to_nan(bits: int, dtype: torch.dtype) -> None:
    assert round_stochastically(floats([bits] * 100), dtype).isnan().all()


DIGITS = {torch.bfloat16: 8, torch.float16: 11}
SMALLEST = {torch.bfloat16: -133, torch.float16: -24}  # exponents of the spacings at zero


def neighbours(value: float, spacing: float) -> list[list[float]]:
    """What may come of a value: it itself, or one or both of the values of 16 bits beside it."""
    below, above = (end(value / spacing) * spacing for end in (math.floor, math.ceil))
    return [[below], [above], [below, above]]


@given(
    st.floats(2.0**-24, 65000, width=32) | st.floats(-65000, -(2.0**-24), width=32),
    st.sampled_from(LOW),
    st.integers(0),
)
def test_the_expectation_of_stochastic_rounding_is_the_value(value: float, dtype: torch.dtype, seed: int) -> None:
    count = 20_000
    generator = torch.Generator().manual_seed(seed % 2**32)
    rounded = round_stochastically(torch.full((count,), value), dtype, generator).double()
    spacing = 2.0 ** max(math.frexp(value)[1] - DIGITS[dtype], SMALLEST[dtype])
    assert rounded.unique().tolist() in neighbours(value, spacing)
    assert abs(rounded.mean().item() - value) <= 6 * spacing * 0.5 / math.sqrt(count)


def test_chance_repeats_from_a_seed() -> None:
    values = torch.rand(1000)
    draws = [round_stochastically(values, torch.bfloat16, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def wrap(net: Net, name: str = "momentum", kind: Any = None, **options: Any) -> LossScaledOptimizer:
    return LossScaledOptimizer(OPTIMIZERS[name](net.parameters()), LossScale(init=64.0), master_weights=kind, **options)


def masters_of(opt: LossScaledOptimizer) -> list[torch.Tensor]:
    return [master.detach() for master in opt.state_dict()["master_weights"].values()]


@pytest.mark.parametrize("name", ["momentum", "sgd_foreach", "sgd_fused", "adamw_fused", "third_party"])
def test_remainders_give_the_very_masters_that_memory_gives(name: str) -> None:
    nets = [Net(usual=True), Net(usual=True)]
    opts = [wrap(net, name, kind) for net, kind in zip(nets, (True, "remainder"), strict=True)]
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 3)
        train(net, opt, 1, overflow=True)
        train(net, opt, 2)
    assert bits(masters_of(opts[0])) == bits(masters_of(opts[1]))
    assert bits(nets[1].low()) == bits([split(master)[0] for master in masters_of(opts[0])])


@pytest.mark.parametrize("dtype", LOW)
def test_stochastic_rounding_is_a_step_in_float32_and_one_rounding(dtype: torch.dtype) -> None:
    nets = [Net(dtype), Net(dtype)]
    opts = [wrap(net, "sgd", kind) for net, kind in zip(nets, (True, "stochastic"), strict=True)]
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt)
    far = 0
    for param, master in zip(nets[1].low(), masters_of(opts[0]), strict=True):
        error, nearest = (param.float() - master).abs(), (master.to(dtype).float() - master).abs()
        assert (error <= torch.finfo(dtype).eps * master.abs()).all()
        far += int((error > nearest).sum())
    assert far > 10  # of 136 elements


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("remainder", torch.bfloat16), ("stochastic", torch.bfloat16), ("stochastic", torch.float16)],
)
def test_updates_that_16_bits_round_away_add_up(kind: str, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    opt = polyamp.wrap_optimizer(torch.optim.SGD([weight], lr=1e-5), "bfloat16", master_weights=kind)
    for _ in range(1000):
        opt.zero_grad()
        opt.backward(weight.float().sum())
        opt.step()
    assert weight.float().mean().item() == pytest.approx(0.99, abs=0.002)


@temporary_kinds
@pytest.mark.parametrize("name", ["adamw_fused", "momentum"])
def test_a_step_that_the_host_skips_leaves_every_bit(kind: str, name: str) -> None:
    net = Net(usual=True)
    opt = wrap(net, name, kind, skip_on_device=False)
    train(net, opt, 2)
    before = memory(net, opt)
    train(net, opt, overflow=True)
    assert memory(net, opt) == before


@temporary_kinds
@pytest.mark.parametrize("name", ["adamw_fused", "sgd_fused"])
def test_a_step_that_the_device_skips_leaves_every_bit_but_chance(kind: str, name: str) -> None:
    net = Net(usual=True)
    opt = wrap(net, name, kind, skip_on_device=True)
    with torch.no_grad():
        net.unused.copy_(torch.tensor([-0.0, 1e-40, math.inf]))
    train(net, opt, 2)
    before = memory(net, opt)
    train(net, opt, overflow=True)
    after = memory(net, opt)
    assert after[:3] == before[:3]
    assert (after[3] == before[3]) == (kind == "remainder")


@temporary_kinds
def test_float32_values_exist_during_a_step_only(kind: str) -> None:
    net = Net()
    opt = wrap(net, "adamw", kind)
    seen = []

    def look(*_: Any) -> None:
        for param, master in zip(opt.masters.model, opt.masters.masters, strict=True):
            seen.append(torch.equal(param.float(), master) and master.stride() == torch.empty_like(param).stride())

    opt.register_step_pre_hook(look)
    train(net, opt)
    train(net, opt, overflow=True)
    assert seen == [True] * 6
    masters = opt.masters.masters
    assert all(master.untyped_storage().nbytes() <= 4 and master.isnan().all() for master in masters)
    assert [(master.shape, master.dtype) for master in masters] == [(p.shape, torch.float32) for p in opt.masters.model]
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        masters[0].copy_(torch.ones(masters[0].shape))


@temporary_kinds
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("in_a_step", [False, True])
def test_copies_train_on_as_the_original(kind: str, clone: Callable[[Any], Any], in_a_step: bool) -> None:
    net = Net()
    opt = wrap(net, "adamw", kind)

    def step(net: Net, opt: LossScaledOptimizer, seed: int) -> None:
        net.random = torch.Generator().manual_seed(seed)
        train(net, opt)

    step(net, opt, 1)
    if in_a_step:
        net.random = torch.Generator().manual_seed(2)
        opt.zero_grad()
        opt.backward(net.loss())
        opt.unscale_()
    other_net, other = clone((net, opt))
    assert all(master.isnan().all() for master in other.masters.masters)
    for seed in (3, 4):
        step(net, opt, seed)
        step(other_net, other, seed)
    assert memory(other_net, other) == memory(net, opt)


def test_runs_with_stochastic_rounding_repeat() -> None:
    nets = [Net(), Net()]
    opts = []
    for net in nets:
        torch.manual_seed(len(opts))  # ranks often seed torch differently, and must round alike
        opts.append(wrap(net, "adamw", "stochastic"))
        train(net, opts[-1], 3)
    assert memory(nets[0], opts[0]) == memory(nets[1], opts[1])


@kinds
@pytest.mark.parametrize("name", REEVALUATING)
@pytest.mark.parametrize("overflow_at", [0, 1, 2])
def test_closures_that_are_evaluated_again(kind: Any, name: str, overflow_at: int) -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0, 0.5], dtype=torch.bfloat16))
    opt = LossScaledOptimizer(REEVALUATING[name]([weight]), LossScale(init=64.0), master_weights=kind)
    model = torch.nn.ParameterList([weight])
    count = 0

    def closure() -> torch.Tensor:
        nonlocal count
        count += 1
        opt.zero_grad()
        loss = (weight.float() - torch.tensor([1.0, 2.0, 3.0])).square().sum()
        opt.backward(loss)
        if count == overflow_at:
            weight.grad[1] = math.inf
        return loss

    before, counts = bits(weight), opt.state_dict()["master_weights"]
    opt.step(closure)
    assert opt.last_step.applied == (overflow_at == 0)
    assert (bits(weight) == before) == (overflow_at > 0)
    assert len(model) == 1
    if overflow_at == 1:
        assert bits(opt.state_dict()["master_weights"]) == bits(counts)
    count, overflow_at, first = 0, 0, (weight.detach().float() - torch.tensor([1.0, 2.0, 3.0])).norm()
    for _ in range(5):
        opt.step(closure)
    assert (weight.detach().float() - torch.tensor([1.0, 2.0, 3.0])).norm() < first or first < 0.05


@kinds
def test_sparse_gradients(kind: Any) -> None:
    table = torch.nn.Embedding(5, 2, sparse=True, dtype=torch.bfloat16)
    opt = LossScaledOptimizer(torch.optim.SGD(table.parameters(), lr=0.5), LossScale(init=64.0), master_weights=kind)
    with torch.no_grad():
        table.weight.fill_(4.0)
    opt.backward(table(torch.tensor([1, 1, 2])).float().sum())
    opt.step()
    assert table.weight[:, 0].tolist() == [4.0, 3.0, 3.5, 4.0, 4.0]


@kinds
def test_gradients_reach_masters_exactly(kind: Any) -> None:
    params = [torch.nn.Parameter(torch.zeros(65536, dtype=torch.bfloat16)) for _ in range(2)]
    opt = LossScaledOptimizer(torch.optim.SGD(params, lr=0.5), LossScale(), master_weights=kind)
    params[0].grad = PATTERNS.view(torch.bfloat16).clone()
    opt.masters.take_gradients()
    first, second = opt.param_groups[0]["params"]
    assert second.grad is None
    numbers = ~first.grad.isnan()
    assert same_bits(first.grad[numbers], params[0].grad.float()[numbers])
    assert torch.equal(numbers, ~params[0].grad.isnan())


@temporary_kinds
def test_masters_follow_a_model_that_was_written_to(kind: str) -> None:
    net = Net()
    opt = wrap(net, "sgd", kind)
    train(net, opt)
    with torch.no_grad():
        net.scalar.fill_(8.0)
    opt.zero_grad()
    opt.backward(net.scalar.float() * 0)
    opt.unscale_()
    with torch.no_grad():
        net.scalar.fill_(16.0)  # also after the masters were given their values
    opt.open_window()
    opt.step(scaled=True)
    assert net.scalar.item() == 16.0


@temporary_kinds
def test_groups_that_come_later(kind: str) -> None:
    net, other = Net(), Net()
    opt = wrap(net, "adamw", kind)
    train(net, opt)
    opt.add_param_group({"params": iter([other.turned, other.image]), "lr": 0.5})
    before = bits(other.turned)
    opt.zero_grad()
    opt.backward(net.loss() + other.turned.float().sum())
    opt.step()
    assert bits(other.turned) != before
    assert len(opt.masters.masters) == 8
    with pytest.raises(polyamp.errors.InvalidValueError, match="more than one parameter group"):
        opt.add_param_group({"params": other.turned})
    assert len(opt.param_groups) == 2


def test_a_first_group_of_16_bits_that_comes_later_is_kept_as_was_asked_for() -> None:
    with pytest.warns(polyamp.PolyampWarning, match="no parameter has 16 bits"):
        opt = wrap(Net(torch.float32), "sgd", "remainder")
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]})
    assert opt.param_groups[1]["params"][0].isnan().all()


def test_float16_has_no_remainders() -> None:
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), half], lr=0.1)
    with pytest.raises(polyamp.errors.InvalidValueError, match="only bfloat16"):
        LossScaledOptimizer(inner, master_weights="remainder")
    assert [param.dtype for param in inner.param_groups[0]["params"]] == [torch.bfloat16, torch.float16]
    net = Net()
    opt = wrap(net, "sgd", "remainder")
    with pytest.raises(polyamp.errors.InvalidValueError, match="only bfloat16"):
        opt.add_param_group({"params": [half]})
    assert len(opt.param_groups) == 1
    train(net, opt)


@pytest.mark.parametrize("kind", ["kahan", 3, 0.5])
def test_unknown_ways_to_keep_masters_are_refused(kind: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="unknown way to keep master weights"):
        wrap(Net(), "sgd", kind)


@temporary_kinds
def test_many_blocks_do_what_one_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parted = Net(), Net()
    opts = [wrap(whole, "adamw", kind)]
    monkeypatch.setattr(master_storage, "_LARGEST", 20)
    opts.append(wrap(parted, "adamw", kind))
    for net, opt in zip((whole, parted), opts, strict=True):
        train(net, opt, 3)
    assert len(opts[1].masters._storage._blocks) > len(opts[0].masters._storage._blocks)
    states = [memory(net, opt) for net, opt in zip((whole, parted), opts, strict=True)]
    assert states[0] == states[1]
    assert [len(state[0]) for state in states] == [9, 9]
