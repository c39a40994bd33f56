"""The mismatch of two programs for one model: the log-probabilities of the same tokens, compared by format.

Reinforcement learning trains with one program and samples with another: an inference engine with other kernels, formats
or weights. Their log-probabilities differ, so the importance ratio of a token is not 1 before the first update. For
example, a model in bfloat16 with and without a fused attention kernel::

    mean |difference|: float32 0.0000002, mixed_bfloat16 0.012, mixed_float16 0.0015

Float16 has three more bits of mantissa than bfloat16, so its differences are about eight times smaller: Qi et al.,
"Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from polyamp.diagnosis.causes import Cause, Programs, find_causes
from polyamp.diagnosis.differences import Clip, Differences, log_probs, to_numpy
from polyamp.diagnosis.programs import Program
from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.formats import format_of
from polyamp.layout import JsonReport, aligned, plural, share
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy
from polyamp.validation import check_callable, check_choice, is_number, shown

if TYPE_CHECKING:
    from os import PathLike

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
"""The policies that `mismatch` compares the programs under by default."""

SHOWN = 8
"""How many causes of each comparison are shown."""

SMALL = 0.005
"""A cause with a smaller share is not shown."""

Pair = tuple[Policy, Policy]


@dataclass(frozen=True)
class Comparison:
    """Two programs compared in one choice of formats."""

    # the policy of the training program and that of the inference program; None if they ran as they are
    policies: Pair | None
    differences: Differences  # the differences between their log-probabilities
    causes: tuple[Cause, ...] = ()  # the operations that cause the differences, the largest cause first

    @property
    def name(self) -> str:
        """The names of the policies; one name if both programs ran under the same policy."""
        if self.policies is None:
            return "as written"
        train, infer = (str(one).partition(" ")[0] for one in self.policies)
        return train if self.policies[0] == self.policies[1] else f"{train} / {infer}"

    @property
    def is_low(self) -> bool:
        """Whether a program ran in 16 bits by its policy."""
        return any(format_of(one.compute).is_low for one in self.policies or ())

    @property
    def main_causes(self) -> list[Cause]:
        """The causes to show: the largest ones, without those of a negligible share."""
        return [one for one in self.causes if one.share > SMALL][:SHOWN]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        train, infer = (None, None) if self.policies is None else map(str, self.policies)
        causes = [one.as_dict() for one in self.causes]
        return {"name": self.name, "train": train, "infer": infer, **self.differences.as_dict(), "causes": causes}


@dataclass(frozen=True)
class Mismatch(JsonReport):
    """The result of `mismatch`: a comparison for each choice of formats. Prints as a table."""

    comparisons: tuple[Comparison, ...]  # in the order of ``policies``
    clip: Clip = (0.8, 1.2)  # smallest and largest importance ratio that count as inside

    def __getitem__(self, name: str) -> Comparison:
        """Return the comparison with this name, such as "mixed_float16"."""
        known = {one.name: one for one in self.comparisons}
        check_choice(name, known, where="report[name]", fix="use the name of one of the comparisons")
        return known[name]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; numbers that are not finite become None."""
        return {"clip": list(self.clip), "comparisons": [one.as_dict() for one in self.comparisons]}

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the share of tokens that differ by more than each size, and the causes, into an image file."""
        from polyamp.diagnosis.pictures import draw_mismatch

        curves = {one.name: np.sort(np.abs(one.differences.usable)).tolist() for one in self.comparisons}
        worst = max(self.comparisons, key=lambda one: (bool(one.causes), one.differences.mean))
        bars = [(cause.rule, cause.share) for cause in worst.main_causes]
        draw_mismatch(path, curves, self.clip, (worst.name, bars))

    def __str__(self) -> str:
        counts = plural(self.comparisons[0].differences.tokens, "token")
        lines = [f"{counts}: differences of log-probabilities, train - infer", "", self.table()]
        rows = list(self._cause_rows())
        if rows:
            title = "the part that disappears if these operations run in float32 in both programs:"
            lines += ["", title, aligned([("policy", "rule", "programs", "share"), *rows], right={3})]
        return "\n".join([*lines, "", *self.conclusions()])

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table: the heading, then a row per comparison."""
        low, high = self.clip
        heading = ("policy", "mean", "95%", "max", "KL", f"outside {low:g}..{high:g}", "sequence ratio", "not finite")
        return [heading, *map(_row, self.comparisons)]

    def table(self) -> str:
        """Return the rows as an aligned table."""
        return aligned(self.rows(), right=range(1, 8))

    def _cause_rows(self) -> Iterator[tuple[str, ...]]:
        for one in self.comparisons:
            for cause in one.main_causes:
                yield one.name, cause.rule, cause.programs, share(cause.share)

    def conclusions(self) -> list[str]:
        """Return what follows from the numbers, in sentences."""
        return [*self._about_values(), *self._about_formats(), *self._about_causes()]

    def _about_values(self) -> Iterator[str]:
        for one in self.comparisons:
            if count := one.differences.nonfinite:
                has = "has" if count == 1 else "have"
                yield f"{one.name}: {plural(count, 'token')} {has} a log-probability that is inf or NaN"

    def _about_formats(self) -> Iterator[str]:
        low = sorted((one for one in self.comparisons if one.is_low), key=lambda one: one.differences.mean)
        wide = next((one for one in self.comparisons if one.policies and not one.is_low), None)
        if wide and low and wide.differences.mean > low[0].differences.mean / 2:
            yield (
                "the programs differ in float32 too: first look for a different computation, such as a mask, "
                "positions, dropout or a temperature"
            )
        elif len(low) > 1 and low[0].differences.mean > 0:
            best, worst = low[0], low[-1]
            ratio = worst.differences.mean / best.differences.mean
            yield f"{best.name} differs {ratio:.1f} times less than {worst.name}"

    def _about_causes(self) -> Iterator[str]:
        for one in self.comparisons:
            if not one.causes:
                continue
            largest = one.causes[0]
            if largest.share >= 0.5:
                yield f'{one.name}: rules={{"{largest.rule}": "full"}} removes {share(largest.share)} of the difference'
            else:
                yield f"{one.name}: no operation causes half of the difference; more bits of mantissa reduce all of it"


