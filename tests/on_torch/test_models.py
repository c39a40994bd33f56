"""The models of the examples: published sizes, the same training under every policy, products in 16 bits, real data."""

import doctest
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyamp

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from models import big_lstm as task
from models.data import Data, images, pairs, scenes, sentences, utterances
from models.on_torch import mask_rcnn, proposals
from models.on_torch.mask_rcnn import SMALL, MaskRCNN
from models.on_torch.roi_align import roi_align
from models.on_torch.training import batches, fit, seeded

pytestmark = pytest.mark.slow


def module(name: str) -> ModuleType:
    if name == "bert":
        pytest.importorskip("transformers", reason="BERT is transformers' own: pip install polyamp[models]")
        return pytest.importorskip("models.on_torch.bert", reason="transformers does not load its BERT here")
    return import_module(f"models.on_torch.{name}")


def formats(model: nn.Module, *inputs: Tensor) -> dict[str, list[str]]:
    """The formats that every operation runs in under autocast, by its name."""
    found = defaultdict(list)
    for row in polyamp.explain(model, *inputs, policy="mixed_float16", engine="autocast").operations:
        found[row.name].append(row.format)
    return found


# --- sizes ------------------------------------------------------------------------------------------------------------

# Parameters; of Inception v2 those of the Caffe model, of the other models of images torchvision's.
IMAGES = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "googlenet": 13_004_888,
    "inception_v2": 11_295_240,
    "inception_v3": 27_161_264,
    "resnet50": 25_557_032,
}


def big_transformer() -> nn.Module:
    models = module("transformer")
    made: nn.Module = models.Transformer(32_768, 32_768, models.BIG, shared=True)
    return made


OTHERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "bert base": (lambda: module("bert").bert(num_labels=2).bert, 109_482_240),  # transformers' BertModel, with pooler
    "jasper 10x5": (lambda: module("jasper").Jasper(), 332_632_349),  # NeMo's weights of Jasper 10x5 DR for English
    "transformer": (lambda: module("transformer").Transformer(37_000, 37_000, shared=True), 63_082_496),
    # FAIRseq's big transformer for English to German with 32,768 words, the sines left out
    "big transformer": (big_transformer, 209_911_808),
    # MLPerf's has a second bias for the gates of each of its nine layers, which adds nothing
    "gnmt v2": (lambda: module("gnmt").GNMT(32_320, 32_320, shared=True), 160_671_297 - 9 * 4 * 1024),
    "big lstm": (lambda: module("big_lstm").BigLSTM(), 1_776_882_559),
    "mask rcnn": (lambda: mask_rcnn.freeze(MaskRCNN()), 44_401_393),
}


@pytest.mark.parametrize("name", [*IMAGES, *OTHERS])
def test_the_published_model_has_the_published_number_of_parameters_and_scores(name: str) -> None:
    with torch.device("meta"):
        if name in OTHERS:
            make, published = OTHERS[name]
            model = make()
        else:
            model, published, size = getattr(module(name), name)(), IMAGES[name], module(name).RECIPE.size
            assert model.eval()(torch.empty(2, 3, size, size)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_jasper_halves_the_time() -> None:
    with torch.device("meta"):
        assert module("jasper").Jasper()(torch.empty(2, 400, 64)).shape == (2, 200, 29)


# --- 16 bits ----------------------------------------------------------------------------------------------------------

DATA: dict[str, Callable[[], Data]] = {
    "bert": lambda: sentences(16),
    "jasper": lambda: utterances(2, 60),
    "transformer": pairs,
    "gnmt": pairs,
}
FULL = {"jasper": "ctc_loss", "bert": "layer_norm", "transformer": "layer_norm", "gnmt": "softmax"}
"""What computes in float32, next to the softmax of the loss."""


def loss_of(name: str) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]:
    return module("translation" if name in ("transformer", "gnmt") else name).loss_of


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
    assert {*found["matmul"], *found["conv"], *found["attention"]} == {"float16"}
    assert {*found["log_softmax"], *found[FULL[name]]} == {"float32"}


def test_the_big_lstms_products_run_in_16_bits() -> None:
    found = formats(module("big_lstm").initial(0), torch.from_numpy(task.test_words()[:2, :-1]).long())
    assert set(found["matmul"]) == {"float16"}


CONVOLUTIONS = {"alexnet": 5, "vgg16": 13, "googlenet": 57, "inception_v2": 69, "inception_v3": 94, "resnet50": 53}
"""Those that make the scores of a trained model."""
WIDTH = {"vgg16": 1 / 16, "inception_v3": 1 / 16}


