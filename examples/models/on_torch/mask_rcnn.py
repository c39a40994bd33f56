"""Mask R-CNN with a ResNet and a feature pyramid: boxes, classes and masks of objects, trained from scratch.

He et al., "Mask R-CNN", ICCV 2017, as torchvision's ``maskrcnn_resnet50_fpn`` has it: region proposals from anchors,
RoIAlign, a box head and a mask head, and five losses. `MaskRCNN()` has the published sizes, with 44,401,393 numbers.
`train` makes it narrow and shallow, for four digits (MNIST) on a canvas; images of a batch have one size. The published
model begins with a trained backbone; this one goes on from `pretrained`, all of it trained in float32. From scratch the
results of equal settings are up to ten points apart, which no ten seeds could tell from an effect of precision.
"""

import contextvars
import copy
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import polyamp
from models.data import Part, Scene, batches_of, scenes
from models.on_torch import proposals as regions
from models.on_torch.proposals import Objects
from models.on_torch.resnet50 import resnet50
from models.on_torch.roi_align import paste, roi_align
from models.on_torch.training import evaluate, fit, seeded

WEIGHTS = (10.0, 5.0)
"""Of moves and growths in the box head."""
BOX_BINS, MASK_BINS = 7, 14
"""Of RoIAlign along each side of a box, for the two heads. Masks come out twice as fine."""


class Sizes(NamedTuple):
    """Sizes of a Mask R-CNN; the published ones by default."""

    classes: int = 91
    """With the background, which is 0."""
    width: float = 1.0
    """Of the backbone."""
    depths: tuple[int, ...] = (3, 4, 6, 3)
    channels: int = 256
    """Of the feature pyramid."""
    hidden: int = 1024
    """Of the box head."""
    anchors: tuple[int, ...] = (32, 64, 128, 256, 512)
    proposals: int = 2000
    sampled_anchors: int = 256
    sampled_boxes: int = 512


PUBLISHED = Sizes()


class Backbone(nn.Module):
    """A ResNet without its classifier, which returns the features of its four stages."""

    def __init__(self, width: float, depths: Sequence[int]) -> None:
        super().__init__()
        self.stem, *blocks = resnet50(width, depths=tuple(depths))[:-2]
        ends = zip(accumulate(depths), depths, strict=True)
        self.stages = nn.ModuleList(nn.Sequential(*blocks[end - depth : end]) for end, depth in ends)

    def forward(self, images: Tensor) -> list[Tensor]:
        return list(accumulate(self.stages, lambda x, stage: stage(x), initial=self.stem(images)))[1:]


class FrozenBatchNorm2d(nn.Module):
    """Batch norm whose numbers do not train."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        for name in ("running_mean", "running_var", "weight", "bias"):
            self.register_buffer(name, getattr(norm, name).detach())

    def forward(self, x: Tensor) -> Tensor:
        # x * scale + shift, with float32 numbers, would make float32 of every activation in 16 bits
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


def freeze(model: nn.Module) -> nn.Module:
    """Freeze every batch norm in place, as published for a backbone that was trained before."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, FrozenBatchNorm2d(child))
    return model


class FeaturePyramid(nn.Module):
    """Features of every level with the meaning of the deepest (Lin et al., CVPR 2017), and one level more."""

    def __init__(self, inputs: Sequence[int], channels: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Conv2d(count, channels, 1) for count in inputs)
        self.outer = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in inputs)

    def forward(self, stages: Sequence[Tensor]) -> list[Tensor]:
        inner = [layer(stage) for layer, stage in zip(self.inner, stages, strict=True)]
        for level in reversed(range(len(inner) - 1)):
            inner[level] = inner[level] + F.interpolate(inner[level + 1], size=inner[level].shape[-2:])
        levels = [layer(features) for layer, features in zip(self.outer, inner, strict=True)]
        return [*levels, F.max_pool2d(levels[-1], 1, 2)]


class BoxHead(nn.Module):
    """Scores of classes for each box, and for each class how to move the box."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        first = nn.Linear(sizes.channels * BOX_BINS**2, hidden)
        self.hidden = nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.scores = nn.Linear(hidden, sizes.classes)
        self.deltas = nn.Linear(hidden, sizes.classes * 4)
        for layer in (self.hidden[1], self.hidden[3]):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        for layer, deviation in ((self.scores, 0.01), (self.deltas, 0.001)):  # as Detectron has them
            nn.init.normal_(layer.weight, std=deviation)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores of shape [boxes, classes] and deltas of shape [boxes, classes, 4]."""
        hidden = self.hidden(features)
        return self.scores(hidden), self.deltas(hidden).unflatten(1, (-1, 4))