def mismatch(
    train_fn: Callable[..., Any],
    infer_fn: Callable[..., Any],
    /,
    *args: Any,
    policies: Iterable[Policy | str | tuple[Policy | str, Policy | str]] | None = POLICIES,
    tokens: Any = None,
    mask: Any = None,
    clip: Clip = (0.8, 1.2),
    causes: bool = True,
    backend: str | None = None,
) -> Mismatch:
    """Compare the log-probabilities of two programs for the same tokens, by format, and find the causes.

    Both programs run under each policy. Then each group of operations that the policy computes in 16 bits runs in
    float32 in both programs, to measure how much of the difference disappears.

    >>> import jax, jax.numpy as jnp
    >>> def train(w, x):
    ...     return jax.nn.log_softmax(x @ w)[:, 0]
    >>> def infer(w, x):
    ...     return jax.nn.log_softmax((x @ w).astype(x.dtype) * 1.01)[:, 0]
    >>> w, x = jax.random.normal(jax.random.key(0), (8, 4)), jnp.ones((3, 8))
    >>> report = mismatch(train, infer, w, x)
    >>> report.conclusions()[0].partition(":")[0], report["float32"].differences.tokens
    ('the programs differ in float32 too', 3)

    Args:
        train_fn: returns the log-probability of each token, of shape (batch, time); or logits, with ``tokens``.
        infer_fn: the same for the inference program. Neither may use dropout or other random numbers.
        *args: the arguments of both programs.
        policies: for each comparison a policy or its name, or a pair for the training and the inference program. None
            runs the programs as they are, for programs that choose their formats themselves.
        tokens: the tokens that follow each position, if a program returns logits.
        mask: which tokens count: an array like the log-probabilities, 0 or False for padding.
        clip: smallest and largest importance ratio that the training's clipping leaves unchanged.
        causes: whether to search for causes, which runs both programs up to 32 times for each 16-bit policy.
        backend: the framework's name, if neither the functions nor the arguments show it and several are loaded.

    Raises:
        InvalidTypeError: a program cannot be called, or does not return one floating-point array.
        InvalidValueError: the programs return different shapes; logits come without tokens, or do not fit them; the
            mask has another shape; the clip range is invalid; or there are no policies.
    """
    for name, fn in (("train_fn", train_fn), ("infer_fn", infer_fn)):
        check_callable(
            fn, where=f"mismatch({name})", allowed="a function of the arguments", fix="pass the function itself"
        )
    compare = _Compare(_array(tokens), _array(mask), _checked_clip(clip))
    found = []
    for train, infer in _pairs(policies):
        programs = (
            Program("train", train_fn, args, train, backend),
            Program("infer", infer_fn, args, infer, backend),
        )
        found.append(compare.of(programs, causes=causes))
    return Mismatch(tuple(found), compare.clip)


