"""State dicts: with and without masters, in torch.distributed.checkpoint's form, of plain optimizers, and bad ones."""

import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import polyamp
from polyamp import LossScale
from polyamp.backends.torch import LossScaledOptimizer
from support.harness_torch import OPTIMIZERS, contents, linear, loss_of
from support.torch_kinds import Net, bits, memory, train

KINDS = [("sgd", torch.float32, None), ("adam", torch.float16, None), ("adamw_fused", torch.bfloat16, True)]
OPTIONS = {
    "as_it_is": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "on_the_cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "on_disk": StateDictOptions(),
}


def fresh(dtype: torch.dtype, name: str = "adamw_fused", kind: Any = None) -> tuple[Net, LossScaledOptimizer]:
    net = Net(dtype, usual=True)
    scale = LossScale(init=64.0, interval=3)
    return net, LossScaledOptimizer(OPTIMIZERS[name](net.parameters()), scale, master_weights=kind)


def trained(dtype: torch.dtype, name: str = "adamw_fused", kind: Any = None) -> tuple[Net, LossScaledOptimizer]:
    net, opt = fresh(dtype, name, kind)
    train(net, opt, 2)
    train(net, opt, overflow=True)
    return net, opt


def check_goes_on(pairs: list[tuple[Net, LossScaledOptimizer]]) -> None:
    """Both have the same bits now, and after some more steps."""
    for _ in range(2):
        (net, opt), (other_net, other) = pairs
        assert memory(other_net, other) == memory(net, opt)
        assert bits(other.state_dict()) == bits(opt.state_dict())
        for each, its in pairs:
            each.random.manual_seed(5)
            train(each, its, 4)


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
    other_net, other = fresh(torch.bfloat16, name, kind)
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
    other_net, other = fresh(after)
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
        ({"options": {"lr"}}, "lacks options"),
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
    for option in change.get("options", ()):
        del state["param_groups"][0][option]
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


