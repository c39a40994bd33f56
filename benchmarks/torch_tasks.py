"""Whole models at the shapes of published tables, with batches that can be learned, and their optimizers.

ResNet-50 v1.5 and Mask R-CNN come from torchvision, BERT-large and GPT-2 from transformers; without torchvision, both
are our own, with the same layers. Jasper, the transformer of FAIRseq and GNMT are those of ``examples/models``. Weights
are random, and batches are made from a seed.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_device import DEVICE
from torch_models import Classifier, resnet50

sys.path.append(str(Path(__file__).parents[1] / "examples"))

Batch = dict[str, Any]
Params = Iterable[nn.Parameter]
MASKED, MASK = 0.15, 103  # the share of BERT's words that are masked, and the word that replaces them


class Task(NamedTuple):
    """A model at a published shape.

    ``model(small, dropout)`` returns its loss when it is called with ``batch(small, seed)``. ``parts`` are the modules
    that are compiled one by one; if there are none, the whole is compiled.
    """

    model: Callable[[bool, bool], nn.Module]
    batch: Callable[[bool, int], Batch]
    optimizer: Callable[[Params], torch.optim.Optimizer]
    samples: Callable[[bool], int]  # in a batch
    max_norm: float | None = None
    parts: Callable[[], tuple[type[nn.Module], ...]] = tuple
    needs: str | None = None  # a package
    eager_only: str | None = None  # why it is not compiled
    fixed_shapes: bool = True

    @property
    def missing(self) -> str | None:
        """Return the reason why it cannot run here."""
        found = self.needs is None or importlib.util.find_spec(self.needs)
        return None if found else f"{self.needs} is not installed"


class Loss(nn.Module):
    """A model of transformers, which returns its loss among other results."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, **batch: Tensor) -> Tensor:
        return self.network(**batch).loss


