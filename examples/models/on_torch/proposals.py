"""The region proposal network of Mask R-CNN, and its rules for boxes: anchors, coding, matching, samples, suppression.

Boxes are float32 corners x0, y0, x1, y1 in pixels, of shape [boxes, 4], under every policy. What a network returns
in 16 bits only moves them, and `decode` computes in float32: a growth in bfloat16 would be off by up to 0.4 percent.

>>> box, moved = torch.tensor([[0.0, 0.0, 8.0, 4.0]]), torch.tensor([[1.0, 0.0, 9.0, 8.0]])
>>> encode(moved, box)
tensor([[0.1250, 0.5000, 0.0000, 0.6931]])
>>> decode(encode(moved, box), box)
tensor([[1., 0., 9., 8.]])
>>> overlaps(box, moved)
tensor([[0.4118]])
>>> nms(torch.cat([box, moved]), torch.tensor([0.8, 0.9]), 0.4)  # the better one stays
tensor([1])
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Objects = dict[str, Tensor]
"""The objects of an image, as torchvision names them: boxes, labels, masks and, where they were found, scores."""

RATIOS = (0.5, 1.0, 2.0)
"""Height over width of the anchors at one place."""
MOST_GROWTH = math.log(1000 / 16)
"""The largest logarithm of a growth that is decoded, so that `exp` cannot overflow (Detectron, torchvision)."""
BETA = 1 / 9
"""Where the loss of boxes turns from a square into a line."""
BACKGROUND, IGNORED = -1, -2
"""What `matches` returns for boxes without an object."""


def anchors(shapes: Sequence[tuple[int, int]], image: tuple[int, int], sizes: Sequence[float]) -> list[Tensor]:
    """Return the boxes of each level of features, of shape [height * width * 3, 4]: at each place, the three ratios.

    Args:
        shapes: height and width of each level.
        image: height and width of the image.
        sizes: of each level, the square root of an anchor's area.
    """
    found = []
    for (height, width), size in zip(shapes, sizes, strict=True):
        roots = torch.tensor(RATIOS).sqrt()
        half = torch.stack((size / roots, size * roots), 1) / 2
        at_origin = torch.cat((-half, half), 1).round()
        y, x = torch.meshgrid(
            torch.arange(height) * (image[0] // height), torch.arange(width) * (image[1] // width), indexing="ij"
        )
        places = torch.stack((x, y, x, y), -1).reshape(-1, 1, 4)
        found.append((places + at_origin).reshape(-1, 4))
    return found


def encode(boxes: Tensor, references: Tensor, weights: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return how boxes differ from references: moves, relative to their sizes, and logarithms of growths.

    Args:
        weights: of the moves and of the growths, so that the losses of both are of one order.
    """
    middles, sizes = _middles_and_sizes(boxes)
    at, extents = _middles_and_sizes(references)
    moves, growths = (middles - at) / extents, (sizes / extents).log()
    return torch.cat((moves * weights[0], growths * weights[1]), -1)


