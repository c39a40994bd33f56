"""Histograms of exponents, made on the device; one transfer to the host at the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyamp.backends.torch.recording.widened import values_of
from polyamp.diagnosis.spread import FIELDS, Spread, stride


class Counts:
    """What was counted of each tensor of a step.

    >>> counts = Counts()
    >>> index = counts.add(torch.tensor([0.0, -3.0, float("inf")]))
    >>> spread = counts.spreads()[index]
    >>> spread.elements, spread.zeros, spread.inf, spread.largest
    (3, 1, 1, 3.0)
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._sizes: list[tuple[int, int]] = []

    def add(self, tensor: Tensor) -> int:
        """Count a floating tensor's elements; of a distributed one, this rank's.

        Returns:
            Its index in `spreads`.
        """
        values = _flat(tensor)
        sample = values[:: stride(values.numel())].contiguous()
        self._rows.append(_row(values, sample))
        self._sizes.append((values.numel(), sample.numel()))
        return len(self._rows) - 1

    def spreads(self) -> list[Spread]:
        """All of them. Waits for each device once."""
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
    """The elements in float32, in memory's order where they fill it: flattening a transposed tensor would copy it."""
    tensor = values_of(tensor).detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    values = tensor.float()
    if values.numel() == _extent(values):
        return values.as_strided((values.numel(),), (1,))
    return values.reshape(-1)


def _extent(tensor: Tensor) -> int:
    """From the first element of a tensor to its last, in memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps)


def _row(values: Tensor, sample: Tensor) -> Tensor:
    fields = (sample.view(torch.int32) >> 23) & (FIELDS - 1)
    magnitudes = sample.abs()
    zeros = (magnitudes == 0).sum()
    extremes = [one.double().reshape(1) for one in (zeros, *_extremes(values))]
    return torch.cat([_histogram(fields, None).double(), _histogram(fields, magnitudes).double(), *extremes])


def _histogram(fields: Tensor, weights: Tensor | None) -> Tensor:
    if fields.device.type == "cpu":
        return torch.bincount(fields, weights, FIELDS)
    added = torch.ones_like(fields) if weights is None else weights  # bincount would wait for the device
    return torch.zeros(FIELDS, dtype=added.dtype, device=added.device).index_add_(0, fields, added)


def _extremes(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many are infinite, how many NaN, and the largest finite magnitude."""
    magnitudes = values.abs()
    if values.device.type == "cpu" and math.isfinite(largest := float(magnitudes.amax())):
        return torch.zeros(()), torch.zeros(()), torch.tensor(largest)
    finite = torch.where(values.isfinite(), magnitudes, 0.0)
    return values.isinf().sum(), values.isnan().sum(), finite.amax()