class Losses(nn.Module):
    """A detector, which returns losses by name."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, targets: list[Batch]) -> Tensor:
        return torch.stack(list(self.network(images, targets).values())).sum()


class WithLoss(nn.Module):
    """A model of ``examples/models``, and the function that returns its loss on inputs and targets."""

    def __init__(self, network: nn.Module, loss_of: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]) -> None:
        super().__init__()
        self.network, self.loss_of = network, loss_of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_of(self.network, (x, y))


def adamw(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, fused=True)


def momentum(rate: float) -> Callable[[Params], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=rate, momentum=0.9, fused=True)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def counting(count: int, length: int, words: int, seed: int) -> Tensor:
    """Return rows of words that count upwards, each row with its own start and step: the next word can be learned."""
    made = {"generator": seeded(seed), "device": DEVICE}
    starts, steps = torch.randint(words, (count, 1), **made), torch.randint(1, 8, (count, 1), **made)
    return (starts + steps * torch.arange(length, device=DEVICE)) % words


@functools.cache
def has_torchvision() -> bool:
    """Return whether torchvision is there, and is for this build of PyTorch."""
    try:
        import torchvision.models.detection  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def resnet(small: bool, dropout: bool) -> nn.Module:
    """Return ResNet-50 v1.5: the stride is in the 3x3 convolution. It has no dropout."""
    if small:
        network: nn.Module = resnet50(8, 10, (1, 1))
    elif has_torchvision():
        from torchvision.models import resnet50 as published

        network = published(weights=None)
    else:
        network = resnet50()
    return Classifier(network).to(memory_format=torch.channels_last)


def images(small: bool, seed: int) -> Batch:
    """Return noise whose mean depends on the class."""
    count, side, classes = (4, 64, 10) if small else (256, 224, 1000)
    made = {"generator": seeded(seed), "device": DEVICE}
    labels = torch.randint(classes, (count,), **made)
    colours = torch.randn(classes, 3, 1, 1, generator=seeded(0), device=DEVICE)
    noise = torch.randn(count, 3, side, side, **made)
    return {"images": (noise + colours[labels]).to(memory_format=torch.channels_last), "labels": labels}


def bert(small: bool, dropout: bool) -> nn.Module:
    """Return BERT-large with its two heads. As in transformers, it scores every word, masked or not."""
    from transformers import BertForPreTraining

    return Loss(BertForPreTraining(bert_config(small, dropout)))


def bert_config(small: bool, dropout: bool) -> Any:
    from transformers import BertConfig

    words, width, layers, heads = (211, 64, 2, 4) if small else (30522, 1024, 24, 16)
    rate = 0.1 if dropout else 0.0
    return BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate,
    )


def sentences(count: int, length: int) -> Callable[[bool, int], Batch]:
    """Return words with some of them masked, as targets, and whether the second half follows the first."""

    def batch(small: bool, seed: int) -> Batch:
        shape = (4, 32) if small else (count, length)
        words = counting(*shape, 211 if small else 30522, seed)
        masked = torch.rand(shape, generator=seeded(seed), device=DEVICE) < MASKED
        follows = torch.arange(shape[0], device=DEVICE) % 2
        return {
            "input_ids": words.masked_fill(masked, MASK),
            "token_type_ids": torch.zeros_like(words),
            "labels": words.masked_fill(~masked, -100),
            "next_sentence_label": follows,
        }

    return batch


def bert_parts() -> tuple[type[nn.Module], ...]:
    from transformers.models.bert.modeling_bert import BertLayer

    return (BertLayer,)  # all have one shape: compiled once


def gpt2(small: bool, dropout: bool) -> nn.Module:
    """Return GPT-2 with 124 M numbers, without dropout, as it is usually trained from scratch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 211, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4} if small else {}
    words = {"bos_token_id": 0, "eos_token_id": 0} if small else {}
    config = GPT2Config(**sizes, **words, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return Loss(GPT2LMHeadModel(config))


def text(small: bool, seed: int) -> Batch:
    words = counting(2, 32, 211, seed) if small else counting(12, 1024, 50257, seed)
    return {"input_ids": words, "labels": words}


def gpt2_parts() -> tuple[type[nn.Module], ...]:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    return (GPT2Block,)


def questions(small: bool, dropout: bool) -> nn.Module:
    """Return BERT-large with the head for SQuAD, which marks where an answer starts and ends."""
    from transformers import BertForQuestionAnswering

    return Loss(BertForQuestionAnswering(bert_config(small, dropout)))


def answers(small: bool, seed: int) -> Batch:
    """Return words, and the places that words which occur once mark as start and end."""
    count, length, words = (4, 32, 211) if small else (32, 384, 30522)
    texts = counting(count, length, words - 2, seed)
    places = torch.randint(length, (2, count), generator=seeded(seed), device=DEVICE).sort(0).values
    for mark, place in enumerate(places):
        texts[torch.arange(count), place] = words - 2 + mark
    return {"input_ids": texts, "start_positions": places[0], "end_positions": places[1]}


def mask_rcnn(small: bool, dropout: bool) -> nn.Module:
    """Return Mask R-CNN on ResNet-50 with a feature pyramid; small, on a shallow ResNet with few proposals."""
    if not has_torchvision():
        return own_mask_rcnn(small)
    from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    if not small:
        return Losses(maskrcnn_resnet50_fpn(weights=None, weights_backbone=None))
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None)
    few = {"rpn_pre_nms_top_n_train": 20, "rpn_post_nms_top_n_train": 10, "box_batch_size_per_image": 8}
    return Losses(MaskRCNN(backbone, num_classes=5, min_size=64, max_size=64, **few))


def own_mask_rcnn(small: bool) -> nn.Module:
    from models.on_torch.mask_rcnn import SMALL, MaskRCNN, Sizes

    return Losses(MaskRCNN(SMALL._replace(classes=5) if small else Sizes()))


def scenes(small: bool, seed: int) -> Batch:
    """Return noise with brighter rectangles, the objects, and their boxes, classes and masks."""
    count, height, width, objects, classes = (2, 64, 64, 2, 5) if small else (12, 800, 1216, 8, 91)
    found = [scene(height, width, objects, classes, 1000 * seed + index) for index in range(count)]
    return {"images": torch.stack([image for image, _ in found]), "targets": [target for _, target in found]}


def scene(height: int, width: int, objects: int, classes: int, seed: int) -> tuple[Tensor, Batch]:
    made = {"generator": seeded(seed), "device": DEVICE}
    image, masks = 0.5 * torch.rand(3, height, width, **made), torch.zeros(objects, height, width, device=DEVICE)
    places = torch.rand(objects, 4, **made) * torch.tensor([0.6, 0.6, 0.25, 0.25], device=DEVICE)
    sides = torch.tensor([width, height] * 2, device=DEVICE)
    corners = (places[:, :2], places[:, :2] + 0.12 + places[:, 2:])
    boxes = (torch.cat(corners, 1) * sides).floor()
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    labels = torch.randint(1, classes, (objects,), **made)
    return image + 0.5 * masks.amax(0), {"boxes": boxes, "labels": labels, "masks": masks.to(torch.uint8)}


