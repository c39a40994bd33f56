"""The two tables that mixed precision became known by: their models, and the numbers that were published of them.

>>> row = row_of("resnet50")
>>> row.title, row.accuracy.float32, row.accuracy.mixed
('ResNet-50', 75.92, 76.04)
>>> margin_of(row.metric)
0.005

A row's model is in ``models.on_torch``, and in ``models.on_jax`` and ``models.on_keras`` where those have it, in the
module of the row's name.
"""

from typing import NamedTuple

PAPER = "Micikevicius et al., Mixed Precision Training, ICLR 2018"
OF_NVIDIA = "tables of NVIDIA"
"""The sources. Both are quoted at second hand: the originals could not be looked up."""

MARGINS = {"accuracy": 0.005, "token_accuracy": 0.01, "average_precision": 0.01, "error_rate": 0.01, "loss": 0.01}
"""The difference that would matter, by metric: fractions, or nats for a loss. They were fixed before any training.

Half a point for accuracies, which are of 1,000 test examples or more. One point where the test part is smaller: 200
sentences, 600 utterances, a few scenes. A hundredth of a nat for the loss of a language model.
"""


class Accuracy(NamedTuple):
    """The percentages that were published, in float32 and in mixed precision."""

    of: str
    """The metric and the data of the published numbers."""
    float32: float
    mixed: float
    source: str


class SpeedUp(NamedTuple):
    """The speed-up that was published: mixed precision over float32, on the same GPU."""

    low: float
    high: float
    source: str


class Row(NamedTuple):
    """A model of the tables."""

    name: str
    """The module's name."""
    title: str
    metric: str
    """The metric of the accuracy table here: an entry of the dictionary that the module's ``train`` returns."""
    accuracy: Accuracy | None = None
    speed_up: SpeedUp | None = None
    timed_as: tuple[str, ...] = ()
    """The models of ``benchmarks/end_to_end.py`` that stand for it in the speed table."""


def _imagenet(float32: float, mixed: float) -> Accuracy:
    return Accuracy("ImageNet top-1", float32, mixed, PAPER)


ROWS = (
    Row("alexnet", "AlexNet", "accuracy", _imagenet(56.77, 56.93)),
    Row("vgg16", "VGG-16 (VGG-D)", "accuracy", _imagenet(65.40, 65.43)),
    Row("googlenet", "GoogLeNet", "accuracy", _imagenet(68.33, 68.43)),
    Row("inception_v2", "Inception v2", "accuracy", _imagenet(70.03, 70.02)),
    Row("inception_v3", "Inception v3", "accuracy", _imagenet(73.85, 74.13)),
    Row("resnet50", "ResNet-50", "accuracy", _imagenet(75.92, 76.04)),
    Row(
        *("bert", "BERT", "accuracy", Accuracy("questions and answers", 91.18, 91.24, OF_NVIDIA)),
        speed_up=SpeedUp(3.25, 4.25, OF_NVIDIA),
        timed_as=("bert-large-128", "bert-large-512"),
    ),
    Row("jasper", "Jasper", "error_rate", speed_up=SpeedUp(2.2, 3.0, OF_NVIDIA), timed_as=("jasper",)),
    Row(
        *("mask_rcnn", "Mask R-CNN", "average_precision"),
        speed_up=SpeedUp(1.2, 1.5, OF_NVIDIA),
        timed_as=("mask-rcnn",),
    ),
    Row(
        *("transformer", "Transformer (FAIRseq)", "token_accuracy"),
        speed_up=SpeedUp(4.0, 4.0, OF_NVIDIA),
        timed_as=("transformer",),
    ),
    Row("gnmt", "GNMT", "token_accuracy", speed_up=SpeedUp(2.0, 2.0, OF_NVIDIA), timed_as=("gnmt",)),
    Row("big_lstm", "big LSTM", "loss"),
)


def row_of(name: str) -> Row:
    """Return the row of a module's name."""
    return next(row for row in ROWS if row.name == name)


def accuracy_rows() -> list[Row]:
    """Return the rows of the accuracy table, with the LSTM of its figure: all but those of the speed table alone."""
    return [row for row in ROWS if row.accuracy or not row.speed_up]


def margin_of(metric: str) -> float:
    """Return the margin of a metric."""
    return MARGINS[metric]