# --- in the form of torch.distributed.checkpoint ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", OPTIONS)
@pytest.mark.parametrize(("name", "dtype", "kind"), KINDS)
def test_distributed_checkpoints_round_trip(
    name: str, dtype: torch.dtype, kind: Any, form: str, tmp_path: Path
) -> None:
    options = OPTIONS[form]
    net, opt = trained(dtype, name, kind)
    opt.zero_grad()
    opt.backward(net.loss(), loss_id=("other", 1))
    net.turned.grad[0, 0] = torch.inf
    opt.step()
    opt.zero_grad()
    before = memory(net, opt), bits(opt.state_dict())
    saved = copy.deepcopy(get_state_dict(net, opt, options=options))  # which shares memory with the optimizer
    assert (memory(net, opt), bits(opt.state_dict())) == before
    other_net, other = fresh(dtype, name, kind)
    if form == "on_disk":
        other.scale(torch.ones(()), loss_id=("other", 1))
        dcp.save({"all": list(saved)}, checkpoint_id=tmp_path)
        saved = get_state_dict(other_net, other, options=options)
        dcp.load({"all": list(saved)}, checkpoint_id=tmp_path)
    set_state_dict(other_net, other, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    for group in other.param_groups:
        group.update((key, tuple(group[key])) for key in ("betas",) if key in group)  # torch gathers it as a list
    assert other.scaler.of(("other", 1)).state == opt.scaler.of(("other", 1)).state
    check_goes_on([(net, opt), (other_net, other)])


@pytest.mark.parametrize(("name", "dtype", "kind"), [*KINDS, ("third_party", torch.bfloat16, True)])
@pytest.mark.parametrize("moment", ["new", "scaled", "unscaled", "skipped"])
def test_asking_changes_nothing(name: str, dtype: torch.dtype, kind: Any, moment: str) -> None:
    pairs = [fresh(dtype, name, kind) for _ in range(2)]
    for asked in (True, False):
        net, opt = pairs[not asked]
        if moment != "new":
            opt.backward(net.loss())
        if moment == "skipped":
            net.turned.grad[0, 0] = torch.inf
            opt.step()
        elif moment == "unscaled":
            opt.unscale_()
        if asked:
            get_optimizer_state_dict(net, opt)
            get_optimizer_state_dict(net, opt, options=OPTIONS["flat"])
        if moment in ("scaled", "unscaled"):
            opt.step()
            assert opt.last_step
    check_goes_on(pairs)


def test_an_optimizer_that_needs_a_closure_is_saved() -> None:
    models = [linear(), linear()]
    opts = [LossScaledOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=2)) for model in models]

    def train_one(model: torch.nn.Linear, opt: LossScaledOptimizer) -> None:
        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(model)
            opt.backward(loss)
            return loss

        opt.step(closure)

    train_one(models[0], opts[0])
    options = StateDictOptions(strict=False)
    saved = copy.deepcopy(get_state_dict(models[0], opts[0], options=options))
    set_state_dict(models[1], opts[1], model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    for model, opt in zip(models, opts, strict=True):
        train_one(model, opt)
    assert bits(list(models[0].parameters())) == bits(list(models[1].parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", [None, True])
def test_a_checkpoint_of_skipped_steps_alone_is_read(kind: Any, flat: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    pairs = [fresh(torch.float32 if kind is None else torch.float16, "adamw_fused", kind) for _ in range(2)]
    train(*pairs[0], overflow=True)
    saved, read = (get_optimizer_state_dict(*pair, options=options) for pair in pairs)
    dcp.save(saved, checkpoint_id=tmp_path)
    dcp.load(read, checkpoint_id=tmp_path)
    set_optimizer_state_dict(*pairs[1], read, options=options)
    assert not pairs[1][1].inner.state
    check_goes_on(pairs)


def with_muon(dtype: torch.dtype) -> tuple[torch.nn.Module, list[LossScaledOptimizer]]:
    """Matrices are trained by Muon, vectors by AdamW, each with its own loss scale."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).to(dtype)
    matrices, vectors = ([param for param in model.parameters() if param.dim() == dim] for dim in (2, 1))
    plain = torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(vectors, lr=0.1)
    return model, [LossScaledOptimizer(each, LossScale(init=64.0)) for each in plain]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_several_optimizers_are_saved_in_one_call(dtype: torch.dtype, flat: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    pairs = [with_muon(dtype) for _ in range(2)]

    def train_both(model: torch.nn.Module, opts: list[LossScaledOptimizer], overflow_at: int | None = None) -> None:
        for number, opt in enumerate(opts):
            opt.zero_grad()
            opt.backward(model(torch.ones(3, 4, dtype=dtype)).float().square().mean())
            if number == overflow_at:
                next(opt.model_parameters()).grad.fill_(torch.nan)
            opt.step()

    for overflow_at in (None, 1, None):
        train_both(*pairs[0], overflow_at)
    saved, read = (get_optimizer_state_dict(*pair, options=options) for pair in pairs)
    dcp.save({"model": pairs[0][0].state_dict(), "optimizers": saved}, checkpoint_id=tmp_path)
    model = pairs[1][0].state_dict()
    dcp.load({"model": model, "optimizers": read}, checkpoint_id=tmp_path)
    pairs[1][0].load_state_dict(model)
    set_optimizer_state_dict(*pairs[1], read, options=options)
    assert [opt.loss_scale for opt in pairs[1][1]] == [64.0, 32.0]
    for _ in range(2):
        one, other = (bits([list(model.parameters()), *(opt.state_dict() for opt in opts)]) for model, opts in pairs)
        assert one == other
        for pair in pairs:
            train_both(*pair)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checkpoint_of_a_plain_run_is_read_by_a_plain_optimizer_first(dtype: torch.dtype, tmp_path: Path) -> None:
    plain_net, net = Net(dtype, usual=True), Net(dtype, usual=True)
    plain = OPTIMIZERS["adam"](plain_net.parameters())
    plain_net.loss().backward()
    plain.step()
    plain.zero_grad()
    plain_net.unused.requires_grad_(False)
    net.unused.requires_grad_(False)
    saved = dict(zip(("model", "optimizer"), get_state_dict(plain_net, plain), strict=True))
    dcp.save(saved, checkpoint_id=tmp_path)
    first = OPTIMIZERS["adam"](net.parameters())
    read = dict(zip(("model", "optimizer"), get_state_dict(net, first), strict=True))
    dcp.load(read, checkpoint_id=tmp_path)
    opt = LossScaledOptimizer(first, LossScale(init=64.0))  # as the page of checkpoints shows it
    with pytest.warns(polyamp.PolyampWarning, match="that was not wrapped"):
        set_state_dict(net, opt, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    assert bits(list(net.parameters())) == bits(list(plain_net.parameters()))
    moment = opt.inner.state[opt.param_groups[0]["params"][0]]["exp_avg"]
    assert torch.equal(moment, plain.state[plain_net.image]["exp_avg"].float())
    train(net, opt, 2)


def test_a_state_in_the_form_of_checkpoints_loads_anywhere() -> None:
    net, opt = trained(torch.float16, "adam", None)
    opt.zero_grad()
    saved = get_optimizer_state_dict(net, opt)
    other_net, other = fresh(torch.float16, "adam", None)
    other_net.load_state_dict(net.state_dict())
    other.load_state_dict(saved)
    assert bits(other.state_dict()) == bits(opt.state_dict())
    plain_net = Net(torch.float32, usual=True)
    plain = OPTIMIZERS["adam"](plain_net.parameters())
    set_optimizer_state_dict(plain_net, plain, saved)
    assert plain.state_dict()["state"][0]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("rest", [3, "", "{", "[]", '{"loss_scale": 3}'])
def test_a_bad_state_in_the_form_of_checkpoints_changes_nothing(rest: Any) -> None:
    net, opt = trained(torch.float32, "adam", None)
    opt.zero_grad()
    saved = get_optimizer_state_dict(net, opt)
    saved["param_groups"][0]["polyamp"] = rest
    before = memory(net, opt)
    with pytest.raises(polyamp.errors.StateError):
        set_optimizer_state_dict(net, opt, saved)
    assert memory(net, opt) == before


# --- plain optimizers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw_fused", "third_party"])
def test_the_state_of_a_plain_optimizer_is_taken_with_one_warning(name: str) -> None:
    polyamp.errors.forget_warnings()
    plain_model, model = linear(), linear()
    plain = OPTIMIZERS[name](plain_model.parameters())
    for _ in range(2):
        plain.zero_grad()
        loss_of(plain_model).backward()
        plain.step()
    opt = polyamp.wrap_optimizer(OPTIMIZERS[name](model.parameters()), "mixed_float16")
    opt.loss_scale = 8.0
    model.load_state_dict(plain_model.state_dict())
    with pytest.warns(polyamp.PolyampWarning, match="that was not wrapped"):
        opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert opt.loss_scale == 65536.0
    for _ in range(2):
        assert contents(opt) == contents(plain)
        for each, its in ((plain_model, plain), (model, opt)):
            its.zero_grad()
            loss = loss_of(each)
            opt.backward(loss) if its is opt else loss.backward()
            its.step()


@pytest.mark.parametrize("name", ["adamw", "momentum", "sgd"])
def test_a_state_that_has_lost_its_moments_is_reported(name: str) -> None:
    """As torch.distributed.checkpoint reads one into the state of a new optimizer, which has no entries for moments."""
    opt, resumed = (polyamp.wrap_optimizer(OPTIMIZERS[name](linear().parameters()), "mixed_float16") for _ in range(2))
    for param in opt.model_parameters():
        param.grad = torch.ones_like(param)
    opt.step(scaled=True)
    read = {**resumed.state_dict(), "loss_scale": opt.state_dict()["loss_scale"]}
    keeps = name != "sgd"
    with pytest.warns(polyamp.PolyampWarning, match="get_state_dict") if keeps else contextlib.nullcontext():
        resumed.load_state_dict(read)
    assert not resumed.state
    resumed.load_state_dict(opt.state_dict())


def test_a_state_of_another_policy_is_loaded_and_reported() -> None:
    def wrapped(policy: str) -> Any:
        return polyamp.wrap_optimizer(torch.optim.SGD([torch.ones(2)], lr=0.1), policy, loss_scale=8.0)

    saved = wrapped("mixed_float16").state_dict()
    assert saved["policy"] == "mixed_float16"
    wrapped("mixed_float16").load_state_dict(saved)
    with pytest.warns(polyamp.PolyampWarning, match="for mixed_float16, and goes on in one for mixed_bfloat16"):
        wrapped("mixed_bfloat16").load_state_dict(saved)