def mask_head(sizes: Sizes) -> nn.Module:
    """Return the network from features of boxes to scores of pixels for each class, [boxes, classes, 28, 28]."""
    width = sizes.channels
    layers = [
        *(nn.Conv2d(width, width, 3, padding=1) for _ in range(4)),
        nn.ConvTranspose2d(width, width, 2, 2),
        nn.Conv2d(width, sizes.classes, 1),
    ]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.ReLU())))[:-1]


class Sample(NamedTuple):
    """Proposals of an image that have a loss."""

    boxes: Tensor
    """Those with an object come first."""
    objects: Tensor
    """The places of the objects of these first boxes."""

    @property
    def with_objects(self) -> Tensor:
        return self.boxes[: len(self.objects)]

    def labels(self, found: Objects) -> Tensor:
        """Return the labels of all boxes; 0 for background."""
        return F.pad(found["labels"][self.objects], (0, len(self.boxes) - len(self.objects)))


class MaskRCNN(nn.Module):
    """Find boxes, classes and masks; called with images and their objects, it returns the five losses by name.

    Its batch norms train, as from scratch they must; `freeze` makes them what they are in the published model.
    """

    def __init__(self, sizes: Sizes = PUBLISHED) -> None:
        super().__init__()
        self.sizes = sizes
        self.backbone = Backbone(sizes.width, sizes.depths)
        self.pyramid = FeaturePyramid([round((256 << stage) * sizes.width) for stage in range(4)], sizes.channels)
        self.regions = regions.RegionProposals(sizes.channels, sizes.proposals, sizes.sampled_anchors)
        self.box_head, self.mask_head = BoxHead(sizes), mask_head(sizes)

    def forward(self, images: Tensor, found: Sequence[Objects]) -> dict[str, Tensor]:
        """Return the losses.

        Args:
            images: of shape [images, 3, height, width].
            found: the objects of each image: ``boxes``, ``labels`` from 1 on, and ``masks`` [objects, height, width].
        """
        size, levels, anchors = self._features(images)
        scores, deltas = self.regions(levels)
        losses = self.regions.losses(scores, deltas, anchors, found)
        proposed = self.regions.propose(scores, deltas, anchors, size)
        samples = [self._sample(boxes, objects["boxes"]) for boxes, objects in zip(proposed, found, strict=True)]
        both = list(zip(samples, found, strict=True))
        boxes = self.box_head(inside(levels, [one.boxes for one in samples], size, BOX_BINS))
        masks = self.mask_head(inside(levels, [one.with_objects for one in samples], size, MASK_BINS))
        return losses | box_losses(*boxes, both) | mask_loss(masks, both)

    @torch.no_grad()
    def detect(self, images: Tensor, threshold: float = 0.05, most: int = 100) -> list[Objects]:
        """Return what is in each image, best first, with ``scores``, and with ``masks`` as booleans.

        Args:
            images: of shape [images, 3, height, width].
            threshold: the least score.
            most: number of objects of an image.
        """
        size, levels, anchors = self._features(images)
        proposed = self.regions.propose(*self.regions(levels), anchors, size)
        scores, deltas = self.box_head(inside(levels, proposed, size, BOX_BINS))
        counts = [len(boxes) for boxes in proposed]
        shares = scores.float().softmax(-1)  # in 16 bits many of the best would be equal
        parts = zip(shares.split(counts), deltas.split(counts), proposed, strict=True)
        found = [self._best(*part, size, threshold, most) for part in parts]
        masks = self.mask_head(inside(levels, [one["boxes"] for one in found], size, MASK_BINS)).sigmoid()
        for one, mask in zip(found, masks.split([len(one["labels"]) for one in found]), strict=True):
            of_class = mask[torch.arange(len(mask), device=mask.device), one["labels"]]
            one["masks"] = paste(of_class, one["boxes"], *size) > 0.5
        return found

    def _features(self, images: Tensor) -> tuple[tuple[int, int], list[Tensor], list[Tensor]]:
        """Return the images' height and width, and the features and the anchors of each level."""
        height, width = images.shape[-2:]
        levels = self.pyramid(self.backbone(images))
        anchors = regions.anchors([one.shape[-2:] for one in levels], (height, width), self.sizes.anchors)
        return (height, width), levels, [one.to(images.device) for one in anchors]

    @torch.no_grad()
    def _sample(self, proposed: Tensor, true: Tensor) -> Sample:
        random = torch.rand(self.sizes.proposals + len(true), device=true.device)
        boxes = torch.cat((proposed, true))
        matched = regions.matches(regions.overlaps(true, boxes), 0.5, 0.5)
        good, bad = regions.sampled(matched, self.sizes.sampled_boxes, 0.25, random[: len(boxes)])
        return Sample(boxes[torch.cat((good, bad))], matched[good])

    @staticmethod
    def _best(
        scores: Tensor, deltas: Tensor, proposed: Tensor, size: tuple[int, int], threshold: float, most: int
    ) -> Objects:
        """Return the best boxes of an image, each box of each class by itself."""
        places, labels = (scores > threshold).nonzero(as_tuple=True)
        places, labels = places[labels > 0], labels[labels > 0]
        score = scores[places, labels]
        boxes = regions.clipped(regions.decode(deltas[places, labels], proposed[places], WEIGHTS), *size)
        best = regions.best_of(boxes, score, 0.5, labels)[:most]
        return {"boxes": boxes[best], "labels": labels[best], "scores": score[best]}


