"""The differences between the log-probabilities that two programs compute for the same tokens.

For example, if the training program computes log 0.50 for a token and the inference program log 0.49, the difference is
log(0.50 / 0.49), about 0.02, and the importance ratio of this token is 1.02.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.formats import name_of_dtype
from polyamp.layout import finite
from polyamp.policies import policy as make_policy
from polyamp.validation import kind_of

Clip = tuple[float, float]


@dataclass(frozen=True)
class Differences:
    """The differences log p_train - log p_infer of tokens, and their statistics."""

    train: np.ndarray  # log-probabilities of the training program, one per token; the last axis is time
    infer: np.ndarray  # those of the inference program
    counted: np.ndarray | None = None  # which tokens count; None means all
    clip: Clip = (0.8, 1.2)  # smallest and largest importance ratio that count as inside

    @cached_property
    def each(self) -> np.ndarray:
        """The difference of each token; NaN where a token does not count or a log-probability is not finite."""
        counts = np.isfinite(self.train) & np.isfinite(self.infer)
        counts = counts if self.counted is None else counts & self.counted
        found = np.full(counts.shape, np.nan)
        np.subtract(self.train, self.infer, out=found, where=counts)
        return found

    @cached_property
    def usable(self) -> np.ndarray:
        """The differences that are not NaN, in one row."""
        found: np.ndarray = self.each[np.isfinite(self.each)]
        return found

    @property
    def tokens(self) -> int:
        """The number of tokens that count."""
        return self.each.size if self.counted is None else int(self.counted.sum())

    @property
    def nonfinite(self) -> int:
        """The number of tokens for which a program computes inf or NaN. The other statistics leave them out."""
        return self.tokens - self.usable.size

    @cached_property
    def mean(self) -> float:
        """The mean magnitude."""
        return _mean(np.abs(self.usable))

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return self.quantile(1.0)

    def quantile(self, share: float) -> float:
        """Return the magnitude that this share of the tokens does not exceed."""
        return float(np.quantile(np.abs(self.usable), share)) if self.usable.size else float("nan")

    @property
    def k1(self) -> float:
        """The estimate of KL(infer || train) that is the mean of -log(ratio): unbiased, but it can be negative."""
        return -_mean(self.usable)

    @property
    def k3(self) -> float:
        """The estimate of KL(infer || train) that is the mean of ratio - 1 - log(ratio), which is never negative."""
        # Source: Schulman, "Approximating KL Divergence", 2020. The tokens have to be sampled by the inference program.
        with np.errstate(over="ignore"):
            return _mean(np.expm1(self.usable) - self.usable)

    @property
    def outside(self) -> float:
        """The share of tokens with an importance ratio outside of the clip range."""
        low, high = np.log(self.clip)
        return _mean((self.usable < low) | (self.usable > high))

    @property
    def sequence_ratios(self) -> tuple[float, float]:
        """The smallest and the largest importance ratio of a whole sequence: the product over the last axis."""
        with np.errstate(over="ignore"):
            ratios = np.exp(np.nansum(np.atleast_1d(self.each), axis=-1))
        return float(ratios.min()), float(ratios.max())

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        numbers = {
            "mean": self.mean,
            "median": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "p99": self.quantile(0.99),
            "max": self.largest,
            "k1": self.k1,
            "k3": self.k3,
            "outside": self.outside,
        }
        return {
            "tokens": self.tokens,
            "nonfinite": self.nonfinite,
            **{name: finite(value) for name, value in numbers.items()},
            "sequence_ratios": [finite(ratio) for ratio in self.sequence_ratios],
        }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")


def log_probs(result: Any, tokens: np.ndarray | None, *, where: str) -> np.ndarray:
    """Return the log-probability of each token in float64, from a program's result."""
    if name_of_dtype(getattr(result, "dtype", None)) is None:
        raise InvalidTypeError(
            "a program must return floating-point numbers",
            where=where,
            found=_described(result),
            allowed="one array of log-probabilities, or of logits with tokens=",
            fix="return log_probs of shape (batch, time), or logits of shape (batch, time, vocabulary)",
        )
    values = to_numpy(result)
    if tokens is None or values.shape == tokens.shape:
        _check_negative(values, where)
        return values
    if values.shape[:-1] != tokens.shape or not values.shape:
        raise InvalidValueError(
            "logits and tokens have shapes that do not fit",
            where=where,
            found=f"logits {values.shape}, tokens {tokens.shape}",
            allowed="one token for each position: logits (batch, time, vocabulary), tokens (batch, time)",
            fix="where each position predicts the next token, use logits[:, :-1] and tokens[:, 1:]",
        )
    return _chosen(values, tokens, where)


def to_numpy(value: Any) -> np.ndarray:
    """Return an array of any framework as a NumPy array; floating-point numbers become float64."""
    name = name_of_dtype(getattr(value, "dtype", None))
    if name == "bfloat16":  # which NumPy does not have
        value = make_policy("float32").cast_to_param(value)
    if hasattr(value, "detach"):  # a tensor that may have a gradient, or be on another device
        value = value.detach().cpu()
    array = np.asarray(value)
    return array if name is None else np.asarray(array, np.float64)


def _chosen(logits: np.ndarray, tokens: np.ndarray, where: str) -> np.ndarray:
    """Return the log-softmax of logits at the tokens, in float64, so that only the programs differ."""
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < logits.shape[-1]):
        raise InvalidValueError(
            "tokens must be numbers of the vocabulary",
            where="mismatch(tokens=)",
            found=f"{tokens.min()} to {tokens.max()}",
            allowed=f"0 to {logits.shape[-1] - 1}, the last axis of the logits of {where}",
            fix="replace padding by any token and leave it out with mask=",
        )
    at_token = np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        highest = logits.max(axis=-1)
        normaliser = np.log(np.exp(logits - highest[..., None]).sum(axis=-1)) + highest
    found: np.ndarray = at_token - normaliser
    return found


def _check_negative(values: np.ndarray, where: str) -> None:
    """Refuse logits without tokens, and probabilities: a log-probability is not positive, up to rounding."""
    highest = np.nanmax(values, initial=-np.inf)
    if 0.1 < highest < np.inf:
        raise InvalidValueError(
            "log-probabilities must not be positive",
            where=where,
            found=f"an array of shape {values.shape} with values up to {highest:.4g}",
            allowed="the log-probability of each token, at most 0",
            fix="for logits, pass tokens=: the token that follows each position",
        )


def _described(result: Any) -> str:
    dtype = getattr(result, "dtype", None)
    return kind_of(result) + ("" if dtype is None else f" of {dtype}")