def decode(deltas: Tensor, references: Tensor, weights: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return the float32 boxes that `encode` encoded, from deltas of shape [..., boxes, 4] in any format."""
    at, extents = _middles_and_sizes(references)
    moves, growths = deltas[..., :2].float() / weights[0], deltas[..., 2:].float() / weights[1]
    middles, halves = at + moves * extents, growths.clamp(max=MOST_GROWTH).exp() * extents / 2
    return torch.cat((middles - halves, middles + halves), -1)


def _middles_and_sizes(boxes: Tensor) -> tuple[Tensor, Tensor]:
    sizes = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + sizes / 2, sizes


def clipped(boxes: Tensor, height: int, width: int) -> Tensor:
    """Return the parts of boxes inside an image."""
    return boxes.clamp(min=0).minimum(boxes.new_tensor((width, height, width, height)))


def areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).prod(1)


def overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the areas of intersections over those of unions, of shape [boxes, others]."""
    low = torch.maximum(boxes[:, None, :2], others[:, :2])
    high = torch.minimum(boxes[:, None, 2:], others[:, 2:])
    common = (high - low).clamp(min=0).prod(2)
    return common / (areas(boxes)[:, None] + areas(others) - common)


def matches(found: Tensor, low: float, high: float, *, every_object: bool = False) -> Tensor:
    """Return the object of each box, `BACKGROUND` below ``low``, and `IGNORED` between ``low`` and ``high``.

    Args:
        found: overlaps of shape [objects, boxes].
        low: the overlap below which a box is background.
        high: the overlap from which on a box has the object.
        every_object: whether an object also has the boxes that overlap it most, however little.
    """
    best, objects = found.max(0)
    result = objects.masked_fill(best < high, IGNORED).masked_fill(best < low, BACKGROUND)
    if every_object:
        needed = (found == found.amax(1, keepdim=True)).any(0)
        result = torch.where(needed, objects, result)
    return result


def sampled(matched: Tensor, most: int, share: float, random: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of a random sample of boxes with objects, at most a share of it, and of background.

    Args:
        matched: the result of `matches`.
        most: size of the sample.
        share: the largest share of boxes with objects.
        random: a number for each box. Drawing as many at every step keeps later random numbers the same, whatever a
            policy changes of the boxes.
    """
    objects = _first(matched >= 0, int(most * share), random)
    return objects, _first(matched == BACKGROUND, most - len(objects), random)


def _first(among: Tensor, most: int, random: Tensor) -> Tensor:
    places = among.nonzero()[:, 0]
    return places[random[places].argsort()[:most]]


def nms(boxes: Tensor, scores: Tensor, threshold: float, groups: Tensor | None = None) -> Tensor:
    """Return the places of boxes that no better one overlaps by more than a threshold, best first.

    It is the greedy rule, computed for all boxes together: a box stays unless a better one that stays overlaps it.
    Repeated, this settles after as many turns as the longest chain of overlaps has boxes.

    Args:
        boxes: in any order.
        scores: higher is better; equal ones in the order of the boxes.
        threshold: intersection over union.
        groups: a number for each box; only boxes of the same group suppress each other.
    """
    order = scores.argsort(descending=True, stable=True)
    rivals = overlaps(boxes[order], boxes[order]) > threshold
    if groups is not None:
        rivals &= groups[order, None] == groups[order]
    better = rivals.triu(1)
    stays = torch.ones_like(order, dtype=torch.bool)
    while not torch.equal(stays, again := ~(better & stays[:, None]).any(0)):
        stays = again
    return order[stays]


def best_of(boxes: Tensor, scores: Tensor, threshold: float, groups: Tensor) -> Tensor:
    """Return the places that `nms` returns, without boxes narrower than 0.001 pixels."""
    places = (boxes[:, 2:] - boxes[:, :2] > 1e-3).all(1).nonzero()[:, 0]
    return places[nms(boxes[places], scores[places], threshold, groups[places])]


class RegionProposals(nn.Module):
    """Score anchors, and move them onto objects (Ren et al., "Faster R-CNN", NeurIPS 2015).

    Args:
        channels: of the features of every level.
        proposals: number of boxes of an image; also of each level before non-maximum suppression.
        sampled: number of anchors of an image that have a loss.
    """

    def __init__(self, channels: int, proposals: int, sampled: int) -> None:
        super().__init__()
        self.proposals, self.sampled = proposals, sampled
        self.hidden = nn.Conv2d(channels, channels, 3, padding=1)
        self.scores = nn.Conv2d(channels, len(RATIOS), 1)
        self.deltas = nn.Conv2d(channels, len(RATIOS) * 4, 1)
        for layer in (self.hidden, self.scores, self.deltas):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, levels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the scores of each level, of shape [images, anchors], and its deltas, [images, anchors, 4]."""
        hidden = [F.relu(self.hidden(features)) for features in levels]
        scores = [self.scores(one).permute(0, 2, 3, 1).flatten(1) for one in hidden]
        deltas = [self.deltas(one).unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3) for one in hidden]
        return scores, deltas

    def losses(
        self, scores: list[Tensor], deltas: list[Tensor], levels: list[Tensor], found: Sequence[Objects]
    ) -> dict[str, Tensor]:
        """Return the two losses of a random sample of anchors; ``levels`` are the anchors of each level."""
        references, kept, targets, moved, moves = torch.cat(levels), [], [], [], []
        for score, delta, objects in zip(torch.cat(scores, 1), torch.cat(deltas, 1), found, strict=True):
            matched = matches(overlaps(objects["boxes"], references), 0.3, 0.7, every_object=True)
            good, bad = sampled(matched, self.sampled, 0.5, torch.rand(len(references), device=references.device))
            kept += [score[good], score[bad]]
            targets += [torch.ones_like(good, dtype=torch.float32), torch.zeros_like(bad, dtype=torch.float32)]
            moved.append(delta[good])
            moves.append(encode(objects["boxes"][matched[good]], references[good]))
        chosen = torch.cat(kept)
        boxes = F.smooth_l1_loss(torch.cat(moved), torch.cat(moves), beta=BETA, reduction="sum") / len(chosen)
        return {
            "objectness": F.binary_cross_entropy_with_logits(chosen, torch.cat(targets)),
            "proposed_boxes": boxes,
        }

    @torch.no_grad()
    def propose(
        self, scores: list[Tensor], deltas: list[Tensor], levels: list[Tensor], size: tuple[int, int]
    ) -> list[Tensor]:
        """Return the best boxes of each image, at most ``proposals``, best first; ``size`` is height and width."""
        proposed = []
        for image in range(len(scores[0])):
            best = [score[image].topk(min(score.shape[1], self.proposals)).indices for score in scores]
            boxes = [
                clipped(decode(delta[image, rows], references[rows]), *size)
                for delta, references, rows in zip(deltas, levels, best, strict=True)
            ]
            score = torch.cat([score[image, rows] for score, rows in zip(scores, best, strict=True)])
            level = torch.cat([torch.full_like(rows, number) for number, rows in enumerate(best)])
            found = torch.cat(boxes)
            proposed.append(found[best_of(found, score, 0.7, level)[: self.proposals]])
        return proposed