@dataclass(frozen=True)
class _Compare:
    """Compares two programs."""

    tokens: np.ndarray | None  # the tokens that follow each position; None if the programs return log-probabilities
    mask: np.ndarray | None  # which tokens count; None means all
    clip: Clip  # the clip range

    def of(self, programs: Programs, *, causes: bool) -> Comparison:
        """Return the comparison of two programs, with causes if they are wanted and a policy is in 16 bits."""
        train, infer = (one.policy for one in programs)
        differences = self.differences(programs)
        found = Comparison(None if train is None or infer is None else (train, infer), differences)
        if not (causes and found.is_low):
            return found
        return replace(
            found, causes=find_causes(programs, differences.mean, lambda trial: self.differences(trial).mean)
        )

    def differences(self, programs: Programs) -> Differences:
        """Run both programs and return the differences of their results."""
        one, other = (log_probs(each.run(), self.tokens, where=f"mismatch({each.name}_fn)") for each in programs)
        if one.shape != other.shape:
            raise InvalidValueError(
                "the programs return different shapes",
                where="mismatch(train_fn, infer_fn)",
                found=f"{one.shape} and {other.shape}",
                allowed="one log-probability for each token, in the same order",
                fix="return the same tokens from both, without the prompt's first position or padding of one of them",
            )
        return Differences(one, other, self._counted(one.shape), self.clip)

    def _counted(self, shape: tuple[int, ...]) -> np.ndarray | None:
        if self.mask is None:
            return None
        if self.mask.shape != shape:
            raise InvalidValueError(
                "the mask must have one number for each token",
                where="mismatch(mask=)",
                found=f"{self.mask.shape}",
                allowed=f"{shape}, the shape of the log-probabilities",
                fix="cut the mask like the tokens, for example mask[:, 1:]",
            )
        return self.mask.astype(bool)


def _array(value: Any) -> np.ndarray | None:
    return None if value is None else to_numpy(value)


def _pairs(policies: Any) -> Sequence[Pair | tuple[None, None]]:
    if policies is None:
        return [(None, None)]
    each = [policies] if isinstance(policies, str | Policy) else list(policies)
    if not each:
        raise InvalidValueError(
            "nothing to compare under",
            where="mismatch(policies=)",
            found="no policies",
            allowed="at least one policy, or None",
            fix='leave policies out, or write policies=["mixed_bfloat16", "mixed_float16"]',
        )
    return [_pair(one) for one in each]


def _pair(one: Any) -> Pair:
    if isinstance(one, tuple) and len(one) != 2:
        raise InvalidTypeError(
            "a pair has two policies",
            where="mismatch(policies=)",
            found=shown(one),
            allowed="a policy or its name, or (training policy, inference policy)",
            fix='write, for example, ("mixed_bfloat16", "mixed_float16")',
        )
    train, infer = one if isinstance(one, tuple) else (one, one)
    return make_policy(train), make_policy(infer)


def _checked_clip(clip: Any) -> Clip:
    numbers = isinstance(clip, tuple | list) and len(clip) == 2 and all(map(is_number, clip))
    if not (numbers and 0 < clip[0] < 1 < clip[1] < float("inf")):
        raise InvalidValueError(
            "invalid clip range",
            where="mismatch(clip=)",
            found=shown(clip),
            allowed="(low, high) with 0 < low < 1 < high",
            fix="for a clip of 0.2 write (0.8, 1.2)",
        )
    return float(clip[0]), float(clip[1])


def _row(one: Comparison) -> tuple[str, ...]:
    found = one.differences
    low, high = found.sequence_ratios
    numbers = (found.mean, found.quantile(0.95), found.largest, found.k3)
    return (
        one.name,
        *(f"{number:.2g}" for number in numbers),
        share(found.outside),
        f"{low:.3g}..{high:.3g}",
        str(found.nonfinite),
    )
