"""Train Jasper 10x5 with dense residuals (Li et al., Jasper: An End-to-End Convolutional Neural Acoustic Model, 2019).

The published model reads 64 features a frame and scores 28 characters and a blank. It has 54 convolutions over time in
ten blocks of five and three more layers, each with batch norm, ReLU and dropout; each block adds the output of every
block before it, through a convolution of kernel 1. That makes 333 million parameters. Here ``width`` multiplies the
channels, and kernels are as published; the small model is a "10x1", with one convolution in a block and no dropout,
because blocks of five with few channels learn little in so few steps. The data are spoken vowels of two men in a row,
and the model writes who spoke: writing nothing has an error rate of 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import polyamp
from models.data import utterances
from models.on_torch.training import batches, evaluate, fit, seeded


class Block(NamedTuple):
    channels: int
    kernel: int
    dropout: float
    repeat: int = 5
    stride: int = 1
    dilation: int = 1


FIRST = Block(256, 11, 0.2, repeat=1, stride=2)
DENSE = [
    Block(channels, kernel, dropout)
    for channels, kernel, dropout in ((256, 11, 0.2), (384, 13, 0.2), (512, 17, 0.2), (640, 21, 0.3), (768, 25, 0.3))
    for _ in range(2)
]
LAST = [Block(896, 29, 0.4, repeat=1, dilation=2), Block(1024, 1, 0.4, repeat=1)]
DATA = (2, 60)  # speakers, frames
WIDTH, REPEAT, DROPOUT, STEPS, BATCH, LEARNING_RATE = 1 / 16, 1, 0.0, 450, 32, 2e-3


def convolution(inputs: int, block: Block) -> nn.Sequential:
    """Return a convolution that keeps the number of frames (halves it with a stride of 2), and its batch norm."""
    padding = block.dilation * (block.kernel - 1) // 2
    return nn.Sequential(
        nn.Conv1d(inputs, block.channels, block.kernel, block.stride, padding, block.dilation, bias=False),
        nn.BatchNorm1d(block.channels, eps=1e-3),
    )


class JasperBlock(nn.Module):
    """Convolutions in a row; before the last ReLU, the earlier blocks' outputs are added, each through its own one."""

    def __init__(self, inputs: int, block: Block, earlier: list[int]) -> None:
        super().__init__()
        sizes = [inputs] + [block.channels] * (block.repeat - 1)
        self.convolutions = nn.ModuleList(convolution(size, block) for size in sizes)
        self.residuals = nn.ModuleList(convolution(size, Block(block.channels, 1, 0)) for size in earlier)
        self.dropout = nn.Dropout(block.dropout)

    def forward(self, x: Tensor, earlier: list[Tensor]) -> Tensor:
        *first, last = self.convolutions
        for each in first:
            x = self.dropout(each(x).relu())
        x = last(x)
        for each, value in zip(self.residuals, earlier, strict=True):
            x = x + each(value)
        return self.dropout(x.relu())


class Jasper(nn.Module):
    """Score labels: from features of shape (rows, frames, features) to (rows, frames / 2, labels). 0 is the blank."""

    def __init__(
        self, features: int = 64, labels: int = 29, width: float = 1, repeat: int = 5, dropout: float = 1
    ) -> None:
        super().__init__()

        def scaled(block: Block) -> Block:
            channels, each = round(block.channels * width), min(block.repeat, repeat)
            return block._replace(channels=channels, repeat=each, dropout=block.dropout * dropout)

        first, dense, last = scaled(FIRST), [scaled(block) for block in DENSE], [scaled(block) for block in LAST]
        self.first = JasperBlock(features, first, [])
        outputs = [first.channels, *(block.channels for block in dense)]
        self.dense = nn.ModuleList(
            JasperBlock(outputs[number], block, outputs[: number + 1]) for number, block in enumerate(dense)
        )
        self.last = nn.ModuleList(
            JasperBlock(inputs, block, []) for inputs, block in zip([outputs[-1], last[0].channels], last, strict=True)
        )
        self.head = nn.Conv1d(last[-1].channels, labels, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.first(x.mT, [])]
        for block in self.dense:
            outputs.append(block(outputs[-1], outputs))
        x = outputs[-1]
        for block in self.last:
            x = block(x, [])
        return self.head(x).mT


def small() -> Jasper:
    features = utterances(*DATA).train.x.shape[-1]
    return Jasper(features, utterances(*DATA).classes, WIDTH, REPEAT, DROPOUT)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, labels = batch
    logs = model(x).log_softmax(-1).transpose(0, 1)
    frames, count = torch.full((len(x),), len(logs)), torch.full((len(x),), labels.shape[1])
    return nn.functional.ctc_loss(logs, labels, frames, count)


def written(frames: list[int]) -> list[int]:
    """Return what the best label of each frame spells: repeats count once, and blanks not at all."""
    return [label for label, before in zip(frames, [0, *frames], strict=False) if label and label != before]


def distance(found: list[int], wanted: list[int]) -> int:
    """Return how many insertions, deletions and replacements turn one into the other (Levenshtein, 1966)."""
    row = list(range(len(wanted) + 1))
    for number, label in enumerate(found, start=1):
        above, row = row, [number]
        for place, other in enumerate(wanted):
            row.append(min(row[-1] + 1, above[place + 1] + 1, above[place] + (label != other)))
    return row[-1]


def metrics_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    found, wanted = model(batch[0]).argmax(-1).tolist(), batch[1].tolist()
    errors = sum(distance(written(frames), labels) for frames, labels in zip(found, wanted, strict=True))
    return {"error_rate": torch.tensor(errors / batch[1].numel()), "loss": loss_of(model, batch)}


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Return the error rate (edit distance over length) and the CTC loss on test utterances, after training."""
    data = utterances(*DATA)
    model = seeded(small, seed)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=1e-3)
    fit(
        model,
        loss_of,
        batches(data.train, BATCH, STEPS, seed),
        optimizer,
        policy,
        schedule=lambda opt: OneCycleLR(opt, LEARNING_RATE, STEPS),
        max_grad_norm=1.0,
    )
    return evaluate(model, metrics_of, batches(data.test, 300, 1, seed=0), policy)
