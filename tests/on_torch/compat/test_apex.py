"""The names of Apex beside `amp`: PyTorch's own with Apex' arguments, or refused with what to write."""

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
from polyamp.backends.torch.apex import TABLE, Missing, modules
from polyamp.errors import UnsupportedError

PAGE = Path(__file__).parents[3] / "docs" / "migrate" / "apex.md"
NAMES = [(module, name) for module, names in TABLE.items() for name in names]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def test_the_modules_are_reached_from_their_parents() -> None:
    assert modules()["apex"].amp is apex.amp
    assert modules()["apex.amp._amp_state"]._amp_state is apex.amp._amp_state
    assert modules()["apex.normalization.fused_layer_norm"].FusedLayerNorm is nn.LayerNorm
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
    "FusedSGD": ({"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "FusedAdagrad": ({"eps": 1e-3}, lambda p: torch.optim.Adagrad(p, eps=1e-3)),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers_are_torchs(case: str) -> None:
    options, expected = OPTIMIZERS[case]
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    twin.load_state_dict(model.state_dict())
    ours = TABLE["apex.optimizers"][case.partition(",")[0]](model.parameters(), **options)
    theirs = expected(twin.parameters())
    assert type(ours) is type(theirs)
    for one, opt in ((model, ours), (twin, theirs)):
        one(X).square().mean().backward()
        opt.step()
    assert torch.equal(model.weight, twin.weight)


@pytest.mark.parametrize("option", [{"bias_correction": False}, {"capturable": True}, {"master_weights": True}])
def test_options_that_torch_does_not_have_are_refused(option: dict[str, bool]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(option))):
        TABLE["apex.optimizers"]["FusedAdam"](nn.Linear(4, 2).parameters(), **option)


def test_layers_are_torchs() -> None:
    layer = TABLE["apex.normalization"]["FusedRMSNorm"](4)
    assert isinstance(layer, nn.RMSNorm)
    assert torch.equal(layer(X), nn.RMSNorm(4, eps=1e-5)(X))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    half = TABLE["apex.fp16_utils"]["network_to_half"](copy.deepcopy(model))
    expected = polyamp.convert(copy.deepcopy(model), "O2")
    assert [one.dtype for one in half.state_dict().values()] == [one.dtype for one in expected.state_dict().values()]
    assert type(TABLE["apex.parallel"]["convert_syncbn_model"](model)[1]) is nn.SyncBatchNorm


def test_data_parallel_training_is_torchs(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        parallel = TABLE["apex.parallel"]["DistributedDataParallel"]
        model = parallel(nn.Linear(4, 2), delay_allreduce=True, num_allreduce_streams=2)
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        assert model.find_unused_parameters
        model(X).sum().backward()
        for option, value in (("gradient_average", False), ("gradient_predivide_factor", 2.0)):
            with pytest.raises(UnsupportedError, match=option):
                parallel(nn.Linear(4, 2), **{option: value})
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("module", "name"), [key for key in NAMES if isinstance(TABLE[key[0]][key[1]], Missing)])
def test_what_torch_does_not_have_is_refused_where_it_is_used(module: str, name: str) -> None:
    missing = TABLE[module][name]
    with pytest.raises(UnsupportedError, match=re.escape(missing.instead)):
        missing(nn.Linear(4, 2).parameters())
    assert not missing.available


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_page_has_every_name(module: str, name: str) -> None:
    (row,) = (row for row in PAGE.read_text().splitlines() if row.startswith(f"| `{module}.{name}` |"))
    value = TABLE[module][name]
    assert not isinstance(value, Missing) or f"`{value.instead}`" in row
