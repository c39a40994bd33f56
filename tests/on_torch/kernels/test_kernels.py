"""The operators of a loss-scaled step, compiled and in PyTorch, on every device: what they must do."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyamp import LossScale, advance
from polyamp.backends.torch.kernels.control import APPLIED, decode
from polyamp.backends.torch.kernels.operators import SCHEMAS
from polyamp.backends.torch.kernels.optimizers import SGD, Adam, Settings
from support.torch_operators import (
    ADAM,
    PLAIN_SGD,
    REFERENCE,
    SCALE,
    SGDS,
    SHAPES,
    STORAGES,
    Problem,
    same,
)

RULES = {"adam": ADAM, "sgd": SGDS, "plain_sgd": PLAIN_SGD}
LOW = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, *LOW]

rules = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
storages = pytest.mark.parametrize("storage", STORAGES)


@pytest.fixture(params=["reference", "compiled"])
def operators(request: pytest.FixtureRequest) -> Any:
    return REFERENCE if request.param == "reference" else request.getfixturevalue("compiled")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- a step, against float64 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offsets", "max_norm"),
    [((0, 0), math.inf), ((1, 1), 1.0), ((0, 3), 1.0), ((1, 0), math.inf)],
    ids=["aligned", "misaligned", "only gradients", "all but gradients"],
)
@storages
@rules
def test_a_step_is_that_of_float64(
    operators: Any, device: str, rules: Any, storage: str, max_norm: float, offsets: tuple[int, int]
) -> None:
    offset, grad_offset = offsets
    problem = Problem(rules, storage, device=device, max_norm=max_norm, offset=offset, grad_offset=grad_offset)
    for _ in range(3):
        problem.new_gradients()
        values, firsts, seconds = problem.in_float64()
        problem.step(operators)
        for found, expected in zip(problem.values(), values, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=2e-7, atol=3e-7)
        for moments, wanted in ((problem.firsts, firsts), (problem.seconds, seconds)):
            for found, expected in zip(moments, wanted, strict=bool(moments)):
                torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=3e-7)
    assert problem.report[APPLIED : APPLIED + 2].tolist() == [1, 1]


def test_tensors_may_have_had_different_numbers_of_steps(operators: Any, device: str) -> None:
    problem = Problem(ADAM, device=device)
    for index, step in enumerate(problem.steps):
        step.fill_(100.0 * (index % 4))
    before = [step.item() for step in problem.steps]
    expected = problem.in_float64()[0]
    problem.step(operators)
    for found, value in zip(problem.params, expected, strict=True):
        torch.testing.assert_close(found.double(), value, rtol=1e-6, atol=3e-7)
    assert [step.item() - 1 for step in problem.steps] == before


@pytest.mark.parametrize("storage", ["float16_master", "bfloat16_master"])
@rules
def test_low_precision_copies_are_those_of_float32(operators: Any, device: str, rules: Any, storage: str) -> None:
    """However parameters are kept, the arithmetic is the same: bit for bit."""
    problem, wide = Problem(rules, storage, device=device), Problem(rules, "float32", device=device)
    for _ in range(3):
        problem.new_gradients()
        wide.params = problem.values()
        wide.grads = [grad.float() for grad in problem.grads]
        problem.step(operators)
        wide.step(operators)
        for param, master, value in zip(problem.params, problem.masters, wide.params, strict=True):
            assert same([param, master], [value.to(param.dtype), value])


@pytest.mark.parametrize("storage", ["float16_master", "bfloat16_master"])
@rules
def test_masters_follow_what_was_written_to_their_parameters(
    operators: Any, device: str, rules: Any, storage: str
) -> None:
    problem = Problem(rules, storage, device=device)
    problem.step(operators)
    other = problem.copy()
    for param, master in zip(problem.params, problem.masters, strict=True):
        written = param.flatten()[::3]
        param.flatten()[::3] = master.flatten()[::3] = written + 1  # the master of each third element, by hand
    for param in other.params:
        param.flatten()[::3] += 1
    for one in (problem, other):
        one.step(operators)
    assert same(problem.bits(), other.bits())


@storages
@rules
def test_compiled_and_reference_agree(compiled: Any, rules: Any, storage: str) -> None:
    """Bit for bit, but for Adam's square root, which PyTorch's on the CPU does not always round to nearest."""
    one = Problem(rules, storage, max_norm=3.0)
    other = one.copy()
    for step in range(4):
        one.new_gradients()
        if step == 2:
            one.grads[2][3] = math.nan
        other.grads = [grad.clone() for grad in one.grads]
        one.step(compiled)
        other.statistics(REFERENCE)
        torch.testing.assert_close(one.stats, other.stats, rtol=1e-6, atol=0, equal_nan=True)
        other.stats.copy_(one.stats)
        other.apply(REFERENCE)
        assert torch.equal(one.report, other.report)
        assert torch.equal(one.control, other.control)
        if isinstance(rules[0], SGD):
            assert same(one.bits(), other.bits())
        else:
            for found, expected in zip(one.values(), other.values(), strict=True):
                torch.testing.assert_close(found, expected, rtol=2e-7 * (step + 1), atol=2e-8 * (step + 1))


@pytest.mark.parametrize(
    ("rule", "plain"),
    [
        (Adam(1e-2, 0.9, 0.999, 1e-8, 0.0, 0), lambda p: torch.optim.Adam(p, 1e-2)),
        (Adam(0.1, 0.9, 0.99, 1e-3, 0.1, 2), lambda p: torch.optim.Adam(p, 0.1, (0.9, 0.99), 1e-3, 0.1, maximize=True)),
        (Adam(1e-2, 0.9, 0.999, 1e-6, 0.1, 1), lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-6, weight_decay=0.1)),
        (SGD(0.1, 0.0, 0.0, 0), lambda p: torch.optim.SGD(p, 0.1)),
        (SGD(0.1, 0.9, 0.01, 0), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
        (SGD(0.1, 0.9, 0.0, 3), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, maximize=True)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_those_of_torch(operators: Any, device: str, rule: Any, plain: Any, fused: bool) -> None:
    problem = Problem([rule], device=device, max_norm=2.0)
    params = [torch.nn.Parameter(param.clone()) for param in problem.params]
    optimizer = plain(params)
    optimizer.param_groups[0]["fused"] = fused
    for _ in range(8):
        problem.new_gradients()
        for param, grad in zip(params, problem.grads, strict=True):
            param.grad = grad / SCALE
        torch.nn.utils.clip_grad_norm_(params, 2.0)
        optimizer.step()
        problem.step(operators)
    for found, expected in zip(problem.params, params, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=3e-6, atol=3e-6)


def test_learning_rates_on_the_device_replace_those_of_the_rules(operators: Any, device: str) -> None:
    one, other = Problem(ADAM, device=device), Problem([rule._replace(lr=0.5) for rule in ADAM], device=device)
    other.lrs = [torch.tensor(rule.lr, device=device) for rule in ADAM]
    one.step(operators)
    other.step(operators)
    assert same(one.bits(), other.bits())


# --- skipped steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "bad"), [((2, 0), math.inf), ((6, -1), -math.inf), ((7, 20_000), math.nan)])
@storages
@rules
def test_a_skipped_step_keeps_every_bit(
    operators: Any, device: str, rules: Any, storage: str, bad: float, where: tuple[int, int]
) -> None:
    problem = Problem(rules, storage, device=device)
    problem.step(operators)
    before = problem.bits()
    problem.grads[where[0]].flatten()[where[1]] = bad
    problem.step(operators)
    assert same(problem.bits(), before)
    assert decode(problem.report.tolist())[0] == (SCALE / 2, 0, 0, 1, 1, 2, 0, 1, 0, SCALE)
    assert problem.report[APPLIED:].tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("found", [2.0, 0.5, -1.0, math.nan, math.inf])
def test_any_count_but_zero_skips(operators: Any, device: str, found: float) -> None:
    """Ranks add their counts up; a kernel that looks for 1 applies the step where two found one each."""
    problem = Problem(ADAM, device=device)
    before = problem.bits()
    problem.statistics(operators)[1] = found
    problem.apply(operators)
    assert same(problem.bits(), before)


# --- numbers ---------------------------------------------------------------------------------------------------------


def copied(operators: Any, values: Tensor, storage: str) -> Tensor:
    """The 16-bit copies of float32 values, by a step from zero to them: minus lr times momentum."""
    problem = Problem([SGD(-1.0, 1.0, 0.0, 0)], storage, [tuple(values.shape)], device=values.device.type)
    problem.params[0].fill_(-0.0)
    problem.masters[0].fill_(-0.0)
    problem.firsts[0].copy_(values)
    problem.grads[0].fill_(-0.0)  # which keeps the sign of zeros
    problem.step(operators)
    return problem.params[0]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("low_half", [0, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001])
def test_copies_are_rounded_as_torch_rounds(operators: Any, device: str, dtype: torch.dtype, low_half: int) -> None:
    """Every upper half of a float32, with low halves on both sides of ties of either format."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device) << 16
    values = (upper | low_half).view(torch.float32)
    values = values[~values.isnan()]
    found = copied(operators, values, {torch.float16: "float16_master", torch.bfloat16: "bfloat16_master"}[dtype])
    assert torch.equal(found.view(torch.int16), values.to(dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", LOW)
def test_every_16_bit_gradient_is_read_exactly(operators: Any, device: str, dtype: torch.dtype) -> None:
    grads = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    grads = grads[grads.isfinite()]
    problem = Problem([SGD(1.0, 0.5, 0.0, 0)], "float16_master", [tuple(grads.shape)], device=device)
    problem.params = [torch.zeros_like(grads)]
    problem.grads, problem.scale = [grads.clone()], torch.tensor(1.0, device=device)
    problem.step(operators)
    assert torch.equal(problem.firsts[0], grads.float())


@storages
def test_zeros_keep_their_sign(operators: Any, device: str, storage: str) -> None:
    problem = Problem([SGD(0.5, 0.0, 0.0, 0)], storage, [(9,)], device=device)
    for tensor in (*problem.params, *problem.masters):
        tensor.zero_()
    for tensor in (*problem.params, *[master for master in problem.masters if master.is_floating_point()]):
        tensor.neg_()
    problem.grads[0].zero_()
    problem.step(operators)
    assert problem.values()[0].signbit().all()
    assert problem.params[0].signbit().all()


def test_subnormal_gradients_count(operators: Any, device: str) -> None:
    """Nothing is flushed to zero: 2**-149 is multiplied as any other number."""
    problem = Problem([SGD(1.0, 0.0, 0.0, 0)], "float32", [(9,)], device=device)
    problem.params[0].zero_()
    problem.grads[0].fill_(2.0**-143)
    problem.step(operators)
    assert problem.params[0].tolist() == [-(2.0**-149)] * 9


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics(operators: Any, device: str, dtype: torch.dtype, offset: int) -> None:
    problem = Problem(ADAM, device=device, offset=offset)
    problem.dtype = dtype
    problem.new_gradients()
    squares = sum((grad.double() / SCALE).square().sum().item() for grad in problem.grads)
    problem.stats.fill_(7.0)
    problem.losses = [torch.tensor(1.0, device=device), torch.tensor([0.5, 2.0], dtype=dtype, device=device)]
    assert problem.statistics(operators).tolist() == pytest.approx([squares, 0, 0], rel=1e-6)
    assert problem.workspace[-1] == 0


@pytest.mark.parametrize("as_loss", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_of_what_is_not_finite_are_not_counted(
    operators: Any, device: str, dtype: torch.dtype, as_loss: bool
) -> None:
    """Kernels look at eight at once: none, some or all are bad, or finite and too large to be squared."""
    large = torch.finfo(dtype).max
    bad = [math.inf, -math.inf, math.nan]
    eights = [[1.0] * 8, [large, -large] * 4, [1.0, *bad, large, 0.0, -0.0, 1.0], [*bad, *bad, *bad[:2]]]
    numbers = torch.tensor([*eights, *eights], dtype=dtype, device=device).flatten()[:-3]
    problem = Problem(ADAM, shapes=[], device=device)
    problem.grads, problem.losses = ([], [numbers]) if as_loss else ([numbers], [])
    counted = int(numbers.isfinite().logical_not().sum())
    assert problem.statistics(operators)[1:].tolist() == ([0, counted] if as_loss else [counted, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_finite_gradients_are_finite(operators: Any, device: str, dtype: torch.dtype) -> None:
    problem = Problem(ADAM, shapes=[(20_001,)], device=device)
    problem.grads = [torch.ones(20_001, dtype=dtype, device=device)]
    problem.grads[0][::2] = 2.0**127
    squares = 10_001 * (2.0**127 / SCALE) ** 2
    assert problem.statistics(operators).tolist() == pytest.approx([squares, 0, 0], rel=1e-6)


def test_statistics_are_the_same_each_time(operators: Any, device: str) -> None:
    problem = Problem(ADAM, shapes=[(100_003,), *SHAPES] * 3, device=device)
    first = problem.statistics(operators).clone()
    assert all(torch.equal(problem.statistics(operators), first) for _ in range(5))


# --- unscaling and clipping for any optimizer ------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
def test_unscaling_rounds_once(operators: Any, device: str, offset: int, max_norm: float) -> None:
    problem = Problem(ADAM, device=device, offset=offset)
    grads = [problem._place(grad.to(dtype)) for grad, dtype in zip(problem.grads, FLOATS * 3, strict=False)]
    problem.grads = grads
    norm = math.sqrt(problem.statistics(operators)[0].item())
    factor = torch.tensor(min(1.0, max_norm / (norm + 1e-6)) / SCALE).float().item()
    expected = [(grad.float() * factor).to(grad.dtype) for grad in grads]
    operators.unscale_clip_(grads, problem.scale, problem.stats, max_norm)
    assert same(grads, expected)


def test_a_norm_that_is_nan_spoils_all_gradients_as_in_torch(operators: Any, device: str) -> None:
    """Where nobody asked for a test, stats[1] is 0 whatever the gradients are."""
    grads, expected = ([torch.ones(3, device=device), torch.full((2,), math.nan, device=device)] for _ in range(2))
    params = [torch.zeros_like(grad, requires_grad=True) for grad in expected]
    for param, grad in zip(params, expected, strict=True):
        param.grad = grad
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    stats = torch.tensor([math.nan, 0.0, 0.0], dtype=torch.float64, device=device)
    operators.unscale_clip_(grads, torch.tensor(1.0, device=device), stats, 1.0)
    torch.testing.assert_close(grads, expected, equal_nan=True)


@pytest.mark.parametrize(("scale", "found"), [(1.0, 0.0), (SCALE, 1.0)], ids=["nothing to do", "skipped"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_unscaling_leaves_alone_what_need_not_change(
    operators: Any, device: str, dtype: torch.dtype, scale: float, found: float
) -> None:
    numbers = [-0.0, 3.0, *[math.nan, -math.nan, math.inf] * int(found)] * 3
    grads = torch.tensor(numbers, device=device).to(dtype)
    whole = {2: torch.int16, 4: torch.int32}[grads.element_size()]
    before = grads.view(whole).clone()
    stats = torch.tensor([4.0, found, 0.0], dtype=torch.float64, device=device)
    operators.unscale_clip_([grads], torch.tensor(scale, device=device), stats, 100.0)
    assert torch.equal(grads.view(whole), before)


# --- many, few, none -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("count", [1, 576, 577, 1153])
@rules
def test_any_number_of_tensors(compiled: Any, device: str, rules: Any, count: int, finite: bool) -> None:
    """In several launches, every tensor has its own step count."""
    problem = Problem(rules, "bfloat16_master", [(1 + index % 5,) for index in range(count)], device=device)
    wide = problem.copy()
    wide.params, wide.masters, wide.grads = problem.values(), [], [grad.float() for grad in problem.grads]
    wide.step(compiled)
    if not finite:
        problem.grads[count // 2].fill_(math.nan)
    before = problem.bits()
    problem.step(compiled)
    assert problem.report[APPLIED : APPLIED + 2].tolist() == [finite, 1]
    assert finite or same(problem.bits(), before)
    assert not finite or same(problem.masters, wide.params)
    assert {step.item() for step in problem.steps} == {float(finite and isinstance(rules[0], Adam))}


@pytest.mark.parametrize("count", [24, 25, 60])
def test_any_number_of_groups(operators: Any, device: str, count: int) -> None:
    rules = [ADAM[0]._replace(lr=1e-3 * (index + 1)) for index in range(count)]
    problem = Problem(rules, shapes=[(5,)] * (2 * count), device=device)
    expected = problem.in_float64()[0]
    problem.step(operators)
    for found, value in zip(problem.params, expected, strict=True):
        torch.testing.assert_close(found.double(), value, rtol=1e-6, atol=1e-7)


def test_statistics_of_more_tensors_than_a_launch_takes(operators: Any, device: str) -> None:
    grads = [torch.full((3,), SCALE, device=device) for _ in range(5000)]
    problem = Problem(ADAM, device=device)
    problem.grads, grads[4321][1] = grads, math.inf
    assert problem.statistics(operators)[1:].tolist() == [1, 0]
    grads[4321][1] = SCALE
    assert problem.statistics(operators).tolist() == [15_000, 0, 0]


@rules
def test_without_tensors_the_loss_scale_moves_all_the_same(operators: Any, device: str, rules: Any) -> None:
    problem = Problem(rules, shapes=[], device=device, config=LossScale(init=SCALE, interval=1))
    problem.stats.fill_(3.0)
    problem.step(operators)
    assert problem.stats.tolist() == [0, 0, 0]
    assert decode(problem.report.tolist())[0] == (2 * SCALE, 0, 1, 0, 0, 1, 1, 0, 1, 0)
    operators.unscale_clip_([], problem.scale, problem.stats, 1.0)


# --- the loss scale --------------------------------------------------------------------------------------------------

configs = st.builds(
    LossScale,
    init=st.sampled_from([1.0, 2.0**16, 3.7]),
    growth=st.sampled_from([2.0, 1.5, 1e30]),
    backoff=st.sampled_from([0.5, 0.7, 1e-30]),
    min=st.sampled_from([2.0**-14, 0.9]),
    max=st.sampled_from([2.0**24, 1e38, 7e4]),
    interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    consecutive=st.booleans(),
    late_growth=st.sampled_from(["never", "after_overflow", "always"]),
)


@settings(max_examples=200)
@given(configs, st.lists(st.booleans(), min_size=1, max_size=12))
def test_the_loss_scale_is_advanced_as_everywhere(compiled: Any, config: LossScale, outcomes: list[bool]) -> None:
    problem = Problem(SGDS, shapes=[], config=config)
    config = config.in_float32()
    state = config.initial_state()
    problem.set_loss_scale(state)
    problem.settings = torch.tensor(Settings.of(config), dtype=torch.float64)
    for finite in outcomes:
        state = advance(config, state, finite)
        problem.stats[1] = float(not finite)
        problem.apply(compiled)
        assert decode(problem.report.tolist())[0] == state
        assert problem.report[APPLIED] == finite


# --- what is refused, and what PyTorch asks of operators -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("grads", lambda all: [*all[:3], all[3].double(), *all[4:]], "grads has another dtype"),
        ("grads", lambda all: [*all[:2], all[2].new_zeros(14)[::2], *all[3:]], "grads overlaps itself or has gaps"),
        ("firsts", lambda all: all[:-1], "exp_avgs has 7 tensors, not 8"),
        ("firsts", lambda all: [*all[:3], all[3].flatten(), *all[4:]], "exp_avgs has not the shape and strides"),
        ("masters", lambda all: [*all[:3], all[3].t().contiguous().t(), *all[4:]], "masters has not the shape and str"),
        ("masters", lambda all: [one.short() for one in all], "masters has another dtype"),
        ("groups", lambda one: one + 1, "groups has 3, and there are 3 rules"),
        ("control", lambda one: one[:15], "control has 15 elements, not 16"),
        ("settings", lambda one: one.float(), "settings has another dtype"),
    ],
)
def test_bad_arguments_change_nothing(compiled: Any, name: str, spoil: Any, message: str) -> None:
    problem = Problem(ADAM, "float16_master")
    before, control = problem.bits(), problem.control.clone()
    spoiled = problem.copy()
    for shared in ("params", "masters", "firsts", "seconds", "steps"):
        setattr(spoiled, shared, list(getattr(problem, shared)))
    spoiled.control = problem.control
    setattr(spoiled, name, spoil(getattr(spoiled, name)))
    with pytest.raises(RuntimeError, match=message):
        spoiled.apply(compiled)
    assert same(problem.bits(), before)
    assert torch.equal(problem.control, control)


@pytest.mark.parametrize("name", SCHEMAS)
def test_operators_are_what_their_schemas_say(compiled: Any, name: str) -> None:
    problem = Problem(SGDS if name == "sgd_step_" else ADAM, "bfloat16_master", [(7,), (3, 3)])
    taken: list[Any] = []
    recorder = {each: lambda *args, each=each: taken.append((each, args)) for each in SCHEMAS}
    recording = type("Recording", (), {key: staticmethod(value) for key, value in recorder.items()})
    problem.step(recording)
    recording.unscale_clip_(problem.grads, problem.scale, problem.stats, 1.0)
    (arguments,) = [args for called, args in taken if called == name]
    torch.library.opcheck(getattr(compiled, name).default, arguments)
