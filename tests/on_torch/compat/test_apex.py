"""The names of Apex beside `amp`: PyTorch's own with Apex' arguments, or refused with what to write."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.backends.torch import apex
from polyamp.backends.torch.apex import TABLE, modules
from polyamp.errors import PolyampDeprecationWarning, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampDeprecationWarning")

NAMES = [(module, name) for module, names in TABLE.items() for name in names]
PAGE = Path(__file__).parents[3] / "docs" / "migrate" / "apex.md"
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def named(module: str, name: str) -> Any:
    return getattr(modules()[module], name)


def test_the_modules_are_reached_from_their_parents() -> None:
    assert modules()["apex"].amp is apex.amp
    assert modules()["apex.amp._amp_state"]._amp_state is apex.amp._amp_state
    for name, module in modules().items():
        parent, _, last = name.rpartition(".")
        assert not parent or getattr(modules()[parent], last) is module


Made = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[dict[str, Any], Made]] = {
    "FusedAdam": ({"lr": 0.1, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1)),
    "FusedAdam, L2": (
        {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": False},
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1),
    ),
    "FusedSGD": ({"lr": 0.1, "momentum": 0.9, "set_grad_none": True}, lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "FusedAdagrad": ({"eps": 1e-3}, lambda p: torch.optim.Adagrad(p, eps=1e-3)),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers_are_torchs(case: str) -> None:
    options, expected = OPTIMIZERS[case]
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    twin.load_state_dict(model.state_dict())
    ours, theirs = (
        named("apex.optimizers", case.partition(",")[0])(model.parameters(), **options),
        expected(twin.parameters()),
    )
    assert type(ours) is type(theirs)
    for _ in range(3):
        for one, opt in ((model, ours), (twin, theirs)):
            opt.zero_grad()
            one(X).square().mean().backward()
            opt.step()
    assert torch.equal(model.weight, twin.weight)


@pytest.mark.parametrize(("name", "twin"), [("FusedLayerNorm", nn.LayerNorm(4)), ("FusedRMSNorm", nn.RMSNorm(4, 1e-5))])
def test_norms_are_torchs(name: str, twin: nn.Module) -> None:
    layer = named("apex.normalization.fused_layer_norm", name)(4, memory_efficient=True)
    assert isinstance(layer, type(twin))
    assert named("apex.normalization", f"Mixed{name}") is named("apex.normalization", name)
    assert torch.equal(layer(X), twin(X))


def test_batch_norms_are_converted_to_torchs() -> None:
    parallel = modules()["apex.parallel"]
    model = parallel.convert_syncbn_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert type(model[1]) is nn.SyncBatchNorm is parallel.SyncBatchNorm
    assert parallel.create_syncbn_process_group(0) is None


def test_data_parallel_training_is_torchs(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        parallel = modules()["apex.parallel"].DistributedDataParallel
        model = parallel(nn.Linear(4, 2), delay_allreduce=True, num_allreduce_streams=2)
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        assert model.find_unused_parameters
        model(X).sum().backward()
        for option in (
            {"gradient_average": False},
            {"gradient_predivide_factor": 2.0},
            {"allreduce_always_fp32": True},
        ):
            with pytest.raises(UnsupportedError, match=next(iter(option))):
                parallel(nn.Linear(4, 2), **option)
    finally:
        torch.distributed.destroy_process_group()


def test_a_network_is_converted_as_at_o2() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    expected = polyamp.convert(copy.deepcopy(model), "O2")
    half = named("apex.fp16_utils", "network_to_half")(model)
    assert {name: value.dtype for name, value in half.state_dict().items()} == {
        name: value.dtype for name, value in expected.state_dict().items()
    }


@pytest.mark.parametrize("option", [{"bias_correction": False}, {"capturable": True}, {"master_weights": True}])
def test_options_that_torch_does_not_have_are_refused(option: dict[str, bool]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(option))):
        named("apex.optimizers", "FusedAdam")(nn.Linear(4, 2).parameters(), **option)


MISSING = [(module, name) for module, name in NAMES if name not in vars(apex)]


@pytest.mark.parametrize(("module", "name"), MISSING)
def test_what_torch_does_not_have_is_refused_where_it_is_used(module: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(TABLE[module][name])):
        named(module, name)(nn.Linear(4, 2).parameters())
    assert not named(module, name).available


def test_each_name_shows_once_what_to_write_instead() -> None:
    for name in ("FusedLayerNorm", "FusedRMSNorm"):
        with pytest.warns(PolyampDeprecationWarning, match=re.escape(TABLE["apex.normalization"][name])) as caught:
            named("apex.normalization", name)(4)
        assert caught[0].filename == __file__


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_page_has_every_name(module: str, name: str) -> None:
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{module}.{name}`"))
    assert re.split("[;:,] ", TABLE[module][name])[0] in row.replace("`", "")