@pytest.mark.parametrize("name", IMAGES)
def test_convolutions_run_in_16_bits(name: str) -> None:
    model, size = getattr(module(name), name)(WIDTH.get(name, 1 / 8), 10, 1).eval(), module(name).RECIPE.size
    found = formats(model.to(memory_format=torch.channels_last), torch.randn(1, 1, size, size))
    assert found["conv"] == ["float16"] * CONVOLUTIONS[name]


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data", "founding", "on_torch.training", "on_torch.vision", "on_torch.products"])
def test_the_examples_of_the_shared_code_run(name: str) -> None:
    found = doctest.testmod(import_module(f"models.{name}"))
    assert found.attempted
    assert not found.failed


def test_no_test_image_is_among_those_that_train() -> None:
    digits = images(size=28)
    trained = {image.tobytes() for image in digits.train.x}
    assert sum(image.tobytes() in trained for image in digits.test.x) == 0
    assert np.bincount(digits.test.y).min() > 200


# --- Mask R-CNN: RoIAlign by hand, boxes and losses in float32 under every policy -------------------------------------

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


def sampled(features: np.ndarray, y: float, x: float) -> np.ndarray:
    """Return the bilinear sample as RoIAlign defines it, for one place at a time."""
    height, width = features.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return np.zeros(len(features))
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = features[:, top, left] * (1 - x + left) + features[:, top, right] * (x - left)
    lower = features[:, bottom, left] * (1 - x + left) + features[:, bottom, right] * (x - left)
    return upper * (1 - y + top) + lower * (y - top)


def by_hand(features: np.ndarray, box: np.ndarray, size: int, scale: float) -> np.ndarray:
    x0, y0, x1, y1 = box * scale
    wide, high = max(x1 - x0, 1) / size, max(y1 - y0, 1) / size
    places = [(row, column) for row in range(size) for column in range(size)]
    quarters = [(a, b) for a in (0.25, 0.75) for b in (0.25, 0.75)]
    bins = [
        np.mean([sampled(features, y0 + (row + a) * high, x0 + (column + b) * wide) for a, b in quarters], axis=0)
        for row, column in places
    ]
    return np.reshape(np.transpose(bins), (-1, size, size))


def random_boxes(count: int, side: float, seed: int = 0) -> Tensor:
    places = np.random.default_rng(seed).uniform(0, side, (count, 2, 2))
    places.sort(axis=1)
    return torch.from_numpy(places.reshape(count, 4).astype(np.float32))


def test_roi_align_agrees_with_its_definition_also_at_edges_and_in_tiny_boxes() -> None:
    features = np.random.default_rng(0).normal(size=(2, 3, 9, 7)).astype(np.float32)
    special = [[-9.0, -9, 40, 60], [3, 3, 3.5, 3.25], [20, 30, 27.9, 35.9], [26, 34, 60, 70], [-60, 0, -30, 9]]
    boxes = torch.cat([random_boxes(12, 28.0), torch.tensor(special)])
    images = torch.arange(len(boxes)) % 2
    found = roi_align(torch.from_numpy(features), boxes, images, 3, 0.25)
    wanted = [by_hand(features[image], box, 3, 0.25) for image, box in zip(images, boxes.double().numpy(), strict=True)]
    np.testing.assert_allclose(found, np.array(wanted), atol=2e-5)


@pytest.mark.parametrize("low", [torch.float32, torch.float16, torch.bfloat16])
def test_boxes_stay_float32_where_the_network_returns_16_bits(low: torch.dtype) -> None:
    reference = torch.tensor([[1300.25, 700.5, 1331.75, 760.5]])
    found = proposals.decode(torch.zeros(1, 4, dtype=low), reference)
    assert found.dtype == torch.float32
    assert torch.equal(found, reference)  # in float16, 1300.25 would be 1300 and 1331.75 would be 1332
    deltas = torch.tensor([[0.3, -0.2, 0.7, -0.4]]).to(low)
    assert torch.equal(proposals.decode(deltas, reference), proposals.decode(deltas.float(), reference))


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, list[proposals.Objects]]:
    return mask_rcnn.batch(scenes(2, objects=3))


@pytest.mark.parametrize("name", POLICIES)
def test_five_losses_and_boxes_in_float32_under_every_policy(name: str, batch: tuple) -> None:
    model = seeded(lambda: MaskRCNN(SMALL), 0)
    with polyamp.autocast(name):
        assert proposals.decode(torch.zeros(1, 4), torch.ones(1, 4)).dtype == torch.float32
        losses = model(*batch)
        found = model.detect(batch[0], threshold=0.0, most=5)
    assert losses.keys() == {"objectness", "proposed_boxes", "classes", "boxes", "masks"}
    assert all(loss.dtype == torch.float32 for loss in losses.values())
    assert losses["objectness"].item() == pytest.approx(math.log(2), abs=0.1)  # nothing is known yet
    assert losses["classes"].item() == pytest.approx(math.log(11), abs=0.1)
    for one in found:
        assert one["boxes"].dtype == one["scores"].dtype == torch.float32
        assert one["masks"].shape == (5, 128, 128)