def inside(levels: Sequence[Tensor], boxes: Sequence[Tensor], size: tuple[int, int], bins: int) -> Tensor:
    """Return the features inside the boxes of all images, of shape [boxes, channels, bins, bins].

    A box of 224 x 224 pixels reads the third of four levels, and one of half its sides the level before (Lin et al.).
    """
    every, images = torch.cat(list(boxes)), places_of(boxes)
    level_of = (4 + (regions.areas(every).sqrt() / 224).log2() + 1e-6).floor().clamp(2, 5) - 2
    rows = [(level_of == level).nonzero()[:, 0] for level in range(4)]
    parts = [
        roi_align(features, every[some], images[some], bins, features.shape[-1] / size[1])
        for features, some in zip(levels, rows, strict=False)  # the fifth level has anchors only
    ]
    return torch.cat(parts)[torch.cat(rows).argsort()]


def places_of(groups: Sequence[Tensor]) -> Tensor:
    """Return, for each row of all groups, the place of its group."""
    return torch.cat([torch.full((len(group),), place, device=group.device) for place, group in enumerate(groups)])


def box_losses(scores: Tensor, deltas: Tensor, both: Sequence[tuple[Sample, Objects]]) -> dict[str, Tensor]:
    """Return the losses of classes and of boxes, from the box head's output for all samples."""
    labels = torch.cat([sample.labels(objects) for sample, objects in both])
    moves = [regions.encode(objects["boxes"][one.objects], one.with_objects, WEIGHTS) for one, objects in both]
    good = labels.nonzero()[:, 0]
    moved = F.smooth_l1_loss(deltas[good, labels[good]], torch.cat(moves), beta=regions.BETA, reduction="sum")
    return {"classes": F.cross_entropy(scores, labels), "boxes": moved / len(labels)}


def mask_loss(scores: Tensor, both: Sequence[tuple[Sample, Objects]]) -> dict[str, Tensor]:
    """Return the loss of masks, each of its own class alone, against the true masks inside the proposed boxes."""
    starts = np.cumsum([0, *(len(objects["labels"]) for _, objects in both)]).tolist()
    which = torch.cat([start + sample.objects for start, (sample, _) in zip(starts, both, strict=False)])
    labels, masks = (torch.cat([objects[name] for _, objects in both]) for name in ("labels", "masks"))
    boxes = torch.cat([sample.with_objects for sample, _ in both])
    true = roi_align(masks[:, None], boxes, which, scores.shape[-1])[:, 0]
    given = scores[torch.arange(len(which), device=which.device), labels[which]]
    return {"masks": F.binary_cross_entropy_with_logits(given, true)}


def average_precision(found: Sequence[Objects], true: Sequence[Objects], overlap: float = 0.5) -> float:
    """Return the mean over classes of the area under precision over recall, where precision is made to fall only.

    As in COCO, the detections of a class and image in turn, the best score first, each take the free true mask that
    they overlap most, if by ``overlap`` or more.
    """
    areas = []
    for label in torch.cat([objects["labels"] for objects in true]).unique():
        both = [(of_class(one, label), of_class(objects, label)) for one, objects in zip(found, true, strict=True)]
        scores = torch.cat([one["scores"] for one, _ in both]).cpu().numpy()
        hits = np.array([hit for one, objects in both for hit in taken(one["masks"], objects["masks"].bool(), overlap)])
        hits = hits[np.argsort(-scores, kind="stable")]
        precision = hits.cumsum() / np.arange(1, len(hits) + 1)
        highest = np.maximum.accumulate(precision[::-1])[::-1]
        areas.append((highest * hits).sum() / sum(len(objects["labels"]) for _, objects in both))
    return float(np.mean(areas))


