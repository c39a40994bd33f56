"""Whole models at the shapes of published tables, with batches that can be learned, and their optimizers.

ResNet-50 v1.5 and Mask R-CNN come from torchvision, BERT-large and GPT-2 from transformers; without torchvision,
ResNet-50 is our own, with the same layers. Weights are random, and batches are made from a seed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_device import DEVICE
from torch_models import Classifier, resnet50

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
    ways: tuple[str, ...] = ("eager", "compiled")
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
    """A detector of torchvision, which returns losses by name."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: list[Tensor], targets: list[Batch]) -> Tensor:
        return torch.stack(list(self.network(images, targets).values())).sum()


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


def resnet(small: bool, dropout: bool) -> nn.Module:
    """Return ResNet-50 v1.5: the stride is in the 3x3 convolution. It has no dropout."""
    if small:
        network: nn.Module = resnet50(8, 10, (1, 1))
    elif importlib.util.find_spec("torchvision"):
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
    from transformers import BertConfig, BertForPreTraining

    words, width, layers, heads = (211, 64, 2, 4) if small else (30522, 1024, 24, 16)
    rate = 0.1 if dropout else 0.0
    config = BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate,
    )
    return Loss(BertForPreTraining(config))


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


def mask_rcnn(small: bool, dropout: bool) -> nn.Module:
    """Return torchvision's Mask R-CNN on ResNet-50 with a feature pyramid; small, on ResNet-18 with few proposals."""
    from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    if not small:
        return Losses(maskrcnn_resnet50_fpn(weights=None, weights_backbone=None))
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None)
    few = {"rpn_pre_nms_top_n_train": 20, "rpn_post_nms_top_n_train": 10, "box_batch_size_per_image": 8}
    return Losses(MaskRCNN(backbone, num_classes=5, min_size=64, max_size=64, **few))


def scenes(small: bool, seed: int) -> Batch:
    """Return noise with brighter rectangles, the objects, and their boxes, classes and masks."""
    count, height, width, objects, classes = (2, 64, 64, 2, 5) if small else (12, 800, 1216, 8, 91)
    found = [scene(height, width, objects, classes, 1000 * seed + index) for index in range(count)]
    return {"images": [image for image, _ in found], "targets": [target for _, target in found]}


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


def count(full: int, small: int) -> Callable[[bool], int]:
    return lambda is_small: small if is_small else full


TASKS = {
    "resnet50": Task(resnet, images, momentum(0.05), count(256, 4)),
    "bert-large-128": Task(bert, sentences(256, 128), adamw, count(256, 4), 1.0, bert_parts, "transformers"),
    "bert-large-512": Task(bert, sentences(32, 512), adamw, count(32, 4), 1.0, bert_parts, "transformers"),
    "gpt2": Task(gpt2, text, adamw, count(12, 2), 1.0, gpt2_parts, "transformers"),
    # Its detections, and so its shapes, differ from step to step: not for a compiler.
    "mask-rcnn": Task(
        mask_rcnn, scenes, momentum(0.002), count(12, 2), needs="torchvision", ways=("eager",), fixed_shapes=False
    ),
}