def jasper(small: bool, dropout: bool) -> nn.Module:
    """Return Jasper 10x5 with dense residuals; small, with few channels."""
    from models.on_torch.jasper import Jasper, loss_of

    sizes = {"width": 1 / 16, "repeat": 1} if small else {}
    return WithLoss(Jasper(**sizes, dropout=float(dropout)), loss_of)


def speech(small: bool, seed: int) -> Batch:
    """Return 16.7 s of 64 features each 10 ms, in which every letter has a sound of 8 frames, and the letters."""
    rows, letters = (2, 6) if small else (32, 208)
    made = {"generator": seeded(seed), "device": DEVICE}
    text = torch.randint(1, 29, (rows, letters), **made)
    sounds = torch.randn(29, 64, generator=seeded(0), device=DEVICE)
    heard = sounds[text].repeat_interleave(8, 1)
    return {"x": heard + torch.randn(heard.shape, **made), "y": text}


WORDS = 32320
"""Of both languages together, in GNMT v2 of MLPerf; the transformer's published vocabulary is near (33,708)."""


def transformer(small: bool, dropout: bool) -> nn.Module:
    """Return the transformer in its big form, with 210 M numbers."""
    from models.on_torch.transformer import BIG, SMALL, Transformer
    from models.on_torch.translation import loss_of

    words, sizes = (211, SMALL) if small else (WORDS, BIG)
    sizes = sizes if dropout else sizes._replace(dropout=0.0)
    return WithLoss(Transformer(words, words, sizes, shared=True), loss_of)


def transformer_parts() -> tuple[type[nn.Module], ...]:
    from models.on_torch.transformer import DecoderLayer, EncoderLayer

    return (EncoderLayer, DecoderLayer)


def gnmt(small: bool, dropout: bool) -> nn.Module:
    """Return GNMT v2, with four layers of 1,024 cells; on a GPU with the LSTM of cuDNN, as where it was published."""
    from models.on_torch.gnmt import GNMT
    from models.on_torch.translation import loss_of

    words, width = (211, 32) if small else (WORDS, 1024)
    network = GNMT(words, words, width, shared=True)
    for module in network.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    return WithLoss(fused_lstm(network) if DEVICE == "cuda" else network, loss_of)


class FusedLSTM(nn.LSTM):
    """PyTorch's LSTM, which returns all outputs and no state."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def fused_lstm(network: nn.Module) -> nn.Module:
    """Replace every LSTM that is made of linear layers by PyTorch's own."""
    from models.on_torch.recurrent import LSTM

    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LSTM):
                inputs = child.gates.in_features - child.outputs
                setattr(parent, name, FusedLSTM(inputs, child.cells, batch_first=True))
    return network


def translations(rows: int) -> Callable[[bool, int], Batch]:
    """Return sentences of 32 words, and as their translation the same words, each with another number."""

    def batch(small: bool, seed: int) -> Batch:
        count, length, words = (4, 8, 207) if small else (rows, 32, WORDS - 4)
        text = counting(count, length, words, seed)
        return {"x": text + 4, "y": (text + 1) % words + 4}  # 0 to 3 are marks, such as padding

    return batch


def count(full: int, small: int) -> Callable[[bool], int]:
    return lambda is_small: small if is_small else full


CHANGING = "its detections, and so its shapes, change at every step"

TASKS = {
    "resnet50": Task(resnet, images, momentum(0.05), count(256, 4)),
    "bert-large-128": Task(bert, sentences(256, 128), adamw, count(256, 4), 1.0, bert_parts, "transformers"),
    "bert-large-512": Task(bert, sentences(32, 512), adamw, count(32, 4), 1.0, bert_parts, "transformers"),
    "bert-large-squad": Task(questions, answers, adamw, count(32, 4), 1.0, bert_parts, "transformers"),
    "jasper": Task(jasper, speech, momentum(0.001), count(32, 2)),
    "transformer": Task(transformer, translations(160), adamw, count(160, 4), parts=transformer_parts),
    "gnmt": Task(gnmt, translations(128), adamw, count(128, 4), 5.0, eager_only="most of it is the LSTM of cuDNN"),
    "gpt2": Task(gpt2, text, adamw, count(12, 2), 1.0, gpt2_parts, "transformers"),
    "mask-rcnn": Task(mask_rcnn, scenes, momentum(0.002), count(12, 2), eager_only=CHANGING, fixed_shapes=False),
}
