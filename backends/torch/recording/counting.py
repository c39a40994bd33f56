"""Histograms of exponents, computed on the device, with one transfer to the host at the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyamp.backends.torch.recording.widening import values_of
from polyamp.diagnosis.spread import FIELDS, Spread, stride


class Counts:
    """The counts of each tensor of a step."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._sizes: list[tuple[int, int]] = []

    def add(self, tensor: Tensor) -> int:
        """Count a floating-point tensor's elements; for a distributed tensor, those of this rank."""
        magnitudes = _flat(tensor).abs()
        sample = magnitudes[:: stride(magnitudes.numel())].contiguous()
        self._rows.append(_row(magnitudes, sample))
        self._sizes.append((magnitudes.numel(), sample.numel()))
        return len(self._rows) - 1

    def spreads(self) -> list[Spread]:
        """Return all spreads. Waits for each device once."""
        devices = {row.device for row in self._rows}
        rows: list[list[float]] = [[]] * len(self._rows)
        for device in devices:
            places = [place for place, row in enumerate(self._rows) if row.device == device]
            found = torch.stack([self._rows[place] for place in places]).tolist()
            for place, row in zip(places, found, strict=True):
                rows[place] = row
        return [_spread(*size, row) for size, row in zip(self._sizes, rows, strict=True)]


def _spread(elements: int, seen: int, row: list[float]) -> Spread:
    zeros, inf, nan, largest = row[2 * FIELDS :]
    return Spread.of_fields(
        elements, seen, int(zeros), int(inf), int(nan), largest, row[:FIELDS], row[FIELDS : 2 * FIELDS]
    )


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in float32, in memory order if they fill their memory: flattening could copy."""
    tensor = values_of(tensor).detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    values = tensor.float()
    if values.numel() == _extent(values):
        return values.as_strided((values.numel(),), (1,))
    return values.reshape(-1)


def _extent(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one, in memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps)


def _row(magnitudes: Tensor, sample: Tensor) -> Tensor:
    fields = sample.view(torch.int32) >> 23  # the sign bit is 0
    zeros = sample.numel() - sample.count_nonzero()
    extremes = torch.stack([one.double() for one in (zeros, *_extremes(magnitudes))])
    return torch.cat([_histogram(fields, None).double(), _histogram(fields, sample).double(), extremes])


def _histogram(fields: Tensor, weights: Tensor | None) -> Tensor:
    if fields.device.type == "cpu":
        return torch.bincount(fields, weights, FIELDS)
    added = torch.ones_like(fields) if weights is None else weights  # bincount would wait for the device
    return torch.zeros(FIELDS, dtype=added.dtype, device=added.device).index_add_(0, fields, added)


def _extremes(magnitudes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of infinite elements, the number of NaN, and the largest finite element."""
    largest = magnitudes.amax()
    if largest.device.type == "cpu" and math.isfinite(largest):
        none = torch.zeros(())
        return none, none, largest
    finite = torch.where(magnitudes.isfinite(), magnitudes, 0.0)
    return magnitudes.isinf().sum(), magnitudes.isnan().sum(), finite.amax()
