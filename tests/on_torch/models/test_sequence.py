"""The models of sequences: published sizes, the same training under every policy, products in 16 bits."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import polyamp

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from models import big_lstm as task
from models.data import Data, pairs, sentences, utterances
from models.on_torch.training import batches, fit, seeded

pytestmark = pytest.mark.slow

DATA: dict[str, Callable[[], Data]] = {
    "bert": lambda: sentences(16),
    "jasper": lambda: utterances(2, 60),
    "transformer": pairs,
    "gnmt": pairs,
}
FULL = {"jasper": "ctc_loss", "bert": "layer_norm", "transformer": "layer_norm", "gnmt": "softmax"}
"""What computes in float32, next to the softmax of the loss."""


def module(name: str) -> ModuleType:
    if name == "bert":
        pytest.importorskip("transformers", reason="BERT is transformers' own: pip install polyamp[models]")
        return pytest.importorskip("models.on_torch.bert", reason="transformers does not load its BERT here")
    return __import__(f"models.on_torch.{name}", fromlist=["train"])


def loss_of(name: str) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]:
    return module("translation" if name in ("transformer", "gnmt") else name).loss_of


PUBLISHED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "bert base": (lambda: module("bert").bert(num_labels=2).bert, 109_482_240),  # transformers' BertModel, with pooler
    "jasper 10x5": (lambda: module("jasper").Jasper(), 332_632_349),  # NeMo's weights of Jasper 10x5 DR for English
    "transformer": (lambda: module("transformer").Transformer(37_000, 37_000, shared=True), 63_082_496),
    # FAIRseq's big transformer for English to German with 32,768 words, the sines left out
    "big transformer": (lambda: big_transformer(module("transformer")), 209_911_808),
    # MLPerf's has a second bias for the gates of each of its nine layers, which adds nothing
    "gnmt v2": (lambda: module("gnmt").GNMT(32_320, 32_320, shared=True), 160_671_297 - 9 * 4 * 1024),
    "big lstm": (lambda: module("big_lstm").BigLSTM(), 1_776_882_559),
}


def big_transformer(models: ModuleType) -> nn.Module:
    made: nn.Module = models.Transformer(32_768, 32_768, models.BIG, shared=True)
    return made


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_model_has_the_published_number_of_parameters(name: str) -> None:
    make, published = PUBLISHED[name]
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in make().parameters()) == published


def test_jasper_halves_the_time() -> None:
    with torch.device("meta"):
        assert module("jasper").Jasper()(torch.empty(2, 400, 64)).shape == (2, 200, 29)


def losses(name: str, policy: polyamp.Policy, seed: int = 0) -> list[float]:
    model = seeded(module(name).small, seed)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    return fit(model, loss_of(name), batches(DATA[name]().train, 4, 2, seed), optimizer, policy)


@pytest.mark.parametrize("name", DATA)
def test_a_short_training_in_16_bits_ends_near_float32(name: str) -> None:
    names = ("float32", "mixed_float16", "mixed_bfloat16")
    full, half, brain = (losses(name, polyamp.policy(each)) for each in names)
    assert half == pytest.approx(full, rel=0.01)
    assert brain == pytest.approx(full, rel=0.05)
    assert half != full != brain


class WithLoss(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model, self.loss_of = module(name).small(), loss_of(name)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_of(self.model, (x, y))


@pytest.mark.parametrize("name", DATA)
def test_products_run_in_16_bits_and_what_needs_it_in_float32(name: str) -> None:
    batch = batches(DATA[name]().train, 2, 1, seed=0)[0]
    found = formats(WithLoss(name).eval(), *batch)
    assert found["matmul"] | found["conv"] | found["attention"] == {"float16"}
    assert found["log_softmax"] == found[FULL[name]] == {"float32"}


def formats(model: nn.Module, *inputs: Tensor) -> dict[str, set[str]]:
    found = defaultdict(set)
    for row in polyamp.explain(model, *inputs, policy="mixed_float16", engine="autocast").as_dict()["operations"]:
        found[row["name"]].add(row["format"])
    return found


def test_the_big_lstms_products_run_in_16_bits() -> None:
    found = formats(module("big_lstm").initial(0), torch.from_numpy(task.test_words()[:2, :-1]).long())
    assert found["matmul"] == {"float16"}