def of_class(objects: Objects, label: Tensor) -> Objects:
    return {name: value[objects["labels"] == label] for name, value in objects.items()}


def taken(found: Tensor, true: Tensor, overlap: float) -> list[bool]:
    """Return whether each found mask, the best one first, takes a true one."""
    common = (found[:, None] & true).sum((2, 3))
    shares = common / (found[:, None] | true).sum((2, 3)).clamp(min=1)
    hits = []
    for share in shares:
        free = share.max(0) if len(share) else None
        hits.append(free is not None and bool(free.values >= overlap))
        if hits[-1]:
            shares[:, free.indices] = -1
    return hits


SMALL = Sizes(
    classes=11,
    width=1 / 8,
    depths=(1, 1, 1, 1),
    channels=24,
    hidden=128,
    proposals=64,
    sampled_anchors=64,
    sampled_boxes=16,
)
OBJECTS, LARGER = 4, 2
"""Digits in a scene, and how many times larger the model sees it: its finest features are four pixels apart."""
TESTED = 200


class Recipe(NamedTuple):
    """How to train: AdamW, with a learning rate that rises for a tenth of the steps, and then falls."""

    steps: int
    rate: float
    scenes: int = 800
    scenes_seed: int = 0
    batch: int = 4


PRETRAINING, FINE_TUNING = Recipe(400, 2e-3, scenes_seed=1), Recipe(120, 5e-4)


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Return the average precision of masks, and the loss, on scenes of four digits, after fine-tuning on others."""
    start = pretrained()  # before the seed is set: the first call draws random numbers
    model = seeded(lambda: copy.deepcopy(start), seed)
    trained(model, FINE_TUNING, policy, seed)
    return evaluate(model, metrics_of, [batch(scenes(TESTED, objects=OBJECTS, test=True))], policy)


@functools.cache
def pretrained() -> MaskRCNN:
    """Return a model that was trained from scratch in float32, once for all seeds and policies, on other scenes."""
    alone = contextvars.Context()  # what a control of parity imposes on the fine-tuning does not reach this training
    return alone.run(trained, seeded(lambda: MaskRCNN(SMALL), 1000), PRETRAINING, polyamp.policy("float32"), seed=1000)


def trained(model: MaskRCNN, recipe: Recipe, policy: polyamp.Policy, seed: int) -> MaskRCNN:
    """Train the model in place, and return it."""
    steps, every = recipe.steps, np.arange(recipe.scenes)
    seen = scenes(recipe.scenes, objects=OBJECTS, seed=recipe.scenes_seed)
    orders = batches_of(Part(every, every), recipe.batch, steps, seed)
    fit(
        model,
        loss_of,
        [batch([seen[row] for row in rows]) for rows in orders],
        torch.optim.AdamW(model.parameters(), recipe.rate, (0.9, 0.98)),
        policy,
        schedule=lambda opt: OneCycleLR(opt, recipe.rate, steps, pct_start=0.1, cycle_momentum=False),
        max_grad_norm=5.0,
    )
    return model


def batch(seen: Sequence[Scene]) -> tuple[Tensor, list[Objects]]:
    """Return images of shape [images, 3, height, width] and their objects, larger than the scenes."""
    pixels = torch.from_numpy(np.stack([scene.pixels for scene in seen]))
    images = F.interpolate(pixels[:, None], scale_factor=LARGER, mode="bilinear").expand(-1, 3, -1, -1)
    return images, [
        {
            "boxes": torch.from_numpy(scene.boxes) * LARGER,
            "labels": torch.from_numpy(scene.labels).long(),
            "masks": torch.from_numpy(scene.masks.repeat(LARGER, 1).repeat(LARGER, 2)),
        }
        for scene in seen
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, list[Objects]]) -> Tensor:
    return torch.stack(list(model(*batch).values())).sum()


def metrics_of(model: MaskRCNN, batch: tuple[Tensor, list[Objects]]) -> dict[str, Tensor]:
    found = average_precision(model.detect(batch[0]), batch[1])
    return {"average_precision": torch.tensor(found), "loss": loss_of(model, batch)}
